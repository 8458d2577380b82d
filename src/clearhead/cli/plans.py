"""`clearhead plan`: which kernel would run, why not another, and what it costs."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from clearhead.cli import inputs
from clearhead.core.errors import ArgumentError, first_line
from clearhead.core.installing import brings
from clearhead.explain.render.terminal import hanging, printed
from clearhead.measure.plans import plan as plan_call

DTYPES = ("float16", "bfloat16", "float32", "float64")


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
    heads: Annotated[
        int | None, typer.Option(min=1, max=4096, help="So many heads, where the example has one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}.")] = None,
    device: Annotated[str | None, typer.Option(help="Where PyTorch would have it: cpu, cuda, cuda:1.")] = None,
    kernel: Annotated[str | None, typer.Option(help="Ask for this kernel, which then runs or refuses.")] = None,
    json: inputs.Json = False,
) -> None:
    r"""Say what a call would do: the kernel, why not another, FLOPs and bytes.

    \b
    Examples:
      clearhead plan random:4096,4096,64 --mask "window(255)"
      clearhead plan random:4096,4096,64 --heads 32 --dtype bfloat16 --device cuda
      clearhead plan --npz call.npz --causal --json
    """
    call = inputs.given(example, npz, npy, safetensors, json_input, None, mask, causal, scale, softcap)
    arrays = tuple(_as_asked(array, heads, dtype, device) for array in (call.q, call.k, call.v))
    found = plan_call(*arrays, kernel=kernel, **call.options)
    if json:
        typer.echo(json_module.dumps(dataclasses.asdict(found)))
        return
    console = Console(highlight=False)
    lines = [part for line in str(found).splitlines() for part in hanging(line, console.width, 16)]
    printed(console, Text("\n".join(lines)))


def _as_asked(array: np.ndarray, heads: int | None, dtype: str | None, device: str | None) -> Any:
    """An array with as many heads, of that type and on that device; a plan reads none of its numbers."""
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("--dtype", f"is {dtype[:60]!r}, expected one of {', '.join(DTYPES)}")
    if dtype not in (None, "bfloat16"):
        array = array.astype(dtype)
    if device is not None or dtype == "bfloat16":
        array = _tensor(array, dtype, device)
    if heads is None:
        return array
    if array.ndim != 2:
        raise ArgumentError("--heads", f"is given, and the file has its own: an array of shape {tuple(array.shape)}")
    return (
        np.broadcast_to(array, (heads, *array.shape)) if isinstance(array, np.ndarray) else array.expand(heads, -1, -1)
    )


def _tensor(array: np.ndarray, dtype: str | None, device: str | None) -> Any:
    option = "--dtype" if device is None else "--device"
    try:
        import torch
    except ImportError:
        raise ArgumentError(option, f"needs PyTorch: {brings('torch')}") from None
    try:
        return torch.from_numpy(np.array(array)).to(device, None if dtype is None else getattr(torch, dtype))
    except Exception as error:  # a device that there is not, of any of PyTorch's kinds of error
        raise ArgumentError(option, f"is {device!r}, and PyTorch says: {first_line(error)}") from None
