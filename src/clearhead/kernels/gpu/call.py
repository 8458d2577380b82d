"""One call of the GPU kernels: tensors with one batch axis, what kernels are compiled for, and what may differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from clearhead.core.arrays import Array, dtype_name
from clearhead.core.dropout import mix
from clearhead.core.positions import Added, Alibi, Relative, distances
from clearhead.core.problem import Problem
from clearhead.kernels.gpu import device, tuning
from clearhead.kernels.gpu import masks as spans
from clearhead.kernels.gpu.bypass import descriptor_of
from clearhead.kernels.gpu.cache_key import Cache, LeastRecentlyUsed, cache_key_of
from clearhead.kernels.gpu.compiling import compiled_ahead
from clearhead.kernels.gpu.device import KernelForm, Lists, Scoring
from clearhead.kernels.gpu.launcher import Launcher, hooked
from clearhead.kernels.gpu.masks import four_axes, upload
from clearhead.kernels.gpu.replay import MOST, TRIES, Recorder, Replay, tensors_of
from clearhead.kernels.gpu.tuning import Blocks, power_of_2

NOTHING = nullcontext()
LOG2E = math.log2(math.e)
TAKEN = ("problem", "q", "k", "v", "sinks")  # of a call, what does not outlive it
SMALLEST = 2.0**-60  # scale that biases are divided by without leaving float32


# Sums are moved from one peak to the next by differences of rounded products. Fused into a multiply-add a product is
# not rounded, and of two equal peaks of 10⁴ the difference would not be 0.
EXACT = {"enable_fp_fusion": False}


class Forward(NamedTuple):
    """What a forward gives, (*batch, heads, queries, …) each; the next three where they are wanted, else None.

    `told` has a number that is not 0 where some row is not finite, or has no sum; None where nobody has looked.
    """

    output: torch.Tensor
    lse: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    largest: torch.Tensor | None
    entropy: torch.Tensor | None
    unrounded: torch.Tensor | None
    told: torch.Tensor | None = None

    @property
    def arrays(self) -> tuple[torch.Tensor | None, ...]:
        """All but what is told of them."""
        return self[:-1]


class Call:
    """A problem as the kernels take it."""

    def __init__(self, problem: Problem) -> None:
        self.grid = grid = problem.grid
        self.device = problem.q.device
        self.batch = math.prod(grid.batch)
        self.rows = self.batch * grid.heads
        self.launch = Launcher()
        self.kept: dict[Any, Any] = {}
        self.replays: dict[Any, Replay | int] = {}
        self.as_given = False
        self.grows = False  # in another size its like was played: so this one may be, layer by layer
        self.take(problem)
        self.mask = spans.prepare(problem.mask, grid, self.device, problem.lowered)
        raw = problem.softcap is None and not isinstance(problem.bias, Added) and problem.scale > SMALLEST
        kind, bias, strides, offset, centre = self.bias(problem.scale if raw else 1.0)
        head_dim, value_dim = self.q.shape[-1], self.v.shape[-1]
        self.form = KernelForm(
            head_dim=head_dim,
            padded_head_dim=max(16, power_of_2(head_dim)),
            value_dim=value_dim,
            padded_value_dim=max(16, power_of_2(value_dim)),
            group=problem.group,
            heads=grid.heads,
            raw=raw,
            softcap=problem.softcap is not None,
            bias=kind,
            bias_by_row=isinstance(offset, torch.Tensor),
            span_by_row=self.mask.span_by_row,
            program=self.mask.program,
            dropout=problem.dropout is not None,
            described=self.describable(),
        )
        rescale, threshold, seed = self.dropout()
        factor = problem.scale * LOG2E if raw else LOG2E
        self.scoring = Scoring(
            problem.scale, factor, problem.softcap or 1.0, bias, *strides, offset, centre, rescale, threshold, seed
        )

    @classmethod
    def of(cls, problem: Problem) -> Call:
        """A problem's call, made from the last one of its kind where there was one."""
        key = cache_key_of(problem)
        if key is None:
            return cls(problem)
        last = _calls.get(key)
        key.looks_again()
        if last is not None:
            if spans.capturing(problem.q.device):
                _captured.append(last)
            return cls.again(problem, last)
        family = key.family(problem)
        relative = None if family is None else _families.asked(family)
        if relative is None:
            call = cls(problem)
            last = {name: value for name, value in vars(call).items() if name not in TAKEN}
            if family is not None and call.as_given:
                _families.keep(family, last)
        else:
            last = resized(relative, problem)
            call = cls.again(problem, last)
            _families.keep(family, last)
        _calls.keep(key, last)
        if spans.capturing(problem.q.device):
            _captured.append(last)
        return call

    @classmethod
    def again(cls, problem: Problem, last: dict[str, Any]) -> Call:
        """A call made of what another one left."""
        call = object.__new__(cls)
        vars(call).update(last)
        call.take(problem)
        return call

    def take(self, problem: Problem) -> None:
        """The arrays of a problem."""
        self.problem = problem
        q, k, v = problem.q, problem.k, problem.v
        if q.requires_grad or k.requires_grad or v.requires_grad:
            q, k, v = q.detach(), k.detach(), v.detach()
        self.q, self.k, self.v = q, k, v
        if not self.as_given:
            self.q, self.k, self.v = (self.aligned(self.one_batch_axis(a)) for a in (q, k, v))
            self.as_given = self.q is q and self.k is k and self.v is v
        self.sinks = None
        if problem.sinks is not None:
            self.sinks = torch.as_tensor(problem.sinks).detach().to(self.device, torch.float32).contiguous()

    def current(self) -> AbstractContextManager[Any]:
        """The device is the one that kernels are launched on, which is not so everywhere."""
        if self.device.type != "cuda" or self.device.index == torch.cuda.current_device():
            return NOTHING
        return torch.cuda.device(self.device)

    def once(self, name: Any, find: Callable[[], Any]) -> Any:
        """What is the same for all calls of this kind, found by the first."""
        if name not in self.kept:
            self.kept[name] = find()
        return self.kept[name]

    def replayed(self, name: Any, inputs: Sequence[Array | None], compute: Callable[[], Any], sort: Any = None) -> Any:
        """What `compute` gives for these tensors; recorded by one call of a kind, and played for those after it.

        Under one name all of its launches and results must be the same, but for addresses. Calls of one `sort` and form
        launch the same kernels, which are compiled side by side.
        """
        known = self.replays.get(name, 0)
        if hooked() or (isinstance(known, int) and (known >= TRIES or spans.capturing(self.device))):
            return compute()
        if isinstance(known, Replay):
            return known.play(inputs)
        if not known and len(self.replays) >= MOST:
            self.replays.clear()
        # what comes once is not worth recording; but a mask of any kind took longer to prepare, and layers share it
        shared = self.form.program is not None and cache_key_of(self.problem) is not None
        if not known and not self.grows and not shared:
            self.replays[name] = 1
            compiled_ahead(self, sort, compute)
            return compute()
        compiled_ahead(self, sort, compute)
        launcher, recorder = self.launch, Recorder(self.launch, inputs)
        self.launch = recorder
        found = compute()
        self.launch = launcher
        lasting = tensors_of((self.mask, self.scoring, self.kept))
        self.replays[name] = recorder.replay(found, lasting) or known + 1
        return found

    def one_batch_axis(self, tensor: Array) -> torch.Tensor:
        """(*batch, heads, positions, features) with one batch axis; a copy only where strides do not allow it."""
        batch = self.grid.batch
        if len(batch) != 1 or tensor.shape[:-3] != batch:
            tensor = tensor.expand(*batch, *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:])
        return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

    def aligned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of half precision whose rows are fetched 16 bytes at a time; a copy, with zeros added, if need be.

        Number by number would be slow; and of products of tiles fetched so, Triton 3.6 gives wrong ones on Hopper.
        """
        if tensor.element_size() != 2 or not tensor.numel():
            return tensor
        steps = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        if all(number % 16 == 0 for number in (tensor.shape[-1], tensor.data_ptr(), *steps)):
            return tensor
        return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 16)).contiguous()

    def describable(self) -> bool:
        """True where the copy engine can fetch keys and values: Hopper or later, and rows that start at 16 bytes."""
        if machine(self.device)[0] < (9, 0) or self.q.element_size() != 2:
            return False
        whole = (self.form_width(self.k), self.form_width(self.v))
        return all(whole) and all(
            tensor.data_ptr() % 16 == 0
            and tensor.shape[-2] > 0
            and all(stride * 2 % 16 == 0 and stride > 0 for stride in tensor.stride()[:-1])
            for tensor in (self.k, self.v)
        )

    @staticmethod
    def form_width(tensor: torch.Tensor) -> bool:
        """True where the features of a tensor are a power of two that a tile has."""
        features = tensor.shape[-1]
        return 16 <= features <= 256 and features == power_of_2(features)

    def described(self, blocks: Blocks) -> tuple[Any, Any]:
        """Descriptors of keys and values, in tiles of these blocks; where there are none, anything."""
        if not self.form.described:
            return self.k, self.v
        keys, values = self.once(("described", blocks.columns), lambda: self.fields(blocks.columns))
        return descriptor_of(TensorDescriptor, self.k, **keys), descriptor_of(TensorDescriptor, self.v, **values)

    def fields(self, columns: int) -> list[dict[str, Any]]:
        """The descriptors of keys and values, but for their addresses."""
        return [
            {"shape": list(a.shape), "strides": list(a.stride()), "block_shape": [1, 1, columns, a.shape[-1]]}
            for a in (self.k, self.v)
        ]

    def bias(self, unit: float) -> tuple[int, Any, tuple[int, int, int, int], Any, int]:
        """The bias: its kind, its array (in `unit`s) and strides, the position of query 0, and where distance 0 is."""
        bias, grid = self.problem.bias, self.grid
        nothing = self.mask.span.rows
        if bias is None:
            return device.NONE.value, nothing, (0, 0, 0, 0), 0, 0
        if isinstance(bias, Added):
            array = four_axes(bias.array, grid, self.device)
            strides = [0 if n == 1 else s for n, s in zip(array.shape, array.stride(), strict=True)]
            return device.ADDED.value, array, (strides[0], strides[1], strides[2], strides[3]), 0, 0
        assert isinstance(bias, Alibi | Relative)
        where = spans.flat(bias.alignment.offset(grid), grid)
        if isinstance(bias, Alibi):
            offset = where if isinstance(where, int) else upload(where.astype(np.int32), self.device)
            slopes = upload((bias.slopes / unit).astype(np.float32), self.device)
            return device.ALIBI.value, slopes, (0, 0, 0, 0), offset, 0
        # entry query + place − key + centre, query and key from 0
        distance, centre, places = distances(np.atleast_1d(where), grid)
        place = int(places[0]) if isinstance(where, int) else upload(places.astype(np.int32), self.device)
        chosen = upload(bias.chosen(distance), self.device)
        table = torch.as_tensor(bias.table).detach().to(self.device, torch.float32) / unit
        return device.TABLE.value, table[chosen].T.contiguous(), (0, chosen.shape[0], 0, 0), place, centre

    def dropout(self) -> tuple[float, int, int]:
        """What kept weights are multiplied with, the threshold and the mixed seed, as signed 32-bit numbers."""
        dropout = self.problem.dropout
        if dropout is None:
            return 1.0, 0, 0
        low, high = np.array([[dropout.seed & 0xFFFFFFFF], [dropout.seed >> 32]], dtype=np.uint32)
        seed = mix(mix(low) ^ high)
        threshold = np.array([min(dropout.threshold, 0xFFFFFFFF)], dtype=np.uint32)
        return dropout.rescale, int(threshold.view(np.int32)[0]), int(seed.view(np.int32)[0])

    def lists(self, blocks: Blocks, *, turned: bool = False, coarse: bool = False) -> Lists:
        """The tiles that are not empty, where the mask is no span; `coarse`: and others beside them (`masks.tiles`)."""
        if self.form.program is None:
            nothing = self.mask.span.rows
            return Lists(nothing, nothing, 0, 0, 1, 1, 1)
        rows, columns = blocks.rows, blocks.columns
        return spans.tiles(self.mask, self.problem.lowered, self.grid, rows, columns, turned=turned, coarse=coarse)

    @property
    def backwards(self) -> bool:
        """True where later queries see more keys, so that blocks of them should start first."""
        return self.form.program is None and self.mask.span.high < self.grid.keys

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Room for a result, (batch · heads, …)."""
        return self.launch.room((self.rows, *shape), dtype, self.device)

    def results(self, observing: bool) -> Forward:
        """Room for what a forward gives."""
        rows = (*self.grid.batch, self.grid.heads, self.grid.queries)
        output = self.launch.room((*rows, self.form.value_dim), self.q.dtype, self.device)
        new = partial(self.launch.room, rows, torch.float32, self.device)
        lse, peak, total = new(), new(), new()
        largest, entropy = (new() if observing else None for _ in range(2))
        return Forward(output, lse, peak, total, largest, entropy, self.unrounded(output))

    def unrounded(self, output: torch.Tensor) -> torch.Tensor | None:
        """Room for an output in the precision of its sums, where gradients need it."""
        return self.launch.room(output.shape, torch.float32, self.device) if self.problem.keeps_unrounded else None

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch · heads, …) as (*batch, heads, …)."""
        return tensor.view(*self.grid.batch, self.grid.heads, *tensor.shape[1:])

    def blocks(self, kernel: str, size: int) -> Blocks:
        """The blocks of a kernel, with no more rows than `size` needs."""
        key = (dtype_name(self.q), self.form.padded_head_dim, self.form.padded_value_dim)
        return tuning.blocks(kernel, key, size, *machine(self.device))

    def fitting(self, kernel: str, size: int) -> Blocks:
        """The blocks of a kernel, or smaller ones that the device has room for."""
        wanted: Blocks = self.once((kernel, size), lambda: self.blocks(kernel, size))
        return _fitted.get((kernel, self.form, wanted, self.device), wanted) if _fitted else wanted

    def fitted(self, kernel: str, size: int, launch: Callable[[Blocks], None]) -> None:
        """Launch a kernel with its blocks, or with the largest smaller ones that the device has room for."""
        blocks: Blocks | None = self.fitting(kernel, size)
        while blocks is not None:
            try:
                launch(blocks)
            except OutOfResources:
                blocks = tuning.less(blocks)
                if blocks is None:
                    raise
                if len(_fitted) >= 256:
                    _fitted.clear()
                _fitted[kernel, self.form, self.kept[kernel, size], self.device] = blocks
            else:
                return


def resized(relative: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """What a call of the same family left, with what depends on how many positions there are found anew."""
    grid = problem.grid
    mask = spans.prepare(problem.mask, grid, relative["device"], problem.lowered)
    grows = any(isinstance(one, Replay) and one.played for one in relative["replays"].values())
    return {**relative, "grid": grid, "mask": mask, "launch": Launcher(), "kept": {}, "replays": {}, "grows": grows}


# blocks that a device had room for, where the first choice was too large
_fitted: dict[Any, Blocks] = {}

# what a call of each kind is made of, but for its arrays
_calls = Cache()

# the same where a CUDA graph was captured, which knows masks and lists by their addresses and may be replayed any time
_captured: list[dict[str, Any]] = []

# the same for each family, of calls that take tensors as they are given
_families = LeastRecentlyUsed()


@cache
def machine(on: torch.device) -> tuple[tuple[int, int], str]:
    """The capability and the name of a device; in the interpreter, those of none."""
    if on.type != "cuda":
        return (9, 0), "interpreter"
    return torch.cuda.get_device_capability(on), torch.cuda.get_device_name(on)


@cache
def processors(device: torch.device) -> int:
    """How many programs run side by side; a small number in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
