"""Triton's interpreter, made fit for these tests: kernels run on CPU tensors, one program after the other."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

INSTALLED = importlib.util.find_spec("triton") is not None


# of tests that interpret the GPU kernels; `interpreting` is in conftest.py
MARKS = [
    pytest.mark.skipif(not INSTALLED, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and kernels are not interpreted"),
    pytest.mark.usefixtures("interpreting"),
]


def mend() -> None:
    """Triton 3.6 asks int() of arrays of one number, which NumPy 2.4 no longer gives: loops over such bounds fail.

    And it takes long for what is of no use. Whatever a kernel calls looks through the whole language again for what is
    to be interpreted: once for each launch is enough. Whole numbers are checked for overflow at each step, and what was
    found is thrown away unless one debugs. And each operation makes the table of types anew that it looks one up in.
    """
    from triton.runtime import interpreter

    original, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
    if getattr(original, "mended", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(())))

    patched.mended = True
    interpreter._patch_lang_tensor = patched
    builder, look_up = interpreter.interpreter_builder, interpreter._get_np_dtype
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    types: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in types:
            types[name] = look_up(kind)
        return types[name]

    interpreter._get_np_dtype = numpy_type
    done: set[Any] = set()  # modules of the language that are being interpreted

    @cache
    def language(function: Any) -> set[Any]:
        return {value for value in function.__globals__.values() if value in (interpreter.tl, interpreter.tl.core)}

    def once(function: Any) -> Any:
        modules = language(function)
        if modules <= done:
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        restore = scope.restore
        done.update(modules)

        def restored() -> None:
            restore()
            done.clear()

        scope.restore = restored
        return scope

    interpreter._patch_lang = once


def import_kernels() -> None:
    """Import the GPU kernels to be interpreted, where there is no GPU to compile them for.

    Triton decides that when a kernel is defined, and whoever imports one first decides for all tests.
    """
    if not INSTALLED or torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("clearhead.kernels.triton.launch")
    importlib.import_module("clearhead.kernels.triton.linear_launch")
    mend()
    del os.environ["TRITON_INTERPRET"]
