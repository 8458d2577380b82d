"""Somebody's own function, pasted into the page: held against the library by `check`, in a process of its own.

It runs code, so the server comes here only after it was switched on. The process is given a time and ended with all
that it began; what it finds comes back through a file, so that nothing the code prints is taken for an answer.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.calls import attention
from clearhead.core.array_masks import where
from clearhead.core.errors import ArgumentError
from clearhead.core.masks import causal
from clearhead.doctor.checking import check
from clearhead.doctor.processes import end
from clearhead.doctor.report import Example, listed

SECONDS = 60  # that a check may take, of which PyTorch may need some to be imported
LONGEST = 64_000  # characters of what is pasted
LARGEST = 2_000_000  # bytes of what is found


def examined(source: str, name: str = "", seconds: float = SECONDS) -> dict[str, Any]:
    """What `check` says of a function that this text defines, found in another process."""
    chosen(source, name)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "pasted.py").write_text(source, encoding="utf-8")
        paths = os.pathsep.join(path for path in sys.path if path)
        child = subprocess.Popen(
            [sys.executable, "-m", "clearhead.explorer.pasted", folder, name, str(seconds)],
            cwd=folder, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ArgumentError("function", f"was given up after {seconds:g} seconds") from None
        finally:
            end(child)
        found = place / "found.json"
        if not found.is_file() or found.stat().st_size > LARGEST:
            raise ArgumentError("function", f"ended Python without an answer (exit status {child.returncode})")
        told: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    if "refused" in told:
        raise ArgumentError("function", told["refused"])
    return told


def chosen(source: str, name: str = "") -> str:
    r"""Which function or class is meant: the one named, else the last that the text defines.

    >>> chosen("def helper(x): ...\ndef attention(q, k, v): ...")
    'attention'
    """
    if len(source) > LONGEST:
        raise ArgumentError("function", f"has {len(source):,} characters, expected at most {LONGEST:,}")
    try:
        tree = ast.parse(source)
    except SyntaxError as wrong:
        raise ArgumentError("function", f"is no Python: {wrong.msg} in line {wrong.lineno}") from None
    except (ValueError, MemoryError, RecursionError):
        raise ArgumentError("function", "is no Python that can be read") from None
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = [one.name for one in tree.body if isinstance(one, kinds)]
    if not defined:
        raise ArgumentError("function", "defines nothing: expected such as def attention(q, k, v): …")
    if name and name not in defined:
        raise ArgumentError("name", f"is {name[:60]!r}, expected one of {', '.join(defined)[:200]}")
    return name or defined[-1]


def told(function: Any) -> dict[str, Any]:
    """The report as the page shows it, each example with the cell that is to be opened."""
    report = check(function)
    found: dict[str, Any] = json.loads(report.json())
    found["verdict"] = report.verdict
    for words, finding in zip(found["findings"], report.findings, strict=True):
        words["lines"] = [] if finding.example is None else finding.example.lines()
        words["cell"] = None if finding.example is None else cell(finding.example)
    return found


def cell(example: Example) -> dict[str, Any] | None:
    """The example as a call of its own, and its pair that is most wrong; None where it is no plain call.

    Which pair: the one whose weight changes most in the smallest change of weights that explains what came out.
    """
    arrays = [np.asarray(array) for array in list(example.inputs.values())[:3]]
    others = list(example.inputs.items())[3:]
    if len(arrays) < 3 or any(a.dtype.kind != "f" or a.ndim not in (2, 3) for a in arrays):
        return None
    fitting = _fitting(arrays, others, example.expected)
    if fitting is None:
        return None
    spelled, output = fitting
    off = np.zeros_like(output) if isinstance(example.got, str) else example.got - output
    size = np.abs(np.nan_to_num(off, nan=np.inf)).max(-1)
    at = np.unravel_index(int(size.argmax()), size.shape)
    values = arrays[2].astype(np.float64)
    values = values[at[0] * len(values) // len(arrays[0])] if values.ndim == 3 else values
    change = np.abs(np.linalg.pinv(values.T) @ np.nan_to_num(off[at]))
    given = {name: listed(array) for name, array in zip("qkv", arrays, strict=True)} | spelled
    place = {"query": int(at[-1]), "key": int(change.argmax())} | ({"head": int(at[0])} if len(at) == 2 else {})
    return {"given": json.dumps(given, separators=(",", ":")), **place}


def _fitting(
    arrays: list[np.ndarray], others: list[tuple[str, Any]], expected: np.ndarray
) -> tuple[dict[str, Any], np.ndarray] | None:
    """The mask under which the library itself gives what was expected, as the page spells it, and that output."""
    for spelled, mask in _masks(others):
        try:
            output = np.asarray(attention(*(a.astype(np.float64) for a in arrays), mask=mask))
        except (ArgumentError, ValueError):
            continue
        if output.shape == expected.shape and np.allclose(output, expected, 1e-4, 1e-6):
            return spelled, output
    return None


def _masks(others: list[tuple[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """The masks that what was handed over beside q, k and v may mean, each as it is spelled for the page."""
    found: list[tuple[dict[str, Any], Any]] = [({}, None)]
    for _, value in others:
        array = np.asarray(value)
        if array.ndim == 0 and array:
            found += [({"mask": "causal()"}, causal()), ({"mask": 'causal(align="start")'}, causal(align="start"))]
        elif array.ndim >= 2:
            seen = array if array.dtype.kind == "b" else array > -1.0 if array.dtype.kind == "f" else array != 0
            seen = seen.reshape(seen.shape[-2:]) if seen.size == seen.shape[-1] * seen.shape[-2] else seen
            found += [({"allowed": one.astype(int).tolist()}, where(one)) for one in (seen, ~seen) if one.ndim == 2]
    return found


def main(folder: str, name: str, seconds: float) -> None:
    """Load what was pasted, check it, and leave what was found, or why nothing was."""
    late = threading.Timer(seconds + 1, os._exit, (124,))  # should who waits for it be gone by then
    late.daemon = True
    late.start()
    place = Path(folder)
    source = (place / "pasted.py").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("pasted", place / "pasted.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            spec.loader.exec_module(module)
        found = told(getattr(module, chosen(source, name)))
    except ArgumentError as refused:
        found = {"refused": str(refused).removeprefix("function: ").removeprefix("function ")}
    except BaseException as error:  # whatever it raises is told, not shown as this program's own
        found = {"refused": f"could not be loaded: {type(error).__name__}: {error}"[:300]}
    (place / "found.json").write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
