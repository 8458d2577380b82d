"""PyTorch's own fused attention on the GPU: cuDNN, FlashAttention or the memory-efficient one, whichever is fastest.

Which that is depends on the sizes and the machine, so it is measured, once for each class of sizes. The mathematical
back end, which builds the matrix, is never used.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from clearhead.arrays import Array, dtype_name
from clearhead.errors import KernelRefused
from clearhead.formula import Gradients
from clearhead.kernels.contract import Ran
from clearhead.mask import Mask
from clearhead.masks import Band
from clearhead.observe import Observed
from clearhead.problem import Problem

TYPES = ("float16", "bfloat16")
# in the order that they are taken without measuring; by name, as PyTorch's checks are
BACK_ENDS = ("cudnn", "flash", "efficient")
RUNS = 5


class Vendor:
    """Plain and causal problems in half precision, given to PyTorch."""

    name = "vendor"

    def __init__(self) -> None:
        self.fastest: dict[tuple[Any, ...], str] = {}

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        if problem.library.name != "torch":
            return f"it takes PyTorch tensors on a GPU, not {problem.library.name} arrays"
        device = problem.q.device
        if device.type != "cuda":
            if not sys.modules["torch"].cuda.is_available():
                return "PyTorch has no CUDA device here"
            return f"it takes tensors on a GPU, not on {device}"
        if dtype_name(problem.q) not in TYPES:
            return f"it takes {' and '.join(TYPES)}, not {dtype_name(problem.q)}"
        reason = options(problem) or causality(problem)[1]
        if reason is not None:
            return reason
        if not able(problem, *arrays(problem)):
            return "none of cuDNN, FlashAttention and the memory-efficient back end takes these sizes"
        return None

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp."""
        torch = sys.modules["torch"]
        q, k, v = arrays(problem)
        causal, _ = causality(problem)
        output, lse = FORWARD[self.back_end(problem, q, k, v)](q, k, v, causal, problem.scale)
        lead = (*problem.grid.batch, problem.grid.heads, problem.grid.queries)
        lse = lse[..., : problem.grid.queries].reshape(lead)
        observed = Observed(output.reshape(*lead, problem.width), lse, None, None, self.name)
        return Ran(observed, lse, torch.ones_like(lse))

    def gradients(self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array) -> Gradients:
        """dq, dk and dv; log-sum-exp means the same to every back end, so another one than ran may give them."""
        q, k, v = arrays(problem)
        causal, _ = causality(problem)
        dout, output = (one_batch_axis(problem, a).contiguous() for a in (dout, output))
        lse = one_batch_axis(problem, peak[..., None])[..., 0].contiguous()
        name = self.back_end(problem, q, k, v)
        if name == "efficient":  # for small problems, where its forward is quick; others are as good at gradients
            name = able(problem, q, k, v)[0]
        found = BACKWARD[name](dout, q, k, v, output, lse, causal, problem.scale)
        shaped = []
        for gradient, like in zip(found, (problem.q, problem.k, problem.v), strict=True):
            gradient = gradient.reshape(*problem.grid.batch, *like.shape[-3:])
            for axis, (have, want) in enumerate(zip(gradient.shape, like.shape, strict=True)):
                if have != want:
                    gradient = gradient.sum(axis, keepdim=True)
            shaped.append(gradient)
        return Gradients(shaped[0], shaped[1], shaped[2])

    def back_end(self, problem: Problem, q: Array, k: Array, v: Array) -> str:
        """The fastest back end for sizes like these, measured at the first call that has them."""
        torch = sys.modules["torch"]
        candidates = able(problem, q, k, v)
        if not candidates:
            raise KernelRefused(self.name, "no back end takes these sizes")
        causal, _ = causality(problem)
        sizes = (q.shape[0] * q.shape[1], q.shape[-2], k.shape[-2])
        classes = tuple(max(size - 1, 0).bit_length() for size in sizes)
        key = (q.device, q.dtype, q.shape[-1], v.shape[-1], problem.group, causal, candidates, classes)
        if key not in self.fastest:
            if len(candidates) == 1 or torch.cuda.is_current_stream_capturing():
                return candidates[0]
            times = {name: seconds(partial(FORWARD[name], q, k, v, causal, problem.scale)) for name in candidates}
            self.fastest[key] = min(times, key=lambda name: times[name])
        return self.fastest[key]


def options(problem: Problem) -> str | None:
    """Which option PyTorch's attention has not."""
    if problem.want is not None:
        return "it gives neither entropy nor weights; `triton` does"
    for name in ("bias", "softcap", "sinks", "dropout"):
        if getattr(problem, name) is not None:
            return f"it is for problems without {name}"
    if 0 in problem.grid.shape:
        return "there is nothing to attend to"
    return None


def causality(problem: Problem) -> tuple[bool, str | None]:
    """(is it causal as PyTorch means it, or why its mask is none of PyTorch's)."""
    mask, grid = problem.mask, problem.grid
    if mask is None:
        return False, None
    if not (isinstance(mask, Band) and mask.back is None and mask.ahead == 0):
        return False, f"it takes no mask but causal(), not {brief(mask)}"
    offset = mask.alignment.offset(grid)
    if offset.ndim and offset.size != 1:
        return False, "its causal masks start at one key for all batch rows"
    start = int(offset.reshape(-1)[0])
    if start >= grid.keys - 1:  # the first query sees all keys, and so do the others
        return False, None
    if start == 0 and grid.queries == grid.keys:
        return True, None
    return False, "its causal masks are for as many queries as keys, the first query at the first key"


def brief(mask: Mask) -> str:
    """A mask in few words."""
    words = repr(mask)
    return words if len(words) <= 40 else "a compound mask"


def one_batch_axis(problem: Problem, tensor: Array) -> Array:
    """(*batch, heads, …) with one batch axis."""
    batch = problem.grid.batch
    tensor = tensor.detach()
    if len(batch) == 1 and tensor.shape[:-3] == batch:
        return tensor
    return tensor.expand(*batch, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def arrays(problem: Problem) -> tuple[Array, Array, Array]:
    """q, k and v with one batch axis."""
    q, k, v = (one_batch_axis(problem, a) for a in (problem.q, problem.k, problem.v))
    return q, k, v


def able(problem: Problem, q: Array, k: Array, v: Array) -> tuple[str, ...]:
    """The back ends that take these arrays, by PyTorch's own word."""
    cuda = sys.modules["torch"].backends.cuda
    causal, _ = causality(problem)
    params = cuda.SDPAParams(q, k, v, None, 0.0, causal, problem.group > 1)
    return tuple(name for name in BACK_ENDS if getattr(cuda, f"can_use_{name}_attention")(params, False))


def seconds(call: Callable[[], Any]) -> float:
    """The median time of a call on the device."""
    torch = sys.modules["torch"]
    call()
    times = []
    for _ in range(RUNS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[RUNS // 2]


def aten(name: str) -> Any:
    """An operation of PyTorch's."""
    return getattr(sys.modules["torch"].ops.aten, f"_scaled_dot_product_{name}")


def cudnn(q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
    """(output, log-sum-exp)."""
    output, lse, *_ = aten("cudnn_attention")(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return output, lse.reshape(q.shape[:-1])


def flash(q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
    """(output, log-sum-exp)."""
    output, lse, *_ = aten("flash_attention")(q, k, v, 0.0, causal, False, scale=scale)
    return output, lse


def efficient(q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
    """(output, log-sum-exp)."""
    output, lse, *_ = aten("efficient_attention")(q, k, v, None, True, 0.0, causal, scale=scale)
    return output, lse[..., : q.shape[-2]]


def cudnn_backward(
    dout: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    """(dq, dk, dv)."""
    seed = sys.modules["torch"].zeros((), dtype=sys.modules["torch"].int64, device=q.device)
    sizes = (None, None, q.shape[-2], k.shape[-2])
    found = aten("cudnn_attention_backward")(
        dout, q, k, v, output, lse[..., None], seed, seed, None, *sizes, 0.0, causal, scale=scale
    )
    return tuple(found)


def flash_backward(
    dout: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    """(dq, dk, dv)."""
    seed = sys.modules["torch"].zeros((), dtype=sys.modules["torch"].int64, device=q.device)
    sizes = (None, None, q.shape[-2], k.shape[-2])
    found = aten("flash_attention_backward")(dout, q, k, v, output, lse, *sizes, 0.0, causal, seed, seed, scale=scale)
    return tuple(found)


def efficient_backward(
    dout: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    """(dq, dk, dv). Its log-sum-exp is padded to whole blocks of 32.

    It reads output as (batch, positions, heads, features) in memory, whatever its strides say.
    """
    torch = sys.modules["torch"]
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    dq, dk, dv, _ = aten("efficient_attention_backward")(
        dout, q, k, v, None, output, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


FORWARD: dict[str, Callable[..., tuple[Array, Array]]] = {"cudnn": cudnn, "flash": flash, "efficient": efficient}
BACKWARD: dict[str, Callable[..., tuple[Array, ...]]] = {
    "cudnn": cudnn_backward,
    "flash": flash_backward,
    "efficient": efficient_backward,
}

vendor = Vendor()
