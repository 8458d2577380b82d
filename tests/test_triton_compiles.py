"""The portable GPU kernels are compiled for Hopper on any machine: the interpreter takes more than a compiler does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import INSTALLED

WANTED = (
    "forward", "repair", "deltas", "gradients_of_keys", "gradients_of_queries", "split_keys", "merge_parts", "largest",
)  # fmt: skip


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed")
def test_kernels_compile_for_hopper() -> None:
    # in a process of its own: here kernels are imported to be interpreted
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # a kernel that was not changed is not compiled again: Triton knows it by its source, its options and itself
    environment["TRITON_CACHE_DIR"] = str(script.parents[1] / "build" / "triton")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == sorted(WANTED * 3)
