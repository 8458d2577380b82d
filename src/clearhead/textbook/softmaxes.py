"""The softmax on its own, for teaching: its exponentials, shifted or not, and its Jacobian.

    softmax(x)_i = exp(x_i − max x) / Σ exp(x_j − max x)        J = diag(p) − p pᵀ

The shift changes nothing on paper and everything in a computer: exp ends at 709 in float64, at 88 in float32.

>>> softmax(np.array([1.0, 2.0, 3.0])).round(4)
array([0.09  , 0.2447, 0.6652])
>>> softmax(np.array([1000.0, 999.0])).round(4), softmax(np.array([1000.0, 999.0]), shift=False)
(array([0.7311, 0.2689]), array([nan, nan]))
"""

from __future__ import annotations

import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import Array, Library
from clearhead.core.errors import ArgumentError
from clearhead.textbook.faces import numbers, whole


def exponentials(x: Array, axis: int = -1, *, shift: bool = True) -> Array:
    """exp(x − max x) along an axis, or with `shift=False` exp(x) as the first formula of every text has it.

    >>> exponentials(np.array([1.0, 3.0])).round(4), exponentials(np.array([1.0, 3.0]), shift=False).round(4)
    (array([0.1353, 1.    ]), array([ 2.7183, 20.0855]))
    >>> exponentials(np.array([709.0, 710.0]), shift=False).tolist()  # overflow: past the largest number there is
    [8.218407461554972e+307, inf]

    A row of only −inf is left where it is: it has no largest number to be shifted by, and its exponentials are 0.
    """
    x = _rows(x, axis)
    xp = Library.of(x).xp
    if shift and x.shape[-1]:
        peak = xp.max(x, axis=-1)[..., None]
        with np.errstate(invalid="ignore"):  # inf − inf
            x = x - xp.where(peak == -xp.inf, 0.0, peak)
    with np.errstate(over="ignore", invalid="ignore"):  # the overflow is what is to be seen
        return xp.moveaxis(xp.exp(x), -1, axis)


def softmax(x: Array, axis: int = -1, *, shift: bool = True) -> Array:
    """Numbers as weights that are positive and sum to one along an axis; a row of only −inf has weights 0.

    >>> softmax(np.array([[0.0, 0.0], [-np.inf, 5.0], [-np.inf, -np.inf]]))
    array([[0.5, 0.5],
           [0. , 1. ],
           [0. , 0. ]])
    >>> softmax(np.array([[0.0, 0.0], [np.log(3.0), 0.0]]), axis=0).round(4)
    array([[0.25, 0.5 ],
           [0.75, 0.5 ]])

    With `shift=False` the exponentials are divided as they are: inf/inf and 0/0 are NaN.

    >>> softmax(np.array([89.0, 0.0], dtype=np.float32), shift=False)
    array([nan,  0.], dtype=float32)
    >>> softmax(np.array([-800.0, -800.0]), shift=False)
    array([nan, nan])
    """
    x = _rows(x, axis)
    xp = Library.of(x).xp
    if shift:
        with np.errstate(invalid="ignore"):
            return xp.moveaxis(formula.softmax(x)[0], -1, axis)
    raised = exponentials(x, shift=False)
    with np.errstate(invalid="ignore"):
        return xp.moveaxis(raised / xp.sum(raised, axis=-1)[..., None], -1, axis)


def softmax_jacobian(x: Array) -> Array:
    """∂p_i/∂x_j of p = softmax(x) along the last axis, (…, n, n): p_i (1 − p_i) on the diagonal, −p_i p_j beside it.

    >>> softmax_jacobian(np.array([np.log(3.0), 0.0])).round(4)
    array([[ 0.1875, -0.1875],
           [-0.1875,  0.1875]])

    1 − p_i is summed from the other weights: where one weight is nearly 1 the difference would lose every digit.

    >>> p = softmax(np.array([40.0, 0.0]))
    >>> float(p[0] * (1 - p[0])), float(softmax_jacobian(np.array([40.0, 0.0]))[0, 0])
    (0.0, 4.248354255291589e-18)
    """
    p = softmax(x)
    xp = Library.of(p).xp
    n = p.shape[-1]
    off = xp.reshape(xp.arange(n), (n, 1)) != xp.arange(n)  # (n, n), True beside the diagonal
    off = Library.of(p).asarray(off)
    beside = xp.where(off, -p[..., :, None] * p[..., None, :], xp.zeros_like(p[..., None]))
    return beside - xp.where(off, xp.zeros_like(beside), xp.sum(beside, axis=-1)[..., None])


def _rows(x: Array, axis: int) -> Array:
    x = numbers("x", x)
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -x.ndim <= axis < x.ndim:
        raise ArgumentError("axis", f"is {axis!r}, expected one of the {whole('x.ndim', x.ndim)} axes of x")
    return Library.of(x).xp.moveaxis(x, axis, -1)
