"""The compiled kernel in JAX: as it is and under jit, mapped, differentiated, scanned, cut over devices, donated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import budget
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import built  # which imports the libraries, and sets XLA's flags before JAX starts
from test_mask_runs import GRID, LEAVES, PATTERNS

import clearhead as ch
from clearhead.kernels.prepared import PROGRAMS

pytestmark = built

NUMBERS = np.random.default_rng(5)
B, H, G, T, S, D, E = 3, 4, 2, 19, 23, 13, 11
EPS = float(np.finfo(np.float32).eps)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(NUMBERS.standard_normal(shape), jnp.float32)


Q, K, V = normal(B, H, T, D), normal(B, G, S, D), normal(B, G, S, E)
DOUT = normal(B, H, T, E)
IDS = np.sort(NUMBERS.integers(0, 4, (B, S)))
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": ch.causal()},
    "window and lengths": lambda: {"mask": ch.window(5, 2, offset=[1, 4, 2]) & ch.lengths([9, 23, 0])},
    "documents": lambda: {"mask": ch.documents(IDS)},
    "documents, ids beyond 32 bits": lambda: {"mask": ch.documents(IDS * 2**40)},
    "global tokens": lambda: {"mask": ch.causal() | ch.global_tokens([2, 7], offset=[0, 1, 2])},
    "blocks": lambda: {"mask": ~ch.random_blocks(4, count=2, seed=3)},
    "array": lambda: {"mask": NUMBERS.random((B, 1, T, S)) < 0.5},
    "bias": lambda: {"bias": normal(H, T, S), "softcap": 3.0},
    "alibi": lambda: {"bias": ch.alibi(H, offset=[3, 0, 50]), "scale": 0.4},
    "relative": lambda: {"bias": ch.relative_bias(normal(8, H)), "mask": ch.prefix(3) | ch.causal()},
    "sinks": lambda: {"sinks": normal(H), "mask": ch.causal(align="start")},
}


def wide(tree: Any) -> Any:
    """The same numbers in float64."""
    return jax.tree.map(lambda a: a.astype(np.float64) if getattr(a, "dtype", None) == np.float32 else a, tree)


def held(got: Any, plain: Any, exact: Any, keys: int, size: float | None = None) -> None:
    """All arrays within the error that `budget.py` derives; whole numbers are the same.

    Where a result is one number, the sum of so many that most of them cancel, `size` is the sum of their sizes, and as
    many are added up as queries have numbers.
    """

    def one(got: Any, plain: Any, exact: Any) -> None:
        if not jnp.issubdtype(got.dtype, jnp.floating):
            np.testing.assert_array_equal(got, exact)
            return
        assert (got.dtype, exact.dtype) == (np.float32, np.float64)
        of, terms = (None, keys) if exact.ndim else (size, Q.size)
        budget.check(got, budget.Expected(*map(np.asarray, (exact, plain)), EPS, of), terms, "")

    jax.tree.map(one, got, plain, exact)


def both(run: Callable[..., Any], *given: Any, keys: int = S, size: Callable[[Any], Any] | None = None) -> None:
    """What the kernel gives is what the formula gives in float64, but for the error that it makes in float32 itself."""
    got, plain = (run(kernel, *given) for kernel in ("compiled", "dense"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Q", "K", "V", "DOUT", "SINKS"):
            patch.setattr(sys.modules[__name__], name, wide(globals()[name]))
        exact = run("dense", *wide(given))
        terms = None if size is None else float(size(exact))
    held(got, plain, exact, keys, terms)


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_the_same_as_it_is_compiled_and_traced(make: Callable[[], dict[str, Any]]) -> None:
    options = make()
    numbers = {name: np.asarray(a) if isinstance(a, jax.Array) else a for name, a in options.items()}
    if isinstance(numbers.get("bias"), type(ch.relative_bias(Q[0, 0]))):
        numbers["bias"] = ch.relative_bias(np.asarray(options["bias"].table))
    expected = ch.observe(*map(np.asarray, (Q, K, V)), kernel="compiled", top=3, received=True, **numbers)
    masks = {name: options[name] for name in options if name in ("mask", "bias", "sinks")}
    rest = {name: options[name] for name in options if name not in masks}

    def seen(q: Any, k: Any, v: Any, given: Any) -> Any:
        return ch.observe(q, k, v, kernel="compiled", top=3, received=True, **given, **rest)

    found = {
        "as it is": seen(Q, K, V, masks),
        "again": seen(Q, K, V, masks),
        "options known": jax.jit(lambda q, k, v: seen(q, k, v, masks))(Q, K, V),
    }
    if "beyond" not in str(options):
        found["options traced"] = jax.jit(seen)(
            Q, K, V, {n: jnp.asarray(a) if hasattr(a, "dtype") else a for n, a in masks.items()}
        )
    for how, one in found.items():
        assert type(one) is ch.Observed, how
        for name in ("output", "lse", "max_score", "entropy", "received"):
            np.testing.assert_array_equal(getattr(one, name), getattr(expected, name), err_msg=f"{how}: {name}")
        np.testing.assert_array_equal(one.top.indices, expected.top.indices)


# large ids do not fit the 32 bits that JAX has, and what is in a mask of one's own JAX does not know
HELD = {name: mask for name, mask in (LEAVES | PATTERNS).items() if "large ids" not in name and "one's own" not in name}


@pytest.mark.parametrize("mask", HELD.values(), ids=HELD)
def test_masks_may_hold_arrays_of_jax(mask: ch.Mask) -> None:
    batch, heads = GRID.batch[0], GRID.heads
    q, k, v = (normal(batch, heads, n, 8) for n in (GRID.queries, GRID.keys, GRID.keys))
    here = jax.device_put(mask)

    def call(q: jax.Array, mask: ch.Mask) -> jax.Array:
        return ch.attention(q, k, v, mask=mask, kernel="compiled")

    expected = call(q, mask)
    np.testing.assert_array_equal(call(q, here), expected)
    np.testing.assert_array_equal(jax.jit(lambda q: call(q, here))(q), expected)
    np.testing.assert_array_equal(jax.jit(call)(q, here), expected)


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_everything_that_learns(make: Callable[[], dict[str, Any]]) -> None:
    options = make()
    learned = {name: options.pop(name) for name in ("bias", "sinks") if name in options}
    if isinstance(learned.get("bias"), type(ch.alibi(H))):
        options["bias"] = learned.pop("bias")

    def loss(kernel: str, q: Any, k: Any, v: Any, learned: Any, scale: Any) -> Any:
        given = {"scale": scale, **options}
        seen = ch.observe(q, k, v, kernel=kernel, **given, **learned)
        finite = jnp.where(seen.lse == -jnp.inf, 0.0, seen.lse)
        return (seen.output * DOUT).sum() + (finite**2).sum()

    scale = options.pop("scale", 0.3)
    for compiled in (lambda f: f, jax.jit):

        def slopes(kernel: str, learned: Any, compiled: Any = compiled) -> Any:
            whole = jax.value_and_grad(lambda *given: loss(kernel, *given), argnums=(0, 1, 2, 3, 4))
            return compiled(whole)(Q, K, V, learned, jnp.asarray(scale, Q.dtype))

        def terms(exact: Any, learned: Any = learned) -> Any:
            """Of the loss, and of the gradient by the scale, Σ q · dq / scale."""
            seen = ch.observe(Q, K, V, kernel="dense", scale=scale, **options, **wide(learned))
            added = abs(seen.output * DOUT).sum() + jnp.where(seen.lse == -jnp.inf, 0.0, seen.lse**2).sum()
            return added + abs(Q * exact[1][0]).sum() / scale

        both(slopes, learned, size=terms)


def test_a_scale_of_zero_has_its_gradient() -> None:
    for scale in (0.0, -0.7):

        def slope(kernel: str, scale: float = scale) -> Any:
            by_scale = jax.grad(lambda s: (ch.attention(Q, K, V, scale=s, kernel=kernel) * DOUT).sum())
            return by_scale(jnp.asarray(scale, Q.dtype))

        def terms(exact: Any, scale: float = scale) -> Any:
            """Σ q · k times the gradient of their score, which is the one of a bias."""
            of_bias = jax.grad(
                lambda bias: (ch.attention(Q, K, V, scale=scale, bias=bias, kernel="dense") * DOUT).sum()
            )
            return abs(of_bias(jnp.zeros((B, H, T, S))) * (Q @ jnp.repeat(K, H // G, axis=1).mT)).sum()

        both(slope, size=terms)
    dq = jax.grad(lambda q, s: (ch.attention(q, K, V, scale=s, kernel="compiled") * DOUT).sum(), argnums=(0, 1))(
        Q, 0.0
    )[0]
    assert not dq.any()


def test_gradients_through_what_is_observed() -> None:
    def loss(kernel: str, q: Any, k: Any) -> Any:
        seen = ch.observe(q, k, V, mask=ch.causal(), kernel=kernel, top=2, received=True, weights=True)
        return (seen.entropy * seen.lse).sum() + (seen.received**2).sum() + seen.top.weights[..., 0].sum()

    both(lambda kernel: jax.grad(lambda q, k: loss(kernel, q, k), argnums=(0, 1))(Q, K))


def test_forward_and_second_derivatives() -> None:
    q, k, v = Q[0, :, :2, :3], K[0, :, :3, :3], V[0, :, :3]

    def call(kernel: str) -> Callable[..., Any]:
        return lambda q, k: ch.attention(q, k, v.astype(q.dtype), mask=ch.causal(), sinks=SINKS, kernel=kernel)

    def total(kernel: str) -> Callable[..., Any]:
        return lambda q, k: (call(kernel)(q, k) ** 2).sum()

    def twice(kernel: str) -> Callable[..., Any]:
        return jax.grad(lambda q, k: (jax.grad(total(kernel))(q, k) ** 2).sum(), (0, 1))

    both(lambda kernel, q, k: jax.jvp(call(kernel), (q, k), (2 * q, k)), q, k)
    both(lambda kernel, q, k: jax.jit(jax.jacfwd(call(kernel)))(q, k), q, k)
    both(lambda kernel, q, k: jax.jit(twice(kernel))(q, k), q, k)
    both(lambda kernel, q, k: jax.jit(jax.hessian(total(kernel)))(q, k), q, k)


SINKS = normal(H)


# options of a number for each call, and over which axes q, k and v are mapped
MAPPED: dict[str, tuple[Callable[[Any], dict[str, Any]], tuple[int | None, ...]]] = {
    "all": (lambda n: {"mask": ch.causal()}, (0, 0, 0)),
    "some": (lambda n: {"bias": ch.alibi(H)}, (0, None, None)),
    "at the end": (lambda n: {}, (3, None, 0)),
    "lengths": (lambda n: {"mask": ch.lengths(n) & ch.window(6)}, (0, 0, 0)),
    "offsets alone": (lambda n: {"mask": ch.causal(offset=n)}, (None, None, None)),
    "offsets of a bias": (lambda n: {"bias": ch.alibi(H, offset=n)}, (0, 0, 0)),
    "scale": (lambda n: {"scale": 1.0 / n}, (0, 0, 0)),
    "arrays": (lambda n: {"mask": (jnp.arange(S) < n)[None]}, (0, 0, 0)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_calls_are_one_call(name: str) -> None:
    options, axes = MAPPED[name]
    whole = zip((Q, K, V), axes, strict=True)
    given = [a[0] if axis is None else jnp.moveaxis(a, 0, axis) for a, axis in whole] + [jnp.asarray([4, 23, 9])]

    def mapped(kernel: str) -> Callable[..., Any]:
        return jax.vmap(lambda q, k, v, n: ch.attention(q, k, v, kernel=kernel, **options(n)), (*axes, 0))

    def slopes(kernel: str, *given: Any) -> Any:
        one = jax.grad(lambda q, k, v, n: (ch.attention(q, k, v, kernel=kernel, **options(n)) ** 2).sum())
        return jax.jit(jax.vmap(one, (*axes, 0)))(*given)

    both(lambda kernel, *given: mapped(kernel)(*given), *given)
    both(slopes, *given)
    program = str(jax.make_jaxpr(mapped("compiled"))(*given))
    assert program.count("clearhead_attention[") == 1
    # one after the other only where calls differ in what each has one of
    assert ("scan" in program) == (name in ("scale", "offsets of a bias"))


def test_mapped_twice() -> None:
    twice = jax.vmap(jax.vmap(lambda q, k: ch.attention(q, k, V[0], kernel="compiled"), (0, None)), (None, 0))
    one_by_one = [ch.attention(Q, K[n][None], V[:1], kernel="compiled") for n in range(B)]
    np.testing.assert_array_equal(twice(Q, K), jnp.stack(one_by_one))


def test_scanned_and_checkpointed() -> None:
    def chain(kernel: str) -> Any:
        def step(x: Any, _: Any) -> Any:
            return ch.attention(x, x, x, mask=ch.causal(), kernel=kernel) + x, None

        return jax.jit(jax.grad(lambda x: jax.lax.scan(jax.checkpoint(step), x, None, length=3)[0].sum()))(Q)

    both(chain)


def test_numbers_that_change_are_not_compiled_again() -> None:
    compilations = []

    @jax.jit
    def run(q: Any, lengths: Any, offset: Any, scale: Any, sinks: Any, bias: Any) -> Any:
        compilations.append(1)
        mask = ch.lengths(lengths) & ch.causal(offset=offset)
        return ch.observe(q, K, V, mask=mask, scale=scale, sinks=sinks, bias=bias, kernel="compiled", top=2)

    for step in range(4):
        given = (
            Q + step,
            jnp.asarray([step, 5, 23]),
            jnp.asarray(step),
            0.1 * (step + 1),
            SINKS * step,
            normal(H, T, S),
        )
        mask = ch.lengths(np.asarray(given[1])) & ch.causal(offset=step)
        options = {"mask": mask, "scale": given[3]}
        plain, exact = (
            ch.attention(*arrays, sinks=sinks, bias=bias, **options, kernel="dense")
            for *arrays, sinks, bias in ([given[0], K, V, *given[4:]], wide([given[0], K, V, *given[4:]]))
        )
        held(run(*given).output, plain, exact, S)
    assert len(compilations) == 1


def test_calls_as_they_are_keep_one_program_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    PROGRAMS.clear()
    expected = ch.attention(*map(np.asarray, (Q, K, V)), mask=ch.causal())
    for _ in range(4):
        np.testing.assert_array_equal(ch.attention(Q, K, V, mask=ch.causal()), expected)
        ch.attention(Q + 1, K, V, mask=ch.causal())
    assert len({id(program) for program in PROGRAMS.values()}) == 1
    assert next(iter(PROGRAMS.values()))._cache_size() == 1
    # where another thread count is asked for it is had at once, and gives the same bits
    ch.set_threads(1)
    np.testing.assert_array_equal(ch.attention(Q, K, V, mask=ch.causal()), expected)
    ch.set_threads(None)


def test_donated_buffers() -> None:
    def step(q: Any, k: Any) -> Any:
        return ch.attention(q, k, k, mask=ch.causal(), kernel="compiled")

    expected = np.asarray(step(K + 1, K))
    for before in (lambda q: None, lambda q: ch.attention(q, K, K), lambda q: ch.observe(q, K, K)):
        q = K + 1
        before(q)
        got = jax.jit(step, donate_argnums=0)(q, K)
        assert q.is_deleted()
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("jit", [False, True], ids=["as it is", "jit"])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 8])
def test_gradients_of_few_queries_see_the_scores_that_the_output_saw(queries: int, jit: bool) -> None:
    """Of scores of 10⁴, the last digits are tenths of a weight: added up in another order they are other scores."""
    numbers = np.random.default_rng(queries)
    q, k, v = (numbers.standard_normal((4, n, 64), dtype=np.float32) for n in (queries, 700, 700))
    q *= 300
    dout = numbers.standard_normal(q.shape, dtype=np.float32)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.vdot(ch.attention(*arrays, kernel="compiled"), dout)

    found = (jax.jit if jit else lambda call: call)(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, (q, k, v)))
    for got, expected in zip(found, ch.gradients(q, k, v, dout, kernel="compiled")[:3], strict=True):
        # XLA's own steps take numbers below the smallest normal one for 0
        np.testing.assert_allclose(got, expected, rtol=0, atol=np.finfo(np.float32).tiny)


def test_half_precision_and_no_rounding_before_gradients() -> None:
    q, k, v, dout = (a.astype(jnp.bfloat16) for a in (Q, K, V, DOUT))
    output, pull = jax.vjp(lambda *a: ch.attention(*a, mask=ch.causal(), kernel="compiled"), q, k, v)
    assert output.dtype == jnp.bfloat16
    expected = ch.gradients(*map(np.asarray, (q, k, v, dout)), mask=ch.causal(), kernel="compiled")
    for got, want in zip(pull(dout), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


def test_plan_says_which_way() -> None:
    plan = ch.plan(Q, K, V)
    assert (plan.kernel, plan.how) == (
        "compiled",
        "where arrays lie; under jit through XLA's foreign function interface",
    )
    assert ch.plan(*map(np.asarray, (Q, K, V))).how is None
    assert ch.plan(Q, K, V, dropout=(0.5, 1)).others["compiled"] == "refused: it has no dropout; `tiled` has"
    with pytest.raises(ch.KernelRefused, match="it takes no traced softcap; `tiled` does"):
        jax.jit(lambda c: ch.attention(Q, K, V, softcap=c, kernel="compiled"))(3.0)


def test_queries_count_as_much_as_is_said() -> None:
    """Weights of queries are an operand: traced, mapped over or not, and not in the way of gradients."""
    rng = np.random.default_rng(17)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, n, 8)), jnp.float32) for n in (7, 11, 11))
    counts = jnp.asarray(rng.standard_normal((3, 2, 7)), jnp.float32)

    def received(q: Any, k: Any, v: Any, counts: Any) -> Any:
        return ch.observe(q, k, v, mask=ch.causal(), received=counts, top=2, kernel="compiled").received

    expected = ch.observe(*(np.asarray(a) for a in (q, k, v)), mask=ch.causal(), received=np.asarray(counts)).received
    np.testing.assert_array_equal(received(q, k, v, counts), expected)
    traced = jax.jit(received)
    np.testing.assert_array_equal(traced(q, k, v, counts), expected)
    traced(q, k, v, 2 * counts)
    assert traced._cache_size() == 1
    np.testing.assert_array_equal(jax.jit(jax.vmap(received))(q, k, v, counts), expected)
    shared = jax.vmap(received, (0, 0, 0, None))(q, k, v, counts[0])  # one for all rows
    np.testing.assert_array_equal(shared, received(q, k, v, jnp.broadcast_to(counts[0], counts.shape)))
    np.testing.assert_array_equal(shared, jax.jit(jax.vmap(received, (0, 0, 0, None)))(q, k, v, counts[0]))

    def loss(kernel: str, q: Any, k: Any, v: Any, counts: Any) -> Any:
        seen = ch.observe(q, k, v, mask=ch.causal(), received=counts, kernel=kernel)
        return seen.output.sum() + (seen.received**2).sum()

    both(lambda kernel, *given: jax.jit(jax.grad(partial(loss, kernel)))(*given), q, k, v, counts, keys=11)
