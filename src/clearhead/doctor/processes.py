"""Processes in which somebody's code runs: ended with all that they began."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group of its own, and what it began, if anything is left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
