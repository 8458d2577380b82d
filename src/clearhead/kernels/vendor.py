"""PyTorch's own fused attention on the GPU: cuDNN, FlashAttention or the memory-efficient one, whichever is fastest.

Which that is depends on the sizes and the machine, so it was measured, or is. The mathematical back end, which builds
the matrix, is never used. Of JAX's arrays cuDNN takes what it can (`kernels/cudnn.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from clearhead.core.arrays import Array, dtype_name, made, summed_like, to_numpy
from clearhead.core.formula import Gradients
from clearhead.core.mask import Mask
from clearhead.core.masks import Band
from clearhead.core.observations import Observed
from clearhead.core.problem import Problem, default_scale
from clearhead.kernels import cudnn
from clearhead.kernels.back_ends import BACKWARD, FORWARD, one_a_query
from clearhead.kernels.contract import Passes, Ran

TYPES = ("float16", "bfloat16")
# in the order that they are taken without measuring; by name, as PyTorch's checks are
BACK_ENDS = ("cudnn", "flash", "efficient")
KINDS = 256  # that are remembered


class Way(NamedTuple):
    """How problems of one kind are given to PyTorch: why not, or as causal or not to one of some back ends."""

    reason: str | None
    causal: bool
    able: tuple[str, ...]
    kind: Any = None


class Vendor:
    """Plain and causal problems in half precision, given to PyTorch."""

    name = "vendor"

    def __init__(self) -> None:
        # of the last kinds of problems: asking PyTorch takes longer than a short attention
        self.known: dict[Any, Way] = {}
        # the back end of each kind, for its output alone and with gradients, once it was found the fastest of all
        self.settled: dict[tuple[Any, Passes], str] = {}
        # the same where it was asked for by name, and is the fastest of its own
        self.picked: dict[tuple[Any, Passes], str] = {}

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        if problem.library.name == "jax":
            return cudnn.rejects(problem)
        if problem.library.name != "torch":
            return f"it takes PyTorch tensors on a GPU, not {problem.library.name} arrays"
        device = problem.q.device
        if device.type != "cuda":
            if not sys.modules["torch"].cuda.is_available():
                return "PyTorch has no CUDA device here"
            return f"it takes tensors on a GPU, not on {device}"
        if dtype_name(problem.q) not in TYPES:
            return f"it takes {' and '.join(TYPES)}, not {dtype_name(problem.q)}"
        return options(problem) or self.way(problem).reason

    def how(self, problem: Problem) -> str | None:
        """How cuDNN is reached from JAX."""
        return cudnn.how(problem) if problem.library.name == "jax" else None

    def at_once(self, q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Array | None:
        """The output for tensors on a GPU of a kind for which one of these back ends was found the fastest.

        PyTorch's attention of short sequences takes no longer than it takes to pose the problem. With gradients,
        autograd is PyTorch's own. None for whatever is unusual.
        """
        if not (mask is None or (type(mask) is Band and mask.back is None)):  # windows are not for them
            return None
        if not (scale is None or type(scale) is float):
            return None
        torch = sys.modules["torch"]
        learns = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
        key = kind(q, k, v, mask)
        name, way = self.settled.get((key, "training" if learns else "forward")), self.known.get(key)
        if name is None or way is None or not q.ndim == k.ndim == v.ndim == 4:
            return None
        scale = default_scale(q) if scale is None else scale
        if not 0 < scale < math.inf or not q.shape[0] == k.shape[0] == v.shape[0]:
            return None
        output: Array = FORWARD[name](q, k, v, way.causal, scale)[0]
        return output

    def ways(self, problem: Problem, passes: Passes) -> tuple[str, ...]:
        """The back ends that take a problem."""
        return self.way(problem).able

    def settle(self, problem: Problem, passes: Passes, name: str) -> None:
        """Take this back end for all problems of the same kind, without asking again."""
        self.settled[self.way(problem).kind, passes] = name

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp."""
        if problem.library.name == "jax":
            return cudnn.run(problem)
        q, k, v = arrays(problem)
        way = self.way(problem)
        output, lse = FORWARD[self.pick(problem)](q, k, v, way.causal, problem.scale)
        lse = one_a_query(lse, q)
        if len(problem.grid.batch) != 1:
            lead = (*problem.grid.batch, problem.grid.heads, problem.grid.queries)
            output, lse = output.reshape(*lead, problem.width), lse.reshape(lead)
        # what is made while a graph is captured lives no longer than the graph
        capturing = sys.modules["torch"].cuda.is_current_stream_capturing()
        total = sys.modules["torch"].ones_like(lse) if capturing else one(lse.device).expand(lse.shape)
        observed = made(Observed, output=output, lse=lse, max_score=None, entropy=None, kernel=self.name)
        return Ran(observed, lse, total)

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk and dv; log-sum-exp means the same to every back end, so another one than ran may give them.

        PyTorch's kernels have no gradient of the log-sum-exp, and are not asked for one: they observe nothing.
        """
        if problem.library.name == "jax":
            return cudnn.gradients(problem, dout)
        q, k, v = arrays(problem)
        way = self.way(problem)
        dout, output = (aligned(one_batch_axis(problem, a).to(q.dtype).contiguous()) for a in (dout, output))
        lse = peak if not any(total.stride()) else peak + total.log()  # all ones, as `run` gives them, or not
        lse = one_batch_axis(problem, lse[..., None])[..., 0].contiguous()
        found = BACKWARD[self.pick(problem)](dout, q, k, v, output, lse, way.causal, problem.scale)
        dq, dk, dv = (
            summed_like(gradient.reshape(*problem.grid.batch, *like.shape[-3:]), like)
            for gradient, like in zip(found, (problem.q, problem.k, problem.v), strict=True)
        )
        return Gradients(dq, dk, dv)

    def calls(self, problem: Problem, passes: Passes) -> dict[str, Callable[[], Any]]:
        """Each back end as it would be called for a problem, for its time."""
        q, k, v = arrays(problem)
        causal, scale = self.way(problem).causal, problem.scale

        def both(name: str) -> None:
            output, lse = FORWARD[name](q, k, v, causal, scale)
            BACKWARD[name](output, q, k, v, output, one_a_query(lse, q).contiguous(), causal, scale)

        if passes == "training":
            return {name: partial(both, name) for name in self.way(problem).able}
        return {name: partial(FORWARD[name], q, k, v, causal, scale) for name in self.way(problem).able}

    def way(self, problem: Problem) -> Way:
        """How this problem is given to PyTorch."""
        way = problem.found.get(self.name)
        if way is None:
            way = problem.found[self.name] = self.way_of_kind(problem)
        return way

    def way_of_kind(self, problem: Problem) -> Way:
        """The same, for which PyTorch is asked once for each kind."""
        if not (problem.mask is None or isinstance(problem.mask, Band)):
            return Way(causality(problem)[1], False, ())
        key = kind(problem.q, problem.k, problem.v, problem.mask)
        way = self.known.get(key)
        if way is None:
            causal, reason = (False, "there is nothing to attend to") if 0 in problem.grid.shape else causality(problem)
            able = () if reason else able_to(problem, causal)
            if not reason and not able:
                reason = "none of cuDNN, FlashAttention and the memory-efficient back end takes these sizes"
            if len(self.known) >= KINDS:
                self.known.clear()
                self.settled.clear()
                self.picked.clear()
            way = self.known[key] = Way(reason, causal, able, key)
        return way

    def pick(self, problem: Problem) -> str:
        """Of the back ends that are able the fastest for sizes like these."""
        passes: Passes = "training" if problem.differentiated else "forward"
        key = (self.way(problem).kind, passes)
        name = self.settled.get(key) or self.picked.get(key)
        if name is None:
            from clearhead.kernels.fastest import fastest  # reads files: for who has a GPU

            choice = fastest(problem, passes, (self,))
            name = choice.way
            if choice.sure:
                self.picked[key] = name
        return name


def kind(q: Array, k: Array, v: Array, mask: Mask | None) -> Any:
    """What PyTorch's answer depends on: sizes, strides, the mask, and which back ends are switched on."""
    torch = sys.modules["torch"]
    cuda = torch.backends.cuda
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0, mask_kind(mask) if isinstance(mask, Band) else None,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
    )  # fmt: skip


def mask_kind(mask: Band) -> Any:
    """A mask by what it says."""
    given = mask.alignment.given
    where = None if given is None else (given.shape, to_numpy(given).tobytes())
    return (mask.back, mask.ahead, mask.alignment.align, where)


@cache
def one(device: Any) -> Array:
    """The number 1 on a device; also for training, where the first call is in inference mode."""
    torch = sys.modules["torch"]
    with torch.inference_mode(False):
        return torch.tensor(1.0, device=device)  # copied before it returns: the next call may be on another stream


def options(problem: Problem) -> str | None:
    """Which option PyTorch's attention has not."""
    if problem.want is not None:
        return "it gives neither entropy nor weights; `triton` does"
    for name in ("bias", "softcap", "sinks", "dropout"):
        if getattr(problem, name) is not None:
            return f"it is for problems without {name}"
    # what a mask hides is −inf before it is multiplied by the scale; and the largest product is not the largest score
    return None if problem.scale > 0 else f"scale {problem.scale} is not above 0"


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
    if tensor.requires_grad:
        tensor = tensor.detach()
    if len(batch) == 1 and tensor.shape[:-3] == batch:
        return tensor
    return tensor.expand(*batch, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def aligned(tensor: Array) -> Array:
    """The same where memory can be read 16 bytes at a time."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def arrays(problem: Problem) -> tuple[Array, Array, Array]:
    """q, k and v with one batch axis."""
    return one_batch_axis(problem, problem.q), one_batch_axis(problem, problem.k), one_batch_axis(problem, problem.v)


def able_to(problem: Problem, causal: bool) -> tuple[str, ...]:
    """The back ends that take these arrays, by PyTorch's own word."""
    cuda = sys.modules["torch"].backends.cuda
    params = cuda.SDPAParams(*arrays(problem), None, 0.0, causal, problem.group > 1)
    return tuple(name for name in BACK_ENDS if getattr(cuda, f"can_use_{name}_attention")(params, False))


vendor = Vendor()
