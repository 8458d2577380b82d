"""`clearhead approximate`: how far approximations are from exact attention, on a call of yours."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.text import Text

from clearhead.approximations.auditing import audit
from clearhead.approximations.audits import WIDTH
from clearhead.approximations.spelling import read_method
from clearhead.approximations.sweeping import By, sweep
from clearhead.cli import inputs
from clearhead.cli.plot import ENDINGS, FORMATS, _save
from clearhead.core.errors import ArgumentError
from clearhead.explain.render.terminal import printed


def approximate(
    example: inputs.ExampleName = "random:512,512,32",
    npz: inputs.Npz = None,
    npy: inputs.Npy = None,
    safetensors: inputs.Safetensors = None,
    json_input: inputs.JsonInput = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help='As in Python: "performer(256)"; may be given again.', metavar="METHOD"),
    ] = None,
    mask: inputs.MaskText = None,
    causal: inputs.Causal = False,
    scale: inputs.Scale = None,
    temperature: inputs.Temperature = None,
    queries: Annotated[int, typer.Option(min=1, max=65536, help="How many queries of each head are compared.")] = 64,
    by: Annotated[
        str | None, typer.Option(help="The error against features, length or temperature.", metavar="WHAT")
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="The numbers for --by, with commas between.", metavar="NUMBERS")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw --by into a .png, .svg or .pdf file.", metavar="FILE")
    ] = None,
    json: inputs.Json = False,
) -> None:
    r"""Say how far linear attention, Performer, Linformer, Nyström, LSH and others are from exact, by head.

    \b
    Examples:
      clearhead approximate --method "performer(256)" --causal
      clearhead approximate --npz call.npz -m linear -m "nystrom(64)" --json
      clearhead approximate random:1024,1024,16 -m "performer(256)" --by features --at 16,64,256,1024
      clearhead approximate -m "performer(64)" --by temperature -o errors.png
    """
    call = inputs.given(example, npz, npy, safetensors, json_input, None, mask, causal, scale, None, temperature)
    methods = [read_method(text, "--method") for text in method or ["linear", "performer(256)"]]
    console = Console(highlight=False)
    width = min(console.width, WIDTH)
    if by is None:
        for name, value in (("--at", at), ("--output", output)):
            if value is not None:
                raise ArgumentError(name, "is given without --by, which says what is to grow")
        found = [audit(one, call.q, call.k, call.v, queries=queries, **call.options) for one in methods]
        if json:
            typer.echo(json_module.dumps([json_module.loads(one.json()) for one in found]))
        else:
            printed(console, Text("\n\n".join(one.text(width) for one in found)))
        return
    if scale is not None or temperature is not None:
        raise ArgumentError("--by", "is given together with --scale or --temperature, expected one of them")
    if output is not None and output.suffix.lower() not in FORMATS:
        raise ArgumentError("--output", f"is {output.name!r}, expected a name that ends in {ENDINGS}")
    chosen: By = _by(by)
    swept = sweep(
        methods, call.q, call.k, call.v, by=chosen, at=_numbers(at), mask=call.options.get("mask"), queries=queries
    )
    if output is not None:
        try:
            from clearhead.plots import plot_sweep

            _save(plot_sweep(swept), output, 150)
        except ImportError as error:
            raise ArgumentError("--output", str(error)) from None
    if json:
        typer.echo(swept.json())
    else:
        printed(console, Text(swept.text(width)))


def _by(text: str) -> By:
    for known in get_args(By):
        if text == known:
            return known
    raise ArgumentError("--by", f"is {text[:60]!r}, expected features, length or temperature")


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError("--at", f"is {text[:60]!r}, expected numbers with commas between") from None
    if len(numbers) > 64 or not all(0 < one < 2**40 for one in numbers):
        raise ArgumentError("--at", f"is {text[:60]!r}, expected at most 64 numbers above 0")
    return numbers
