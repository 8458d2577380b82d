"""Triton's interpreter, made fit for these tests: kernels run on CPU tensors, one program after the other."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np

INSTALLED = importlib.util.find_spec("triton") is not None


def mend() -> None:
    """Triton 3.6 asks int() of arrays of one number, which NumPy 2.4 no longer gives: loops over such bounds fail."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "mended", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(())))

    patched.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched


def switch_on() -> None:
    """From here on kernels that are imported are interpreted; to be called before the first of them is."""
    os.environ["TRITON_INTERPRET"] = "1"
    mend()
