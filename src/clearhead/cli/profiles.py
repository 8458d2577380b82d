"""`clearhead profile`: what attention costs as lengths grow, measured and on paper."""

from __future__ import annotations

import json as json_module
import re
import textwrap
from dataclasses import asdict
from typing import Annotated, Protocol

import typer
from rich.columns import Columns
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from clearhead.approximations.spelling import read_method
from clearhead.cli import inputs
from clearhead.core.errors import ArgumentError
from clearhead.core.spelling import read_mask
from clearhead.explain.render.terminal import printed
from clearhead.measure.costs import PUBLISHED, Configuration, Growth, cost, grown
from clearhead.measure.profiling import LENGTHS, Profile
from clearhead.measure.profiling import profile as measure
from clearhead.measure.tables import WIDTH

ITEMS = {"float16": 2, "float32": 4, "float64": 8}
NOT_PUBLISHED = "GPT-4 is not among them: its sizes were not published, and what is said of them is guessed."


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*[0-9]+\s*", part) for part in parts):
        raise ArgumentError(option, f"is {text[:60]!r}, expected whole numbers with commas between")
    if len(parts) > 64:
        raise ArgumentError(option, f"has {len(parts)} numbers, expected at most 64")
    if large := [part.strip() for part in parts if len(part.strip()) > 9]:
        raise ArgumentError(option, f"has {large[0][:30]}, expected numbers up to 999,999,999")
    return [int(part) for part in parts]


def measured(
    lengths: str | None, heads: int, features: int, dtype: str, mask: str | None, seconds: float,
    method: str | None = None,
) -> Profile:  # fmt: skip
    """The profile of some lengths, with a progress bar on stderr where somebody is watching."""
    chosen = None if lengths is None else numbers("--lengths", lengths)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        return measure(
            chosen,
            heads=heads,
            features=features,
            dtype=dtype,
            mask=None if mask is None else read_mask(mask, "--mask"),
            seconds=seconds,
            method=None if method is None else read_method(method, "--method"),
            progress=lambda done, of, words: bar.update(task, completed=done, total=of, description=words),
        )


def profile(
    lengths: Annotated[
        str | None, typer.Option(help=f"With commas between; {','.join(map(str, LENGTHS))} unless given.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="How many heads.")] = 8,
    features: Annotated[int, typer.Option(min=1, help="How many features a head has.")] = 64,
    dtype: Annotated[str, typer.Option(help="float16, float32 or float64.")] = "float32",
    mask: inputs.MaskText = None,
    seconds: Annotated[float, typer.Option(help="How long it may take in all.")] = 60.0,
    method: Annotated[
        str | None, typer.Option(help='Measure an approximation beside it: "performer(256)".', metavar="METHOD")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="On paper: of published models, or at --lengths; measure nothing.")
    ] = False,
    json: inputs.Json = False,
) -> None:
    r"""Measure time and memory of the formula with its matrix, and of the best kernel.

    \b
    Examples:
      clearhead profile
      clearhead profile --lengths 512,1024,2048,4096 --mask "causal()" --json
      clearhead profile --method "performer(128)"
      clearhead profile --paper
      clearhead profile --paper --lengths 512,1024,2048 --heads 8
    """
    if paper:
        chosen = None if lengths is None else numbers("--lengths", lengths)
        _paper(json, chosen, heads, features, dtype)
        return
    found = measured(lengths, heads, features, dtype, mask, seconds, method)
    if json:
        typer.echo(found.json())
    else:
        side_by_side(found)


def _paper(json: bool, lengths: list[int] | None, heads: int, features: int, dtype: str) -> None:
    """Published models, or, where lengths are given, what one layer of these sizes costs at each of them."""
    console = Console(highlight=False)
    width = min(console.width, WIDTH)
    if lengths is None:
        costs = [cost(name) for name in PUBLISHED]
    else:
        if dtype not in ITEMS:
            raise ArgumentError("--dtype", f"is {dtype!r}, expected one of {', '.join(ITEMS)}")
        one = Configuration("one layer", 1, heads, heads, features, lengths[0], item=ITEMS[dtype])
        costs = [*grown(one, sorted(lengths)).costs]
    if json:
        counted = ("flops", "bytes", "multiply_adds", "held")
        typer.echo(json_module.dumps([asdict(one) | {name: getattr(one, name) for name in counted} for one in costs]))
        return
    if lengths is not None:
        printed(console, Text(f"{costs[-1].text(width)}\n\n{Growth(tuple(costs)).text(width)}"))
        return
    blocks = []
    for one_cost in costs:
        source = textwrap.fill(one_cost.configuration.source, width, initial_indent="  ", subsequent_indent="  ")
        blocks.append(Text(f"{one_cost.text(width)}\n{source}\n"))
    printed(console, Columns(blocks, padding=(0, 4)))
    printed(console, Text("\n" + textwrap.fill(NOT_PUBLISHED, width)))


class Tables(Protocol):
    """What prints as two tables."""

    def blocks(self, width: int) -> list[str]:
        """The tables, each at most so wide."""


def side_by_side(found: Tables) -> Console:
    """Print two tables beside one another where there is room, and else one after the other; whoever goes on may."""
    console = Console(highlight=False)
    blocks = found.blocks(min(console.width, WIDTH))
    wide = console.width >= 2 * max(len(line) for block in blocks for line in block.splitlines()) + 6
    if wide:
        printed(console, Columns([Text(block) for block in blocks], padding=(0, 6)))
    else:
        printed(console, Text("\n\n".join(block.strip("\n") for block in blocks)))
    return console
