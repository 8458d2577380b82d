"""Running the chunked kernels of factorised weights on a GPU, and their gradients in PyTorch's autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.kernels.gpu.tuning import cdiv, power_of_2
from clearhead.kernels.triton import linear_kernel as kernels

WIDEST = 256
TYPES = (torch.float16, torch.bfloat16, torch.float32)
FEATURES = {None: kernels.PLAIN, "elu+1": kernels.ELU, "relu": kernels.RELU}
CHUNK = 64
# A program's share of the matrix that is carried: more would not fit into its registers
SHARE = 64
# Positions of a segment, at least, and programs for each processor, about
SHORTEST, PROGRAMS = 256, 4


def rejects(a: Tensor, b: Tensor, v: Tensor) -> str | None:
    """Why the kernels do not take features a, b (rows, T, F) and values v (rows, T, V)."""
    for name, tensor in (("features", a), ("features", b), ("values", v)):
        if tensor.dtype not in TYPES:
            return f"{name} are {tensor.dtype}"
        if not 1 <= tensor.shape[-1] <= WIDEST:
            return f"{tensor.shape[-1]} {name} are outside 1 to {WIDEST}"
    if not a.shape[-2] == b.shape[-2] == v.shape[-2] >= 1:
        return "there are not as many keys as queries"
    return None


def chunked(
    a: Tensor, b: Tensor, v: Tensor, *, feature: str | None = None, eps: float = 0.0, normalized: bool = True,
    dtype: torch.dtype | None = None, segment: int | None = None,
) -> Tensor:  # fmt: skip
    """Σ_{j ≤ i} (φ(a_i) · φ(b_j)) v_j by its denominator, for a (rows, T, F), b (rows / group, T, F), v alike.

    The output is of `dtype`, that of v unless given.
    """
    run: Any = Chunked.apply
    out: Tensor = run(a, b, v, feature, eps, normalized, dtype or v.dtype, segment)
    return out


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel, on the device of its first tensor."""
    if args[0].is_cuda:
        with torch.cuda.device(args[0].device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


class Chunked(torch.autograd.Function):
    """The sums as PyTorch differentiates them.

    What is kept is the inputs, the output, its denominators and the sums before each segment, which are few numbers.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, v: Tensor, feature: str | None, eps: float, normalized: bool,
        dtype: torch.dtype, segment: int | None,
    ) -> Tensor:  # fmt: skip
        """The output."""
        a, b, v = (plain(t) for t in (a, b, v))
        call = Sizes(a, b, v, feature, segment, dtype)
        before = call.shifted(*call.sums(b, v, None, None))
        out = a.new_empty((call.rows, call.length, call.values), dtype=dtype)
        den = a.new_empty((call.rows, call.length), dtype=torch.float32)
        launch(
            kernels.forward, (call.rows * call.segments, cdiv(call.values, call.values_share)),
            a, b, v, *before, out, den, a.stride(), b.stride(), v.stride(),
            call.length, call.segments, call.each, call.group, eps,
            NORMALIZED=normalized, FP=call.all_features, BV=call.values_share, **call.constants,
        )  # fmt: skip
        ctx.save_for_backward(a, b, v, out, den, *before)
        ctx.how = (feature, normalized, segment)
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """da, db and dv."""
        a, b, v, out, den, *before = ctx.saved_tensors
        feature, normalized, segment = ctx.how
        dout = plain(given[0])
        call = Sizes(a, b, v, feature, segment, out.dtype)
        if normalized:
            scale, weight = torch.empty_like(den), torch.empty_like(den)
            launch(
                kernels.scales, (call.rows, cdiv(call.length, CHUNK)), dout, out, den, scale, weight, dout.stride(),
                call.length, V=call.values, VP=call.all_values, C=CHUNK,
            )  # fmt: skip
        else:
            scale, weight = torch.ones_like(den), torch.zeros_like(den)
        after = call.shifted(*call.sums(a, dout, scale, weight), backwards=True)
        da = torch.empty_like(a, memory_format=torch.contiguous_format)
        # each query head has gradients of its own for the keys that it shares; they are added up in float32
        shared = torch.float32 if call.group > 1 else None
        db = a.new_empty((call.rows, *b.shape[1:]), dtype=shared or b.dtype)
        dv = a.new_empty((call.rows, *v.shape[1:]), dtype=shared or v.dtype)
        sizes = (call.length, call.segments, call.each, call.group)
        strides = (a.stride(), b.stride(), v.stride(), dout.stride())
        by_features = (call.rows * call.segments, cdiv(call.features, call.features_share))
        wide = {"BF": call.features_share, "VP": call.all_values, **call.constants}
        inputs = (a, b, v, dout, scale, weight)
        launch(kernels.gradients_of_queries, by_features, *inputs, *before, da, *strides, *sizes, **wide)
        launch(kernels.gradients_of_keys, by_features, *inputs, *after, db, *strides, *sizes, **wide)
        by_values = (call.rows * call.segments, cdiv(call.values, call.values_share))
        launch(
            kernels.gradients_of_values, by_values,
            a, b, dout, scale, *after, dv, a.stride(), b.stride(), dout.stride(), *sizes,
            FP=call.all_features, BV=call.values_share, **call.constants,
        )  # fmt: skip
        db, dv = (
            one if call.group == 1 else one.unflatten(0, (-1, call.group)).sum(1).to(like.dtype)
            for one, like in ((db, b), (dv, v))
        )
        return da, db, dv, None, None, None, None, None


class Sizes:
    """The sizes of a call, and how it is cut: into segments for programs, and into shares of the carried matrix."""

    def __init__(
        self, a: Tensor, b: Tensor, v: Tensor, feature: str | None, segment: int | None, dtype: torch.dtype
    ) -> None:
        self.rows, self.length, self.features = a.shape
        self.values = v.shape[-1]
        self.group = self.rows // b.shape[0]
        self.device = a.device
        # bfloat16 is multiplied as it is. What comes back in half precision goes as tf32, which holds float16 exactly:
        # sums over many keys, which are multiplied too, are beyond its range. float32 keeps all its digits.
        precision = "ieee" if dtype == torch.float32 else "tf32"
        if all(t.dtype == torch.bfloat16 for t in (a, b, v)):
            precision = "bf16"
        self.all_features, self.all_values = (max(16, power_of_2(n)) for n in (self.features, self.values))
        self.features_share, self.values_share = (min(SHARE, n) for n in (self.all_features, self.all_values))
        self.each = segment or self.fitted()
        self.segments = cdiv(self.length, self.each)
        wide = max(self.all_features, self.all_values) > 64  # which take more registers and more shared memory
        self.constants: dict[str, Any] = {
            "FEATURE": FEATURES[feature], "F": self.features, "V": self.values, "C": self.chunk,
            "PRECISION": precision, "num_warps": 8 if wide else 4, "num_stages": 1 if wide else 2,
        }  # fmt: skip

    @property
    def chunk(self) -> int:
        """Positions of a chunk: fewer where rows are wide, which lie in shared memory."""
        return CHUNK if max(self.all_features, self.all_values) <= 128 else CHUNK // 2

    def fitted(self) -> int:
        """Positions of a segment: short enough to keep every processor busy."""
        processors = 4
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        wanted = cdiv(self.length * self.rows, PROGRAMS * processors)
        return cdiv(max(SHORTEST, wanted), CHUNK) * CHUNK

    def sums(self, x: Tensor, y: Tensor, scale: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of each segment Σ φ(x) (s y)ᵀ, (rows, segments, F, V), and Σ w φ(x), (rows, segments, F)."""
        rows = x.shape[0]
        sums = x.new_empty((rows, self.segments, self.features, self.values), dtype=torch.float32)
        totals = x.new_empty((rows, self.segments, self.features), dtype=torch.float32)
        grid = (
            rows * self.segments,
            cdiv(self.features, self.features_share),
            cdiv(self.values, self.values_share),
        )
        launch(
            kernels.segment_sums, grid,
            x, y, scale, weight, sums, totals, x.stride(), y.stride(), self.length, self.segments, self.each,
            WEIGHTED=scale is not None, BF=self.features_share, BV=self.values_share, **self.constants,
        )  # fmt: skip
        return sums, totals

    def shifted(self, *sums: Tensor, backwards: bool = False) -> tuple[Tensor, ...]:
        """The sum of all segments before each, or after each."""
        found = []
        for one in sums:
            turned = one.flip(1) if backwards else one
            before = torch.cat([torch.zeros_like(turned[:, :1]), turned[:, :-1]], 1).cumsum(1)
            found.append((before.flip(1) if backwards else before).contiguous())
        return tuple(found)


def plain(tensor: Tensor) -> Tensor:
    """A tensor (rows, T, n) whose rows of numbers lie without gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
