"""`clearhead compare`: one call under several mechanisms, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from clearhead.approximations.comparing import WIDTH
from clearhead.approximations.comparing import compare as compared
from clearhead.approximations.spelling import METHODS, read_method
from clearhead.cli import inputs
from clearhead.cli.plot import ENDINGS, FORMATS, _save
from clearhead.core.errors import ArgumentError
from clearhead.core.positions import rotary
from clearhead.core.spelling import read_mask
from clearhead.explain.render.terminal import printed


def compare(
    example: inputs.ExampleName = "cat_sat",
    npz: inputs.Npz = None,
    npy: inputs.Npy = None,
    safetensors: inputs.Safetensors = None,
    json_input: inputs.JsonInput = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            "-w",
            help='full, rotary, a mask or a method: "window(2)"; may be given again.',
            metavar="MECHANISM",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the weights into a .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    json: inputs.Json = False,
) -> None:
    r"""Put mechanisms side by side on the same numbers: how far apart outputs are, and what each costs.

    \b
    Examples:
      clearhead compare
      clearhead compare it_animal -w full -w "causal()" -w "performer(64)"
      clearhead compare random:64,64,16 -o mechanisms.png
    """
    if output is not None and output.suffix.lower() not in FORMATS:
        raise ArgumentError("--output", f"is {output.name!r}, expected a name that ends in {ENDINGS}")
    call = inputs.given(example, npz, npy, safetensors, json_input, None, None, False)
    chosen = None if mechanism is None else {text: _read(text) for text in mechanism}
    found = compared(call.q, call.k, call.v, chosen)
    if output is not None:
        try:
            from clearhead.plots import plot_comparison

            same = call.tokens if call.q.shape[-2] == call.k.shape[-2] else None
            _save(plot_comparison(found, same), output, 150)
        except ImportError as error:
            raise ArgumentError("--output", str(error)) from None
    console = Console(highlight=False)
    if json:
        typer.echo(found.json())
    else:
        printed(console, Text(found.text(min(console.width, WIDTH))))


def _read(text: str) -> Any:
    if text == "full":
        return None
    if text in ("rotary", "rotary()"):
        return rotary()
    name = text.partition("(")[0].strip()
    return read_method(text, "--with") if name in METHODS else read_mask(text, "--with")
