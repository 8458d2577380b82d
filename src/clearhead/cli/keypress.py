"""Stepping through a trace, one operation at a key press; the terminal is put back however it ends."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from clearhead.explain.render.page import vector
from clearhead.explain.render.terminal import visible
from clearhead.explain.tracing import Trace

STYLES = {"multiply-add": "", "exponential": "cyan", "division": "cyan", "mask": "dim", "maximum": "yellow"}

# How long the rest of an arrow may take after its Escape, in seconds
ESCAPE = 0.05
KEYS = {
    **dict.fromkeys((b"\x1b[D", b"\x1bOD", b"\x1b[A", b"\x1bOA", b"\x7f", b"\x08", b"\x1b[5~"), "back"),
    **dict.fromkeys((b"\x1b[C", b"\x1bOC", b"\x1b[B", b"\x1bOB", b"\x1b[6~"), "next"),
}


@contextlib.contextmanager
def _keys() -> Iterator[bool]:
    """Whether keys can be read one by one; while they can, they are not echoed and need no Enter."""
    try:
        import termios
        import tty
    except ImportError:  # not a system with terminals of this kind
        yield False
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield False
        return
    place = sys.stdin.fileno()
    before = termios.tcgetattr(place)
    try:
        tty.setcbreak(place)  # Ctrl-C still interrupts
        yield True
    finally:
        termios.tcsetattr(place, termios.TCSADRAIN, before)


def _key() -> str:
    """The next key: a letter, or "back" and "next" for what arrows, Backspace and a page up or down send."""
    place = sys.stdin.fileno()
    # unbuffered: an arrow is several characters, and whether more are waiting is asked of the terminal
    first = os.read(place, 1)
    if first == b"\x1b":
        while select.select([place], [], [], ESCAPE)[0] and len(first) < 8:
            first += os.read(place, 1)
            if first[-1:].isalpha() or first[-1:] == b"~":
                if first not in (b"\x1bO", b"\x1b["):
                    break
    return KEYS.get(first, first.decode("utf-8", "replace"))


def walk(shown: Trace) -> None:
    """Print each operation; in a terminal, wait for a key after each: back, next, all that is left, or the end."""
    console = Console(highlight=False)
    operations = list(shown.walk())
    console.print(Text(f"{visible(shown.label)}: {len(operations)} operations", style="bold"))
    digits = len(str(len(operations)))
    with _keys() as waiting:
        if waiting:
            console.print(Text("any key or →: next · b or ←: back · a: all that is left · q: end", style="dim"))
        at = 0
        while at < len(operations):
            operation = operations[at]
            line = Text(f"{operation.number:>{digits}}  {visible(operation.sentence)}")
            line.stylize(STYLES.get(operation.kind, ""))
            console.print(line)
            at += 1
            if waiting:
                key = _key()
                if key in ("q", "Q", "\x04", ""):
                    return
                waiting = key not in ("a", "A")
                if key in ("back", "b", "B"):
                    at = max(at - 2, 0)
    console.print(Text(f"Output: {vector(shown.row.output)}", style="bold green"))
