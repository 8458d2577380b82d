"""The GPU kernels' door: what they take, and how a call is run. Triton is imported by the first call, never before."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.arrays import Array, dtype_name
from clearhead.core.formula import Gradients
from clearhead.core.mask import Both, Either, Mask, Not
from clearhead.core.positions import Alibi, Relative
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran

WIDEST = 256
TYPES = ("float16", "bfloat16", "float32")
DEEPEST = 31  # the answers of a mask's parts wait in the bits of one number
LONGEST = 2**30
LONGEST_ALIBI = 2**24  # positions that float32 tells apart


class Triton:
    """Attention on the GPU, in Triton: every mask and bias by tile, O(n) memory, and what was attended to."""

    name = "triton"

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        if problem.library.name != "torch":
            return f"it takes PyTorch tensors on a GPU, not {problem.library.name} arrays"
        missing = unable(problem.q.device)
        if missing is not None:
            return missing
        name = dtype_name(problem.q)
        if name not in TYPES:
            return f"it takes {', '.join(TYPES)}, not {name}"
        for name, size in (("features of a query", problem.q.shape[-1]), ("features of a value", problem.width)):
            if not 1 <= size <= WIDEST:
                return f"{size} {name} are outside 1 to {WIDEST}"
        positions = max(problem.grid.queries, problem.grid.keys)
        if isinstance(problem.bias, Alibi | Relative) and isinstance(problem.bias.alignment.given, np.ndarray):
            positions += int(np.abs(problem.bias.alignment.given).max(initial=0))
        longest = LONGEST_ALIBI if isinstance(problem.bias, Alibi) else LONGEST
        if positions >= longest:
            return f"{positions:,} positions are above {longest - 1:,}"
        if problem.mask is not None and depth(problem.mask) > DEEPEST:
            return f"a mask nested {depth(problem.mask)} deep is above {DEEPEST}"
        if problem.bias is not None and "bias" in problem.differentiable:
            return "it gives no gradient for a bias; `dense` does"
        return None

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp, and what is wanted in a second look at the scores."""
        return _launch().run(problem)

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk and dv, the weights recomputed by tile."""
        return _launch().gradients(problem, dout, output, peak, total, dlse)


def depth(mask: Mask) -> int:
    """How many answers of parts wait at once while a mask is evaluated, left before right."""
    if isinstance(mask, Both | Either):
        return max(depth(mask.left), depth(mask.right) + 1)
    return depth(mask.mask) if isinstance(mask, Not) else 1


def unable(device: Any) -> str | None:
    """Why there is nothing here that could run the kernels on a device; None where there is."""
    if not _installed():
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if device.type == "cpu" else "Triton's interpreter takes tensors on the CPU"
    if device.type != "cuda":
        import torch

        if not torch.cuda.is_available():
            return "PyTorch has no CUDA device here"
        return f"it takes tensors on a GPU, not on {device}"
    return None


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _launch() -> Any:
    from clearhead.kernels.triton import launch

    return launch


if TYPE_CHECKING:
    from clearhead.kernels.contract import Kernel

    _: Kernel = Triton()

triton = Triton()
