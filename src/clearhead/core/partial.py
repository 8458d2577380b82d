"""(output, lse) as a value, and merge: attention over split keys is an associative reduction.

Attention over a set of keys gives an output and a log-sum-exp. Two such pairs, over two sets of keys, merge into the
pair over their union, exactly: each output counts with its share exp(lseᵢ − lse) of the whole. Tiles, threads, cache
pages, files and machines are all merged by this one rule.

Inside a kernel the same is kept undivided, as `Sums`: dividing and taking logarithms once, at the end, is faster, and
keeps the digits that a log-sum-exp of 10⁴ has no room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from clearhead.core.arrays import Array, ArrayT, Library, dtype_name, require_array, without_gradient
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import share_of
from clearhead.core.trees import tree


@tree
@dataclass(frozen=True, eq=False)
class Partial(Generic[ArrayT]):
    """Attention over some of the keys: the output (…, T, Dv) and the log-sum-exp of the scores (…, T), in nats.

    Largest score and entropy are merged too where every part has them. `share` is the sum of the keys' weights (…, T)
    where a sink has the rest; None says that there is no sink. Only the entropy needs it.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> part = ch.observe(q, k[:, :3], v[:, :3]).partial
    >>> part.output.shape, part.lse.shape
    ((2, 7, 4), (2, 7))
    """

    output: ArrayT
    lse: ArrayT
    max_score: ArrayT | None = None
    entropy: ArrayT | None = None
    share: ArrayT | None = None


@dataclass(frozen=True, eq=False)
class Sums:
    """Attention over some of the keys, undivided: sums of e = exp(score − peak), each row with a peak of its own.

    peak (…, T); total Σ e (…, T); values Σ e·v (…, T, Dv); and Σ e·(score − peak) (…, T), which gives the entropy.
    """

    peak: Array
    total: Array
    values: Array
    weighted: Array | None = None

    def __add__(self, other: Sums) -> Sums:
        """The sums over the keys of both."""
        xp = Library.of(self.peak).xp
        peak = xp.maximum(self.peak, other.peak)
        # a query that may attend to nothing has a peak of −inf: shift by 0, so that −inf − −inf never happens
        shift = xp.where(peak == -xp.inf, 0.0, peak)
        mine, theirs = (xp.exp(_apart(xp, sums.peak, shift)) for sums in (self, other))
        weighted = None
        if self.weighted is not None and other.weighted is not None:
            moved = [
                factor * (sums.weighted + sums.total * xp.where(factor == 0, 0.0, _apart(xp, sums.peak, shift)))
                for factor, sums in ((mine, self), (theirs, other))
            ]
            weighted = moved[0] + moved[1]
        return Sums(
            peak,
            self.total * mine + other.total * theirs,
            self.values * mine[..., None] + other.values * theirs[..., None],
            weighted,
        )

    def with_sink(self, logit: Array) -> tuple[Array, Array]:
        """(peak, total) with one more logit in the denominator; the values and the entropy do not gain by it."""
        xp = Library.of(self.peak).xp
        peak = xp.maximum(self.peak, logit)
        shift = xp.where(peak == -xp.inf, 0.0, peak)
        return peak, self.total * xp.exp(self.peak - shift) + share_of(logit, shift)

    def divided(self, sink: Array | None = None) -> Partial:
        """Output, log-sum-exp, largest score and entropy; a sink takes part in the denominator only."""
        xp = Library.of(self.peak).xp
        peak, total = (self.peak, self.total) if sink is None else self.with_sink(sink)
        some = total != 0  # true for NaN, which is to be seen and not turned into a 0
        divisor = xp.where(some, total, 1.0)
        # the sums are relative to the peak of the keys, the divisor to that of keys and sink
        moved = 1.0 if sink is None else xp.exp(self.peak - xp.where(peak == -xp.inf, 0.0, peak))
        share = moved / divisor
        lse = xp.where(some, peak + xp.log(divisor), -xp.inf)
        entropy = None
        if self.weighted is not None:
            # −Σ w ln w with ln w = (score − self.peak) + (self.peak − lse)
            none = self.total == 0
            apart = xp.where(none, 0.0, lse) - xp.where(none, 0.0, self.peak) if sink is not None else xp.log(divisor)
            # a sink of inf leaves a share of 0, infinitely far away
            entropy = share * (self.total * xp.where(share == 0, 0.0, apart) - self.weighted)
        return Partial(self.values * (share[..., None]), lse, self.peak, entropy)


def _apart(xp: Any, logarithm: Array, shift: Array) -> Array:
    """logarithm − shift, where a sink of inf is no distance from itself."""
    infinite = logarithm == xp.inf
    return xp.where(infinite, 0.0, xp.where(infinite, 0.0, logarithm) - shift)


def merge(*partials: Partial[ArrayT]) -> Partial[ArrayT]:
    """Attention over all the keys, from attention over some of them each; any split, in any order.

    Sinks belong to the whole: give them to one of the calls that are merged, not to each. PyTorch's gradients flow
    through output and log-sum-exp into every part.

    What keys received is summed over queries, each of which gives a part another share, so it cannot be merged
    afterwards. `observe` of a part with `received=exp(part.lse − whole.lse)` has it: each query counts with its share.
    Over split queries, sums add up and the largest of two is the larger one.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 7, 4))
    >>> parts = [ch.observe(q, k[i], v[i]).partial for i in (slice(0, 3), slice(3, 7))]
    >>> bool(np.allclose(ch.merge(*parts).output, ch.attention(q, k, v)))
    True
    """
    _check(partials)
    library = Library.of(partials[0].output)
    sums = _undivided(library, partials[0])
    for partial in partials[1:]:
        sums = sums + _undivided(library, partial)
    whole = sums.divided()
    max_score = partials[0].max_score
    for partial in partials[1:]:
        if max_score is None or partial.max_score is None:
            max_score = None
            break
        max_score = library.xp.maximum(max_score, partial.max_score)
    entropy, share = _entropy(library, partials, sums)
    # as in a call, gradients are those of output and log-sum-exp
    entropy, share = without_gradient(entropy), without_gradient(share)
    return Partial(library.xp.astype(whole.output, partials[0].output.dtype), whole.lse, max_score, entropy, share)


def _undivided(library: Library, partial: Partial) -> Sums:
    """A partial as sums: its weights are exp(score − lse), which with the sink's add up to one, or to nothing."""
    return Sums(partial.lse, _whole(library, partial), library.computing(partial.output))


def _whole(library: Library, partial: Partial) -> Array:
    """One for each query, nothing where it attended to nothing."""
    return library.xp.where(partial.lse == -library.xp.inf, 0.0, library.xp.ones_like(partial.lse))


def _entropy(library: Library, partials: tuple[Partial, ...], sums: Sums) -> tuple[Array | None, Array | None]:
    """−Σ w ln w over the keys of all, and the sum of their weights; None where a part does not say, or has no sink.

    A weight w of a part is w · p in the whole, with p = exp(lseᵢ − lse), so a part adds p · (entropyᵢ − shareᵢ · ln p).
    """
    xp = library.xp
    none = sums.total == 0
    shift, divisor = xp.where(sums.peak == -xp.inf, 0.0, sums.peak), xp.where(none, 1.0, sums.total)
    entropy: Array | None = xp.zeros_like(sums.peak)
    total = xp.zeros_like(sums.peak)
    for partial in partials:
        part = xp.exp(_apart(xp, partial.lse, shift)) / divisor
        share = _whole(library, partial) if partial.share is None else partial.share
        total = total + part * share
        if entropy is None or partial.entropy is None:
            entropy = None
            continue
        # ln p in two steps, for a log-sum-exp of 10⁴ has no room for its digits; 0 · ln 0 is 0
        logarithm = xp.where(part == 0, 0.0, _apart(xp, partial.lse, shift)) - xp.log(divisor)
        entropy = entropy + part * (partial.entropy - share * logarithm)
    return entropy, None if all(partial.share is None for partial in partials) else total


def keys_share(library: Library, sinks: Array, lse: Array) -> Array:
    """The sum of the keys' weights (…, H, T): what a sink (H,) leaves of one."""
    xp = library.xp
    sinks, lse = without_gradient(sinks), without_gradient(lse)
    logits = library.asarray(sinks, lse.dtype)[:, None]
    rest = 0.0 - xp.expm1(_apart(xp, logits, xp.where(lse == -xp.inf, 0.0, lse)))
    # a sink that is all there is may come out a rounding above the log-sum-exp
    return xp.where((lse == -xp.inf) | (rest < 0), 0.0, rest)


def _check(partials: tuple[Partial, ...]) -> None:
    if not partials:
        raise ArgumentError("partials", "is empty, expected at least one Partial")
    for i, partial in enumerate(partials):
        if not isinstance(partial, Partial):
            raise ArgumentError(f"partials[{i}]", f"is a {type(partial).__name__}, expected a Partial")
        require_array(f"partials[{i}].output", partial.output)
        require_array(f"partials[{i}].lse", partial.lse)
        first, shape, rows = partials[0], tuple(partial.output.shape), tuple(partial.lse.shape)
        if shape[:-1] != rows:
            raise ArgumentError(f"partials[{i}].lse", f"has shape {rows}, expected {shape[:-1]} as its output has rows")
        if partial.share is not None and tuple(partial.share.shape) != rows:
            raise ArgumentError(f"partials[{i}].share", f"has shape {tuple(partial.share.shape)}, expected {rows}")
        if shape != tuple(first.output.shape):
            raise ArgumentError(f"partials[{i}].output", f"has shape {shape}, expected {tuple(first.output.shape)}")
        if not Library.of(first.output).owns(partial.output):
            raise ArgumentError(f"partials[{i}].output", "is from another array library than the first")
        if dtype_name(partial.output) != dtype_name(first.output):
            raise ArgumentError(
                f"partials[{i}].output", f"has dtype {dtype_name(partial.output)}, expected {dtype_name(first.output)}"
            )
