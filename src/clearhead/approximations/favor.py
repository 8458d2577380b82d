"""The Performer: random features whose products are, on average, the exponentials of scores (FAVOR+).

    φ(x)_r = exp(ω_r · x − |x|²/2) / √m,    ω_r ~ N(0, I),      so that   E φ(x) · φ(y) = e^(x · y)

Choromanski et al. 2021, "Rethinking Attention with Performers", lemma 1; x is q or k times the square
root of the scale. The ω of a block of D features are made orthogonal, which lowers the variance and changes no mean.
kind="relu" is the paper's generalised attention, φ(x)_r = max(ω_r · x, 0) + ε, another mechanism than softmax.

Conventions: each query's largest exponent, and the largest of all keys, is taken off before the exponential; both
cancel. ε is added to features, and is 0 here for "softmax", so that estimates have no bias; Google's code adds 1e-6 and
performer-pytorch 1e-4. ε is 1e-3 for "relu", as in both. Lengths of ω are drawn as those of normal vectors are
(norms="drawn"); norms="equal" gives all √D. The ω are drawn by NumPy from the seed, in float64: the same everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from clearhead.approximations.directions import directions
from clearhead.approximations.factorised import Factorised
from clearhead.approximations.method import is_compiled, whole
from clearhead.core.arrays import Array, Library, is_torch, is_traced, without_gradient
from clearhead.core.errors import ArgumentError, shown

Kind = Literal["softmax", "relu"]
Norms = Literal["drawn", "equal"]


@dataclass(frozen=True)
class Performer(Factorised):
    """A Performer as a value; `performer(…)` makes one."""

    features: int = 256
    seed: int = 0
    orthogonal: bool = True
    kind: Kind = "softmax"
    eps: float = 0.0
    norms: Norms = "drawn"

    source: ClassVar[str] = "Choromanski et al. 2021"

    def projected(self, library: Library, x: Array, factor: Any) -> tuple[Array, Array]:
        """x · factor, and its products with every ω: (…, n, D) and (…, n, m)."""
        x = x * factor
        drawn = (self.features, int(x.shape[-1]), self.seed, self.orthogonal, self.norms)
        if is_compiled(x):
            from clearhead.approximations import compiling  # needs PyTorch, which is here now

            return x, x @ compiling.normal_directions(x.detach(), *drawn)
        return x, x @ library.asarray(directions(*drawn).T, x.dtype)

    def exponents(self, library: Library, x: Array, factor: Any) -> Array:
        """ω · x − |x|²/2, (…, n, m)."""
        x, along = self.projected(library, x, factor)
        return along - 0.5 * library.xp.sum(x * x, axis=-1, keepdims=True)

    def phi(self, library: Library, x: Array, factor: Any) -> Array:
        """The features with nothing taken off: E φ(x) · φ(y) is exp(scale x · y) for factors whose product it is."""
        xp, small = library.xp, 1.0 / math.sqrt(self.features)
        if self.kind == "relu":
            _, along = self.projected(library, x, factor)
            return small * (xp.where(along > 0, along, xp.zeros_like(along)) + self.eps)
        return small * (xp.exp(self.exponents(library, x, factor)) + self.eps)

    def query_features(self, library: Library, q: Array, scale: Any) -> Array:
        """φ(q), each query's scaled so that its largest is 1."""
        factor, _ = roots(library, scale)
        if self.kind == "relu":
            return self.phi(library, q, factor)
        xp, exponents = library.xp, self.exponents(library, q, factor)
        peak = constant(xp.max(exponents, axis=-1, keepdims=True))
        return xp.exp(exponents - peak) + self.eps

    def key_features(
        self, library: Library, k: Array, keys: Array | None, scale: Any, peak: Array | None = None
    ) -> tuple[Array, Array | None]:
        """φ(k), all scaled so that the largest of the head, or of all steps so far, is 1."""
        xp = library.xp
        _, factor = roots(library, scale)
        if self.kind == "relu":
            b = self.phi(library, k, factor)
            return b if keys is None else xp.where(keys[..., None], b, xp.zeros_like(b)), None
        exponents = self.exponents(library, k, factor)
        if keys is not None:
            exponents = xp.where(keys[..., None], exponents, -xp.inf)
        largest = constant(xp.max(exponents, axis=(-2, -1), keepdims=True)) if exponents.shape[-2] else None
        if largest is None:
            return exponents, peak
        largest = xp.where(xp.isfinite(largest), largest, xp.zeros_like(largest))
        if peak is not None:
            largest = xp.maximum(largest, peak)
        b = xp.exp(exponents - largest) + self.eps
        return b if keys is None else xp.where(keys[..., None], b, xp.zeros_like(b)), largest

    def width(self, features: int) -> int:
        """m."""
        return self.features

    def making(self, features: int) -> float:
        """A product with every ω, and an exponential and two more operations for each."""
        return self.features * (2.0 * features + 3)

    def __repr__(self) -> str:
        given = {
            "seed": self.seed,
            "orthogonal": self.orthogonal,
            "kind": self.kind,
            "eps": self.eps,
            "norms": self.norms,
        }
        usual = {"seed": 0, "orthogonal": True, "kind": "softmax", "eps": default_eps(self.kind), "norms": "drawn"}
        return (
            f"performer({', '.join([str(self.features), *(f'{n}={v!r}' for n, v in given.items() if v != usual[n])])})"
        )


def performer(
    features: int = 256,
    *,
    seed: int = 0,
    orthogonal: bool = True,
    kind: Kind = "softmax",
    eps: float | None = None,
    norms: Norms = "drawn",
) -> Performer:
    """The Performer (Choromanski et al. 2021): e^(q · k · scale) estimated by random features, in O(n), causal too.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 300, 16))
    >>> for size in (0.5, 1.0):
    ...     print([round(ch.audit(ch.performer(m), size * q, size * k, v).error, 2) for m in (64, 256, 1024)])
    [0.27, 0.16, 0.08]
    [1.29, 1.16, 1.09]

    Estimates have no bias; their error falls as 1/√features, and grows as e^(|q + k|² · scale / 2), so that what serves
    short vectors is of no use for long ones. `audit` says how large it is. Another seed draws other features.
    kind="relu" is the paper's ReLU kernel, not softmax.
    """
    whole("features", features)
    whole("seed", seed, 0)
    if not isinstance(orthogonal, bool):
        raise ArgumentError("orthogonal", f"is {shown(orthogonal)}, expected True or False")
    if kind not in ("softmax", "relu"):
        raise ArgumentError("kind", f"is {shown(kind)}, expected 'softmax' or 'relu'")
    if norms not in ("drawn", "equal"):
        raise ArgumentError("norms", f"is {shown(norms)}, expected 'drawn' or 'equal'")
    if eps is None:
        eps = default_eps(kind)
    elif isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ArgumentError("eps", f"is {shown(eps)}, expected a number from 0 up to, not with, 1")
    return Performer(features, seed, orthogonal, kind, float(eps), norms)


def default_eps(kind: str) -> float:
    """None for softmax, so that estimates have no bias."""
    return 0.0 if kind == "softmax" else 1e-3


def roots(library: Library, scale: Any) -> tuple[Any, Any]:
    """Two factors whose product is the scale and whose sizes are equal: for queries, which have its sign, and keys."""
    if is_traced(scale):
        size = library.xp.sqrt(library.xp.abs(scale))
        return library.xp.sign(scale) * size, size
    size = math.sqrt(abs(scale))
    return math.copysign(size, scale), size


def constant(array: Array) -> Array:
    """An array that no gradient flows through: what cancels need not be differentiated."""
    if is_torch(array):
        return without_gradient(array)
    if is_traced(array):
        import jax

        return jax.lax.stop_gradient(array)
    return array
