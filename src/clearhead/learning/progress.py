"""Which exercises are solved, and how often each was tried: a small file in the folder for the user's data.

`CLEARHEAD_HOME` names another folder. It is written whole or not at all; one that cannot be read is told, and kept
beside the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

VERSION = 1


def folder() -> Path:
    """Where progress is kept."""
    chosen = os.environ.get("CLEARHEAD_HOME")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "clearhead"


def place() -> Path:
    """The file."""
    return folder() / "progress.json"


@dataclass
class Progress:
    """When each exercise was solved, and how often it was tried; `broken` says why the file could not be read."""

    solved: dict[int, str] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    broken: str = ""


def read() -> Progress:
    """What is known; nothing where there is no file, or none that can be read."""
    path = place()
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict) or told.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        if not all(isinstance(told.get(name), dict) for name in ("solved", "tries")):
            raise ValueError("it does not say what was solved and tried")
        solved = {int(number): str(when) for number, when in told["solved"].items()}
        tries = {int(number): int(count) for number, count in told["tries"].items()}
    except FileNotFoundError:
        return Progress()
    except OSError as error:
        return Progress(broken=f"{path} cannot be read: {error.strerror or error}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        words = "it is no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
        return Progress(broken=f"{path} is damaged ({words[:80]}): it is kept, and counting begins anew")
    return Progress(solved, tries)


def note(number: int, right: bool) -> str:
    """Remember a try; what there is to tell about that, in one sentence, or nothing."""
    known = read()
    known.tries[number] = known.tries.get(number, 0) + 1
    if right:
        known.solved.setdefault(number, datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        kept = _write(known)
    except OSError as error:
        return f"Progress could not be kept in {folder()}: {error.strerror or error}."
    return f"The file of progress was damaged; it is now {kept.name}, and counting begins anew." if kept else ""


def forget(number: int | None = None) -> bool:
    """Forget one exercise, or all of them; False where nothing was known."""
    known = read()
    if number is None:
        with contextlib.suppress(FileNotFoundError):
            place().unlink()
            return True
        return False
    had = number in known.tries
    known.tries.pop(number, None)
    known.solved.pop(number, None)
    if had:
        _write(known)
    return had


def _write(known: Progress) -> Path | None:
    """The file anew, in one step; where the damaged one went, if there was one."""
    path, aside = place(), None
    path.parent.mkdir(parents=True, exist_ok=True)
    if known.broken:
        names = (path.with_name(f"progress-damaged-{count}.json") for count in range(1, 10_000))
        aside = next(name for name in names if not name.exists())
        os.replace(path, aside)
    told = {"version": VERSION, "solved": known.solved, "tries": known.tries}
    handle, name = tempfile.mkstemp(prefix=".progress-", suffix=".json", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return aside
