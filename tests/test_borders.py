"""Every kernel on both sides of each of its sizes, the compiled one for every instruction set that the machine has."""

from __future__ import annotations

import re
from pathlib import Path

import borders
import draw
import numpy as np
import pytest
import row_by_row
from cases import Case
from conformance import ALL_SETS, INSTRUCTION_SETS, OF_HALF, built, whole
from libraries import LIBRARIES

from clearhead.kernels.compiled import compiled, native
from clearhead.kernels.tiled import tiled

NUMPY = LIBRARIES[0]
NATIVE = Path(__file__).parents[1] / "src" / "clearhead" / "native"


def compiled_cases() -> list[pytest.ParameterSet]:
    runs = []
    for isa in INSTRUCTION_SETS:
        runs += [(isa, case) for case in borders.cases(native.sizes(isa, False), OF_HALF.get(isa, ["float32"]))]
        if isa in OF_HALF:
            continue
        # one source for both precisions, with the same sizes along keys: what is exact takes ten times as long here
        wide = borders.cases(native.sizes(isa, True), ["float64"])
        runs += [(isa, case) for case in wide if "window" not in case.name and "NaN" not in case.name]
    return [pytest.param(isa, case, id=f"{isa}-{case}") for isa, case in runs]


@built
@pytest.mark.parametrize(("isa", "case"), compiled_cases())
def test_the_compiled_kernel_on_both_sides_of_its_sizes(isa: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    whole("compiled", case, NUMPY)


TILES = {"keys": {"columns": tiled.columns}, "queries": {"rows": tiled.rows}}


@pytest.mark.parametrize("case", borders.cases(TILES), ids=str)
def test_the_tiled_kernel_on_both_sides_of_its_tiles(case: Case) -> None:
    whole("tiled", case, NUMPY)


@built
def test_the_sizes_of_the_compiled_kernel_divide_one_another() -> None:
    for isa in INSTRUCTION_SETS:
        for wide in (False, True):
            sizes = native.sizes(isa, wide)
            keys, queries = sizes["keys"], sizes["queries"]
            for name in ("back_tile", "tile", "splits", "pack_step"):
                assert keys[name] % keys["rows"] == 0, (isa, wide, name)
            for name in ("small", "block", "together", "chunk", "chunks"):
                assert queries[name] % queries["panel"] == 0, (isa, wide, name)
            assert keys["back_tile"] % keys["sum_rows"] == 0, (isa, wide)


def test_every_instruction_set_is_held_to_the_cases() -> None:
    declared = re.findall(r"^namespace (\w+) \{ const Kernel\* kernel\(\); \}", (NATIVE / "kernel.h").read_text(), re.M)
    assert tuple(declared) == ALL_SETS
    assert set(draw.ISAS) == {"", *ALL_SETS}
    if native is not None:
        assert native.instruction_set() in INSTRUCTION_SETS


@built
def test_an_instruction_set_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="this machine does not have the instruction set sse9"):
        native.sizes("sse9", False)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_all_rows_at_once_are_those_one_by_one(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    q, k, v, dout = (rng.standard_normal((2, n, d)) for n, d in ((9, 3), (5, 3), (5, 2), (9, 2)))
    options = {"scale": 0.7, "softcap": softcap, "dlse": rng.standard_normal((2, 9))}
    one_by_one = row_by_row.attend(q, k, v, dout, **options)
    monkeypatch.setattr(row_by_row, "MANY", 1)
    at_once = row_by_row.attend(q, k, v, dout, **options)
    assert set(at_once) == set(one_by_one)
    for name, right in one_by_one.items():
        np.testing.assert_allclose(at_once[name], right, rtol=1e-12, atol=1e-13, err_msg=name)
