"""JAX arrays lent to the GPU kernels by way of PyTorch: the same memory, the same numbers, and refusals in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import budget
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import MARKS

import clearhead as ch
from clearhead.core.positions import Relative
from clearhead.core.problem import pose
from clearhead.kernels.gpu import borrowed
from clearhead.kernels.hopper import hopper
from clearhead.kernels.triton import triton
from clearhead.kernels.xla import lending, primitives

pytestmark = MARKS

NUMBERS = np.random.default_rng(9)
Q, K, V, DOUT = (jnp.asarray(NUMBERS.standard_normal((2, n, 17, 16)), jnp.float32) for n in (4, 2, 2, 4))
OPTIONS: dict[str, Any] = {
    "plain": {},
    "masked": {"mask": ch.causal() & ch.lengths([5, 17]), "softcap": 4.0},
    "biased": {"bias": jnp.asarray(NUMBERS.standard_normal((4, 17, 17)), jnp.float32), "scale": 0.3},
    "sinks": {"sinks": jnp.asarray([0.5, -1.0, 2.0, 0.0]), "mask": jnp.asarray(np.tri(17, dtype=bool))},
    "relative": {"bias": ch.relative_bias(jnp.asarray(NUMBERS.standard_normal((8, 4)), jnp.float32))},
}


def read(options: dict[str, Any]) -> dict[str, Any]:
    """The options with NumPy's arrays, for the definition."""
    given = dict(options)
    if isinstance(given.get("bias"), Relative):
        given["bias"] = replace(given["bias"], table=np.asarray(given["bias"].table))
    return given


@pytest.mark.parametrize("name", OPTIONS)
def test_lent_arrays_give_what_the_formula_gives(name: str) -> None:
    options = OPTIONS[name]
    asked = {"top": 2, "received": True}
    seen = ch.observe(Q, K, V, **options, **asked, kernel="triton")
    expected = ch.observe(Q, K, V, **options, **asked, kernel="dense")
    assert seen.kernel == "triton"
    for array in (seen.output, seen.lse, seen.entropy, seen.received, seen.top.weights, seen.top.indices):
        assert isinstance(array, jax.Array)
    allowed = budget.given(Q, K, V, DOUT, **read(options))
    found = {what: getattr(seen, what) for what in ("output", "lse", "max_score", "entropy", "received")}
    np.testing.assert_array_equal(seen.top.indices, expected.top.indices)
    learnt = ch.gradients(Q, K, V, DOUT, **options, kernel="triton")
    budget.hold(found | dict(zip(("dq", "dk", "dv"), learnt, strict=True)), allowed, 17)


def test_nothing_is_copied() -> None:
    lent = borrowed.lent(pose(Q, K, V))
    for tensor, array in zip((lent.q, lent.k, lent.v), (Q, K, V), strict=True):
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert borrowed.back(lent.q).unsafe_buffer_pointer() == Q.unsafe_buffer_pointer()
    half = borrowed.tensor(Q.astype(jnp.bfloat16))
    assert str(half.dtype) == "torch.bfloat16"
    assert borrowed.back(half).dtype == jnp.bfloat16


def test_arrays_that_are_there_are_given_to_programs_without_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowed, "at_once", lambda problem: True)  # as on a GPU
    mask = ch.documents(np.arange(17) // 5) | ch.prefix(2)
    for _ in range(4):
        q, k, v, dout = (jnp.asarray(NUMBERS.standard_normal(a.shape), jnp.float32) for a in (Q, K, V, DOUT))
        before = len(primitives._programs)
        seen = ch.observe(q, k, v, mask=mask, top=2, received=True, kernel="triton")
        learnt = ch.gradients(q, k, v, dout, mask=mask, kernel="triton")
        allowed = budget.given(q, k, v, dout, mask=mask)
        found = {what: getattr(seen, what) for what in ("output", "lse", "max_score", "entropy", "received")}
        budget.hold(found | dict(zip(("dq", "dk", "dv"), learnt, strict=True)), allowed, 17)
    assert len(primitives._programs) == before
    last = next(reversed(primitives._programs))
    assert len(last[-1]) <= 8  # q, k, v and what gradients are made of


def test_a_mask_that_comes_once_has_no_program_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowed, "jax_platform", lambda array: "gpu")
    before, made = len(lending._numbers), []
    for ids in (np.arange(17) // 4, np.arange(17) // 6, np.arange(17) // 7, np.arange(17) // 4):
        mask = ch.documents(ids)
        output = ch.attention(Q, K, V, mask=mask, kernel="triton")
        budget.hold({"output": output}, budget.given(Q, K, V, mask=mask), 17)
        made.append(len(lending._numbers) - before)
    assert made == [0, 0, 0, 1]


@pytest.mark.parametrize("library", ["attention", "observe"])
def test_calls_of_jax_are_remembered_by_the_numbers_of_their_mask(library: str) -> None:
    call = {"attention": ch.attention, "observe": lambda *a, **b: ch.observe(*a, **b, received=True).output}[library]
    for ids in (np.arange(17) // 5, np.arange(17) // 3, np.arange(17) // 5):
        mask = ch.documents(ids)
        for _ in range(3):
            budget.hold({"output": call(Q, K, V, mask=mask)}, budget.given(Q, K, V, mask=mask), 17)


IN_PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, lengths": {"mask": ch.causal() & ch.lengths([5, 17]), "softcap": 4.0},
    "documents": {"mask": ch.documents(np.arange(17) // 5), "scale": 0.3},
    "array": {"mask": np.tri(17, dtype=bool)},
    "no length": {"mask": ch.lengths([0, 17])},
    "alibi": {"bias": ch.alibi(4), "mask": ch.causal()},
}


@pytest.mark.parametrize(("name", "wide"), [*((name, False) for name in IN_PROGRAMS), ("documents", True)])
def test_programs_lend_their_arrays(name: str, wide: bool) -> None:
    options = IN_PROGRAMS[name]
    with (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(wide):

        @jax.jit
        def both(q: Any, k: Any, v: Any) -> Any:
            seen = ch.observe(q, k, v, **options, top=3, received=True, map=(3, 4), queries=[-1], kernel="triton")
            output, pull = jax.vjp(lambda *a: ch.attention(*a, **options, kernel="triton"), q, k, v)
            return seen, output, pull(DOUT)

        seen, output, learnt = both(Q, K, V)
    assert seen.kernel == "triton"
    assert seen.top.indices.dtype == (jnp.int64 if wide else jnp.int32)
    expected = ch.observe(
        *map(np.asarray, (Q, K, V)), **options, top=3, received=True, map=(3, 4), queries=[-1], kernel="dense"
    )  # fmt: skip
    np.testing.assert_array_equal(seen.top.indices, expected.top.indices)
    allowed = budget.given(Q, K, V, DOUT, **options)
    found = {what: getattr(seen, what) for what in ("output", "lse", "max_score", "entropy", "received")}
    budget.hold(found | dict(zip(("dq", "dk", "dv"), learnt, strict=True)), allowed, 17)
    budget.hold({"output": output}, allowed, 17)
    rows = budget.Expected(
        *(part[..., -1:, :] for part in allowed["weights"][:2]), *allowed["weights"][2:]
    )  # fmt: skip
    budget.check(seen.queries.weights, rows, 17, "queries")


@pytest.mark.parametrize("name", ["plain", "causal, lengths", "documents", "alibi"])
def test_a_program_that_ran_before_is_played_where_xla_wants_its_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.kernels.gpu.placed import Placed  # needs Triton, which MARKS have asked for

    played: list[bool] = []
    play = Placed.play
    monkeypatch.setattr(Placed, "play", lambda self, *given: played.append(play(self, *given)) or played[-1])
    options = IN_PROGRAMS[name] | {"scale": 0.4}  # of a kind that no other test has recorded

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        seen = ch.observe(q, k, v, **options, top=3, received=True, map=(3, 4), kernel="triton")
        output, pull = jax.vjp(lambda *a: ch.attention(*a, **options, kernel="triton"), q, k, v)
        return seen, output, pull(DOUT)

    first = 1 if name == "documents" else 2  # a mask of any kind is recorded at once
    for turn in range(5):
        q, k, v = (NUMBERS.standard_normal(a.shape).astype(np.float32) for a in (Q, K, V))
        seen, output, learnt = jax.block_until_ready(both(q, k, v))
        allowed = budget.given(q, k, v, DOUT, **options)
        found = {what: getattr(seen, what) for what in ("output", "lse", "max_score", "entropy", "received")}
        budget.hold(found | dict(zip(("dq", "dk", "dv"), learnt, strict=True)), allowed, 17)
        budget.hold({"output": output}, allowed, 17)
        expected = ch.observe(q, k, v, **options, top=3, map=(3, 4), kernel="dense")
        np.testing.assert_array_equal(seen.top.indices, expected.top.indices)
        budget.check(seen.top.weights, budget.Expected(*top_of(allowed, expected)), 17, "top")
        if turn == first - 1:
            assert not played
    assert len(played) >= 3 * (5 - first)  # three operations
    assert all(played)


def top_of(allowed: Any, expected: Any) -> Any:
    """The budget of the largest weights; 0 where there are fewer."""
    places = expected.top.indices
    picked = (np.take_along_axis(np.asarray(part), np.maximum(places, 0), -1) for part in allowed["weights"][:2])
    return *(np.where(places < 0, 0, part) for part in picked), *allowed["weights"][2:]


def test_half_precisions_are_learnt_from_what_was_not_rounded() -> None:
    q, k, v, dout = (a.astype(jnp.bfloat16) for a in (Q, K, V, DOUT))
    learnt = jax.grad(lambda *a: (ch.attention(*a, kernel="triton") * dout).sum(), argnums=(0, 1, 2))(q, k, v)
    assert {str(gradient.dtype) for gradient in learnt} == {"bfloat16"}
    budget.hold(dict(zip(("dq", "dk", "dv"), learnt, strict=True)), budget.given(q, k, v, dout), 17)


def test_programs_map_scan_and_differentiate_again() -> None:
    options: dict[str, Any] = {"mask": ch.lengths([5, 17])}

    def by(kernel: str) -> Any:
        return lambda q: ch.attention(q, K, V, **options, kernel=kernel)

    many = jnp.stack([Q, 2 * Q])
    one_by_one = [by("triton")(q) for q in many]
    for mapped in (jax.vmap(by("triton"))(many), jax.lax.map(by("triton"), many)):
        for got, expected in zip(mapped, one_by_one, strict=True):
            np.testing.assert_array_equal(got, expected)
    slopes = jax.vmap(jax.grad(lambda q: (by("triton")(q) * DOUT).sum()))(many)
    for q, slope in zip(many, slopes, strict=True):
        budget.hold({"dq": slope}, budget.given(q, K, V, DOUT, **options), 17)
    # forwards, and of the gradients, through plain steps
    for derivative in (
        lambda f: jax.jvp(f, (Q,), (DOUT,))[1],
        lambda f: jax.grad(lambda q: (jax.grad(lambda p: (f(p) * DOUT).sum())(q) ** 2).sum())(Q),
    ):
        mine, plain = derivative(by("triton")), derivative(by("dense"))
        room = 2 * 17 * float(jnp.finfo(jnp.float32).eps) * float(jnp.abs(plain).max())
        assert float(jnp.abs(mine - plain).max()) <= room


def test_a_program_is_compiled_once_for_equal_options() -> None:
    counted = []

    @partial(jax.jit, static_argnames="mask")
    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        counted.append(1)
        return ch.attention(q, k, v, mask=mask, kernel="triton")

    for factor in (1.0, 2.0):
        call(factor * Q, K, V, ch.window(3) & ch.lengths([5, 17]))
    assert len(counted) == 1
    slope = jax.grad(lambda q: ch.attention(q, K, V, mask=ch.documents(np.arange(17) // 5), kernel="triton").sum())
    slope(Q)
    before = len(lending._numbers), len(primitives._programs)
    slope(2 * Q)
    assert before == (len(lending._numbers), len(primitives._programs))


def test_a_program_of_another_process_is_not_run() -> None:
    program = jax.jit(lambda q: ch.attention(q, K, V, kernel="triton"))
    program(Q)
    kept = dict(lending._handed)
    lending._handed.clear()
    try:
        with pytest.raises(Exception, match="was compiled by another process"):
            jax.block_until_ready(program(2 * Q))
    finally:
        lending._handed.update(kept)


def test_what_goes_wrong_in_a_kernel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: Any) -> Any:
        raise ValueError("nothing left")

    program = jax.jit(lambda q: ch.attention(q, K, V, kernel="triton"))
    lowered = program.lower(Q).compile()
    monkeypatch.setattr(type(triton), "run", lambda self, problem: fails(problem))
    with pytest.raises(Exception, match="nothing left"):
        jax.block_until_ready(lowered(Q))


REFUSED: dict[str, tuple[Any, str]] = {
    "a traced mask": (lambda x: {"mask": ch.lengths(x.astype(int))}, "under jit it takes no traced mask"),
    "a traced scale": (lambda x: {"scale": x[0]}, "under jit it takes no traced scale"),
    "sinks": (lambda x: {"sinks": jnp.ones(4)}, "under jit it is for problems without sinks"),
    "a bias": (lambda x: {"bias": jnp.ones((17, 17))}, "under jit it has no bias but ALiBi"),
    "dropout": (lambda x: {"dropout": (0.1, 3)}, "under jit it is for problems without dropout"),
}


@pytest.mark.parametrize("kernel", [triton, hopper], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_when_a_program_is_compiled_is_refused_in_words(name: str, kernel: Any) -> None:
    options, reason = REFUSED[name]
    said = []
    jax.jit(lambda q, x: said.append(kernel.rejects(pose(q, K, V, **options(x)))))(Q, jnp.ones(2))
    assert said == [reason]
    if "traced" in name:  # also where nothing else is
        jax.jit(lambda x: said.append(kernel.rejects(pose(Q, K, V, **options(x)))))(jnp.ones(2))
        assert said[1] == reason


def test_a_gpu_gets_a_call_and_no_matrix_of_all_pairs() -> None:
    call = partial(ch.observe, k=K, v=V, mask=ch.documents(np.arange(17) // 5), top=3, kernel="triton")
    try:
        program = jax.jit(lambda q: call(q).output).trace(Q).lower(lowering_platforms=("cuda",)).as_text()
    except NotImplementedError as error:  # XLA for the CPU alone, which takes no functions for a GPU
        pytest.skip(str(error))
    assert "clearhead_lent" in program
    assert "17x17x" not in program


def test_pytorch_is_not_imported_for_it() -> None:
    program = """
import sys, jax.numpy as jnp, clearhead as ch
x = jnp.ones((1, 4, 8))
said = ch.plan(x, x, x).others["triton"]
assert said == (
    "refused: it takes JAX arrays by way of PyTorch, which is not imported: `import torch` first"
), said
ch.attention(x, x, x)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
