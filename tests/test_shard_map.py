"""JAX: attention and observe under shard_map, on devices that are processes' threads: jit, gradients, observations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_three_devices_give_what_one_gives() -> None:
    """In a process of its own: how many devices there are is settled when JAX is imported."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    program = Path(__file__).with_name("in_shard_map.py")
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, **flags}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("all as on one device")
