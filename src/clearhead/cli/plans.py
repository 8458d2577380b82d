"""`clearhead plan`: which kernel would run, why not another, and what it costs."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import Annotated

import typer
from rich.console import Console

from clearhead.cli import inputs
from clearhead.measure.plans import plan as plan_call


def plan(
    example: inputs.ExampleName = "cat_sat",
    npz: inputs.Npz = None,
    npy: inputs.Npy = None,
    safetensors: inputs.Safetensors = None,
    json_input: inputs.JsonInput = None,
    mask: inputs.MaskText = None,
    causal: inputs.Causal = False,
    scale: inputs.Scale = None,
    softcap: inputs.Softcap = None,
    kernel: Annotated[str | None, typer.Option(help="Ask for this kernel, which then runs or refuses.")] = None,
    json: inputs.Json = False,
) -> None:
    r"""Say what a call would do: the kernel, why not another, FLOPs and bytes.

    \b
    Examples:
      clearhead plan random:4096,4096,64 --mask "window(255)"
      clearhead plan --npz call.npz --causal --json
    """
    call = inputs.given(example, npz, npy, safetensors, json_input, None, mask, causal, scale, softcap)
    found = plan_call(call.q, call.k, call.v, kernel=kernel, **call.options)
    if json:
        typer.echo(json_module.dumps(dataclasses.asdict(found)))
        return
    for line in str(found).splitlines():
        Console(highlight=False).print(line, markup=False, soft_wrap=True)
