"""Linear attention: the exponential of a score replaced by a product of features, φ(q) · φ(k).

    o_i = φ(q_i) (Σ_j φ(k_j) v_jᵀ) / (φ(q_i) · Σ_j φ(k_j) + ε),        φ(x) = elu(x) + 1

Katharopoulos, Vyas, Pappas and Fleuret 2020, "Transformers are RNNs", equations 4 to 7; causal as in equations 8 to 12.
It is a mechanism of its own and approximates softmax only loosely: there is no scale, for φ is not an exponential, and
`audit` says how far it is from exact. Conventions: ε is added to the denominator (1e-6, as the authors' code has it);
arrays are (…, heads, positions, features), where the authors' and most others' have positions before heads
(`approximate(…, layout="nhd")`). With `normalized=False` nothing is divided, as in retention and its kin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from clearhead.approximations.factorised import Factorised
from clearhead.core.arrays import Array, Library, is_array
from clearhead.core.errors import ArgumentError, shown

Feature = Literal["elu+1", "relu"]


@dataclass(frozen=True)
class LinearAttention(Factorised):
    """Linear attention as a value; `linear(…)` makes one."""

    feature: Feature | Callable[[Any], Any] = "elu+1"
    eps: float = 1e-6
    normalized: bool = True

    source: ClassVar[str] = "Katharopoulos et al. 2020"
    scaled: ClassVar[bool] = False

    @property
    def added(self) -> float:
        """ε."""
        return self.eps

    @property
    def divides(self) -> bool:
        """Whether it is divided by the sum of weights."""
        return self.normalized

    @property
    def fused(self) -> str | None:
        """φ, which kernels know by name unless it is a function of one's own."""
        return None if callable(self.feature) else self.feature

    def query_features(self, library: Library, q: Array, scale: Any) -> Array:
        """φ(q)."""
        return self.phi(library, q)

    def key_features(
        self, library: Library, k: Array, keys: Array | None, scale: Any, peak: Array | None = None
    ) -> tuple[Array, Array | None]:
        """φ(k), and zero for keys that are not there; nothing overflows."""
        b = self.phi(library, k)
        return b if keys is None else library.xp.where(keys[..., None], b, library.xp.zeros_like(b)), None

    def phi(self, library: Library, x: Array) -> Array:
        """The features of queries or keys, (…, n, F)."""
        xp = library.xp
        if self.feature == "elu+1":
            # elu(x) + 1 is x + 1 above 0 and eˣ below; of what is not used the exponential must not overflow
            return xp.where(x > 0, x + 1.0, xp.exp(xp.where(x > 0, xp.zeros_like(x), x)))
        if self.feature == "relu":
            return xp.where(x > 0, x, xp.zeros_like(x))
        assert callable(self.feature)
        found = self.feature(x)
        if not is_array(found) or tuple(found.shape[:-1]) != tuple(x.shape[:-1]) or not library.owns(found):
            shape = tuple(found.shape) if is_array(found) else type(found).__name__
            raise ArgumentError(
                "feature",
                f"gave {shape} for {tuple(x.shape)}, expected an array of {library.name}"
                " that differs in the last axis only",
            )
        return found

    def width(self, features: int) -> int:
        """As many as a head has; of a function of one's own, as many as it gives for that many."""
        if not callable(self.feature):
            return features
        import numpy as np

        try:
            return int(self.feature(np.zeros((1, features))).shape[-1])
        except Exception:  # it may want another library's arrays
            return features

    def making(self, features: int) -> float:
        """Three operations a number: a comparison, an exponential and a choice."""
        return 3.0 * features

    def __repr__(self) -> str:
        named = getattr(self.feature, "__name__", "…") if callable(self.feature) else repr(self.feature)
        parts = [] if self.feature == "elu+1" else [f"feature={named}"]
        parts += [f"eps={self.eps:g}"] if self.eps != 1e-6 else []
        parts += [] if self.normalized else ["normalized=False"]
        return f"linear({', '.join(parts)})"


def linear(
    feature: Feature | Callable[[Any], Any] = "elu+1", *, eps: float = 1e-6, normalized: bool = True
) -> LinearAttention:
    """Linear attention (Katharopoulos et al. 2020): φ(q) · φ(k) in place of e^(q · k), in O(n), causal too.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 16))
    >>> ch.approximate(q, k, v, ch.linear(), mask=ch.causal()).shape
    (2, 300, 16)

    feature: "elu+1", "relu", or a function from arrays (…, n, D) to arrays (…, n, F) of the same library.
    eps is added to each denominator; normalized=False leaves the denominator out.
    """
    if feature not in ("elu+1", "relu") and not callable(feature):
        raise ArgumentError("feature", f"is {shown(feature)}, expected 'elu+1', 'relu' or a function of an array")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ArgumentError("eps", f"is {shown(eps)}, expected a number from 0 up to, not with, 1")
    if not isinstance(normalized, bool):
        raise ArgumentError("normalized", f"is {shown(normalized)}, expected True or False")
    return LinearAttention(feature, float(eps), normalized)
