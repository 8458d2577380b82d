"""Observed in programs that JAX compiles for a GPU: the kernels in Pallas's interpreter, and as GPUs get them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget import given, hold
from libraries import numbers  # which sets XLA's flags before JAX starts

import clearhead as ch
from clearhead.core.observations import want
from clearhead.core.problem import Problem, pose
from clearhead.kernels import choose, compiled, cudnn
from clearhead.kernels import triton as door
from clearhead.kernels.gpu import borrowed
from clearhead.kernels.triton import in_xla, triton

try:
    from clearhead.kernels.triton import pallas_kernel

    pallas_kernel.checked()
except (ImportError, AttributeError) as error:
    pytest.skip(f"JAX {jax.__version__} has no Pallas for GPUs that is called so: {error}", allow_module_level=True)

NUMBERS = np.random.default_rng(11)
WHAT = ("output", "lse", "max_score", "entropy", "received")
NOTHING = dict.fromkeys(("top", "received", "received_max", "removal", "map", "queries"))


def arrays(queries: int, keys: int, features: int = 16, dtype: Any = "float32") -> tuple[jax.Array, ...]:
    shapes = [(2, heads, n, features) for heads, n in ((4, queries), (2, keys), (2, keys), (4, queries))]
    return tuple(jnp.asarray(NUMBERS.standard_normal(shape), dtype) for shape in shapes)


def posed(q: Any, k: Any, v: Any, asked: dict[str, Any] | None = None, **options: Any) -> Problem:
    wanted = NOTHING | ({"received": True} if asked is None else asked)
    return pose(q, k, v, **options, want=partial(want, **wanted, weights=False))


def seen(q: Any, k: Any, v: Any, asked: dict[str, Any] | None = None, **options: Any) -> Any:
    problem = posed(q, k, v, asked, **options)
    assert in_xla.unfit(problem) is None
    return in_xla.run(problem, interpret=True).observed


def by_name(observed: Any) -> dict[str, np.ndarray]:
    return {name: numbers(getattr(observed, name)) for name in WHAT if getattr(observed, name) is not None}


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "full": (33, 100, {}),
    "whole tiles": (64, 128, {}),
    "causal": (70, 70, {"mask": ch.causal()}),
    "causal, aligned at the end": (70, 133, {"mask": ch.causal()}),
    "causal, the first queries see nothing": (133, 70, {"mask": ch.causal()}),
    "window": (130, 130, {"mask": ch.window(9)}),
    "window both ways": (130, 130, {"mask": ch.window(3, 5)}),
    "lengths": (70, 133, {"mask": ch.lengths([133, 50])}),
    "no length": (70, 133, {"mask": ch.lengths([0, 50])}),
    "window & lengths": (130, 130, {"mask": ch.window(70) & ch.lengths([2**40, 66])}),
    "offsets": (20, 70, {"mask": ch.causal(offset=np.array([3, 50]))}),
    "softcap, scale": (33, 70, {"softcap": 2.0, "scale": 0.7}),
    "large scores": (33, 70, {"scale": 3000.0}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in CASES), ("window & lengths", "bfloat16"), ("full", "float16")],
)
def test_the_kernels_are_held_to_the_definition(name: str, dtype: str) -> None:
    queries, keys, options = CASES[name]
    q, k, v, _ = arrays(queries, keys, 32 if name == "full" else 16, dtype)
    hold(by_name(seen(q, k, v, **options)), given(q, k, v, **options), max(queries, keys))


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_traced_is_an_operand(wide: bool) -> None:
    with (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(wide):
        q, k, v, _ = arrays(40, 70)

        @jax.jit
        def call(q: Any, scale: Any, lengths: Any, offset: Any) -> Any:
            return seen(q, k, v, mask=ch.lengths(lengths) & ch.causal(offset=offset), scale=scale)

        for lengths, offset in (([70, 9], [0, 30]), ([0, 70], [-3, 5])):
            found = call(q, jnp.float32(0.4), jnp.asarray(lengths), jnp.asarray(offset))
            options = {
                "mask": ch.lengths(lengths) & ch.causal(offset=np.array(offset)),
                "scale": float(np.float32(0.4)),
            }
            hold(by_name(found), given(q, k, v, **options), 70)
        assert call._cache_size() == 1


def test_queries_that_count_less() -> None:
    q, k, v, _ = arrays(40, 70)
    weights = given(q, k, v)["weights"].exact
    counts = jnp.asarray(NUMBERS.standard_normal((4, 40)), jnp.float32)
    for asked, much in ((7, np.arange(40) >= 33), (counts, np.asarray(counts, np.float64))):
        found = numbers(seen(q, k, v, {"received": asked}).received)
        expected = (weights * np.broadcast_to(much, weights.shape[:-1])[..., None]).sum(-2)
        room = np.sqrt(70) * float(np.finfo(np.float32).eps) * np.abs(weights).sum(-2).max()
        assert np.abs(found - expected).max() <= 2 * room
    assert seen(q, k, v, {}).received is None


def test_what_is_not_finite_spoils_those_who_see_it() -> None:
    q, k, v, _ = arrays(40, 40)
    k, v = k.at[0, 0, 30].set(jnp.nan), v.at[1, 1, 20].set(jnp.inf)
    hold(by_name(seen(q, k, v, mask=ch.causal())), given(q, k, v, mask=ch.causal()), 40)
    v = v.at[:, :, 35:].set(jnp.nan)  # which nobody sees
    mask = ch.lengths([25, 15])
    hold(by_name(seen(q, k, v, mask=mask)), given(q, k, v, mask=mask), 40)


@pytest.mark.parametrize("name", ["causal", "softcap, scale"])
def test_derivatives_pass_through(name: str) -> None:
    queries, keys, options = CASES[name]
    q, k, v, dout = arrays(queries, keys)
    _, pull = jax.vjp(lambda *a: seen(*a, **options).output, q, k, v)
    hold(dict(zip(("dq", "dk", "dv"), pull(dout), strict=True)), given(q, k, v, dout, **options), max(queries, keys))

    # of all that is observed, forwards and backwards, against the formula's own steps
    def all_of(call: Any) -> Any:
        def added(q: Any, k: Any, v: Any) -> Any:
            one = call(q, k, v)
            return sum(jnp.where(jnp.isfinite(a), a, 0).sum() for a in (one.lse, one.entropy, one.received**2))

        return added

    mine = all_of(lambda *a: seen(*a, **options))
    plain = all_of(lambda *a: ch.observe(*a, **options, received=True, kernel="dense"))
    for got, expected in zip(*(jax.grad(f, argnums=(0, 1, 2))(q, k, v) for f in (mine, plain)), strict=True):
        size = float(jnp.abs(expected).max())
        np.testing.assert_allclose(got, expected, atol=np.sqrt(keys) * queries * float(jnp.finfo(q.dtype).eps) * size)
    assert jax.jvp(mine, (q, k, v), (q, k, v))[1].shape == ()


def test_rows_are_mapped_over() -> None:
    q, k, v, _ = arrays(40, 70)
    many = jnp.stack([q, 2 * q])
    found = jax.vmap(lambda q: seen(q, k, v, mask=ch.causal()).received)(many)
    for n in range(2):
        np.testing.assert_array_equal(found[n], seen(many[n], k, v, mask=ch.causal()).received)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "top": ({"top": 3}, {}, "under jit it observes received, not top"),
    "bias": ({}, {"bias": ch.alibi(4)}, "under jit it is for problems without bias"),
    "documents": (
        {},
        {"mask": ch.documents(np.arange(40) // 9)},
        "under jit it takes causal(), window(), lengths(), and one & another",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_is_said(name: str) -> None:
    asked, options, said = REFUSED[name]
    q, k, v, _ = arrays(40, 40)
    assert in_xla.unfit(posed(q, k, v, asked, **options)) == said
    assert in_xla.unfit(pose(q, k, v)) == "under jit it is for what is observed"
    wide = arrays(40, 40, 48)[:3]
    assert in_xla.unfit(posed(*wide)) == "under jit 48 and 48 features are not alike and one of (16, 32, 64, 128)"
    assert in_xla.rejects(posed(q, k, v)) == "it takes JAX arrays on a GPU, not on cpu"


def test_it_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_xla.unable("bfloat16", 64, False).startswith("JAX's Triton does not compile it here: ")
    said = []
    jax.jit(lambda x: said.append(in_xla.unable("bfloat16", 16, True, interpret=True)) or x)(1.0)
    assert said == [None]
    monkeypatch.setattr(in_xla, "by_rows", lambda way, *a: in_xla.by_kernels(way, *a)._replace(lse=a[5] * 7.0))
    assert (
        in_xla.unable("float32", 16, True, interpret=True) == "JAX's Triton gives other numbers here than the formula"
    )


@pytest.mark.parametrize("features", [16, 64, 128])
def test_what_a_gpu_gets(features: int) -> None:
    q, k, v, _ = arrays(200, 300, features, "bfloat16")

    def call(q: Any) -> Any:
        return in_xla.run(posed(q, k, v, mask=ch.causal())).observed.received

    program = jax.jit(call).trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'custom_call @__gpu\$xla.gpu.triton.*?name = "(\w+)"', program) == [
        "clearhead_first_look", "clearhead_second_look",
    ]  # fmt: skip
    assert "200x300x" not in program  # nowhere is there a matrix of all pairs


def test_on_a_gpu_it_is_chosen_under_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (choose, compiled, cudnn, door, in_xla):
        monkeypatch.setattr(place, "jax_platform", lambda array: "gpu")
    monkeypatch.setattr(borrowed, "refused", lambda problem, rejects: "there is no PyTorch")
    monkeypatch.setattr(in_xla, "unable", lambda *kind: None)
    q, k, v, _ = arrays(40, 40)
    said: dict[str, Any] = {}

    def call(q: Any) -> Any:
        said["chosen"] = choose.choose(posed(q, k, v)).name
        said["how"] = triton.how(posed(q, k, v))
        said["top"] = choose.choose(posed(q, k, v, {"top": 3})).name
        said["why"] = triton.rejects(posed(q, k, v, {"top": 3}))
        return q

    jax.jit(call)(q)
    assert said == {
        "chosen": "triton",
        "how": "through Pallas, which XLA compiles",
        "top": "dense",
        "why": "there is no PyTorch; under jit it observes received, not top",
    }
