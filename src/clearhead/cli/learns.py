"""`clearhead learn`: exercises that are checked, from one row by hand to the backward pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from clearhead.cli import inputs
from clearhead.core.errors import ArgumentError
from clearhead.explain.render.terminal import printed


def learn(
    number: Annotated[int | None, typer.Argument(metavar="NUMBER", help="Which exercise; all unless given.")] = None,
    answer: Annotated[
        list[str] | None,
        typer.Argument(metavar="ANSWER…", help="A file, my.py or my.py:name; or the numbers and words asked for."),
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Write a file to start from; one that is there is left.", metavar="FILE")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="How long a solution may take.")] = 120.0,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget what was solved, of one exercise or of all; it asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: inputs.Json = False,
) -> None:
    r"""Exercises that are checked: right, or the mistake by its name, with the smallest example and a hint.

    A solution runs in a process of its own. What is solved is remembered on this machine (CLEARHEAD_HOME).

    \b
    Exit status: 0 right, 1 wrong, 2 could not be read.
    \b
    Examples:
      clearhead learn
      clearhead learn 3
      clearhead learn 3 --start my_solution.py
      clearhead learn 3 my_solution.py
      clearhead learn 1 0.2 0.1 0.7
      clearhead learn --forget
    """
    from clearhead.learning import learn as teach
    from clearhead.learning.listing import Assignment
    from clearhead.learning.teaching import chosen

    if forget:
        _forget(number, yes)
        return
    if number is None:
        if start is not None:
            raise ArgumentError("--start", "is given without NUMBER: which exercise is the file for?")
        _show(teach(), json)
        return
    exercise = chosen(number)
    if start is not None:
        if answer:
            raise ArgumentError("--start", "is given beside an answer: expected one of them")
        _start(Assignment(exercise, False).start, start, number)
        return
    if not answer:
        _show(teach(number), json)
        return
    found = teach(number, *answer) if exercise.typed else _file(number, answer, seconds)
    _show(found, json)
    raise typer.Exit(0 if found.right else 1)


def _file(number: int, answer: list[str], seconds: float):  # type: ignore[no-untyped-def]  # an Outcome, imported late
    """What comes of the solution in a file."""
    from clearhead.learning.aside import examined
    from clearhead.learning.teaching import chosen, remembered

    exercise = chosen(number)
    wanted = " and ".join(one.signature for one in exercise.functions)
    if len(answer) > 1:
        raise ArgumentError("ANSWER", f"has {len(answer)} parts, expected one file that defines {wanted}")
    place, name = answer[0], ""
    match = re.fullmatch(r"(.+\.py):(\w+)", place)
    if match is not None:
        place, name = match[1], match[2]
    if not place.endswith(".py"):
        raise ArgumentError("ANSWER", f"is {place[:60]!r}, expected a .py file that defines {wanted}")
    return remembered(examined(exercise, Path(place), name, seconds))


def _start(text: str, path: Path, number: int) -> None:
    """Write the file to start from, unless there is one of this name."""
    if not text:
        raise ArgumentError("--start", f"is given, and exercise {number} is answered by typing, without a file")
    if path.suffix != ".py":
        raise ArgumentError("--start", f"is {path.name!r}, expected a name that ends in .py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ArgumentError("--start", f"is {str(path)!r}, which is there already and is left as it is") from None
    except OSError as error:
        raise ArgumentError("--start", f"{str(path)!r} cannot be written: {error.strerror or error}") from None
    typer.echo(f"wrote {path}; check it with: clearhead learn {number} {path}")


def _forget(number: int | None, yes: bool) -> None:
    from clearhead.learning import progress
    from clearhead.learning.teaching import chosen

    if number is not None:
        chosen(number)
    what = "all exercises" if number is None else f"exercise {number}"
    if not yes and not typer.confirm(f"Forget what was solved of {what}?"):
        typer.echo("nothing was forgotten")
        return
    try:
        had = progress.forget(number)
    except OSError as error:
        raise ArgumentError("--forget", f"{progress.place()} cannot be changed: {error.strerror or error}") from None
    typer.echo(f"forgot {what}" if had else "there was nothing to forget")


def _show(found: RenderableType, json: bool) -> None:
    if json:
        typer.echo(found.json())  # type: ignore[union-attr]  # all that is shown here has it
        return
    printed(Console(highlight=False), found)
