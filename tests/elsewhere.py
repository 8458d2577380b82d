"""Python in a process of its own, with this library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import clearhead as ch


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    source = str(Path(ch.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
