"""The residual stream of a run, followed: from what heads give, through projections and sums, to the unembedding.

Tensors are followed by identity, as in `steps.py`, and each link is checked by its numbers: a projection's input is the
heads side by side, and the last norm's output is what the unembedding is given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.core.errors import ArgumentError
from clearhead.watching.steps import SHAPES, tensors

SUMS = {"add", "radd", "iadd"}
# what leaves numbers as they are; dropout does in evaluation
SAME = (SHAPES | {"dropout", "to", "type_as", "float"}) - {
    "getitem", "narrow", "select", "chunk", "split", "unbind", "pad", "cat", "concat", "stack", "concatenate", "roll",
    "flip", "index_select", "gather", "as_strided", "unfold",
}  # fmt: skip


@dataclass(eq=False)
class Projection:
    """One call's heads (batch, heads, queries, features), and the weight (width, heads · features) that joins them."""

    name: str
    layer: int
    heads: Tensor
    weight: Tensor | None = None

    def parts(self, place: tuple[int, int]) -> list[Tensor]:
        """What each head adds to the stream at a batch row and a position, (width,)."""
        assert self.weight is not None
        count, size = self.heads.shape[1], self.heads.shape[-1]
        blocks = self.weight.double().reshape(-1, count, size)  # (width, heads, features)
        mine = self.heads[place[0], :, place[1]].double()  # (heads, features)
        return [blocks[:, head] @ mine[head] for head in range(count)]


@dataclass(frozen=True)
class Tag:
    """What a tensor is: "heads" of a call, "projected" heads, or the "stream" that the projections of calls are in."""

    kind: str
    calls: frozenset[Projection]


@dataclass(frozen=True)
class Norm:
    """The last norm as a linear map: γ r (x − mean), with r as it was; none at all where `gain` is None."""

    gain: Tensor | None = None
    centred: bool = False
    eps: float = 0.0

    def at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The map that it is where the stream is x."""
        if self.gain is None:
            return lambda part: part
        gain = self.gain
        scale = torch.rsqrt(self._middle(x).square().mean(-1, keepdim=True) + self.eps)
        return lambda part: gain * scale * self._middle(part)

    def _middle(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


@dataclass(frozen=True)
class End:
    """The end of the stream: what it was before the norm, the norm, the unembedding's weight and its logits."""

    given: Tensor
    norm: Norm
    weight: Tensor
    logits: Tensor


class Followed(TorchFunctionMode):
    """Tells a stream of every call of a PyTorch function."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        name = str(getattr(func, "__name__", "")).strip("_")
        given = list(tensors((args, kwargs or {})))
        tags = self.stream.tags_of(given)
        # dropout may write over what it is given
        before = given[0].clone() if name == "dropout" and any(tags) else None
        result = func(*args, **(kwargs or {}))
        dropped = before is not None and isinstance(result, Tensor) and not torch.equal(before, result)
        if isinstance(result, Tensor) and any(tags) and not dropped:
            self.stream.follow(name, given, tags, bool(kwargs), result)
        return result


class Stream:
    """What is followed during one run of a model."""

    def __init__(self, model: nn.Module, last: nn.Module | None) -> None:
        self.mode: Any = Followed(self)
        self.model, self.last = model, last
        self.calls: list[Projection] = []
        self.tags: dict[int, tuple[weakref.ref[Tensor], int, Tag]] = {}
        self.direct: frozenset[Projection] = frozenset()
        self.norms: list[tuple[nn.Module, Tensor, Tensor, int]] = []  # module, input, output and its version
        self.final: tuple[nn.Module, Tensor, Tensor] | None = None
        self.hooks: list[Any] = []

    def __enter__(self) -> Stream:
        for module in self.model.modules():
            if "norm" in type(module).__name__.lower():
                self.hooks.append(module.register_forward_hook(self._normed))
            if module is self.last or (self.last is None and isinstance(module, nn.Linear)):
                self.hooks.append(module.register_forward_hook(self._ended))
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def _normed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            self.norms = [*self.norms[-1:], (module, args[0], output, _version(output))]

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            self.final = module, args[0], output

    def attended(self, name: str, layer: int, output: Tensor) -> None:
        """A module attended, and its heads gave this, (batch, heads, queries, features)."""
        if output.ndim == 4:
            self.calls.append(Projection(name, layer, output.detach()))
            self._know(output, Tag("heads", frozenset([self.calls[-1]])))

    def tags_of(self, given: list[Tensor]) -> list[Tag | None]:
        """What tensors are, asked before a call that may write over them."""
        return [self._of(tensor) for tensor in given]

    def follow(self, name: str, given: list[Tensor], tags: list[Tag | None], options: bool, result: Tensor) -> None:
        """One call of a PyTorch function, by its name without underscores; `tags` are those before it."""
        first = tags[0]
        if name in SUMS and len(given) == 2 and not options:
            self._sum(given, tags, result)
        elif name in SAME and first is not None and result.numel() == given[0].numel():
            if first.kind == "heads" or _same_rows(given[0], result):
                self._know(result, first)
        elif name in ("linear", "addmm", "matmul"):
            at = 1 if name == "addmm" else 0  # addmm(bias, x, weight), as GPT-2's Conv1D has it
            tag, weight = tags[at], given[at + 1] if name == "linear" else given[at + 1].mT
            if tag is not None and tag.kind == "heads" and weight.ndim == 2:
                (call,) = tag.calls
                if _side_by_side(given[at], call.heads):
                    call.weight = weight.detach()
                    self._know(result, Tag("projected", tag.calls))

    def _sum(self, given: list[Tensor], tags: list[Tag | None], result: Tensor) -> None:
        known = [tag for tag in tags if tag is not None]
        if any(tag.kind == "heads" for tag in known) or any(result.shape != one.shape for one in given):
            bias = [one for one in given if isinstance(one, nn.Parameter)]
            if len(bias) == 1 and known[0].kind == "projected":  # a bias that is added by itself
                self._know(result, known[0])
            return
        calls = [call for tag in known for call in tag.calls]
        if len(set(calls)) < len(calls):  # twice the same, as in x + x
            return
        self._know(result, Tag("stream", frozenset().union(*(tag.calls for tag in known))))

    def _of(self, tensor: Tensor) -> Tag | None:
        found = self.tags.get(id(tensor))
        there = found is not None and found[0]() is tensor and found[1] == _version(tensor)  # not written over since
        return found[2] if found is not None and there else None

    def _know(self, tensor: Tensor, tag: Tag) -> None:
        self.tags[id(tensor)] = (weakref.ref(tensor), _version(tensor), tag)

    def projections(self) -> list[Projection]:
        """Every call, with the weight that joins its heads; words that say so where one is not simply added."""
        if not self.calls:
            raise ArgumentError("model", "made no attention call with heads that could be followed")
        for call in self.calls:
            if call.weight is None:
                raise ArgumentError("model", f"does not join the heads of {call.name!r} by one linear layer")
            if call not in self.direct:
                raise ArgumentError(
                    "model",
                    f"does not add what {call.name!r} gives to the residual stream as it is: it is changed on the "
                    "way, as by a norm or in place, and adds to no logit directly",
                )
        return self.calls

    def end(self) -> End:
        """The end of the stream, checked."""
        if self.final is None or self.final[1].ndim != 3:
            raise ArgumentError(
                "unembedding", "did not run on (batch, positions, features): say which layer gives logits"
            )
        module, given, logits = self.final
        weight: Any = module.weight
        tag = self._of(given)
        if tag is not None and tag.kind == "stream":
            self.direct = tag.calls
            return End(given, Norm(), weight, logits)
        for norm, before, after, version in reversed(self.norms):
            tag = self._of(before)
            if tag is None or tag.kind != "stream" or _version(after) != version:
                continue
            if _last_of(given, after):
                raise ArgumentError(
                    "unembedding",
                    f"was given {given.shape[1]} of {after.shape[1]} positions, expected all of them: leave out "
                    "logits_to_keep, or what else takes the last ones",
                )
            if after.shape == given.shape and torch.equal(after, given):
                self.direct = tag.calls
                return End(before, linearised(norm, before, after), weight, logits)
        raise ArgumentError(
            "model",
            "does not end in one norm of a residual stream and an unembedding: its heads add to no logit directly",
        )


def linearised(norm: nn.Module, before: Tensor, after: Tensor) -> Norm:
    """A norm's gain, found by asking it: of ±1 by turns it gives ±γ, and of ones γ, or nothing where it centres.

    Where the width is odd one feature is asked for 0, so that the others have no mean: first the last, then the first.
    """
    width = before.shape[-1]
    ones = torch.ones(width, dtype=before.dtype, device=before.device)
    turns = ones.clone()
    turns[1::2] = -1.0
    if width % 2:
        turns[-1] = 0.0
    eps = float(getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None) or torch.finfo(before.dtype).eps)
    asked = (0 * ones, ones, turns, turns.roll(1))
    with torch.no_grad():
        base, level, up, other = (norm.forward(x[None, None])[0, 0].double() for x in asked)
        scale = (turns.double().square().mean() + eps) ** 0.5
        gain = torch.where(turns != 0, (up - base) * turns.double(), (other - base) * turns.roll(1).double()) * scale
        found = Norm(gain, bool(torch.allclose(level, base)), eps)
        exact = found.at(before.double())(before.double()) + base
    step = torch.finfo(after.dtype).eps  # a norm in bfloat16 is no closer than that
    most = float(after.abs().max())
    if not torch.allclose(exact, after.double(), rtol=max(1e-3, 4 * step), atol=max(1e-4, 2 * step) * most):
        raise ArgumentError("model", f"ends in {type(norm).__name__}, which is neither a LayerNorm nor an RMSNorm")
    return found


def _version(tensor: Tensor) -> int:
    """How often a tensor, or what it is a view of, was written to; inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _same_rows(given: Tensor, result: Tensor) -> bool:
    """Are features still in the order in which they were? Batch rows and positions may have changed places."""
    width = given.shape[-1] if given.ndim else 0
    if not width or not result.ndim or result.shape[-1] != width:
        return False
    return torch.equal(given.reshape(-1, width)[:1].to(result), result.reshape(-1, width)[:1])


def _last_of(given: Tensor, whole: Tensor) -> bool:
    """Is this the last positions of a whole that has more, (batch, positions, features)?"""
    count = given.shape[1]
    fits = whole.ndim == 3 and count < whole.shape[1] and whole[:, whole.shape[1] - count :].shape == given.shape
    return fits and torch.equal(whole[:, whole.shape[1] - count :], given)


def _side_by_side(joined: Tensor, heads: Tensor) -> bool:
    """Is this the heads (batch, heads, queries, features) one beside the other, a row for each query?"""
    return joined.numel() == heads.numel() and torch.equal(joined.reshape(-1), heads.transpose(1, 2).reshape(-1))
