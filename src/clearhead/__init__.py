"""Exact scaled dot-product attention that you can see through.

- to compute: `attention`, `observe`, `gradients`, `merge`; `set_threads`
- to see: `trace`, `trace_layer`, `explore`, `watch`, `merge_subwords`, `plot_attention` and ten more
- to approximate, and say how far from exact: `approximate`, `audit`, `sweep`, `compare`; methods: `linear`,
  `performer`, `linformer`, `nystrom`, `lsh`, `clusters`, `topk_blocks`; as a Markov chain: `chain`, `powers`
- to judge: `check`, `shuffle_weights`; to change heads and see what they add: `ablate`, `patch`, `contributions`
- to know the cost: `plan`, `profile`, `scaling`; to learn: `learn`
- masks: `causal`, `window`, `lengths`, `documents`, `prefix`, `global_tokens`, `first_tokens`, `blocks`,
  `random_blocks`, `dilated`, `strided`; & | ~; of arrays: `where`, `lets`, `hides`, `padding`
- positions: `rotary`, `alibi`, `relative_bias`, `sinusoidal`, `Linear`, `Yarn`
- values: `Observed`, `Partial`, `Plan`, `Trace`, `Explorer`, `Seen`, `Call`, `Report`, `Profile`, `Scaling`; `Mask`,
  `Dropout`
- errors: `ArgumentError`, `KernelRefused`
- for PyTorch: `nn`; with the names of textbooks: `textbook`
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead.calls import attention, gradients, observe
from clearhead.core.array_masks import hides, lets, padding, where
from clearhead.core.dropout import Dropout
from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.core.mask import Mask
from clearhead.core.masks import causal, documents, global_tokens, lengths, prefix, window
from clearhead.core.observations import Observed
from clearhead.core.partial import Partial, merge
from clearhead.core.positions import Linear, Yarn, alibi, relative_bias, rotary, sinusoidal
from clearhead.core.sparse_masks import blocks, dilated, first_tokens, random_blocks, strided
from clearhead.kernels.threads import set_threads

if TYPE_CHECKING:
    from clearhead import distributed as distributed
    from clearhead import nn as nn
    from clearhead import textbook as textbook
    from clearhead.approximations import (
        Audit,
        Method,
        approximate,
        audit,
        clusters,
        compare,
        linear,
        linformer,
        lsh,
        nystrom,
        performer,
        sweep,
        topk_blocks,
    )
    from clearhead.doctor import Report, check
    from clearhead.explain.layers import LayerTrace, trace_layer
    from clearhead.explain.tracing import Trace, trace
    from clearhead.explorer.opening import Explorer, explore
    from clearhead.learning import learn
    from clearhead.measure.markov import Chain, chain, powers
    from clearhead.measure.plans import Plan, plan
    from clearhead.measure.profiling import Profile, profile
    from clearhead.measure.scales import Scaling, scaling
    from clearhead.measure.shuffling import shuffle_weights
    from clearhead.plots import (
        plot_attention,
        plot_bias,
        plot_comparison,
        plot_entropy,
        plot_geometry,
        plot_heads,
        plot_kept,
        plot_mask,
        plot_profile,
        plot_scaling,
        plot_shift,
        plot_sweep,
    )
    from clearhead.watching.call import Call
    from clearhead.watching.direct import contributions
    from clearhead.watching.edits import ablate, patch
    from clearhead.watching.opening import watch
    from clearhead.watching.seen import Seen
    from clearhead.watching.words import merge_subwords

__version__ = "0.2.0"

__all__ = [
    "ArgumentError",
    "Audit",
    "Call",
    "Chain",
    "Dropout",
    "Explorer",
    "KernelRefused",
    "LayerTrace",
    "Linear",
    "Mask",
    "Method",
    "Observed",
    "Partial",
    "Plan",
    "Profile",
    "Report",
    "Scaling",
    "Seen",
    "Trace",
    "Yarn",
    "ablate",
    "alibi",
    "approximate",
    "attention",
    "audit",
    "blocks",
    "causal",
    "chain",
    "check",
    "clusters",
    "compare",
    "contributions",
    "dilated",
    "documents",
    "explore",
    "first_tokens",
    "global_tokens",
    "gradients",
    "hides",
    "learn",
    "lengths",
    "lets",
    "linear",
    "linformer",
    "lsh",
    "merge",
    "merge_subwords",
    "nystrom",
    "observe",
    "padding",
    "patch",
    "performer",
    "plan",
    "plot_attention",
    "plot_bias",
    "plot_comparison",
    "plot_entropy",
    "plot_geometry",
    "plot_heads",
    "plot_kept",
    "plot_mask",
    "plot_profile",
    "plot_scaling",
    "plot_shift",
    "plot_sweep",
    "powers",
    "prefix",
    "profile",
    "random_blocks",
    "relative_bias",
    "rotary",
    "scaling",
    "set_threads",
    "shuffle_weights",
    "sinusoidal",
    "strided",
    "sweep",
    "topk_blocks",
    "trace",
    "trace_layer",
    "watch",
    "where",
    "window",
]

# What is looked at after the fact is imported when it is first asked for, so that `import clearhead` stays light
_LATER = {
    "Audit": "clearhead.approximations",
    "Call": "clearhead.watching.call",
    "Chain": "clearhead.measure.markov",
    "Explorer": "clearhead.explorer.opening",
    "LayerTrace": "clearhead.explain.layers",
    "Method": "clearhead.approximations",
    "Plan": "clearhead.measure.plans",
    "Profile": "clearhead.measure.profiling",
    "Report": "clearhead.doctor",
    "Scaling": "clearhead.measure.scales",
    "Seen": "clearhead.watching.seen",
    "Trace": "clearhead.explain.tracing",
    "ablate": "clearhead.watching.edits",
    "approximate": "clearhead.approximations",
    "audit": "clearhead.approximations",
    "chain": "clearhead.measure.markov",
    "check": "clearhead.doctor",
    "clusters": "clearhead.approximations",
    "compare": "clearhead.approximations",
    "contributions": "clearhead.watching.direct",
    "explore": "clearhead.explorer.opening",
    "learn": "clearhead.learning",
    "linear": "clearhead.approximations",
    "linformer": "clearhead.approximations",
    "lsh": "clearhead.approximations",
    "merge_subwords": "clearhead.watching.words",
    "nystrom": "clearhead.approximations",
    "patch": "clearhead.watching.edits",
    "performer": "clearhead.approximations",
    "plan": "clearhead.measure.plans",
    "plot_attention": "clearhead.plots",
    "plot_bias": "clearhead.plots",
    "plot_comparison": "clearhead.plots",
    "plot_entropy": "clearhead.plots",
    "plot_geometry": "clearhead.plots",
    "plot_heads": "clearhead.plots",
    "plot_kept": "clearhead.plots",
    "plot_mask": "clearhead.plots",
    "plot_profile": "clearhead.plots",
    "plot_scaling": "clearhead.plots",
    "plot_shift": "clearhead.plots",
    "plot_sweep": "clearhead.plots",
    "powers": "clearhead.measure.markov",
    "profile": "clearhead.measure.profiling",
    "scaling": "clearhead.measure.scales",
    "shuffle_weights": "clearhead.measure.shuffling",
    "sweep": "clearhead.approximations",
    "topk_blocks": "clearhead.approximations",
    "trace": "clearhead.explain.tracing",
    "trace_layer": "clearhead.explain.layers",
    "watch": "clearhead.watching.opening",
}

# Modules that are asked for by name, `clearhead.nn`, and imported only then
_WINGS = ("distributed", "nn", "textbook")
# What this file itself needs, which nobody looks for here
_INTERNAL = {"Any", "TYPE_CHECKING", "import_module"}


class _Absent:
    """A function whose library is not installed: it can be listed and imported, and says what is missing when used."""

    def __init__(self, name: str, words: str) -> None:
        self.__name__, self.__doc__, self._words = name, words, words

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ImportError(self._words)

    def __repr__(self) -> str:
        return f"<clearhead.{self.__name__}, which cannot be used here: {self._words}>"


if not TYPE_CHECKING:  # who checks types has the names from above, and is told of one that is not there

    def __getattr__(name: str) -> Any:
        if name in _WINGS:
            try:
                return import_module(f"clearhead.{name}")
            except ImportError as missing:  # completion asks with getattr, which an ImportError would end
                raise AttributeError(str(missing)) from missing
        if name in _LATER:
            try:
                return getattr(import_module(_LATER[name]), name)
            except ImportError as missing:
                return _Absent(name, str(missing))
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")

    def __dir__() -> list[str]:
        hidden = {name for name in globals() if name.startswith("_") and not name.startswith("__")}
        return sorted({*globals(), *__all__, *_WINGS} - hidden - _INTERNAL)
