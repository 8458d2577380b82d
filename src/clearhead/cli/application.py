"""The app that the commands hang on: mistakes are one line on stderr, and the terminal is left as it was."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from clearhead.cli import (
    approximates as approximate,
)
from clearhead.cli import (
    checks as check,
)
from clearhead.cli import (
    compares as compare,
)
from clearhead.cli import (
    explain,
    plot,
)
from clearhead.cli import (
    explores as explore,
)
from clearhead.cli import (
    learns as learn,
)
from clearhead.cli import (
    plans as plan,
)
from clearhead.cli import (
    profiles as profile,
)
from clearhead.cli import (
    scalings as scaling,
)
from clearhead.cli import (
    watches as watch,
)
from clearhead.cli.helping import fitted
from clearhead.core.errors import ArgumentError, KernelRefused

# Every mistake on the command line is one of these, wherever the installed typer keeps its classes
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Command(TyperCommand):
    """A command whose help is no wider than the terminal."""

    def get_help(self, ctx: Any) -> str:
        """The help, fitted to the terminal."""
        return fitted(super().get_help, ctx)


class OneLineErrors(TyperGroup):
    """A command group that says what is wrong in one line on stderr and exits with status 2."""

    def get_help(self, ctx: Any) -> str:
        """The help, fitted to the terminal."""
        return fitted(super().get_help, ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; usage errors and refused arguments never show a traceback."""
        try:
            status = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
        except (UsageError, ArgumentError, KernelRefused) as mistake:
            words = mistake.format_message() if hasattr(mistake, "format_message") else str(mistake)
            status = _said(words)
        except MemoryError:
            status = _said("there is not enough memory for this")
        except BrokenPipeError:
            _let_go()  # whoever was reading has seen enough
            status = 0
        except SystemExit as end:
            if not isinstance(end.__context__, BrokenPipeError):  # as rich ends where the pipe is closed
                raise
            status = 0
        except OSError as error:  # files that are read and written have words of their own
            _let_go()
            status = _said(f"cannot write what was asked for: {error.strerror or error}")
        except typer.Abort:
            Console(stderr=True).show_cursor(True)
            status = 130
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status


def _let_go() -> None:
    """What is left to be written must not be flushed at the end, into nothing and with a traceback."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no such file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _said(words: str) -> int:
    one = " ".join(words.split())
    with contextlib.suppress(OSError):  # stderr may be full as well
        # a file name or a token may hold anything; what cannot be printed is shown as a sign
        print("clearhead:", one.encode("utf-8", "replace").decode("utf-8"), file=sys.stderr)
    return 2


app = typer.Typer(
    name="clearhead",
    cls=OneLineErrors,
    help="Exact scaled dot-product attention that you can see through.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clearhead {installed('clearhead')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def group(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """Exact scaled dot-product attention that you can see through."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMANDS: dict[Callable[..., None], str] = {
    explain.explain: "Every step of a call, and of one query.",
    check.check: "Is an implementation right?",
    plan.plan: "Which kernel, why, at what cost.",
    profile.profile: "Time and memory as lengths grow.",
    approximate.approximate: "How far approximations are.",
    compare.compare: "Mechanisms side by side.",
    scaling.scaling: "Why scores are divided by √d.",
    explore.explore: "The same in the browser.",
    plot.plot: "Pictures, as PNG, SVG or PDF.",
    watch.watch: "What a trained model attends to.",
    learn.learn: "Exercises that are checked.",
}
for command, short in COMMANDS.items():
    # a line of \b keeps the lines after it as they are; docstrings are raw, and click wants the character
    long = inspect.cleandoc(command.__doc__ or "").replace(r"\b", "\b")
    app.command(cls=Command, short_help=short, help=long)(command)


def main() -> None:
    """Run the command line; the console script `clearhead` calls this."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without ▒ or √ shows ? in their place, and the numbers all the same
            stream.reconfigure(errors="replace")
    app(prog_name="clearhead")
