"""Compiles the kernels of factorised weights for Hopper, on any machine, and names them.

python tests/compile_linear_for_hopper.py [all]
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from compile_for_hopper import Machine
from triton.runtime import driver

from clearhead.kernels.triton import linear_launch

# features, values, dtype: as linear attention has them, and a Performer
CASES = ((64, 64, torch.bfloat16, "elu+1"), (128, 128, torch.bfloat16, "elu+1"), (256, 64, torch.float32, None))
SHARED = 227 * 1024  # bytes of shared memory that a program may have


def compiles(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    done = kernel.warmup(*args, grid=grid, **options)
    assert "cubin" in done.asm
    assert done.metadata.shared <= SHARED, f"{kernel.fn.__name__} wants {done.metadata.shared:,} bytes"
    print(kernel.fn.__name__, f"{done.metadata.shared:,}" if "all" in sys.argv else "", flush=True)


def main() -> None:
    driver.set_active(Machine())
    os.environ["TRITON_INTERPRET"] = "1"  # now that kernels are imported: tensors on the CPU stand for others
    linear_launch.launch = compiles
    for features, values, dtype, feature in CASES if "all" in sys.argv else CASES[:1]:
        a, b = torch.zeros(2, 2, 300, features, dtype=dtype)
        v = torch.zeros(2, 300, values, dtype=torch.bfloat16)
        tensors = [one.requires_grad_() for one in (a.clone(), b.clone(), v)]
        linear_launch.chunked(*tensors, feature=feature).sum().backward()


if __name__ == "__main__":
    main()
