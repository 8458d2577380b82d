"""How JAX's arrays reach cuDNN, seen where there is no GPU: what a program for one would hold, and what is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget import given, hold

import clearhead as ch
from clearhead.core import formula
from clearhead.core.problem import Problem, pose
from clearhead.kernels import cudnn
from clearhead.kernels.prepared import PROGRAMS, on_jax
from clearhead.kernels.vendor import vendor

NUMBERS = np.random.default_rng(5)
B, H, N, D = 2, 4, 18, 16
BIAS = jnp.asarray(NUMBERS.standard_normal((H, N, N)), jnp.bfloat16)
OPTIONS: dict[str, Any] = {
    "full": {},
    "causal": {"mask": ch.causal()},
    "window": {"mask": ch.window(5)},
    "lengths": {"mask": ch.lengths([3, 18])},
    "no length": {"mask": ch.lengths([0, 18])},
    "lengths and causal": {"mask": ch.lengths([2**40, 7]) & ch.causal()},
    "scale": {"scale": 0.3},
    "bias": {"bias": BIAS},
}


def arrays(key_heads: int = H) -> tuple[jax.Array, ...]:
    shapes = [(B, heads, N, D) for heads in (H, key_heads, key_heads, H)]
    return tuple(jnp.asarray(NUMBERS.standard_normal(shape), jnp.bfloat16) for shape in shapes)


def both(problem: Problem, by: str) -> Callable[..., Any]:
    """The output and the gradients, as a function of q, k and v."""
    way, (*_, lengths, bias) = cudnn.posed(problem, by)

    def call(q: Any, k: Any, v: Any, dout: Any) -> Any:
        output, pull = jax.vjp(lambda *a: cudnn.attend(way, *a, lengths, bias), q, k, v)
        return output, *pull(dout)

    return call


def program_for_cuda(call: Callable[..., Any], *given: Any) -> str:
    """What XLA would be given on a GPU."""
    return str(jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text())


def turns(program: str) -> list[str]:
    """Transposes that move something: JAX also writes those that leave axes where they are, which XLA drops."""
    orders = re.findall(r"stablehlo.transpose .*dims = \[([0-9, ]+)\]", program)
    return [order for order in orders if order != "0, 1, 2, 3"]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX asks for cuDNN's version before it writes a call of it down."""
    monkeypatch.setattr(cudnn.entry(), "check_cudnn_version", lambda: 91000)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_arrays_reach_cudnn_as_they_lie(name: str, key_heads: int) -> None:
    qkvd = arrays(key_heads)
    problem = pose(*qkvd[:3], **OPTIONS[name])
    program = program_for_cuda(both(problem, "heads first"), *qkvd)
    calls = re.findall(r"@__cudnn\$fmha(\w*)\(([^)]*)\)", program)
    kind = "ScaleBiasSoftmax" if name == "bias" else "Softmax"
    assert [called for called, _ in calls] == [kind, f"{kind}Backward"]
    assert not turns(program)
    if "lengths" not in name and name != "no length":
        assert all(operands.startswith("%arg0, %arg1, %arg2") for _, operands in calls)
    # by JAX's public function they are turned there and back
    assert len(turns(program_for_cuda(both(problem, "turned"), *qkvd))) >= 8


def stand_in(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, q_seqlen: Any = None, kv_seqlen: Any = None,
    *, scale: float = 1.0, mask_type: Any = None, qkv_layout: str = "BTNH", sliding_window_length: int | None = None,
) -> Any:  # fmt: skip
    """What JAX's way to cuDNN says that it gives, by the definition: heads come first where the layout says so."""
    assert mask is None
    assert qkv_layout == "BNTH"
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    key, value = (jnp.repeat(array, heads // array.shape[1], axis=1).astype(jnp.float32) for array in (key, value))
    i, j = np.arange(queries)[:, None], np.arange(keys)
    seen = jnp.ones((1, 1, queries, keys), bool)
    if "CAUSAL" in mask_type.name:
        seen &= j <= i
    if sliding_window_length is not None:
        assert "CAUSAL" in mask_type.name
        seen &= j > i - sliding_window_length
    if "PADDING" in mask_type.name:
        assert (q_seqlen.dtype, kv_seqlen.dtype) == (jnp.int32, jnp.int32)
        seen &= (j < kv_seqlen[:, None, None, None]) & (i < q_seqlen[:, None, None, None])
    more = {} if bias is None else {"bias": bias.astype(jnp.float32)}
    whole = formula.attention(query.astype(jnp.float32), key, value, scale=scale, mask=seen, **more)
    return whole.output.astype(query.dtype)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = SimpleNamespace(MaskType=cudnn.entry().MaskType, dot_product_attention=stand_in)
    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "entry", lambda: own)
        kept = dict(PROGRAMS)
        forget()
        yield
        PROGRAMS.clear()
        PROGRAMS.update(kept)
    forget()


def forget() -> None:
    for one in (cudnn.no_entry, cudnn.unable, cudnn.program, cudnn.gradient_program):
        one.cache_clear()


@pytest.mark.usefixtures("stood_in")
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_it_is_given_means_the_same(name: str, key_heads: int) -> None:
    q, k, v, dout = arrays(key_heads)
    options = OPTIONS[name]
    if name == "lengths":  # what is hidden may hold anything
        k, v = k.at[0, :, 3:].set(jnp.nan), v.at[0, :, 3:].set(jnp.inf)
    problem = pose(q, k, v, **options)
    assert cudnn.unfit(problem) is None
    assert cudnn.how(problem) == "cuDNN through XLA, on arrays as they lie"
    found = {"output": cudnn.run(problem).observed.output}
    learnt = cudnn.gradients(problem, dout)
    hold(found | {"dq": learnt.dq, "dk": learnt.dk, "dv": learnt.dv}, given(q, k, v, dout, **options), N)


@pytest.mark.usefixtures("stood_in")
def test_a_kind_is_compiled_once_and_then_runs_at_once() -> None:
    q, k, v, _ = arrays()
    mask = ch.causal()
    assert on_jax(q, k, v, mask, None) is None
    first = cudnn.run(pose(q, k, v, mask=mask)).observed.output
    again = on_jax(q, k, v, mask, None)
    np.testing.assert_array_equal(first, again)
    compiled = cudnn.program()
    before = compiled._cache_size()
    cudnn.run(pose(k, q, v, mask=mask))
    for lengths in ([3, 4], [9, 1], [18, 0]):
        cudnn.run(pose(q, k, v, mask=ch.lengths(lengths)))
    assert compiled._cache_size() == before + 1  # with lengths, whatever they are


def test_where_jax_has_no_such_way_arrays_are_turned_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = arrays()
    problem = pose(q, k, v)
    own = cudnn.entry()
    without = SimpleNamespace(MaskType=own.MaskType, dot_product_attention=lambda query, key, value, *, scale: None)
    monkeypatch.setattr(cudnn, "entry", lambda: without)
    forget()
    said = f"cuDNN through jax.nn, on arrays turned to have heads after positions: JAX {jax.__version__} "
    assert vendor.how(problem) == f"{said}knows no bias there"
    assert cudnn.posed(problem, None)[0].by == "turned"

    def gone() -> Any:
        raise ImportError("No module named 'jax._src.cudnn'")

    monkeypatch.setattr(cudnn, "entry", gone)
    forget()
    assert vendor.how(problem) == f"{said}has it elsewhere: No module named 'jax._src.cudnn'"
    forget()


def test_what_jax_has_here_is_known() -> None:
    assert cudnn.no_entry() is None
    q, k, v, _ = arrays()
    # whether there is a cuDNN is asked of JAX itself, in another way than ours
    half = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    theirs = jax.jit(partial(jax.nn.dot_product_attention, implementation="cudnn"))
    try:
        said = str(theirs(half, half, half).shape)
    except RuntimeError as error:
        said = str(error)
    assert (said, str(cudnn.not_as_they_lie())) in {
        ("(1, 64, 1, 64)", "None"),
        ("cuDNN is not detected.", "cuDNN is not detected."),
    }
    assert vendor.how(pose(np.asarray(q, np.float32), np.asarray(k, np.float32), np.asarray(v, np.float32))) is None
