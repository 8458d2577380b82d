"""XLA's foreign function interface, by which programs call `native/`; and a way round it where it is not to be had."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from clearhead.core.arrays import Array
from clearhead.core.errors import first_line
from clearhead.kernels.extension import TYPES, at, native
from clearhead.kernels.threads import allow, threads
from clearhead.kernels.xla.spec import Spec

NAME = "clearhead_attention"


@cache
def missing() -> str | None:
    """Why XLA does not take our function; None where it does."""
    oldest, newest = native.xla_minors()
    reason = None
    for minor in range(newest, oldest - 1, -1):  # an XLA takes those of its own time, and some before it
        try:
            jax.ffi.register_ffi_target(NAME, native.xla_handler(minor), platform="cpu")
        except Exception as error:  # whatever it is, there is another way
            reason = reason or f"{type(error).__name__}: {first_line(error)}"
        else:
            return None
    return reason


def lowered(ctx: Any, operands: Any, spec: Spec, *, back: bool, with_lse: bool) -> Any:
    """The call in a program for a CPU: our function as XLA's own, or through Python where XLA does not take it."""
    allow()
    numbers = np.array(spec.numbers(back=back, with_lse=with_lse), dtype=np.int64)
    scale, softcap = 1.0 if spec.scale is None else spec.scale, spec.softcap or 0.0
    if missing() is None:
        call = jax.ffi.ffi_lowering(NAME)
        return call(ctx, *operands, numbers=numbers, scale=np.float64(scale), softcap=np.float64(softcap))
    shaped: Any = jax.ShapeDtypeStruct
    results = [shaped(aval.shape, aval.dtype) for aval in ctx.avals_out]
    run = partial(in_python, numbers, scale, softcap, results)
    plain = mlir.lower_fun(lambda *given: jax.pure_callback(run, results, *given), multiple_results=True)
    return plain(ctx, *operands)


def in_python(numbers: np.ndarray, scale: float, softcap: float, results: Any, *given: Array) -> list[np.ndarray]:
    """The same call from Python: arrays are read as they lie, and what comes of it is copied once, by XLA."""
    arrays = [np.asarray(array, order="C") for array in given]
    made = [np.empty(one.shape, one.dtype) for one in results]

    def place(array: np.ndarray) -> tuple[int, int, tuple[int, ...]]:
        return at(array), TYPES[array.dtype.name], array.shape

    native.run_described(
        numbers, scale, softcap, list(map(place, arrays)), list(map(place, made)), threads("jax"), False
    )
    return made
