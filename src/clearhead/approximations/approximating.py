"""approximate(): a method in place of attention, and on request how far from exact it is."""

from __future__ import annotations

from typing import Any, Literal, Never

from clearhead.approximations.auditing import judged
from clearhead.approximations.method import OTHERS, Method, whole
from clearhead.core.arrays import AnyArray, ArrayOf, ArrayT, Library, is_traced, require_array
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.foreign import closed, refuse_others
from clearhead.core.mask import Mask

Layout = Literal["hnd", "nhd"]


@closed
def approximate(
    q: ArrayOf[ArrayT],
    k: ArrayOf[ArrayT],
    v: ArrayOf[ArrayT],
    method: Method,
    *,
    mask: Mask | AnyArray | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    layout: Layout = "hnd",
    audit: int | None = None,
    **others: Never,
) -> Any:
    """Attention by an approximation: `linear`, `performer`, `linformer`, `nystrom`, `lsh`, `clusters`, `topk_blocks`.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 16))
    >>> ch.approximate(q, k, v, ch.performer(256), mask=ch.causal()).shape
    (8, 1000, 16)
    >>> output, found = ch.approximate(q, k, v, ch.performer(256), audit=32)
    >>> found.by_head.shape, found.weights.recall.shape
    ((8,), (8,))

    - q, k, v, scale and temperature are those of `attention`; the output is of the same library, dtype and device, and
      gradients flow through it. Methods without scores, such as `linear`, refuse a scale.
    - mask: causal() where the method has a causal form; lengths(…), padding(…) and other masks that are the same for
      all queries; their `&`. Other masks are refused, in words.
    - layout: "hnd", heads before positions, or "nhd", positions before heads, as most published code has it.
    - audit: how many queries of each head to hold against exact attention; the result is then (output, `Audit`).
    """
    if others:
        refuse_others("approximate", others, OTHERS)
    if not isinstance(method, Method):
        raise ArgumentError("method", f"is {shown(method)[:60]}, expected a method, such as performer(256) or linear()")
    if layout not in ("hnd", "nhd"):
        raise ArgumentError("layout", f"is {shown(layout)}, expected 'hnd' or 'nhd'")
    if audit is not None:
        whole("audit", audit)
        if is_traced(q):
            raise ArgumentError("audit", "is given where arrays hold no numbers yet: audit outside of what traces them")
    arrays: tuple[Any, ...] = (q, k, v)
    if layout == "nhd":
        arrays = tuple(_turned(name, array) for name, array in zip("qkv", arrays, strict=True))
    output = method(*arrays, mask=mask, scale=scale, temperature=temperature)
    result = _turned("output", output) if layout == "nhd" else output
    if audit is None:
        return result
    problem, _ = method.posed(arrays[0], arrays[1], arrays[2], mask, scale, temperature)
    return result, judged(method, problem, output, audit, 8, 0)


def _turned(name: str, array: Any) -> Any:
    """Heads and positions exchanged."""
    require_array(name, array)
    if array.ndim < 3:
        raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected (…, positions, heads, features)")
    axes = list(range(array.ndim))
    axes[-3], axes[-2] = axes[-2], axes[-3]
    return Library.of(array).xp.permute_dims(array, tuple(axes))
