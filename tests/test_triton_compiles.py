"""GPU kernels are compiled for Hopper on any machine: the interpreter takes more than a compiler does."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from interpreted import INSTALLED

WANTED = (
    "forward", "repair", "deltas", "gradients_of_keys", "gradients_of_queries", "split_keys", "merge_parts", "largest",
)  # fmt: skip


def compiled(*cases: str) -> list[str]:
    """The kernels of cases, compiled in a process of their own: here they are imported to be interpreted."""
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # a kernel that was not changed is not compiled again: Triton knows it by its source, its options and itself
    environment["TRITON_CACHE_DIR"] = str(script.parents[1] / "build" / "triton")
    command = [sys.executable, script, *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed")
def test_kernels_compile_for_hopper() -> None:
    assert sorted(compiled()) == sorted(WANTED * 3)


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("case", "last"),
    [
        ("Longformer 64, observed", "search"),
        ("Longformer 128, observed", "search"),
        ("causal 128, received and top", "mend"),
        ("documents 64, observed", "search"),  # in the runs of keys that queries see
    ],
)
def test_hoppers_own_second_look_compiles(case: str, last: str) -> None:
    if find_spec("triton.experimental") is None or find_spec("triton.experimental.gluon") is None:
        pytest.skip("this Triton has no Gluon for Hopper")
    assert {"attend", "lay_out", "by_key", "choose", last} <= set(compiled(f"hopper {case}"))
