"""Every kernel × every case × every library it supports: forward, gradients, observations."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import in_jax
import pytest
from cases import BY_NAME, CASES, Case
from conformance import CHECKS, INSTRUCTION_SETS, REFUSED, built
from libraries import LIBRARIES, ArrayLibrary

import clearhead as ch
from clearhead.kernels.choose import KERNELS
from clearhead.kernels.compiled import compiled, native
from clearhead.kernels.tiled import tiled

# The tiled kernel in tiles that are smaller than every case, so that tiles are merged and edges are met: by NumPy in
# those that have others on all sides, and in one tile for all; by the others in those that meet along keys, where sums
# are merged, as rows are cut by Python and not by a library. JAX has tests of its own.
RUNS = [("dense", library) for library in LIBRARIES if library.name != "jax"]
RUNS += [("tiled 7×11", LIBRARIES[0]), ("tiled", LIBRARIES[0])]
RUNS += [("tiled 19×13", library) for library in LIBRARIES if library.name in ("torch", "strict")]
RUNS += [("compiled", library) for library in LIBRARIES if library.name in ("numpy", "torch")]
# and for the other instruction sets that the machine has, by name: `portable` runs on every machine
RUNS += [(f"compiled {isa}", LIBRARIES[0]) for isa in INSTRUCTION_SETS if isa != native.instruction_set()]


IN_TURN = ("dense", "tiled 19×13")


def held(case: Case, run: str, library: ArrayLibrary) -> bool:
    """Whether a case is run at all: not in a precision that the library lacks."""
    if case.dtype not in library.dtypes:
        return False
    # these two kernels are written for NumPy, which they are held to in full; by other libraries their functions are
    # called, which are the same for many cases: each case by one kernel in turn
    if library.name != "numpy" and run in IN_TURN:
        return run == IN_TURN[CASES.index(case) % 2]
    return True


def conforming() -> list[pytest.ParameterSet]:
    return [
        pytest.param(case, run, library, id=f"{case}-{run}-{library}", marks=[built] * ("compiled" in run))
        for case, (run, library) in product(CASES, RUNS)
        if held(case, run, library)
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


# all that comes out of a case in one test, and its tests side by side: starting one takes longer than most checks, and
# what is exact is then worked out by one worker alone
@pytest.mark.parametrize(("case", "run", "library"), conforming())
def test_kernel_conforms(case: Case, kernel: str, library: ArrayLibrary) -> None:
    arrays, _, options = case.build()
    reason = REFUSED.get((kernel, case.name))
    if reason is not None:
        with pytest.raises(ch.KernelRefused) as refusal:
            ch.attention(*map(library.make, arrays), **library.options(options), kernel=kernel)
        assert refusal.value.reason == reason
        return
    for check in CHECKS.values():
        check(kernel, case, library)


@pytest.mark.parametrize(("name", "kernel"), in_jax.AS_IT_IS.items())
def test_kernel_conforms_in_jax(name: str, kernel: str) -> None:
    for check in CHECKS.values():
        check(kernel, BY_NAME[name], in_jax.JAX)


@pytest.mark.parametrize(
    ("name", "run"), [(name, {"tiled": "tiled 19×13"}.get(run, run)) for name, run in in_jax.UNDER_JIT.items()]
)
def test_kernel_conforms_under_jit(kernel: str, name: str) -> None:
    in_jax.under_jit(kernel, BY_NAME[name])


@built
@pytest.mark.parametrize("case", [case for case in CASES if ("compiled", case.name) not in REFUSED], ids=str)
def test_compiled_conforms_in_jax(case: Case) -> None:
    for check in CHECKS.values():
        check("compiled", case, in_jax.JAX)
    in_jax.under_jit("compiled", case)


@built
def test_compiled_conforms_where_jax_has_32_bits() -> None:
    done = subprocess.run(
        [sys.executable, "in_jax.py"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"\d\d cases hold in 32 bits\n", done.stdout)


def test_case_names_are_distinct() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_refusal_is_of_a_case_and_a_kernel() -> None:
    kernels = {kernel.name for kernel in KERNELS}
    names = {case.name for case in CASES}
    assert all(kernel in kernels and case in names for kernel, case in REFUSED)
