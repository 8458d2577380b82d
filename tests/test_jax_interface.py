"""XLA's interface as the compiled kernel speaks it: written out as JAX has it, on two devices, and not there at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conformance import built  # which imports the libraries, and sets XLA's flags before JAX starts

import clearhead as ch

pytestmark = built

PROGRAM = """
import numpy as np, jax, jax.numpy as jnp, clearhead as ch
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert len(jax.devices()) == 2, jax.devices()
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
q, k, v = (jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).standard_normal((3, 4, 2, 17, 8)))
mesh = Mesh(np.array(jax.devices()), ("rows",))
sinks = jnp.asarray([0.5, -1.0])
def call(q, k, v, sinks):
    return ch.attention(q, k, v, sinks=sinks, mask=ch.causal(), kernel="compiled")
cut = shard_map(call, mesh=mesh, in_specs=(P("rows"), P("rows"), P("rows"), P()), out_specs=P("rows"))
expected = call(q, k, v, sinks)
np.testing.assert_array_equal(jax.jit(cut)(q, k, v, sinks), expected)
loss = lambda f: jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2, 3)))(q, k, v, sinks)
for got, want, one in zip(loss(cut), loss(call), (q, k, v, sinks)):
    if one is not sinks:
        np.testing.assert_array_equal(got, want)
        continue
    # what devices share is added up over them, in another order than over all rows: four numbers of each head
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * np.finfo(np.float32).eps * np.abs(want).sum())
# arrays that lie on two devices, as they are and under jit
far = [jax.device_put(a, NamedSharding(mesh, P("rows"))) for a in (q, k, v)]
for _ in range(2):
    np.testing.assert_array_equal(ch.attention(*far, sinks=sinks, mask=ch.causal(), kernel="compiled"), expected)
# one after the other, on the second device alone
there = [jax.device_put(a, jax.devices()[1]) for a in (q, k, v)]
for _ in range(3):
    out = ch.attention(*there, mask=ch.causal())
    assert out.devices() == {jax.devices()[1]}
"""


def test_cut_over_devices() -> None:
    elsewhere(PROGRAM, XLA_FLAGS="--xla_force_host_platform_device_count=2")


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_interface_is_written_out_as_jax_has_it() -> None:
    source = Path(ch.__file__).parent / "native" / "xla.cpp"
    if not source.exists():
        pytest.skip("clearhead is installed without its sources")
    compile = ["c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra"]
    for headers in ([], ["-I", jax.ffi.include_dir()]):
        done = subprocess.run([*compile, *headers, str(source)], capture_output=True, text=True, timeout=120)
        assert not done.stderr
    # and a difference would be noticed
    text = source.read_text().replace(
        "SAME(Buffer, rank, XLA_FFI_Buffer, rank)", "SAME(Buffer, rank, XLA_FFI_Buffer, dims)"
    )
    done = subprocess.run(
        [*compile, "-I", jax.ffi.include_dir(), "-I", str(source.parent), "-x", "c++", "-"],
        input=text, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "XLA_FFI_Buffer.dims lies elsewhere" in done.stderr


def test_without_the_interface_python_stands_between() -> None:
    program = """
import jax, jax.numpy as jnp, numpy as np, clearhead as ch
from clearhead.kernels.xla import interface
def refuse(*given, **more):
    raise RuntimeError("no such interface\\nat all")
jax.ffi.register_ffi_target = refuse
q, k, v = (jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).standard_normal((3, 2, 3, 5, 4)))
f = lambda q: (ch.attention(q, k, v, mask=ch.lengths(jnp.asarray([2, 5])), kernel="compiled") ** 2).sum()
got = jax.jit(jax.value_and_grad(f))(q)
assert "no such interface" in interface.missing()
how = ch.plan(q, k, v).how
assert how == "where arrays lie; under jit through Python, since RuntimeError: no such interface", how
assert how in str(ch.plan(q, k, v))
want = jax.value_and_grad(f)(q)
# a sum of 120 squares, in another order where XLA compiles it; the gradients are the kernel's own
np.testing.assert_allclose(got[0], want[0], rtol=120 * np.finfo(np.float32).eps)
np.testing.assert_array_equal(got[1], want[1])
"""
    elsewhere(program)


def elsewhere(program: str, **environment: str) -> None:
    """Run a program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
