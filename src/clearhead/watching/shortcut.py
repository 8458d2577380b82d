"""transformers' function for "sdpa", called as it was before: its one call is played, and the function is not run.

It looks at its options and asks its module for two things, makes one call, and lays out what that gives. All of it is
the same for tensors of the same kind, the same options and the same answers, and takes longer than what is played. So
what it did is remembered, where it made its call with the very tensors that it was given; and a function that names
anything which is not known here, as a later version may, is always run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from clearhead.watching import again

# all that the function names in transformers 5.0, 5.8, 5.17, 5.22 and 5.23
NAMES = frozenset(
    {
        "get", "ValueError", "logger", "warning_once", "isinstance", "PagedAttentionCache", "update", "layer_idx",
        "hasattr", "num_key_value_groups", "use_gqa_in_sdpa", "repeat_kv", "shape", "getattr",
        "torch", "jit", "is_tracing", "Tensor", "item", "_is_torch_npu_available", "dtype", "bool", "logical_not", "to",
        "device", "create_position_bias_mask", "nn", "functional", "scaled_dot_product_attention", "transpose",
        "contiguous", "is_torchdynamo_compiling", "pack_gqa", "reshape",
    }
)  # fmt: skip
COMPARED = ("dropout", "scaling", "is_causal")  # options that are part of a kind; of others it is known what they say


@dataclass(frozen=True)
class Direct:
    """The function, its call made known by itself; and the options that it may look at, None where that is open."""

    run: Any
    reads: frozenset[str] | None

    def kind(self, module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What tells this call from others, as far as it matters; None where there is more to it."""
        reads = self.reads
        if reads is None or len(given) != 4:
            return None
        for name in options:
            if name in reads and name not in COMPARED and options[name] is not None and options[name] is not False:
                return None
        query, key, value, mask = given
        tensors = again.kind_of(query, key, value, mask, options.get("dropout", 0.0), False, options.get("scaling"))
        if tensors is None:
            return None
        asked = options.get("is_causal"), getattr(module, "is_causal", None), getattr(module, "num_key_value_groups", 0)
        return tensors, self, asked

    def __hash__(self) -> int:
        return id(self.run)


def direct(function: Any, run: Any) -> Direct:
    """The function with another call in it, `run`, which does what it does."""
    code = function.__code__
    if not NAMES.issuperset(code.co_names) or code.co_freevars or code.co_cellvars:
        return Direct(run, None)
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return Direct(run, frozenset(named) | {text for text in code.co_consts if isinstance(text, str)})


def same(made: list[Any], given: tuple[Any, ...], result: Any) -> bool:
    """Was a call made with the tensors that the function was given, and its output laid out and nothing else?"""
    output, *tensors = made
    return (
        all(one is other for one, other in zip(tensors, given[:3], strict=True))
        and isinstance(result, tuple)
        and len(result) == 2
        and result[1] is None
        and result[0].shape == output.transpose(1, 2).shape
        and result[0].is_contiguous()
    )


def laid_out(output: Tensor) -> tuple[Tensor, None]:
    """What the function gives of what its call gave."""
    return output.transpose(1, 2).contiguous(), None
