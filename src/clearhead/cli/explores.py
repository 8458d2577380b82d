"""`clearhead explore`: a call in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli import inputs
from clearhead.core.errors import ArgumentError

TEXT = "I saw the bank near the river"


def explore(
    example: inputs.ExampleName = "cat_sat",
    npz: inputs.Npz = None,
    npy: inputs.Npy = None,
    safetensors: inputs.Safetensors = None,
    json_input: inputs.JsonInput = None,
    tokens: inputs.Tokens = None,
    mask: inputs.MaskText = None,
    causal: inputs.Causal = False,
    scale: inputs.Scale = None,
    softcap: inputs.Softcap = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model in place of arrays: minilm, or one that lies on this machine.", metavar="NAME"),
    ] = None,
    text: Annotated[str | None, typer.Option(help="For --model: the text that it reads.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the page as one file that works offline; serve nothing.", metavar="FILE")
    ] = None,
    port: Annotated[int, typer.Option(help="The port; the next free one where it is taken.", min=0, max=65535)] = 8707,
    host: Annotated[str, typer.Option(help="The address to serve at; this machine's own.")] = "127.0.0.1",
    run_code: Annotated[
        bool | None,
        typer.Option(
            "--code/--no-code",
            help="Let the page check functions that are pasted there. Unless said, its own switch decides, on this "
            "machine alone.",
        ),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    r"""Explore a call in the browser: hover, edit, walk, compare. Every number is the library's own.

    \b
    Examples:
      clearhead explore
      clearhead explore it_animal --no-browser
      clearhead explore --model minilm --text "I saw the bank near the river"
      clearhead explore --npz call.npz --causal --save page.html
    """
    # the server and its views are imported by who opens the page
    from clearhead.explorer.opening import Explorer
    from clearhead.explorer.server import Server

    subject: Any
    if model is not None or text is not None:
        beside = {"--npz": npz, "--npy": npy, "--safetensors": safetensors, "--json-input": json_input, "--mask": mask}
        named = [name for name, value in beside.items() if value]
        if named:
            raise ArgumentError("--model", f"is given beside {named[0]}, which is for arrays: the model has its own")
        subject = _model(model or "minilm", text or TEXT)
    else:
        from clearhead.explorer.scene import scene_of

        call = inputs.given(example, npz, npy, safetensors, json_input, tokens, mask, causal, scale, softcap)
        names: dict[str, Any] = {"tokens": call.tokens, "query_tokens": call.query_tokens}
        subject = scene_of(call.q, call.k, call.v, name=call.name, **names, **call.options)
    if save is not None:
        try:
            Explorer(subject).save(save)
        except OSError as reason:
            raise ArgumentError("--save", f"is {save.name!r}, which cannot be written: {reason.strerror}") from None
        typer.echo(f"{save} holds the whole page; open it in a browser.")
        return
    try:
        server = Server(subject, host, port, run_code=run_code)
    except OSError as reason:
        raise ArgumentError("--host", f"is {host!r}, where nothing can be served: {reason.strerror}") from None
    if host not in ("127.0.0.1", "::1", "localhost"):
        typer.echo(f"Warning: whoever can reach {host} and has this address can see the page.", err=True)
        if run_code:
            typer.echo("Warning: and can run code on this machine, since --code was given.", err=True)
    typer.echo(f"{server.url}  (Ctrl-C ends it)")
    if not no_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()


def _model(name: str, text: str) -> Any:
    """A trained model that reads a text, and others when the page asks for them."""
    from clearhead.explorer.model import Model
    from clearhead.integrations.local_models import load
    from clearhead.watching import meaning

    loaded = load(name)

    def read(given: str) -> Any:
        return meaning.watched(loaded, given, {"keep": True})[0]

    return Model(loaded.name, read(text), text=text, read=read)
