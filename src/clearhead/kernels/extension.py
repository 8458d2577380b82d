"""The compiled extension, `clearhead._native`, or in words why it is not there."""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from typing import Any

import numpy as np

from clearhead.core.installing import builds

NOT_BUILT = ""
try:
    native: Any = import_module("clearhead._native")  # `from` says the same of none and of a broken one
except ModuleNotFoundError:
    native = None
    NOT_BUILT = (
        "it was not built when clearhead was installed: it needs GCC or Clang with C++17; where there is one, "
        f"{builds()} builds it, or shows why not"
    )
except ImportError as error:
    native = None
    NOT_BUILT = f"it was built, but cannot be loaded: {error}"

if native is not None and sys.version_info < (3, 14) and hasattr(native, "end"):
    atexit.register(native.end)

# what `native/observe.h` gathers
OBSERVES = frozenset() if native is None else frozenset(native.observes())
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "bool": 4, "int32": 5, "int64": 6}


def at(array: np.ndarray) -> int:
    """Where an array's numbers lie."""
    return int(array.__array_interface__["data"][0])
