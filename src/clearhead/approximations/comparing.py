"""compare(): the same numbers under several mechanisms: outputs, weights where there are any, distance and cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.approximations.favor import performer
from clearhead.approximations.linear_transformer import linear
from clearhead.approximations.low_rank import linformer
from clearhead.approximations.method import Method, whole
from clearhead.approximations.nystromformer import nystrom
from clearhead.calls import attention, observe
from clearhead.core.arrays import AnyArray, is_traced, to_numpy
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.mask import Mask
from clearhead.core.masks import causal, global_tokens, window
from clearhead.core.positions import Bias, Rotary, alibi, rotary
from clearhead.core.problem import Problem, pose
from clearhead.measure.plans import plan, quantity
from clearhead.measure.tables import laid_out, number

WIDTH = 76
# More weights than this are not kept
WEIGHTS = 2**22


@dataclass(frozen=True, eq=False)
class Mechanism:
    """One of them: its output, weights (…, H, T, S) or None, and numbers.

    `distance` is |output − first output| by the first's length, over all heads; `entropy` the mean of its weights' in
    nats, NaN where there are none, or a weight is negative; `flops` on paper.
    """

    name: str
    says: str
    output: np.ndarray
    weights: np.ndarray | None
    distance: float
    entropy: float
    flops: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found. `print` it, ask for `json()`, index it by name, or draw it with `plot_comparison`."""

    mechanisms: tuple[Mechanism, ...]

    def __getitem__(self, name: str) -> Mechanism:
        for one in self.mechanisms:
            if one.name == name:
                return one
        raise KeyError(f"{name!r}, expected one of {', '.join(one.name for one in self.mechanisms)}")

    def text(self, width: int = WIDTH) -> str:
        """The table, within a width; distances are from the first."""
        titles = ["", "distance", "entropy", "FLOPs"]
        rows = [
            [one.name, number(one.distance, 4), "–" if np.isnan(one.entropy) else number(one.entropy, 4),
             quantity(one.flops, 1000, "FLOP")]
            for one in self.mechanisms
        ]  # fmt: skip
        return "\n".join(laid_out(titles, rows, width, names=True))

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def json(self) -> str:
        """Every number, outputs and weights included."""
        return json.dumps([
            {
                "name": one.name, "says": one.says, "distance": one.distance, "flops": one.flops,
                "entropy": None if np.isnan(one.entropy) else one.entropy,
                "output": one.output.tolist(), "weights": None if one.weights is None else one.weights.tolist(),
            }
            for one in self.mechanisms
        ])  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """Grouped queries made of whole heads: keys and values of neighbouring heads averaged (Ainslie et al. 2023)."""

    kv_heads: int

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays with fewer heads of keys."""
        heads = k.shape[-3]
        if heads % whole("kv_heads", self.kv_heads):
            raise ArgumentError("mechanisms", f"have {self!r}, expected a number that divides the {heads} heads of k")
        shape = (*k.shape[:-3], self.kv_heads, heads // self.kv_heads)
        k, v = (a.reshape(*shape, *a.shape[-2:]).mean(-3).astype(a.dtype) for a in (k, v))
        return q, k, v

    def __repr__(self) -> str:
        return f"grouped({self.kv_heads})"


def compare(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    mechanisms: Iterable[Any] | Mapping[str, Any] | None = None,
    *,
    scale: float | None = None,
) -> Comparison:
    """The same queries, keys and values under several mechanisms, side by side; distances are from the first.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 48, 16)) / 2
    >>> print(ch.compare(q, k, v, [None, ch.causal(), ch.alibi(2), ch.linear(), ch.performer(64)]))
                   distance  entropy        FLOPs
    full             0.0000   3.8408  294.9 kFLOP
    causal()         1.9800   2.9035  294.9 kFLOP
    alibi(2)         0.4254   3.7522  294.9 kFLOP
    linear()         0.2301   3.8649  113.7 kFLOP
    performer(64)    0.2512   3.8099  847.9 kFLOP

    A mechanism is None, which is full attention; a mask; a bias such as alibi(heads); rotary(); a method; the options
    of `attention` as a dict; or a function that is called as attention is. `{"name": mechanism}` names them. Unless
    given they are full, causal, window, Longformer's pattern, ALiBi, rotary, grouped queries, linear, Performer,
    Linformer and Nyström, in sizes that fit the call. Weights are kept where there are up to 4,194,304 of them.
    """
    if any(map(is_traced, (q, k, v))):
        raise ArgumentError("q, k, v", "hold no numbers yet: compare outside of what traces them")
    problem = pose(q, k, v, scale=scale)
    if 0 in (*problem.grid.shape, problem.width):
        raise ArgumentError("q, k, v", f"are empty: there is nothing to compare in {problem.grid}")
    arrays = tuple(map(to_numpy, (problem.q, problem.k, problem.v)))
    if mechanisms is None:
        mechanisms = usual(problem)
    named = mechanisms.items() if isinstance(mechanisms, Mapping) else ((name_of(one), one) for one in mechanisms)
    found: list[Mechanism] = []
    first: np.ndarray | None = None
    for name, mechanism in named:
        output, weights, flops, says = _run(mechanism, arrays, problem)
        first = output if first is None else first
        length = float(np.sqrt((first.astype(np.float64) ** 2).sum()))
        distance = float(np.sqrt(((output.astype(np.float64) - first) ** 2).sum())) / (length or 1.0)
        kept = weights[0] if weights is not None and problem.headless else weights
        shown_output = output[0] if problem.headless else output
        found.append(Mechanism(name, says, shown_output, kept, distance, _entropy(weights), flops))
    if not found:
        raise ArgumentError("mechanisms", "are none, expected at least one")
    return Comparison(tuple(found))


def usual(problem: Problem) -> dict[str, Any]:
    """The mechanisms that texts put side by side, those that fit the sizes of a call."""
    grid, features = problem.grid, problem.q.shape[-1]
    back = max(1, grid.keys // 8)
    found: dict[str, Any] = {
        "full": None,
        "causal": causal(),
        f"window({back}, {back})": window(back, back),
        f"Longformer, window {back}": window(back, back) | global_tokens([0]),
        "ALiBi, causal": {"bias": alibi(grid.heads), "mask": causal()},
    }
    if features % 2 == 0:
        found["rotary"] = rotary()
    if problem.key_heads > 1 and problem.key_heads % 2 == 0:
        found[f"GQA, {problem.key_heads // 2} key heads"] = Shared(problem.key_heads // 2)
    slots = max(1, min(grid.keys // 4, 256))
    for method in (linear(), performer(max(16, 4 * features)), linformer(slots), nystrom(slots)):
        found[repr(method)] = method
    return found


def name_of(mechanism: Any) -> str:
    """What a mechanism is called unless it is named."""
    if mechanism is None:
        return "full"
    if isinstance(mechanism, Mapping):
        return ", ".join(f"{name}={value!r}" for name, value in mechanism.items())
    return getattr(mechanism, "__name__", repr(mechanism))


def _run(
    mechanism: Any, arrays: tuple[np.ndarray, ...], problem: Problem
) -> tuple[np.ndarray, np.ndarray | None, float, str]:
    """Output, weights, operations on paper, and what it is in words."""
    q, k, v = arrays
    options: dict[str, Any] = {"scale": problem.scale}
    small = int(np.prod(problem.grid.shape)) <= WEIGHTS
    if isinstance(mechanism, Method):
        own = options if mechanism.scaled else {}
        output = mechanism(q, k, v, **own)
        posed, seen = mechanism.posed(q, k, v, None, **own)
        rows = mechanism.rows(posed, seen, np.arange(problem.grid.queries)) if small else None
        weights = None if rows is None else np.broadcast_to(to_numpy(rows), problem.grid.shape)
        length, heads = round((problem.grid.queries * problem.grid.keys) ** 0.5), int(np.prod(problem.grid.shape[:-2]))
        return output, weights, heads * mechanism.spent(length, q.shape[-1], v.shape[-1]).flops, mechanism.source
    says = "exact"
    if isinstance(mechanism, Mask):
        options["mask"] = mechanism
    elif isinstance(mechanism, Bias):
        options["bias"] = mechanism
    elif isinstance(mechanism, Rotary):
        q, k = mechanism(q), mechanism(k)
        says = "exact, q and k turned by position"
    elif isinstance(mechanism, Shared):
        q, k, v = mechanism(q, k, v)
        says = "exact, keys and values of neighbouring heads averaged"
    elif isinstance(mechanism, Mapping):
        options |= mechanism
    elif callable(mechanism):
        return _called(mechanism, arrays, problem)
    elif mechanism is not None:
        raise ArgumentError("mechanisms", f"have {shown(mechanism)[:60]}, expected None, a mask, a bias or a method")
    flops = float(plan(q, k, v, **options).flops)
    if not small:
        return attention(q, k, v, **options), None, flops, says
    seen_all = observe(q, k, v, **options, weights=True)
    return seen_all.output, seen_all.weights, flops, says


def _called(
    function: Callable[..., Any], arrays: tuple[np.ndarray, ...], problem: Problem
) -> tuple[np.ndarray, None, float, str]:
    output = function(*arrays)
    shape = (*problem.grid.shape[:-1], problem.width)
    if getattr(output, "shape", None) != shape:
        raise ArgumentError("mechanisms", f"have {name_of(function)}, which did not give an array of shape {shape}")
    return output, None, float(plan(*arrays).flops), "a function of one's own, counted as exact"


def _entropy(weights: np.ndarray | None) -> float:
    if weights is None or (weights < -1e-6).any():
        return float("nan")
    positive = np.where(weights > 0, weights, 1.0)
    return float(-(positive * np.log(positive)).sum(-1).mean())
