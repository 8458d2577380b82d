"""`clearhead explain`: a small call as a whole, and every step for one query."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.text import Text

from clearhead.cli import inputs, keypress
from clearhead.cli.overview import SMALL, Overview
from clearhead.cli.texts import explain_text
from clearhead.core.errors import ArgumentError
from clearhead.explain.layers import LayerTrace, trace_layer
from clearhead.explain.render.terminal import printed, show, terminal
from clearhead.explain.tokens import names_for
from clearhead.explain.tracing import Trace, trace


def explain(
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
    scale: inputs.Scale = None,
    temperature: inputs.Temperature = None,
    softcap: inputs.Softcap = None,
    text: Annotated[str | None, typer.Option(help="A text for a trained model to read, in place of arrays.")] = None,
    model: Annotated[
        str | None, typer.Option(help="For --text: minilm, or one that lies on this machine.", metavar="NAME_OR_FOLDER")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="For --text: one layer; the mean of all unless given.")] = None,
    keys: Annotated[int, typer.Option(min=1, help="How many keys to show where there are more.")] = 16,
    walk: Annotated[bool, typer.Option("--walk", help="One operation at a time, at a key press.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the steps to a self-contained page.", metavar="FILE")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print the formulas as LaTeX.")] = False,
    json: inputs.Json = False,
) -> None:
    r"""Show every step of attention: scores, scaling, mask, softmax, output.

    \b
    Examples:
      clearhead explain
      clearhead explain it_animal
      clearhead explain bank_river
      clearhead explain --query sat --mask "causal() & window(1)"
      clearhead explain random:3,3,3 --walk
      clearhead explain --text "I saw the bank near the river" --query bank
      clearhead explain --npz call.npz --query -1 --head 0,2 --html row.html
    """
    if text is not None:
        arrays = {"--npz": npz, "--npy": npy, "--safetensors": safetensors, "--json-input": json_input}
        kinds = {"--tokens": tokens, "--mask": mask, "--causal": causal, "--scale": scale, "--softcap": softcap}
        kinds |= {"--temperature": temperature}
        pages = {"--walk": walk, "--html": html, "--markdown": markdown, "--latex": latex}
        given = {**arrays, **kinds, **pages, example: example != "cat_sat"}
        beside = [name for name, value in given.items() if value]
        if beside:
            raise ArgumentError("--text", f"is given beside {beside[0]}, which is for arrays: the model has its own")
        explain_text(text, model or "minilm", query, layer, head, json)
        return
    for option, value in (("--model", model), ("--layer", layer)):
        if value is not None:
            raise ArgumentError(option, "is for --text, which is not given")
    call = inputs.given(example, npz, npy, safetensors, json_input, tokens, mask, causal, scale, softcap, temperature)
    queries = call.q.shape[-2] if call.q.ndim > 1 else 0
    if not queries:
        raise ArgumentError("q", f"has shape {call.q.shape}: there is no query to look at")
    wanted = call.layer.query if query is None and call.layer is not None else query
    at = inputs.chosen_query(wanted, names_for("--tokens", call.query_tokens, queries, "queries"))
    one = trace(
        call.q,
        call.k,
        call.v,
        query=at,
        tokens=call.tokens,
        query_tokens=call.query_tokens,
        head=inputs.chosen_head(head),
        **call.options,
    )
    shown: Trace | LayerTrace = one
    if call.layer is not None and head is None:  # from the beginning: where q, k and v come from
        shown = trace_layer(**call.layer.arguments, query=at, tokens=call.tokens, **call.options)
    if html is not None:
        _write(html, shown.html(keys))
    elif json:
        typer.echo(shown.json())
    elif markdown:
        typer.echo(shown.markdown(keys), nl=False)
    elif latex:
        typer.echo(shown.latex())
    elif walk:
        keypress.walk(one)
    elif isinstance(shown, LayerTrace):
        _print_layer(call, shown, keys)
    else:
        _print(call, shown, keys)


def _print_layer(call: inputs.Given, shown: LayerTrace, keys: int) -> None:
    console = Console(highlight=False)
    hint = f"clearhead explain {call.name} --head 0 shows every step of one head"
    printed(console, Group(Text(call.about), Text(), *terminal(shown.page(keys), console.width), Text(hint)))


def _print(call: inputs.Given, shown: Trace, keys: int) -> None:
    console = Console(highlight=False)
    if shown.row.keys <= SMALL and shown.problem.grid.queries <= SMALL and min(shown.row.k.shape + shown.row.v.shape):
        queries = names_for("--tokens", call.query_tokens, shown.problem.grid.queries, "queries")
        names = names_for("--tokens", call.tokens, shown.row.keys, "keys")
        coloured = console.color_system is not None and not console.no_color
        whole = Overview(call.name, call.about, queries, names, shown, coloured, console.width)
        printed(console, Group(*whole.page(), "", ""))
        console.print()
    show(shown.page(keys), console)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError("--html", f"cannot write {path}: {error.strerror or error}") from None
    typer.echo(f"wrote {path}", err=True)
