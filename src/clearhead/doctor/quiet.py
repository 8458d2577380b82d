"""Calling somebody's code quietly: what it prints, warns of and reads is none of ours, and it has a time limit."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator

import numpy as np

# Seconds after which a call is given up: a report should not hang
LIMIT = 15


class Late(BaseException):
    """The alarm; no Exception, so that a function that catches those cannot catch it."""


@contextlib.contextmanager
def quiet(library: str, *, limited: bool = True) -> Iterator[io.StringIO]:
    """Nothing that somebody's function prints, warns of or reads belongs into a report; what it printed is yielded.

    Without a limit it may take as long as it wants, as a file may that imports large libraries.
    """
    torch = sys.modules.get("torch")
    grad = torch.no_grad() if torch is not None and library == "torch" else contextlib.nullcontext()
    arguments, typed, printed = sys.argv, sys.stdin, io.StringIO()
    with (
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
        grad,
        _limited() if limited else contextlib.nullcontext(),
    ):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            # the command line and what is typed are this program's, and none of the function's
            sys.argv, sys.stdin = sys.argv[:1], io.StringIO()
            try:
                yield printed
            finally:
                sys.argv, sys.stdin = arguments, typed


def told(error: BaseException) -> str:
    """What somebody's code raised, in one line."""
    words = " ".join(str(error).split())[:200]
    if isinstance(error, SystemExit):
        return f"it called sys.exit({words})"
    return f"{type(error).__name__}: {words}"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Give a call up after `LIMIT` seconds, where the system can do that: in the main thread, if no alarm is set."""
    free = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not free or signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, _late):
        yield
        return
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _late(number: int, frame: types.FrameType | None) -> None:
    raise Late
