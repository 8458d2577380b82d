"""What the comparison asks for: the same numbers under several mechanisms, and how far their outputs are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from clearhead.approximations.favor import performer
from clearhead.approximations.linear_transformer import linear
from clearhead.approximations.method import Method
from clearhead.calls import observe
from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.core.grid import Grid
from clearhead.core.masks import causal, window
from clearhead.core.positions import alibi, rotary
from clearhead.explorer.answers import Params, Subject, keep, route, spelled, whole
from clearhead.explorer.layered import largest
from clearhead.explorer.scene import Scene

SIDE = 64  # cells of a picture, each way; more are pooled, the largest weight in each
MOST = 2048 * 2048  # pairs of a head
MOST_KEPT = 8  # heads in a saved file

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # q (1, T, D), k (1, S, D), v (1, S, Dv): one head


class Mechanism(NamedTuple):
    """A way to attend: its name, what it does in a few words, how Python spells it, and what it gives.

    `gives` has an `output` (heads, T, Dv), whose heads are put side by side, and `weights` (heads, T, S) or None. It
    may refuse, with an `ArgumentError`, what it cannot do.
    """

    name: str
    says: str
    python: str
    gives: Callable[..., Any]


def _full(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    return observe(q, k, v, weights=True, **options)


def _alibi(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    queries, keys = q.shape[-2], k.shape[-2]
    bias = np.asarray(alibi(8).tile(range(queries), range(keys), Grid((), 8, queries, keys)))[:1]
    return _full(q, k, v, bias=bias, mask=causal())


def _rotary(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    if q.shape[-1] % 2 or q.shape[-2] != k.shape[-2]:
        raise ArgumentError("q", "is not turned: that takes an even number of features, and as many queries as keys")
    return _full(np.asarray(rotary()(q)), np.asarray(rotary()(k)), v)


def _grouped(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    if q.shape[-1] % 2 or v.shape[-1] % 2:
        raise ArgumentError("q", "is not split: two heads take an even number of features")
    q, k, v = (np.concatenate(np.split(array, 2, axis=-1)) for array in (q, k, v))
    return _full(q, k.mean(0, keepdims=True), v.mean(0, keepdims=True))


def _approximated(method: Method, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """A method's output, and the weights that it implies, with their entropy."""
    problem, seen = method.posed(q, k, v, None)
    rows = method.rows(problem, seen, np.arange(q.shape[-2]))
    assert rows is not None  # these two have weights
    weights = np.asarray(rows, np.float64)
    logarithms = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return SimpleNamespace(output=method(q, k, v), weights=weights, entropy=-(weights * logarithms).sum(-1))


# One line each; the first is what the others are held against unless another is chosen
MECHANISMS = (
    Mechanism("full", "every query reads every key", "ch.attention(q, k, v)", _full),
    Mechanism(
        "causal",
        "no key after the query",
        "ch.attention(q, k, v, mask=ch.causal())",
        lambda *qkv: _full(*qkv, mask=causal()),
    ),
    Mechanism(
        "window",
        "one key to either side",
        "ch.attention(q, k, v, mask=ch.window(1, 1))",
        lambda *qkv: _full(*qkv, mask=window(1, 1)),
    ),
    Mechanism(
        "ALiBi",
        "causal; each step away costs half a point",
        "eight = [np.stack([a] * 8) for a in (q, k, v)]  # of eight heads the first is shown\n"
        "ch.attention(*eight, bias=ch.alibi(8), mask=ch.causal())[0]",
        _alibi,
    ),
    Mechanism(
        "rotary",
        "q and k turned by their positions",
        "turn = ch.rotary()\nch.attention(turn(q), turn(k), v)",
        _rotary,
    ),
    Mechanism(
        "grouped",
        "two query heads share one key head, the mean of both",
        "q2, k2, v2 = (np.stack(np.split(a, 2, axis=-1)) for a in (q, k, v))\n"
        "ch.attention(q2, k2.mean(0, keepdims=True), v2.mean(0, keepdims=True))",
        _grouped,
    ),
    Mechanism(
        "linear",
        "features in place of exponentials; not exact",
        "ch.approximate(q, k, v, ch.linear())",
        lambda *qkv: _approximated(linear(), *qkv),
    ),
    Mechanism(
        "Performer",
        "256 random features; exact on average",
        "ch.approximate(q, k, v, ch.performer(256))",
        lambda *qkv: _approximated(performer(256), *qkv),
    ),
)


@route("/compare")
def compare(scene: Scene, params: Params) -> Any:
    """Each mechanism: weights of one head, its output, and how the output differs from that of the one chosen."""
    scene = scene.edited(params)
    if scene.queries * scene.keys > MOST:
        raise ArgumentError("compare", f"has {scene.queries * scene.keys:,} pairs, expected at most {MOST:,}")
    head = whole(params, "head", scene.heads)
    names = [one.name for one in MECHANISMS]
    to = params.get("to") or names[0]
    if to not in names:
        raise ArgumentError("to", f"is {to[:40]!r}, expected one of {', '.join(names)}")
    group = scene.heads // scene.k.shape[0]
    arrays = (scene.q[head][None], scene.k[head // group][None], scene.v[head // group][None])
    found = [told(one, arrays) for one in MECHANISMS]
    measure = next(one for one in found if one["name"] == to).get("output")
    for one in found:
        if measure is not None and "output" in one and one["output"].shape == measure.shape:
            one["differences"] = one["output"] - measure
            one["largest"] = float(np.abs(one["differences"]).max())
            for name in ("output", "differences"):
                one[name] = one[name][:SIDE, :SIDE]
    begin = f"q, k, v = q[{head}], k[{head // group}], v[{head // group}]" if scene.heads > 1 else None
    return {"to": to, "ways": found, "pooled": max(scene.queries, scene.keys) > SIDE, "begin": begin}


def told(one: Mechanism, arrays: Arrays) -> dict[str, Any]:
    """What one mechanism gives, or why it does not."""
    said: dict[str, Any] = {"name": one.name, "says": one.says, "python": one.python}
    try:
        seen = one.gives(*arrays)
    except (ArgumentError, KernelRefused) as refused:
        return said | {"refused": str(refused)}
    said["output"] = np.concatenate(list(np.asarray(seen.output, np.float64)), axis=-1)
    if getattr(seen, "weights", None) is not None:
        weights = np.asarray(seen.weights)[0]
        said["weights"] = largest(weights, SIDE)
        said["entropy"] = float(np.mean(np.asarray(seen.entropy)[0]))
    return said


@keep
def kept(subject: Subject) -> Iterator[str]:
    """What a saved file holds of it: each mechanism as the one that others are held against."""
    yield from (spelled("/compare", head=head or None) for head in range(min(subject.scene({}).heads, MOST_KEPT)))
    yield from (spelled("/compare", to=one.name) for one in MECHANISMS[1:])
