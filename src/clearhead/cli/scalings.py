"""`clearhead scaling`: why scores are divided by √d."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from clearhead.cli import inputs
from clearhead.cli.profiles import numbers, side_by_side
from clearhead.core.errors import ArgumentError
from clearhead.explain.render.terminal import printed
from clearhead.measure.scales import DIMENSIONS
from clearhead.measure.scales import scaling as draw

# Sentences that are longer than this are hard to read
WIDEST = 100


def scaling(
    d_k: Annotated[
        str | None, typer.Option("--d-k", help=f"Features, with commas; {','.join(map(str, DIMENSIONS))} unless given.")
    ] = None,
    keys: Annotated[int, typer.Option(min=1, max=4096, help="How many keys.")] = 64,
    queries: Annotated[int, typer.Option(min=1, max=4096, help="How many queries are drawn.")] = 256,
    sigma: Annotated[float, typer.Option(help="Standard deviation of each feature.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="What all scores are divided by besides.")] = 1.0,
    json: inputs.Json = False,
) -> None:
    r"""Show why scores are divided by √d: what the softmax does with and without it.

    \b
    Examples:
      clearhead scaling
      clearhead scaling --d-k 16,256,4096 --sigma 0.5
      clearhead scaling --temperature 4
    """
    chosen = list(DIMENSIONS) if d_k is None else numbers("--d-k", d_k)
    if max(chosen) > 2**16:
        raise ArgumentError("--d-k", f"has {max(chosen):,}, expected at most {2**16:,}")
    found = draw(chosen, keys=keys, queries=queries, sigma=sigma, temperature=temperature)
    if json:
        typer.echo(found.json())
    else:
        console = side_by_side(found)
        printed(console, Text("\n" + found.words(min(console.width, WIDEST))))
