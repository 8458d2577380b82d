"""One attention call, checked and frozen: arrays in one layout, mask, bias, scale, what to observe."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from clearhead.core.admit import admit, lies_plainly
from clearhead.core.array_masks import given_mask, of_pytorch
from clearhead.core.arrays import (
    HALF,
    Array,
    Library,
    dtype_name,
    is_torch,
    is_traced,
    made,
    require_array,
    require_floating,
)
from clearhead.core.dropout import Dropout, as_dropout
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import Grid, broadcast
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask
from clearhead.core.observations import Want
from clearhead.core.once import once
from clearhead.core.positions import Bias, as_bias
from clearhead.core.trees import introduce, tree


@tree
@dataclass(frozen=True, eq=False)
class Problem:
    """What a kernel is given: q (*batch, Hq, T, D), k (*batch, Hk, S, D), v (*batch, Hk, S, Dv), and the options.

    Batch axes may be of size one where they broadcast; `grid` has their full sizes. Two-dimensional input has gained a
    head axis, which `restore` takes away again.
    """

    q: Array
    k: Array
    v: Array
    library: Library
    grid: Grid
    scale: float
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout: Dropout | None = None
    want: Want | None = None
    headless: bool = False
    differentiated: bool = False  # gradients will be asked for

    @property
    def key_heads(self) -> int:
        """How many heads the keys have; each serves `group` query heads."""
        return self.k.shape[-3]

    @property
    def group(self) -> int:
        """How many query heads share a key head; where there are none of either, one."""
        return self.grid.heads // self.key_heads if self.key_heads else 1

    @property
    def width(self) -> int:
        """Features of a value, Dv."""
        return self.v.shape[-1]

    @once
    def differentiable(self) -> tuple[str, ...]:
        """Which arrays PyTorch wants gradients of: some of q, k, v, bias, sinks."""
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        if self.bias is not None:
            arrays["bias"] = self.bias.parameter
        if self.sinks is not None:
            arrays["sinks"] = self.sinks
        return tuple([name for name, array in arrays.items() if is_torch(array) and array.requires_grad])

    @once
    def found(self) -> dict[str, Any]:
        """What kernels found out about this problem before they run it, each under its name."""
        return {}

    @once
    def lowered(self) -> Node | None:
        """The mask in the terms of kernels, made once for all who look at it."""
        return None if self.mask is None else self.mask.lower(self.grid)

    @property
    def keeps_unrounded(self) -> bool:
        """True where the output is needed in the precision of its sums, which is not the one it comes back in.

        Gradients need it so, and what is said of removing a key: both are differences from it.
        """
        wanted = self.differentiated or (self.want is not None and self.want.removal is not None)
        return wanted and dtype_name(self.q) in HALF

    @property
    def plain(self) -> bool:
        """True for q, k and v alone: no option, and nothing to observe."""
        options = (self.mask, self.bias, self.softcap, self.sinks, self.dropout, self.want)
        usual = not is_traced(self.scale) and self.scale == default_scale(self.q)
        return usual and all(option is None for option in options)

    def to_be_differentiated(self) -> Problem:
        """The same, its gradients to be asked for."""
        return made(Problem, **{**vars(self), "differentiated": True})

    def restore(self, array: Array) -> Array:
        """An array with this call's leading axes, in the layout that the caller's arrays had."""
        return array[0, ...] if self.headless else array


def default_scale(q: Array) -> float:
    """1/√D."""
    features = q.shape[-1]
    return 1.0 / math.sqrt(features) if features else 1.0


def pose(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: tuple[float, int | Array] | None = None,
    want: Callable[[Grid], Want] | None = None,
) -> Problem:
    """Check every argument of a call and freeze it; whatever is wrong is said in one sentence."""
    introduce()  # what comes of it may be handed to JAX
    if not lies_plainly(q, k, v):
        q, k, v = admit("q", q), admit("k", k), admit("v", v)
    sizes = _sizes(q, k, v)
    if sizes.headless:
        q, k, v = q[None, ...], k[None, ...], v[None, ...]
    elif sizes.uneven:
        q, k, v = _even(q, k, v)
    problem = made(
        Problem,
        q=q,
        k=k,
        v=v,
        library=sizes.library,
        grid=sizes.grid,
        scale=default_scale(q) if scale is None else _number("scale", scale, q),
        mask=None if mask is None else given_mask("mask", of_pytorch("mask", mask, q, k)),
        bias=None if bias is None else as_bias(bias),
        softcap=None if softcap is None else _number("softcap", softcap, q, positive=True),
        sinks=_sinks(sinks, q),
        dropout=as_dropout(dropout),
        want=None if want is None else want(sizes.grid),
        headless=sizes.headless,
    )
    refuse_removal(problem.dropout, problem.want)
    if problem.mask is not None:
        problem.mask.check(problem.grid)
    if problem.bias is not None:
        problem.bias.check(problem.grid)
    return problem


def refuse_removal(dropout: Dropout | None, want: Want | None) -> None:
    """What outputs would be without a key is not asked of outputs after dropout."""
    if dropout is not None and want is not None and want.removal is not None:
        raise ArgumentError("removal", "is asked for together with dropout, after which the output is another")


class Sizes(NamedTuple):
    """What is known of three arrays, once they are checked: are they one head, are there batch axes to be added."""

    library: Library
    grid: Grid
    headless: bool
    uneven: bool


# of the last calls: the checks of tensors take longer than launching a kernel for them
_KNOWN: dict[Any, Sizes] = {}


def _sizes(q: Array, k: Array, v: Array) -> Sizes:
    """Three arrays checked; PyTorch's own tensors once for all that differ only in how many positions there are."""
    torch = sys.modules.get("torch")
    if torch is None or not type(q) is type(k) is type(v) is torch.Tensor:
        return _checked(q, k, v)
    queries, keys, values = q.shape, k.shape, v.shape
    if min(len(queries), len(keys), len(values)) < 2 or keys[-2] != values[-2]:
        return _checked(q, k, v)
    key = (
        queries[:-2], keys[:-2], values[:-2], queries[-1], keys[-1], values[-1],
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip
    known = _KNOWN.get(key)
    if known is None:
        known = _checked(q, k, v)
        if len(_KNOWN) >= 256:
            _KNOWN.clear()
        _KNOWN[key] = known
    library, grid, headless, uneven = known
    if (grid.queries, grid.keys) == (queries[-2], keys[-2]):
        return known
    return Sizes(library, Grid(grid.batch, grid.heads, queries[-2], keys[-2]), headless, uneven)


def _checked(q: Array, k: Array, v: Array) -> Sizes:
    _check_arrays(q, k, v)
    library, headless, uneven = Library.of(q), q.ndim == 2, not q.ndim == k.ndim == v.ndim
    q, k, v = (q[None, ...], k[None, ...], v[None, ...]) if headless else _even(q, k, v)
    _check_shapes(q, k, v)
    batch = broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return Sizes(library, Grid(batch, q.shape[-3], q.shape[-2], k.shape[-2]), headless, uneven)


def _even(*arrays: Array) -> tuple[Array, ...]:
    """The same with batch axes of size one where another has more axes."""
    rank = max(array.ndim for array in arrays)
    return tuple(a if a.ndim == rank else a[(None,) * (rank - a.ndim) + (...,)] for a in arrays)


def _check_arrays(q: Array, k: Array, v: Array) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        require_array(name, array)
        require_floating(name, array)
        if array.ndim < 2:
            raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected (…, heads, positions, features)")
    library = Library.of(q)
    for name, array in (("k", k), ("v", v)):
        other = Library.of(array)
        if other.name != library.name:
            raise ArgumentError(name, f"is a {other.name} array, expected {library.name} as q is")
        if dtype_name(array) != dtype_name(q):
            raise ArgumentError(name, f"has dtype {dtype_name(array)}, expected {dtype_name(q)} as q has")
        if None not in (other.device, library.device) and other.device != library.device:
            raise ArgumentError(name, f"is on device {other.device}, expected {library.device} as q is")
        if (q.ndim == 2) != (array.ndim == 2):
            raise ArgumentError(
                name, f"has shape {tuple(array.shape)} where q has {tuple(q.shape)}: only one of them has a head axis"
            )


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    """Shapes with a head axis and equal rank."""
    if k.shape[-1] != q.shape[-1]:
        raise ArgumentError(
            "k", f"has {k.shape[-1]} features (shape {tuple(k.shape)}), expected {q.shape[-1]} as q has"
        )
    if v.shape[-2] != k.shape[-2]:
        raise ArgumentError(
            "v", f"has {v.shape[-2]} positions (shape {tuple(v.shape)}), expected {k.shape[-2]} as k has"
        )
    if v.shape[-3] != k.shape[-3]:
        raise ArgumentError("v", f"has {v.shape[-3]} heads (shape {tuple(v.shape)}), expected {k.shape[-3]} as k has")
    query_heads, key_heads = q.shape[-3], k.shape[-3]
    if query_heads % key_heads if key_heads else query_heads:
        raise ArgumentError("k", f"has {key_heads} heads, expected a number that divides the {query_heads} heads of q")
    try:
        broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        shapes = ", ".join(str(tuple(a.shape[:-3])) for a in (q, k, v))
        raise ArgumentError("q, k, v", f"have batch axes {shapes}, expected equal sizes or sizes of one") from None


def _number(name: str, value: Any, q: Array, *, positive: bool = False) -> Any:
    """A number as a float; one that JAX traces as it is, in the precision that q is computed in."""
    expected = "a finite number above 0" if positive else "a finite number"
    refuse_gradient(name, value)
    if is_traced(value) and not is_torch(value):
        library = Library.of(value)
        real = dtype_name(value).startswith(("int", "uint", "float", "bfloat"))
        if value.ndim or not real or not library.owns(q):
            given = f"{dtype_name(value)} of shape {tuple(value.shape)} beside q of {Library.of(q).name}"
            raise ArgumentError(name, f"is traced, {given}, expected one real number beside arrays of JAX")
        return library.xp.astype(value, library.computing(q[..., :0]).dtype)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(name, f"is {shown(value)}, expected {expected}") from None
    if isinstance(value, (bool, str, bytes)) or not math.isfinite(number) or (positive and number <= 0):
        raise ArgumentError(name, f"is {shown(value)}, expected {expected}")
    return number


def refuse_gradient(name: str, value: Any) -> None:
    """Refuse a tensor for a number where PyTorch would wait for its gradient in vain."""
    if is_torch(value) and value.requires_grad and sys.modules["torch"].is_grad_enabled():
        instead = "multiply q with it, and give scale=1" if name == "scale" else "give .item()"
        raise ArgumentError(name, f"wants its gradient, which a number has not: {instead}")


def _sinks(sinks: Array | None, q: Array) -> Array | None:
    if sinks is None:
        return None
    require_array("sinks", sinks)
    sinks = admit("sinks", sinks)
    require_floating("sinks", sinks)
    heads = q.shape[-3]
    if tuple(sinks.shape) != (heads,):
        raise ArgumentError(
            "sinks", f"has shape {tuple(sinks.shape)}, expected ({heads},): one logit for each query head"
        )
    return sinks
