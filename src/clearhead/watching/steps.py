"""Attention that a model computes in steps, softmax(a bᵀ) c: followed from tensor to tensor and not by name.

Scores are a product of two activations; scaled, masked, biased or cast they stay scores; their softmax are weights, and
weights times a third activation, summed over the axis of the softmax, is attention. A parameter, and what is computed
from parameters alone, is no activation: a router's softmax over a linear layer is none of this. Not followed are a
softmax that is itself written in steps, scores that are no product (additive attention) and sums without a product.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

PRODUCTS = {"matmul", "rmatmul", "bmm", "mm", "mv", "inner", "linear", "einsum", "tensordot"}
ADDED = {"baddbmm", "addbmm", "addmm", "addmv"}  # a product that is added to their first argument
SOFTMAX = {"softmax"}
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# what leaves scores scores, and weights weights
SHAPES = {
    "view", "reshape", "view_as", "reshape_as", "permute", "transpose", "swapaxes", "swapdims", "movedim", "t", "mT",
    "T", "H", "mH", "adjoint", "unsqueeze", "squeeze", "expand", "expand_as", "contiguous", "flatten", "unflatten",
    "getitem", "narrow", "select", "chunk", "split", "unbind", "repeat", "repeat_interleave", "clone", "detach", "data",
    "pad", "cat", "concat", "concatenate", "stack", "roll", "flip", "index_select", "gather", "as_strided", "unfold",
}  # fmt: skip
STEPS = SHAPES | {
    "mul", "multiply", "rmul", "imul", "div", "divide", "truediv", "rtruediv", "itruediv", "true_divide", "idiv", "add",
    "radd", "iadd", "sub", "subtract", "rsub", "isub", "neg", "masked_fill", "masked_scatter", "where", "tril", "triu",
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "cpu", "cuda", "clamp", "clip", "clamp_min",
    "clamp_max", "minimum", "maximum", "tanh", "dropout", "nan_to_num", "copy", "fill", "index_fill", "index_add",
    "index_put", "scatter", "addcmul", "addcdiv",
}  # fmt: skip
MANY = 4096  # tensors that are known of, before those that are gone are forgotten


@dataclass(frozen=True)
class Tag:
    """What a tensor is: "fixed", "uninitialised", "scores", "weights", or any other, which is "plain".

    `axis` is that of the softmax, counted from the end.
    """

    kind: str
    axis: int = -1


PLAIN, FIXED, RAW, SCORES = Tag("plain"), Tag("fixed"), Tag("uninitialised"), Tag("scores")


@dataclass
class Steps:
    """What one thread has computed, as far as it matters here."""

    tags: dict[int, tuple[weakref.ref[Tensor], Tag]] = field(default_factory=dict)
    most: int = MANY

    def tag(self, tensor: Tensor) -> Tag | None:
        """What is known of a tensor; None where it came from nowhere that was seen."""
        found = self.tags.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        return FIXED if isinstance(tensor, nn.Parameter) else None

    def know(self, values: Iterable[Tensor], tag: Tag) -> None:
        """Remember what tensors are, for as long as they live."""
        for tensor in values:
            self.tags[id(tensor)] = (weakref.ref(tensor), tag)
        if len(self.tags) > self.most:
            self.tags = {key: entry for key, entry in self.tags.items() if entry[0]() is not None}
            self.most = max(MANY, 2 * len(self.tags))  # where many live, looking through them stays rare

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str | None:
        """One call that was made: "attends" where it completes attention in steps, "mixes" where it may be part of any.

        What may be part of any attention is a product of two activations, and a tensor that was filled by something
        that cannot be seen.
        """
        name, given = _name(func), list(tensors((args, kwargs)))
        results = [value for value in tensors(result) if not isinstance(value, nn.Parameter)]
        if not results and name != "setitem":
            return None
        tags = [self.tag(tensor) for tensor in given]
        unseen = self._unseen(name, func, given, tags)
        active = [tag for tag in tags if tag is not FIXED]
        if name == "setitem":
            if any(tag is not FIXED for tag in tags[1:]):
                self._written(given[0])
        elif name in UNINITIALISED:
            self.know(results, RAW)
        elif not active:
            self.know(results, FIXED)
        elif name in PRODUCTS or name in ADDED:
            return self._product(name, args, kwargs, results) or unseen
        elif name in SOFTMAX and active[0] is SCORES:
            self.know(results, Tag("weights", _axis(args, kwargs, results[0].ndim)))
        elif name in STEPS:
            marked = next((tag for tag in active if tag is not None and tag.kind in ("scores", "weights")), None)
            if marked is None and name in SHAPES and active[0] is RAW:
                marked = RAW
            self.know(results, PLAIN if marked is None else _moved(marked, name, args, kwargs, results[0].ndim))
        else:
            self.know(results, PLAIN)
        if active and given and results and results[0] is given[0]:  # in place
            self._written(given[0])
        return unseen

    def _written(self, tensor: Tensor) -> None:
        """Activations were written into a tensor: neither it nor what it is a view of is fixed any more."""
        for one in (tensor, tensor._base):
            if one is not None and self.tag(one) in (None, FIXED, RAW):
                self.know([one], PLAIN)

    def _unseen(self, name: str, func: Any, given: list[Tensor], tags: list[Tag | None]) -> str | None:
        """Was any of these tensors filled where nobody could see it?"""
        writes = getattr(func, "__name__", "").endswith("_") and name != "getitem"
        unseen = None
        for place, (tensor, tag) in enumerate(zip(given, tags, strict=True)):
            if tag is None or (tag is RAW and name not in SHAPES and not (writes and place == 0)):
                unseen = "mixes"
                self.know([tensor], PLAIN)
        return unseen

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> str | None:
        operands = list(tensors((args, kwargs)))
        operands = operands[1:] if name in ADDED else operands
        if name == "rmatmul":
            operands.reverse()
        tags = [self.tag(operand) for operand in operands]
        weights = [place for place, tag in enumerate(tags) if tag is not None and tag.kind == "weights"]
        moving = [place for place, tag in enumerate(tags) if tag is not FIXED]
        if len(moving) < 2:
            tag = tags[moving[0]] if moving else FIXED
            same = (
                bool(moving) and results[0].shape == operands[moving[0]].shape
            )  # heads that are mixed with one another
            self.know(results, (tag or PLAIN) if same or not moving else PLAIN)
            return None
        for place in weights:
            tag = tags[place]
            if tag is not None and _summed(name, args, operands, place, tag.axis):
                self.know(results, PLAIN)
                return "attends"
        self.know(results, SCORES)
        return "mixes"


def _name(func: Any) -> str:
    """What a function is called, however it is written: `add`, `add_`, `__add__` and `__iadd__` add."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":  # a property
        name = str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name.strip("_")


def tensors(value: Any, deep: int = 3) -> Iterator[Tensor]:
    """The tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif deep and isinstance(value, tuple | list):
        for inner in value:
            yield from tensors(inner, deep - 1)
    elif deep and isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner, deep - 1)


def _axis(args: tuple[Any, ...], kwargs: dict[str, Any], axes: int) -> int:
    """The axis of a softmax, from the end."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    dim = -1 if not isinstance(dim, int) else dim
    return dim if dim < 0 else dim - axes


def _moved(tag: Tag, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], axes: int) -> Tag:
    """The same tag where its axis has come to lie elsewhere; reshaped it is taken to lie where it was."""
    if tag.kind != "weights":
        return tag
    numbers = [n for n in _flat((args[1:], tuple(kwargs.values()))) if isinstance(n, int)]
    from_end = [n if n < 0 else n - axes for n in numbers]
    axis = tag.axis
    if name in ("mT", "T", "t", "adjoint", "mH", "H"):
        axis = {-1: -2, -2: -1}.get(axis, axis)
    elif name in ("transpose", "swapaxes", "swapdims") and len(from_end) >= 2:
        axis = {from_end[0]: from_end[1], from_end[1]: from_end[0]}.get(axis, axis)
    elif name == "permute" and axis in from_end:
        axis = from_end.index(axis) - axes
    elif name == "unsqueeze" and from_end and from_end[0] >= axis:
        axis -= 1
    return Tag(tag.kind, axis)


def _flat(value: Any) -> Iterator[Any]:
    for inner in value:
        if isinstance(inner, tuple | list):
            yield from _flat(inner)
        else:
            yield inner


def _summed(name: str, args: tuple[Any, ...], operands: list[Tensor], place: int, axis: int) -> bool:
    """Does a product sum over this axis of one of its operands?"""
    if name == "einsum" and args and isinstance(args[0], str):
        left, arrow, right = args[0].replace(" ", "").partition("->")
        names = left.split(",")[place].replace("...", ".")
        if len(names) < -axis:
            return False
        letter = names[axis]
        return letter not in right if arrow else left.count(letter) > 1
    if name in ("linear", "inner", "mv"):
        return axis == -1
    if name in ("tensordot", "einsum"):
        return True
    last = place == 0 or operands[place].ndim == 1
    return axis == (-1 if last else -2)
