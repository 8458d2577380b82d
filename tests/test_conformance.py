"""Every kernel × every case × every library it supports: forward, gradients, observations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from budget import check, expected
from cases import CASES, Case
from conformance import CHECKS, INSTRUCTION_SETS, REFUSED, built
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch
from clearhead.kernels.choose import KERNELS
from clearhead.kernels.compiled import compiled, native
from clearhead.kernels.tiled import tiled

# The tiled kernel also in tiles that are smaller than every case, so that tiles are merged and edges are met. JAX
# compiles each step anew for each shape of tile, which takes hours in tiles of 5×7: there, they run under `jit` below.
RUNS = [pytest.param(kernel, library) for kernel in ("dense", "tiled") for library in LIBRARIES]
RUNS += [pytest.param("tiled 5×7", library) for library in LIBRARIES if library.name != "jax"]
RUNS += [pytest.param("compiled", library, marks=built) for library in LIBRARIES if library.name in ("numpy", "torch")]
# and for the other instruction sets that the machine has, by name: `portable` runs on every machine
RUNS += [
    pytest.param(f"compiled {isa}", LIBRARIES[0], marks=built)
    for isa in INSTRUCTION_SETS
    if isa != native.instruction_set()
]


@pytest.fixture
def kernel(run: str, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, size = run.partition(" ")
    if name == "compiled":
        monkeypatch.setattr(compiled, "isa", size)
    elif size:
        rows, columns = map(int, size.split("×"))
        monkeypatch.setattr(tiled, "rows", rows)
        monkeypatch.setattr(tiled, "columns", columns)
    return name


@pytest.mark.parametrize(("run", "library"), RUNS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("what", CHECKS)
def test_kernel_conforms(kernel: str, case: Case, library: ArrayLibrary, what: str) -> None:
    arrays, _, options = case.build()
    if case.dtype not in library.dtypes:
        with pytest.raises((TypeError, ValueError)):
            library.make(arrays[0])
        return
    reason = REFUSED.get((kernel, case.name))
    if reason is not None:
        with pytest.raises(ch.KernelRefused) as refusal:
            ch.attention(*map(library.make, arrays), **library.options(options), kernel=kernel)
        assert refusal.value.reason == reason
        return
    CHECKS[what](kernel, case, library)


@pytest.mark.parametrize("run", ["tiled 11×13"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiled_conforms_under_jit(kernel: str, case: Case) -> None:
    arrays, dout, options = case.build()
    arrays = tuple(map(jnp.asarray, arrays))
    dout = jnp.asarray(dout.reshape(dout.shape[-2:]) if arrays[0].ndim == 2 else dout)

    @jax.jit
    def everything(q, k, v, dout):
        seen = ch.observe(q, k, v, **options, kernel=kernel, received=True)
        return seen.output, seen.lse, seen.received, ch.gradients(q, k, v, dout, **options, kernel=kernel)

    output, lse, received, gradients = everything(*arrays, dout)
    found = {
        "output": output,
        "lse": lse,
        "received": received,
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
    }
    for what, array in found.items():
        check(numbers(array), expected(case.name)[what], max(arrays[0].shape[-2], arrays[1].shape[-2]), what)


def test_case_names_are_distinct() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_refusal_is_of_a_case_and_a_kernel() -> None:
    kernels = {kernel.name for kernel in KERNELS}
    names = {case.name for case in CASES}
    assert all(kernel in kernels and case in names for kernel, case in REFUSED)
