"""Training on a GPU, a call of a kind that was seen before: its launches are played, forward and backward.

Autograd keeps for each call what every other call with gradients keeps, and asks for gradients in the same way. What is
unusual about them, many at once or derivatives of them, goes the way of other calls.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from clearhead.core.admit import lies_plainly
from clearhead.core.arrays import Array, made
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Kernel
from clearhead.torch_bridge.autograd import changed, differentiated, emptied, filled, is_mapped


class Trained:
    """A kind of call with gradients: `learnt` is what was recorded of it (`kernels/gpu/run.py`)."""

    @classmethod
    def of(cls, problem: Problem, kernel: Kernel, learnt: Any) -> Trained | None:
        """The kind of a problem; None where autograd keeps more of it than q, k and v, to see who writes to it."""
        read: list[Array] = []
        emptied(problem, read)
        return cls(problem, kernel, learnt) if len(read) == 3 else None

    def __init__(self, problem: Problem, kernel: Kernel, learnt: Any) -> None:
        """`kernel` gives the gradients where they cannot be played; of the problem no tensor is kept."""
        self.kernel, self.learnt = kernel, learnt
        # arrays of a mask are copied: who writes to them makes calls of another kind
        self.problem = emptied(made(Problem, **{**vars(problem), "mask": copied(problem.mask)}), [])

    def __call__(self, q: Array, k: Array, v: Array) -> Array | None:
        """The output for other tensors, through which gradients flow; None where somebody hears of every launch."""
        return _function().apply(self, q, k, v) if self.learnt.able() else None

    def gradients(self, dout: Array, output: Array, peak: Array, total: Array, *read: Array) -> tuple[Any, ...]:
        """dq, dk and dv."""
        usual = not torch.is_grad_enabled() and not is_mapped(dout) and lies_plainly(dout)
        given = (*read, dout, output, peak, total)
        found: tuple[Any, ...] | None = self.learnt.gradients(*given) if usual else None
        if found is None:
            problem = filled(self.problem, read)
            found = differentiated(self.kernel, problem, dout, output, peak, total, None)[:3]
            if usual:
                self.learnt.learn(problem, *given)
        return found


def copied(value: Any) -> Any:
    """A mask with arrays of its own."""
    return value.copy() if isinstance(value, np.ndarray) else changed(value, copied)


@lru_cache(maxsize=1)
def _function() -> Any:
    class Played(torch.autograd.Function):
        """A recorded forward, and its backward."""

        @staticmethod
        def forward(ctx: Any, trained: Trained, q: Array, k: Array, v: Array) -> Array:
            output, unrounded, peak, total = trained.learnt.forward(q, k, v)
            ctx.trained = trained
            ctx.save_for_backward(output if unrounded is None else unrounded, peak, total, q, k, v)
            return output

        @staticmethod
        def backward(ctx: Any, dout: Array) -> tuple[Any, ...]:
            # also checks that inputs were not written to since
            output, peak, total, *read = ctx.saved_tensors
            return None, *ctx.trained.gradients(dout, output, peak, total, *read)

    return Played
