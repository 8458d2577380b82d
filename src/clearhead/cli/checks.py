"""`clearhead check`: somebody's attention, by its module and name."""

from __future__ import annotations

import ast
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
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT…", help="What builds a class: 64 8, or d_model=64 heads=8.")
    ] = None,
    mask: Annotated[str | None, typer.Option(help="What True in its mask should mean: attend or hide.")] = None,
    causal: Annotated[str | None, typer.Option(help="Which ends its causal flag should align: end or start.")] = None,
    layout: Annotated[str | None, typer.Option(help="The axes it should take: BHTD, BTHD, BTD or TD.")] = None,
    d: Annotated[int | None, typer.Option("--d", help="The features of a head that it was built for.")] = None,
    json: inputs.Json = False,
) -> None:
    r"""Say whether an implementation of attention is right, and if not, which mistake it is.

    \b
    Exit status: 0 right, 1 wrong, 2 could not run it.
    \b
    Examples:
      clearhead check my_model.py:attention
      clearhead check my_model.py:MultiHeadAttention 64 8
      clearhead check my_model.py:SelfAttention d_model=64 dropout=0.1
      clearhead check torch.nn.functional:scaled_dot_product_attention
      clearhead check my_package.layers:attention --mask attend --causal end
    """
    values, options = built_with(arguments or [])
    found = load(function)
    if (values or options) and not inspect.isclass(found):
        given = " ".join(arguments or [])
        raise ArgumentError("ARGUMENT", f"is {given}, and {function} is no class that is built with arguments")
    report = doctor(found, *values, mask=mask, causal=causal, layout=layout, d=d, **options)  # type: ignore[arg-type]  # checked there
    if json:
        typer.echo(report.json())
    else:
        console = Console(highlight=False)
        printed(console, report)
    raise typer.Exit(0 if report.right else 1)


def built_with(arguments: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a class: those with a name are written name=value; each is a Python literal, or a word.

    >>> built_with(["64", "bias=False", "kind=soft"])
    ([64], {'bias': False, 'kind': 'soft'})
    """
    values: list[Any] = []
    options: dict[str, Any] = {}
    for argument in arguments:
        name, sign, value = argument.partition("=")
        if sign and name.isidentifier():
            options[name] = _literal(value)
        elif options:
            raise ArgumentError("ARGUMENT", f"{argument} comes after {next(iter(options))}=…, expected it before")
        else:
            values.append(_literal(argument))
    return values, options


def _literal(spelled: str) -> Any:
    try:
        return ast.literal_eval(spelled)
    except (ValueError, SyntaxError):
        return spelled


def load(spelled: str) -> Any:
    """What "module:name" or "file.py:name" means."""
    place, _, name = spelled.rpartition(":")
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise ArgumentError("MODULE:FUNCTION", f"is {spelled!r}, expected such as my_file.py:attention")
    arguments = sys.argv
    try:
        # what a module prints while it is imported is not part of the report, and this command line is none of its own
        with contextlib.redirect_stdout(sys.stderr):
            sys.argv = [place]
            found: Any = _module(place, name.split(".")[0])
            for part in name.split("."):
                found = getattr(found, part)
            return found
    except ArgumentError:
        raise
    except (Exception, SystemExit) as error:
        left = isinstance(error, SystemExit)
        words = f"it called sys.exit({error})" if left else f"{type(error).__name__}: {error}"
        raise ArgumentError("MODULE:FUNCTION", f"{spelled!r} could not be loaded: {words[:200]}") from None
    finally:
        sys.argv = arguments


def _module(place: str, name: str) -> Any:
    """The module; one that ends by sys.exit has what it defined before."""
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
    except SystemExit:
        if not hasattr(module, name):
            raise
    finally:
        sys.path.pop(0)
    return module
