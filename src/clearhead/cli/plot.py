"""`clearhead plot`: a picture of a call, a mask, the scale or a profile, as PNG, SVG or PDF."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.calls import observe
from clearhead.cli import inputs
from clearhead.cli.profiles import measured
from clearhead.core.errors import ArgumentError
from clearhead.explain.tokens import names_for
from clearhead.measure.scales import scaling

FORMATS = (".png", ".svg", ".pdf")
# What would make the same picture another file tomorrow
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
ENDINGS = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
# A map with more cells than this is pooled
CELLS = 2**20


class Kind(StrEnum):
    """What can be drawn."""

    attention = "attention"
    heads = "heads"
    mask = "mask"
    geometry = "geometry"
    scaling = "scaling"
    profile = "profile"


def plot(
    kind: Annotated[Kind, typer.Argument(help="What to draw.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to: a .png, .svg or .pdf file.", metavar="FILE")
    ],
    example: inputs.ExampleName = "cat_sat",
    npz: inputs.Npz = None,
    npy: inputs.Npy = None,
    safetensors: inputs.Safetensors = None,
    json_input: inputs.JsonInput = None,
    tokens: inputs.Tokens = None,
    query: inputs.Query = None,
    head: inputs.Head = None,
    mask: inputs.MaskText = None,
    causal: inputs.Causal = False,
    colours: Annotated[str, typer.Option(help="auto, linear, log or sink.")] = "auto",
    lengths: Annotated[str | None, typer.Option(help="For profile: lengths with commas between.")] = None,
    dpi: Annotated[int, typer.Option(min=20, max=600, help="Dots an inch, of a PNG.")] = 150,
    json: Annotated[bool, typer.Option("--json", help="Say as JSON what was written.")] = False,
) -> None:
    r"""Draw attention maps, heads, masks, geometry, scaling or a profile, into a file.

    \b
    Examples:
      clearhead plot attention -o map.png --causal
      clearhead plot heads -o heads.svg --npz call.npz
      clearhead plot geometry it_animal -o it.svg
      clearhead plot mask random:64,64,1 -o mask.png --mask "window(8) | global_tokens([0])"
      clearhead plot scaling -o scaling.png
    """
    if output.suffix.lower() not in FORMATS:
        raise ArgumentError("--output", f"is {output.name!r}, expected a name that ends in {ENDINGS}")
    try:
        from clearhead import plots
    except ImportError as error:
        raise ArgumentError("plot", str(error)) from None
    try:
        if kind is Kind.scaling:
            axes = plots.plot_scaling(scaling())
        elif kind is Kind.profile:
            axes = plots.plot_profile(measured(lengths, 8, 64, "float32", mask, 60.0))
        else:
            call = inputs.given(example, npz, npy, safetensors, json_input, tokens, mask, causal)
            axes = _of_call(plots, kind, call, query, head, colours)
    except ImportError as error:
        raise ArgumentError("plot", str(error)) from None
    _save(axes, output, dpi)
    typer.echo(json_module.dumps({"wrote": str(output)}) if json else f"wrote {output}", err=not json)


def _of_call(plots: Any, kind: Kind, call: inputs.Given, query: str | None, head: str | None, colours: str) -> Any:
    if kind is Kind.mask:
        if call.mask is None:
            raise ArgumentError("--mask", "is not given, and neither is --causal")
        return plots.plot_mask(call.mask, call.q.shape[-2], call.k.shape[-2])
    if kind is Kind.geometry:
        queries = names_for("--tokens", call.query_tokens, call.q.shape[-2], "queries")
        return plots.plot_geometry(
            call.q,
            call.k,
            call.v,
            query=inputs.chosen_query(query, queries),
            tokens=call.tokens,
            query_tokens=call.query_tokens,
            mask=call.mask,
        )
    small = call.q.ndim < 2 or call.q.shape[-2] * call.k.shape[-2] <= CELLS
    wanted: dict[str, Any] = {"weights": True} if small else {"map": (512, 512)}
    seen = observe(call.q, call.k, call.v, **call.options, **wanted)
    if kind is Kind.heads:
        return plots.plot_heads(seen, call.tokens)
    return plots.plot_attention(
        seen, call.tokens, query_tokens=call.query_tokens, head=inputs.chosen_head(head), colours=colours
    )


def _save(axes: Any, path: Path, dpi: int) -> None:
    import matplotlib
    import numpy as np

    figure = np.asarray(axes).ravel()[0].figure
    # the same picture gives the same file: no date, and names inside it that do not change
    with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
        try:
            figure.savefig(path, dpi=dpi, metadata=UNDATED.get(path.suffix.lower()))
        except OSError as error:
            raise ArgumentError("--output", f"cannot write {path}: {error.strerror or error}") from None
