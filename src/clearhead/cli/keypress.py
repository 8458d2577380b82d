"""Stepping through a trace, one operation at a key press; the terminal is put back however it ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from clearhead.explain.render.page import vector
from clearhead.explain.render.terminal import visible
from clearhead.explain.tracing import Trace

STYLES = {"multiply-add": "", "exponential": "cyan", "division": "cyan", "mask": "dim", "maximum": "yellow"}


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


def walk(shown: Trace) -> None:
    """Print each operation; in a terminal, wait for a key after each: q ends, a shows the rest."""
    console = Console(highlight=False)
    operations = list(shown.walk())
    console.print(Text(f"{visible(shown.label)}: {len(operations)} operations", style="bold"))
    with _keys() as waiting:
        if waiting:
            console.print(Text("any key: next · a: all that is left · q: end", style="dim"))
        for operation in operations:
            line = Text(f"{operation.number:>{len(str(len(operations)))}}  {visible(operation.sentence)}")
            line.stylize(STYLES.get(operation.kind, ""))
            console.print(line)
            if waiting:
                key = sys.stdin.read(1)
                if key in ("q", "Q", "\x04", ""):
                    return
                waiting = key not in ("a", "A")
    console.print(Text(f"Output: {vector(shown.row.output)}", style="bold green"))
