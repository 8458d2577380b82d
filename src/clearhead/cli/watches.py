"""`clearhead watch`: the heads of a trained model in which a word looks at the word that settles its meaning."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from clearhead.cli import inputs
from clearhead.cli.attention_map import attention_map
from clearhead.cli.plot import ENDINGS, FORMATS, _save
from clearhead.core.errors import ArgumentError
from clearhead.explain.render.terminal import printed, visible
from clearhead.explain.tokens import bar
from clearhead.watching.tables import columns

TEXTS = ["The bank of the river", "The bank approved the loan"]


def watch(
    model: Annotated[
        str, typer.Option(help="minilm, a folder with a model and its tokenizer, or a name in Hugging Face's cache.")
    ] = "minilm",
    text: Annotated[
        list[str] | None, typer.Option(help="A text; twice or more to compare. Two about a bank unless given.")
    ] = None,
    word: Annotated[
        str | None, typer.Option(help="The word to look at; the rarest that the texts share unless given.")
    ] = None,
    to: Annotated[
        list[str] | None, typer.Option(help="What settles it, one for each text; its rarest own word unless given.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=1000, help="How many heads to show.")] = 8,
    layer: Annotated[int | None, typer.Option(min=0, help="The layer of the map; the best head's, or all.")] = None,
    head: Annotated[int | None, typer.Option(min=0, help="The head of the map; the best one, or all.")] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Also every head's entropy, first token, distance.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help=f"Draw it into a {ENDINGS} file.", metavar="FILE")] = None,
    shift: Annotated[
        Path | None, typer.Option(help="Draw where each text moves the word's vector, into a file.", metavar="FILE")
    ] = None,
    json: inputs.Json = False,
) -> None:
    r"""Show in which heads of a trained model a word looks at the word that settles its meaning, and the map.

    One text without a word gives the attention map alone.

    \b
    Examples:
      clearhead watch
      clearhead watch --text "The bank of the river" --text "The bank approved the loan"
      clearhead watch --shift bank.png
      clearhead watch --text "I saw the bank near the river" --layer 5 --head 7
      clearhead watch --model ./my-model --text "A bat flew by" --word bat --plot bat.png
    """
    for option, path in (("--plot", plot), ("--shift", shift)):
        if path is not None and path.suffix.lower() not in FORMATS:
            raise ArgumentError(option, f"is {path.name!r}, expected a name that ends in {ENDINGS}")
    from clearhead.integrations.local_models import load
    from clearhead.watching import meaning

    loaded = load(model)
    pairs = [meaning.read(loaded, one) for one in text or TEXTS]
    texts = [one for one, _ in pairs]
    if len(texts) == 1 and word is None and not to and plot is None and shift is None and not json:
        console = Console(highlight=False)
        printed(console, Group(*_map(texts[0], layer, head, console.width), *_summaries(pairs if summary else [])))
        return
    found = meaning.looks(texts, word, to or ())
    best = meaning.best_heads(found, heads)
    if plot is not None:
        _draw(found, plot)
    if shift is not None:
        _draw_shift(loaded, text or TEXTS, found[0].word, shift)
    if json:
        typer.echo(json_module.dumps(_plain(loaded.name, found, best)))
        return
    console = Console(highlight=False)
    chosen = (best[0].layer if layer is None else layer), (best[0].head if head is None else head)
    shown = [*_page(found, best, console.width)]
    for one in texts:
        shown += [Text(), *_map(one, *chosen, console.width)]
    printed(console, Group(*shown, *_summaries(pairs if summary else [])))
    for path in (plot, shift):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


def _map(text: Any, layer: int | None, head: int | None, width: int) -> list[RenderableType]:
    """The attention map of a text, by word: of one head, or the mean of those that are not chosen between."""
    layers = sorted(set(text.layers))
    if layer is not None and layer not in layers:
        raise ArgumentError("--layer", f"is {layer}, and the layers that were seen are {layers[0]} to {layers[-1]}")
    weights = text.weights[[place for place, one in enumerate(text.layers) if layer in (None, one)]].mean(0)
    if head is not None and head >= len(weights):
        raise ArgumentError("--head", f"is {head}, and there are {len(weights)} heads")
    weights = weights.mean(0) if head is None else weights[head]
    which = "all layers" if layer is None else f"layer {layer}"
    which += ", the mean of all heads" if head is None else f", head {head}"
    title = Text(f"Attention map of {which}: queries down, keys across", style="bold")
    return [title, *attention_map(weights, text.words, text.words, width)]


def _summaries(pairs: list[Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for one, seen in pairs:
        parts += [Text(f"\n{visible(one.text)}", style="bold"), seen.summary()]
    return parts


def _page(found: list[Any], best: list[Any], width: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for look in found:
        line = Text()
        for place, (name, special) in enumerate(zip(look.text.words, look.text.special, strict=True)):
            if not special:
                style = (
                    "bold cyan" if name.lower() == look.word else "bold yellow" if name.lower() == look.settles else ""
                )
                line.append(("" if place == 0 or not len(line) else " ") + visible(name), style)
        parts.append(line)
    word = visible(found[0].word)
    settled = " or ".join(visible(look.settles) for look in found)
    parts += [Text(), Text(f"How much {word} looks at {settled}, in the heads where it does most:"), Text()]
    if not any(weight for head in best for weight in head.weights):
        back = f"In no head: {word} stands before {settled}, and this model only looks back."
        return [*parts, Text(back)]
    table = columns("layer", "head")
    room = (width - 14) // len(found) - 4
    blocks = max(min(room - 8, 30), 0)
    for look in found:
        table.add_column(visible(look.settles), no_wrap=True, overflow="ellipsis", min_width=5)
    for head in best:
        cells = [f"{weight:.3f} {bar(weight, blocks)}".rstrip() for weight in head.weights]
        table.add_row(str(head.layer), str(head.head), *cells)
    return [*parts, table]


def _plain(name: str, found: list[Any], best: list[Any]) -> dict[str, Any]:
    return {
        "model": name,
        "word": found[0].word,
        "texts": [
            {
                "text": look.text.text,
                "words": list(look.text.words),
                "settles": look.settles,
                "layers": list(look.text.layers),
                "weights": look.weights.astype(float).round(6).tolist(),
            }
            for look in found
        ],
        "heads": [
            {"layer": head.layer, "head": head.head, "weights": [round(weight, 6) for weight in head.weights]}
            for head in best
        ],
    }


def _draw(found: list[Any], path: Path) -> None:
    try:
        from clearhead.plots.meaning import plot_looks

        axes = plot_looks(found)
    except ImportError as error:
        raise ArgumentError("--plot", str(error)) from None
    _saved("--plot", axes, path)


def _draw_shift(loaded: Any, texts: list[str], word: str, path: Path) -> None:
    from clearhead.watching.shifts import shift_of

    found = shift_of(loaded, texts, word)
    try:
        from clearhead.plots.shifts import plot_shift

        axes = plot_shift(found.static, found.paths, labels=found.texts, word=found.word)
    except ImportError as error:
        raise ArgumentError("--shift", str(error)) from None
    _saved("--shift", axes, path)


def _saved(option: str, axes: Any, path: Path) -> None:
    try:
        _save(axes, path, 150)
    except ArgumentError as error:
        raise ArgumentError(option, str(error).partition(": ")[2]) from None
