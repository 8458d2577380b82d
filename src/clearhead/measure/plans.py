"""What a call would do before it does it: the kernel, why not another, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Never

from clearhead.core.arrays import AnyArray, Array, dtype_name
from clearhead.core.foreign import ATTENTION, closed, refuse_others
from clearhead.core.grid import Grid
from clearhead.core.mask import Mask
from clearhead.core.positions import Bias
from clearhead.core.problem import Problem, pose
from clearhead.core.runs import runs
from clearhead.core.temperature import tempered
from clearhead.explain.render.sheet import rows, sheet
from clearhead.kernels.apart import Apart
from clearhead.kernels.choose import choose_gradients, compare, passes_of
from clearhead.kernels.contract import Kernel, how

# Tiles of this size are where a mask is looked at for what it lets a kernel skip.
TILE = 256


@dataclass(frozen=True)
class Plan:
    """The chosen kernel, why each other one was not, and what the call costs.

    `pairs` counts the query–key pairs in tiles that are not empty, over all batch rows and heads; `flops` follow from
    it. `bytes_moved` is what must be read and written once; `matrix_bytes` what the full T×S matrix would take.
    `gradients` is the kernel that gives them where PyTorch will ask for them, else None. `how` is the way that the
    kernel is reached, where there is more than one.

    >>> import numpy as np, clearhead as ch
    >>> x = np.zeros((8, 512, 64), dtype=np.float32)
    >>> found = ch.plan(x, x, x, mask=ch.causal(), kernel="tiled")
    >>> found.kernel, found.others["dense"]
    ('tiled', "'tiled' was asked for")
    """

    kernel: str
    others: dict[str, str]
    problem: str
    pairs: int
    all_pairs: int
    flops: int
    bytes_moved: int
    matrix_bytes: int
    gradients: str | None = None
    how: str | None = None

    def _told(self) -> list[tuple[str, str]]:
        share = self.pairs / self.all_pairs if self.all_pairs else 1.0
        built = "" if self.kernel == "dense" else ", never built"
        return [
            ("kernel", self.kernel),
            *([] if self.how is None else [("how", self.how)]),
            *([] if self.gradients is None else [("gradients", self.gradients)]),
            *((f"not {name}", reason) for name, reason in self.others.items()),
            ("pairs", f"{self.pairs:,} of {self.all_pairs:,} ({share:.1%})"),
            ("FLOPs", quantity(self.flops, 1000, "FLOP")),
            ("bytes moved", quantity(self.bytes_moved, 1024, "B")),
            ("full matrix", quantity(self.matrix_bytes, 1024, "B") + built),
        ]

    def __str__(self) -> str:
        return "\n".join([self.problem, *(f"  {name:<13} {words}" for name, words in self._told())])

    def _repr_html_(self) -> str:
        return sheet("plan", [self.problem], rows(self._told()))


@closed
def plan(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mask: Mask | AnyArray | None = None,
    bias: Bias | AnyArray | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout: tuple[float, int] | None = None,
    kernel: str | None = None,
    **others: Never,
) -> Plan:
    """Which kernel `attention` would run with these arguments, why each other would not, and what it costs.

    >>> import numpy as np, clearhead as ch
    >>> q = k = v = np.zeros((8, 4096, 64), dtype=np.float32)
    >>> print(ch.plan(q, k, v, mask=ch.window(255), kernel="tiled"))
    numpy float32 · heads 8 · 4,096 queries × 4,096 keys · 64 features · window(255)
      kernel        tiled
      not compiled  'tiled' was asked for
      not vendor    'tiled' was asked for
      not hopper    'tiled' was asked for
      not triton    'tiled' was asked for
      not dense     'tiled' was asked for
      pairs         16,252,928 of 134,217,728 (12.1%)
      FLOPs         4.161 GFLOP
      bytes moved   32 MiB
      full matrix   512 MiB, never built
    """
    if others:
        refuse_others("plan", others, ATTENTION)
    if temperature is not None:
        scale = tempered(temperature, scale, q)
    problem = pose(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    chosen, passed_over = compare(problem, kernel)
    grid = problem.grid
    copies = grid.heads
    for size in grid.batch:
        copies *= size
    pairs = counted(chosen, problem)
    features, width = problem.q.shape[-1], problem.width
    item = 2 if dtype_name(problem.q) in ("float16", "bfloat16") else 4 if dtype_name(problem.q) == "float32" else 8
    elements = sum(_elements(a) for a in (problem.q, problem.k, problem.v)) + copies * grid.queries * width
    return Plan(
        kernel=chosen.name,
        others=passed_over,
        problem=_described(problem),
        pairs=pairs,
        all_pairs=copies * grid.queries * grid.keys,
        flops=2 * pairs * (features + width),  # a multiply and an add in q·kᵀ, and again in weights·v
        bytes_moved=elements * item,
        matrix_bytes=copies * grid.queries * grid.keys * max(item, 4),
        gradients=choose_gradients(problem, chosen, kernel).name if passes_of(problem) == "training" else None,
        how=how(chosen, problem),
    )


def counted(kernel: Kernel, problem: Problem) -> int:
    """Query–key pairs in tiles that are not empty, of a problem or of the parts that a kernel is given."""
    problems = [part.problem for part in kernel.parts(problem)] if isinstance(kernel, Apart) else [problem]
    return sum(math.prod(one.grid.shape) if one.mask is None else live_pairs(one.mask, one.grid) for one in problems)


def live_pairs(mask: Mask, grid: Grid) -> int:
    """Query–key pairs in tiles that are not empty, over all batch rows and heads: what is left costs what is left."""
    found = runs(mask, grid, TILE, TILE)
    if not found.batch * found.heads:
        return 0
    return found.pairs * (math.prod(grid.batch) * grid.heads // (found.batch * found.heads))


def _elements(array: Array) -> int:
    count = 1
    for size in array.shape:
        count *= size
    return count


def _described(problem: Problem) -> str:
    grid = problem.grid
    words = [f"{problem.library.name} {dtype_name(problem.q)}"]
    if grid.batch:
        words.append(f"batch {' × '.join(map(str, grid.batch))}")
    shared = f" over {problem.key_heads}" if problem.group > 1 else ""
    words += [f"heads {grid.heads}{shared}", f"{grid.queries:,} queries × {grid.keys:,} keys"]
    words.append(
        f"{problem.q.shape[-1]} features" + (f", {problem.width} out" if problem.width != problem.q.shape[-1] else "")
    )
    words += [str(part) for part in (problem.mask, problem.bias) if part is not None]
    if problem.softcap is not None:
        words.append(f"softcap {problem.softcap:g}")
    if problem.sinks is not None:
        words.append("sinks")
    if problem.dropout is not None:
        words.append(f"dropout {problem.dropout.probability:g}")
    return " · ".join(words)


def quantity(value: float, base: int, unit: str) -> str:
    """A number of bytes or operations with the prefix that makes it short.

    >>> quantity(5_000_000, 1000, "FLOP"), quantity(3 * 2**20, 1024, "B")
    ('5 MFLOP', '3 MiB')
    """
    size = float(value)
    binary = "i" if base == 1024 else ""
    for prefix in ("", *(p + binary for p in ("k" if base == 1000 else "K", "M", "G", "T", "P"))):
        if size < base:
            return f"{size:.4g} {prefix}{unit}"
        size /= base
    return f"{size:.4g} E{binary}{unit}"
