"""A solution in a file, run in a process of its own with a time limit: whatever it does, whoever asks goes on.

What it finds comes back through a file, so that nothing the solution prints is taken for an answer.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from clearhead.core.errors import ArgumentError
from clearhead.doctor.processes import end
from clearhead.doctor.quiet import quiet, told
from clearhead.learning.contents import EXERCISES
from clearhead.learning.exercise import Exercise
from clearhead.learning.judging import Found
from clearhead.learning.outcome import Outcome
from clearhead.learning.results import result
from clearhead.learning.results import told as outcome_of
from clearhead.learning.troubles import TROUBLES

# Seconds that a solution may take in all: PyTorch needs some to be imported, and JAX compiles each size anew
SECONDS = 120.0
LARGEST = 2**20  # bytes of a solution


def examined(exercise: Exercise, path: Path, name: str = "", seconds: float = SECONDS) -> Outcome:
    """What comes of the functions that a file defines; `name` is the function's, where it has another."""
    _readable(path)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "found.json"
        paths = os.pathsep.join(path for path in sys.path if path)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "clearhead.learning.aside", str(exercise.number), str(path.resolve()), name,
             str(answer), str(seconds)],
            env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            return outcome_of(
                exercise, Found(TROUBLES["took-too-long"], f"it had not answered after {seconds:g} seconds")
            )
        finally:
            end(child)
        if not answer.is_file():
            words = f"Python ended with exit status {child.returncode}"
            return outcome_of(exercise, Found(TROUBLES["ended-python"], words))
        text = answer.read_text(encoding="utf-8")
    refused = json.loads(text).get("refused")
    if refused:
        raise ArgumentError("FILE", refused)
    return Outcome.read(text)


def _readable(path: Path) -> None:
    """Refuse what is no Python file, before anything of it is run."""
    if not path.is_file():
        raise ArgumentError("FILE", f"is {str(path)!r}, and there is no such file")
    try:
        if path.stat().st_size > LARGEST:
            raise ArgumentError("FILE", f"is {path.name!r}, which has more than {LARGEST:,} bytes")
        ast.parse(path.read_bytes())
    except SyntaxError as wrong:
        raise ArgumentError("FILE", f"{path.name!r} is no Python: {wrong.msg} in line {wrong.lineno}") from None
    except (ValueError, MemoryError, RecursionError):
        raise ArgumentError("FILE", f"{path.name!r} is no Python that can be read") from None
    except OSError as error:
        raise ArgumentError("FILE", f"{path.name!r} cannot be read: {error.strerror or error}") from None


def functions_of(path: Path, exercise: Exercise, name: str = "") -> tuple[Any, ...]:
    """The functions that an exercise asks for, out of a file: by their names, or the only one that there is."""
    # a name of its own: a file that is called random.py must not be taken for the library's
    spec = importlib.util.spec_from_file_location(f"solution_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and the like look for their module there
    sys.path.insert(0, str(path.parent))
    with quiet("numpy", limited=False):
        try:
            spec.loader.exec_module(module)
        except SystemExit:
            pass  # what was defined before is there
        except BaseException as error:
            raise ArgumentError("FILE", f"{path.name!r} could not be loaded: {told(error)}") from None
    wanted = [name] if name and len(exercise.functions) == 1 else [one.name for one in exercise.functions]
    found: list[Any] = [getattr(module, one, None) for one in wanted]
    if len(wanted) == 1 and found[0] is None and not name:
        own: list[Any] = [
            one for one in vars(module).values() if inspect.isfunction(one) and one.__module__ == module.__name__
        ]
        found = own if len(own) == 1 else found
    missing = [one for one, there in zip(wanted, found, strict=True) if not callable(there)]
    if missing:
        signatures = " and ".join(one.signature for one in exercise.functions)
        raise ArgumentError("FILE", f"{path.name!r} defines no {missing[0]}: expected {signatures}")
    return tuple(found)


def main(number: str, path: str, name: str, answer: str, seconds: str) -> None:
    """Load a solution, examine it, and leave what was found, or why nothing was."""
    late = threading.Timer(float(seconds) + 1, os._exit, (124,))  # should who waits for it be gone by then
    late.daemon = True
    late.start()
    exercise = EXERCISES[int(number)]
    try:
        text = result(exercise, functions_of(Path(path), exercise, name)).json()
    except ArgumentError as refused:
        text = json.dumps({"refused": str(refused).removeprefix("FILE: ")})
    place = Path(answer)
    fresh = place.with_suffix(".part")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
