"""The array libraries that kernels are held to: how numbers get in, and which precisions there are."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

# these tests compile thousands of tiny programs and run each once: compile quickly, not well
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # which takes half as long; but a flag that XLA does not know ends the process
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import torch

from clearhead.core.arrays import to_numpy
from clearhead.core.mask import Where
from clearhead.core.positions import Added, Relative

jax.config.update("jax_enable_x64", True)
# and each of them once: another worker and another run read what was compiled, for this machine alone
PROGRAMS = Path(__file__).parents[1] / "build" / f"jax-{platform.node()}"
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

ALL = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class ArrayLibrary:
    name: str
    make: Callable[[np.ndarray], Any]
    dtypes: tuple[str, ...] = ALL

    def __str__(self) -> str:
        return self.name

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The same options with their arrays in this library."""

        def convert(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return self.make(value)
            if isinstance(value, Relative):
                return replace(value, table=self.make(value.table))
            assert not isinstance(value, Where | Added)
            return value

        return {name: convert(value) for name, value in options.items()}

    def owns(self, array: Any) -> bool:
        return type(array) is type(self.make(np.zeros(1)))


def _torch(a: np.ndarray) -> torch.Tensor:
    if a.dtype.name == "bfloat16":
        return torch.from_numpy(a.astype(np.float32)).to(torch.bfloat16)
    if any(stride < 0 for stride in a.strides) or not a.flags.writeable:
        a = a.copy()  # PyTorch has neither
    return torch.from_numpy(a)


LIBRARIES = (
    ArrayLibrary("numpy", lambda a: a),
    ArrayLibrary("torch", _torch),
    ArrayLibrary("jax", jnp.asarray),
    ArrayLibrary("strict", array_api_strict.asarray, ("float32", "float64")),
)

# PyTorch on a GPU: run where there is one (`test_gpu.py`)
CUDA = ArrayLibrary("cuda", lambda a: _torch(a).cuda())


def numbers(array: Any) -> np.ndarray:
    """Any library's array as NumPy float64, for comparing."""
    return to_numpy(array).astype(np.float64)
