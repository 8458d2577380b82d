"""Where the GPU kernels can run, and what none of them takes: said without importing Triton."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import numpy as np

from clearhead.core.mask import Both, Either, Mask, Not
from clearhead.core.positions import Alibi, Relative
from clearhead.core.problem import Problem

DEEPEST = 31  # the answers of a mask's parts wait in the bits of one number
LONGEST = 2**30
LONGEST_ALIBI = 2**24  # positions that float32 tells apart


def unable(device: Any) -> str | None:
    """Why there is nothing here that could run kernels of Triton on a device; None where there is."""
    if not installed():
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if device.type == "cpu" else "Triton's interpreter takes tensors on the CPU"
    return no_gpu(device)


def no_gpu(device: Any) -> str | None:
    """Why a device is no GPU; None where it is one."""
    if device.type == "cuda":
        return None
    import torch

    if not torch.cuda.is_available():
        return "PyTorch has no CUDA device here"
    return f"it takes tensors on a GPU, not on {device}"


def beyond(problem: Problem) -> str | None:
    """What of a problem is beyond the numbers that the kernels count with; None where nothing is."""
    positions, longest = max(problem.grid.queries, problem.grid.keys), LONGEST
    if problem.bias is not None and isinstance(problem.bias, Alibi | Relative):
        if isinstance(problem.bias.alignment.given, np.ndarray):
            positions += int(np.abs(problem.bias.alignment.given).max(initial=0))
        longest = LONGEST_ALIBI if isinstance(problem.bias, Alibi) else LONGEST
    if positions >= longest:
        return f"{positions:,} positions are above {longest - 1:,}"
    if problem.mask is not None and depth(problem.mask) > DEEPEST:
        return f"a mask nested {depth(problem.mask)} deep is above {DEEPEST}"
    return None


def depth(mask: Mask) -> int:
    """How many answers of parts wait at once while a mask is evaluated, left before right."""
    if isinstance(mask, Both | Either):
        return max(depth(mask.left), depth(mask.right) + 1)
    return depth(mask.mask) if isinstance(mask, Not) else 1


@cache
def installed() -> bool:
    """True where Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
