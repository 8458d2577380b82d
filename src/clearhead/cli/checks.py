"""`clearhead check`: somebody's attention, by its module and name."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from clearhead.cli import inputs
from clearhead.core.errors import ArgumentError
from clearhead.doctor import check as doctor
from clearhead.explain.render.terminal import printed


def check(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="What to check; a module or a .py file.")],
    mask: Annotated[str | None, typer.Option(help="What True in its mask should mean: attend or hide.")] = None,
    causal: Annotated[str | None, typer.Option(help="Which ends its causal flag should align: end or start.")] = None,
    layout: Annotated[str | None, typer.Option(help="The axes it should take: BHTD, BTHD, BTD or TD.")] = None,
    json: inputs.Json = False,
) -> None:
    r"""Say whether an implementation of attention is right, and if not, which mistake it is.

    \b
    Exit status: 0 right, 1 wrong, 2 could not run it.
    \b
    Examples:
      clearhead check my_model.py:attention
      clearhead check torch.nn.functional:scaled_dot_product_attention
      clearhead check my_package.layers:attention --mask attend --causal end
    """
    report = doctor(load(function), mask=mask, causal=causal, layout=layout)  # type: ignore[arg-type]  # checked there
    if json:
        typer.echo(report.json())
    else:
        console = Console(highlight=False)
        printed(console, report)
    raise typer.Exit(0 if report.right else 1)


def load(spelled: str) -> Any:
    """What "module:name" or "file.py:name" means; a class without arguments is made into an object."""
    place, _, name = spelled.rpartition(":")
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise ArgumentError("MODULE:FUNCTION", f"is {spelled!r}, expected such as my_file.py:attention")
    try:
        # what a module prints while it is imported is not part of the report
        with contextlib.redirect_stdout(sys.stderr):
            found: Any = _module(place)
            for part in name.split("."):
                found = getattr(found, part)
            return found() if inspect.isclass(found) else found
    except ArgumentError:
        raise
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {error}"
        raise ArgumentError("MODULE:FUNCTION", f"{spelled!r} could not be loaded: {words[:200]}") from None


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        finally:
            sys.path.pop(0)
    path = Path(place)
    if not path.is_file():
        raise ArgumentError("MODULE:FUNCTION", f"names {place}, and there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
