"""A watched call of a kind that was seen before: what was found out then is done again, and nothing else.

What a call of PyTorch's attention is, which kernel observes it and with which launches, depends on shapes, strides,
dtypes, where memory starts, and a few options. All of that is asked of each call, in a few microseconds; for one whose
like was observed before, the launches are played, what they gave is held on to as bytes, and the model goes on. Calls
with a mask of their own, with gradients, inside autocast, a transform or another mode, and what is more than a key can
say, are read and observed as if for the first time.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.core.arrays import made
from clearhead.core.masks import causal
from clearhead.core.observations import OBSERVATIONS, Observed
from clearhead.kernels.prepared import observed_again
from clearhead.watching.call import Call
from clearhead.watching.wants import Wanted

MOST = 2048  # kinds of one sort of watch that are remembered
APART = 2**18  # bytes of what is kept of a call from which on whole numbers leave as 32 bits
ASKED = ("top", "received", "received_max", "removal", "map")

# for each sort of watch, how calls of each kind are observed
_known: dict[Any, dict[Any, Kind]] = {}


class Kind:
    """Calls that differ in nothing but their numbers, as one sort of watch sees them."""

    def __init__(self, packed: Any, kernel: str, q: Tensor, k: Tensor, scale: float | None, wanted: Wanted) -> None:
        self.packed, self.play = packed, packed.play
        self.keys, self.queries, self.batch = k.shape[-2], q.shape[-2], math.prod(q.shape[:-3])
        features = q.shape[-1]
        self.factor = features / math.sqrt(features) if scale is None else features * abs(scale)
        self.output = wanted.output
        self.bare = torch.empty((*packed.output.shape[:-1], 0), dtype=q.dtype)  # what is there of outputs not kept
        self.fields: dict[str, Any] = {"kernel": kernel}
        self.given: dict[str, Any] = {
            "keys": self.keys,
            "counted": wanted.counted(self.queries),
            "distance": None,
            "kept": None,
        }

    def finite(self, norms: Tensor) -> bool:
        """Were all numbers of a call finite, and its scores, by what was kept for that?"""
        found: bool = self.packed.finite(norms, self.factor)
        return found


class Pending:
    """What is known of a call that was played; a `Call` is made of it when somebody reads it."""

    __slots__ = ("arrays", "doubted", "fields", "kind", "numbers", "output")

    def __init__(self, kind: Kind, kept: Tensor, output: Tensor | None, doubted: Any, fields: dict[str, Any]) -> None:
        self.kind, self.arrays, self.output = kind, kept, output
        self.numbers: Tensor | None = None  # those of 64 bits, where they left by themselves
        self.doubted, self.fields = doubted, fields

    def parcel(self) -> list[Tensor]:
        """What is to go to the host."""
        packed, kept = self.kind.packed, self.arrays
        parts = [kept]
        if packed.size > APART and packed.whole < packed.size:
            parts = [kept[: packed.whole], kept[packed.whole :].view(torch.int64)]
        return parts if self.output is None else [*parts, self.output]

    def arrived(self, found: list[Tensor]) -> Any:
        """What was to go is on its way there; what is to be done when it is there."""
        if self.output is not None:
            self.output = found.pop()
        self.arrays = found[0]
        self.numbers = found[1] if len(found) > 1 else None
        return self.told

    def told(self) -> None:
        """Whoever doubts hears whether numbers were finite."""
        self.doubts([self.kind.packed.norms.of(self.arrays)])()

    def doubts(self, norms: list[Tensor]) -> Any:
        """The same of the largest numbers by themselves, once they are there."""

        def told() -> None:
            if not self.kind.finite(norms[0]):
                self.doubted(self.fields["name"])

        return told

    def call(self) -> Call:
        """The call."""
        packed, own = self.kind.packed, dict(self.kind.fields)
        for name, array in packed.arrays.items():
            if self.numbers is not None and array.dtype == torch.int64:
                whole = self.numbers.long()
                own[name] = whole.as_strided(array.shape, array.strides, (array.start - packed.whole) // 8)
            else:
                own[name] = array.of(self.arrays)
        output = self.kind.bare.to(self.arrays.device) if self.output is None else self.output
        return Call(observed=made(Observed, **gathered(own), output=output), **self.fields, **self.kind.given)


def gathered(fields: dict[str, Any]) -> dict[str, Any]:
    """Arrays by name, those of one observation together."""
    found = {name: array for name, array in fields.items() if "." not in name}
    for name in dict.fromkeys(name.partition(".")[0] for name in fields if "." in name):
        one = OBSERVATIONS[name]
        found[name] = one.of([fields[part] for part in one.names(name)])
    return found


def sort_of(wanted: Wanted, heads: Any, on_device: bool) -> dict[Any, Kind] | None:
    """How watches that want the same observe what they have met; None where they want more than is played."""
    if heads is not None or wanted.distance or wanted.keep or any(name not in ASKED for name in wanted.options):
        return None
    asked = tuple((name, type(value), value) for name, value in sorted(wanted.options.items()))
    try:
        return _known.setdefault((asked, wanted.output), {})
    except TypeError:  # what cannot be compared
        return None


def kind_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """All that a call of PyTorch's attention depends on but its numbers; None where there is more to it."""
    q, k, v = query, key, value
    if attn_mask is not None or dropout_p != 0.0 or not (type(q) is type(k) is type(v) is Tensor) or not q.is_cuda:
        return None
    if not (scale is None or type(scale) is float) or type(is_causal) is not bool or somebody_else():
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    a, b, c, device, dtype = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.get_device(), q.dtype
    if not (a and b and c) or (a | b | c) % 16 or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if not device == k.get_device() == v.get_device() == torch.cuda.current_device() or not dtype == k.dtype == v.dtype:
        return None
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), dtype, device, is_causal, scale, enable_gqa
    )  # fmt: skip


def somebody_else() -> bool:
    """Is a call more than its tensors: autocast, a compiler, a transform, another mode, or a capture?"""
    c = torch._C
    return bool(
        c._is_any_autocast_enabled()
        or c._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or c._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
    )


def learn(known: dict[Any, Kind], key: Any, wanted: Wanted, call: dict[str, Any]) -> None:
    """A call of this kind was observed: remember how, where it can be played."""
    q, k, v, scale = call["query"], call["key"], call["value"], call["scale"]
    mask = causal(align="start") if call["is_causal"] else None
    options = wanted.for_length(q.shape[-2])
    try:
        again = observed_again(q, k, v, mask, scale, tuple(options.get(name) for name in ASKED))
        all_seen = mask is None or k.shape[-2] <= q.shape[-2]
        packed = None if again is None else again.packed(q, k, v, all_seen=all_seen)
    except Exception:  # the model runs on: its calls are observed as before
        return
    if again is None or packed is None:
        return
    add(known, key, Kind(packed, sys.intern(again.kernel), q, k, scale, wanted))


def add(known: dict[Any, Kind], key: Any, kind: Kind) -> None:
    """Remember one more kind."""
    if len(known) >= MOST:
        known.clear()
    known[key] = kind
