"""Attention under shard_map on virtual devices, held against one; `test_shard_map.py` runs it in its own process."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import clearhead as ch
import clearhead.distributed as chd

WORLD, N, D = 3, 24, 8
MESH = Mesh(np.array(jax.devices()[:WORLD]), ("ring",))
ROWS, ALL = PartitionSpec(None, None, "ring"), PartitionSpec()
RNG = np.random.default_rng(0)
IDS = np.array([0] * 5 + [1] * 12 + [2] * 7)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ch.causal()},
    "documents, lengths and a window by row": {
        "mask": ch.documents(IDS) & ch.lengths([24, 11]) | ch.window(2, offset=[0, 2])
    },
    "blocks, Longformer and an array": {
        "mask": ~ch.random_blocks(4, count=2, seed=1) & (RNG.random((2, 1, N, N)) < 0.6) | ch.global_tokens([0, 17])
    },
    "relative": {"bias": ch.relative_bias(RNG.standard_normal((8, 4)), max_distance=9)},
    "bias": {"bias": RNG.standard_normal((4, N, N))},
    "everything": {
        "mask": ch.causal() | ch.prefix([3, 5]), "bias": ch.alibi(4), "softcap": 2.0, "scale": 0.5,
        "sinks": RNG.standard_normal(4), "dropout": (0.3, 7),
    },
}  # fmt: skip


def over(function: Any, out: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=(ROWS, ROWS, ROWS), out_specs=out, check_vma=False))


def main() -> None:
    arrays = [RNG.standard_normal((2, h, N, D)) for h in (4, 2, 2, 4)]
    q, k, v, dout = map(jnp.asarray, arrays)
    zigzag = chd.Placement.zigzag(N, WORLD)
    back = np.argsort(zigzag.order)
    turns = [a[:, :, zigzag.order] for a in (q, k, v)]
    for number, (name, options) in enumerate(CASES.items()):
        whole = ch.attention(*arrays[:3], **options)  # in NumPy, which compiles nothing
        placement = zigzag if number % 2 else None
        call = over(partial(chd.attention, mesh="ring", placement=placement, **options), ROWS)
        got = call(q, k, v) if placement is None else call(*turns)[:, :, back]
        np.testing.assert_allclose(got, whole, atol=1e-12, err_msg=name)
    observed(arrays[:3], "everything", received=9)
    observed(arrays[:3], "documents, lengths and a window by row", received=True, received_max=9, removal=True)
    observed(
        arrays[:3], "blocks, Longformer and an array", received=np.arange(N) % 5 - 1.0, removal=9, received_max=True
    )
    for name in ("everything",):
        options = CASES[name]
        call = over(partial(chd.attention, mesh="ring", **options), ROWS)
        found = jax.jit(jax.grad(lambda *a, call=call: (call(*a) * dout).sum(), argnums=(0, 1, 2)))(q, k, v)
        for got, wanted in zip(found, ch.gradients(*arrays, **options), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-11)
    with pytest.raises(ch.ArgumentError, match="expected the name of an axis"):
        chd.attention(q, k, v, mesh="nowhere")
    with pytest.raises(ch.ArgumentError, match="way: is 'heads', expected 'ring' or None"):
        over(partial(chd.attention, mesh="ring", way="heads"), ROWS)(q, k, v)
    with pytest.raises(ch.KernelRefused, match="'dense' refused: under shard_map"):
        over(partial(chd.attention, mesh="ring", kernel="dense"), ROWS)(q, k, v)
    print("all as on one device")


def observed(arrays: list[np.ndarray], name: str, **by_key: Any) -> None:
    """Everything that can be observed of one case, and of what each key has a number of what is said."""
    options, want = CASES[name], {"top": 3, "map": (4, 5), "queries": [-1, 3], "weights": True, **by_key}
    kinds = dict.fromkeys(("output", "lse", "entropy", "max_score", "weights", *by_key), ROWS)

    def look(q: Any, k: Any, v: Any) -> Any:
        seen = chd.observe(q, k, v, mesh="ring", **options, **want)
        rows = {kind: getattr(seen, kind) for kind in kinds}
        return {**rows, "top": seen.top.weights, "indices": seen.top.indices}, (*seen.map, seen.queries.weights)

    rows, whole = over(look, ({**kinds, "top": ROWS, "indices": ROWS}, (ALL, ALL, ALL)))(*map(jnp.asarray, arrays))
    one = ch.observe(*arrays, **options, **want)
    for kind in kinds:
        np.testing.assert_allclose(rows[kind], getattr(one, kind), atol=1e-12, err_msg=f"{name}: {kind}")
    np.testing.assert_allclose(rows["top"], one.top.weights, atol=1e-12)
    assert np.array_equal(rows["indices"], one.top.indices), name
    for got, expected in zip(whole, (*one.map, one.queries.weights), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12, err_msg=name)


if __name__ == "__main__":
    main()
