"""The kernels of a call compiled side by side, before the first of its sort is run.

A call launches several kernels one after the other, and Triton compiles each when it is first launched. So the first
call of a sort is made twice: once with launches that only compile, in threads, and then in earnest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

from clearhead.core.observations import Want
from clearhead.kernels.gpu.launcher import Launcher
from clearhead.kernels.gpu.masks import FAR, capturing

MOST = 4096  # sorts of calls that are remembered

# how Triton compiles in threads; None in versions that do not, where kernels are compiled one after the other
TOGETHER = getattr(triton, "AsyncCompileMode", None)

_met: set[Any] = set()


class Ahead(Launcher):
    """Kernels are compiled and not launched."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Any] = []

    def __call__(self, name: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Compile a kernel for these arguments."""
        self.kernels.append(kernel.warmup(*args, grid=grid, **options))


def compiled_ahead(call: Any, name: Any, compute: Callable[[], Any]) -> None:
    """Compile what `compute` launches for a call, unless a call of its sort was met before."""
    sort = (name, *sort_of(call))
    if sort in _met or TOGETHER is None or call.device.type != "cuda" or capturing(call.device):
        return
    if len(_met) >= MOST:
        _met.clear()
    _met.add(sort)
    compile_together(call, compute)


def compile_together(call: Any, compute: Callable[[], Any]) -> None:
    """Compile what `compute` launches for a call, each kernel in a thread. What fails will fail again, when it runs."""
    assert TOGETHER is not None
    launch, call.launch = call.launch, Ahead()
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads, TOGETHER(threads, ignore_errors=True):
            compute()
    except Exception:  # a call in earnest follows, and says what is wrong
        pass
    finally:
        call.launch = launch


def sort_of(call: Any) -> tuple[Any, ...]:
    """What the kernels of a call are compiled for, roughly: by far fewer sorts than there are kinds of calls."""
    span, grid = call.mask.span, call.grid
    sizes = [size.bit_length() for size in (grid.queries, grid.keys, call.rows)]
    return call.form, call.q.dtype, call.device, span.low > -FAR, span.high < FAR, span.limit < grid.keys, *sizes


def wanted(want: Want | None) -> Any:
    """What is asked for, but for sizes."""
    return None if want is None else (want.top, *want.names)
