"""What transformers' registry hands models: looked at as it runs; on "eager", called as it is and observed beside it.

A model asks transformers' `AttentionInterface` for its attention function, and on "eager" is given its own, which
builds the matrix. While a watch is open the registry answers with that function wrapped: it computes the result, and
`observe` sees what it was given. That is exact only where both mean the same; so each call is held to its own output.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.core.observations import Observed
from clearhead.torch_bridge.autograd import autocast
from clearhead.watching import handing, mode, shortcut
from clearhead.watching.familiar import Way
from clearhead.watching.given import Given
from clearhead.watching.sdpa import hold_numbers

Function = Callable[..., tuple[Tensor, Any]]
PLAIN = "scaled_dot_product_attention"
OTHERWISE = "its eager attention computes something other than softmax(Q Kᵀ · scale + mask) V, by its output"


class Registry:
    """transformers' registry, answering for watches as long as any is open; on threads that none looks at, as ever."""

    def __init__(self) -> None:
        self.open = 0
        self.kind: Any = None
        self.own: Any = None
        self.answers: dict[Any, Function] = {}  # what was handed out since the first of them was opened
        self.lock = threading.Lock()

    def begin(self) -> None:
        """One more watch is open."""
        with self.lock:
            self.open += 1
            # a model of transformers has imported it
            kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
            if self.kind is None and hasattr(kind, "get_interface"):
                self.kind, self.own = kind, kind.get_interface
                kind.get_interface = self._answer()

    def end(self) -> None:
        """One less."""
        with self.lock:
            self.open -= 1
            if not self.open and self.kind is not None:
                self.kind.get_interface = self.own
                self.kind = self.own = None
                self.answers = {}

    def _answer(self) -> Callable[..., Function]:
        own, answers, active = self.own, self.answers, mode.active

        def get_interface(interface: Any, attn_implementation: str, default: Function) -> Function:
            found: Function = own(interface, attn_implementation, default)
            if not (active.near or active.standing or active.recorders):
                return found
            asked = found, found is default
            if asked not in answers:
                answers[asked] = handed_out(watched(found) if found is default else found)
            return answers[asked]

        return get_interface


registry = Registry()


def handed_out(function: Function) -> Function:
    """A function of the registry; who stands by looks at it as it runs."""
    direct = looked_into(function)

    def running(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = handing.hand_over(function, direct, module, args, options)
        return found

    return running


def looked_into(function: Function) -> shortcut.Direct | None:
    """transformers' own function for "sdpa" with one name changed, so that its call is seen as it makes it; else None.

    The same code over changed names: patching the module would be seen by every thread.
    """
    theirs = "transformers.integrations.sdpa_attention", "sdpa_attention_forward"
    if not isinstance(function, types.FunctionType) or (function.__module__, function.__name__) != theirs:
        return None
    return changed(function) if {PLAIN, "contiguous"} <= set(function.__code__.co_names) else None


@lru_cache(maxsize=16)  # what is remembered of its calls lasts from one watch to the next
def changed(function: types.FunctionType) -> shortcut.Direct:
    """The function, calling ours for PyTorch's."""
    inside = Instead(torch, nn=Instead(nn, functional=Instead(F, **{PLAIN: handing.directly})))
    around = {**function.__globals__, "torch": inside}
    copy = types.FunctionType(function.__code__, around, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return shortcut.direct(function, copy)


class Instead:
    """A module with some names changed."""

    def __init__(self, module: Any, **changed: Any) -> None:
        vars(self).update(changed, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def watched(function: Function) -> Function:
    """A model's own eager attention function, and every watch told of what it was given."""

    def eager(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        rest: list[Any] = []

        def plain() -> Tensor:
            output, *others = function(module, query, key, value, attention_mask, **options)
            rest.extend(others)
            return output.transpose(1, 2)  # (B, H, T, D), as observations have it

        def without_dropout() -> Tensor:
            return function(module, query, key, value, attention_mask, **{**options, "dropout": 0.0})[0].transpose(1, 2)

        dropped = bool(options.get("dropout")) and module.training
        try:
            given = read(query, key, value, attention_mask, options)
        except (ValueError, TypeError, RuntimeError) as error:  # the model runs on, and what was missed is said
            for recorder in mode.active.recorders:
                recorder.count(Way.HANDED)
                recorder.refuse(str(error))
            with mode.without_steps():
                return function(module, query, key, value, attention_mask, **options)
        output = mode.attend_beside(given, plain, without_dropout if dropped else None, like)
        return output.transpose(1, 2), *rest

    return eager


def read(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Given:
    """A call in the terms of `observe`. Eager attention knows no causality but the mask, which it adds."""
    hold_numbers(query, key, value)
    query, key, value = autocast(query, key, value)
    hides, bias = None, None
    if mask is not None:
        mask = mask[..., : key.shape[-2]]
        if mask.dtype == torch.bool:
            hides = mask
        else:
            least = torch.finfo(mask.dtype).min
            hidden = mask <= least / 2
            # most masks only hide: as truth values a row that may see nothing is nobody's, and not the mean of all
            hides = ~hidden if bool(hidden.any()) else None
            rest = mask.masked_fill(hidden, 0.0)
            bias = rest if bool(rest.any()) else None
    given = Given(query, key, value, mask=hides, bias=bias, scale=options.get("scaling"))
    return given.with_transformers(options)


def like(given: Given, observed: Observed, output: Tensor) -> str | None:
    """Why an observation is not of the call that gave this output; None where it is.

    Rounding in scores as large as s moves a weight by s parts in 1/eps, and an output by that share of the largest
    value. Queries that may see nothing are left out: eager attention gives them the mean of everything.
    """
    if observed.output.shape != output.shape:
        return OTHERWISE
    alive = torch.isfinite(observed.lse)
    if not bool(alive.any()):
        return None
    largest = float(observed.max_score[alive].abs().max())
    # ones that are summed: the softmax's denominator, and the values
    steps = 8.0 + 2.0 * largest + float(given.keys) ** 0.5
    allowed = torch.finfo(output.dtype).eps * steps * float(given.v.abs().max())
    away = (observed.output - output).abs().amax(-1)[alive]
    return None if bool((away <= allowed).all()) else OTHERWISE
