"""Does a function ever hold the whole matrix of queries × keys: its memory is watched while it runs."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.doctor.quiet import Late, quiet
from clearhead.doctor.subject import make
from clearhead.learning.exercise import drawn

# Positions; with JAX, whose loops are written out to be looked at, fewer
LENGTH, SHORTER = 1024, 128
FEATURES = 4


def whole_matrix(*options: int) -> Callable[[Any, str], tuple[str, str] | None]:
    """What an exercise asks beside its answers; `options` are handed over after q, k and v."""

    def also(function: Any, library: str) -> tuple[str, str] | None:
        length = SHORTER if library == "jax" else LENGTH
        arrays = [make(library, array, "float32") for array in drawn(3, *[(length, FEATURES)] * 3)]
        look = {"torch": _in_torch, "jax": _in_jax}.get(library, _in_numpy)
        with quiet(library):
            try:
                held = look(function, (*arrays, *options), length)
            except KeyboardInterrupt:
                raise
            except Late:
                return "took-too-long", f"{length:,} positions took too long"
            except BaseException as error:
                words = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                return "raises", f"with {length:,} positions it raised {words}"
        return ("matrix-built", held) if held else None

    return also


def _in_numpy(function: Any, arguments: tuple[Any, ...], length: int) -> str:
    """NumPy's allocations are traced by Python; one matrix in float32 is what may not be reached."""
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        function(*arguments)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not running:
            tracemalloc.stop()
    if peak < length * length * np.dtype(np.float32).itemsize:
        return ""
    return (
        f"with {length:,} positions it held {peak / 2**20:.0f} MiB at once, and one row of scores is {length * 4} bytes"
    )


def _in_torch(function: Any, arguments: tuple[Any, ...], length: int) -> str:
    """The largest tensor that any of PyTorch's functions gives, by the memory that it has."""
    from torch.overrides import TorchFunctionMode

    class Largest(TorchFunctionMode):
        """Sees every function that is called."""

        most = 0

        def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = called(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple | list) else (result,):
                if isinstance(one, sys.modules["torch"].Tensor):
                    # a view such as an expanded row counts with the memory that it has
                    self.most = max(self.most, one.untyped_storage().nbytes() // one.element_size())
            return result

    with Largest() as seen:
        function(*arguments)
    return f"with {length:,} positions a tensor had {seen.most:,} numbers" if seen.most >= length**2 else ""


def _in_jax(function: Any, arguments: tuple[Any, ...], length: int) -> str:
    """The largest array among the steps that JAX traces; a function that cannot be traced is not judged."""
    jax = sys.modules["jax"]
    arrays, options = arguments[:3], arguments[3:]
    try:
        traced = jax.make_jaxpr(lambda *given: function(*given, *options))(*arrays)
    except Exception:
        return ""
    most = max(_sizes(traced.jaxpr), default=0)
    return f"with {length:,} positions an array had {most:,} numbers" if most >= length**2 else ""


def _sizes(steps: Any) -> list[int]:
    found = [int(np.prod(out.aval.shape)) for step in steps.eqns for out in step.outvars]
    for step in steps.eqns:
        for value in step.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += _sizes(inner)
    return found
