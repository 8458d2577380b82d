"""`clearhead explain --text`: what a trained model attends to in a text, as a map, a row and its heads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import typer
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from clearhead.cli import inputs
from clearhead.cli.tables import bars, block, heat_map, matrix, number, side_by_side
from clearhead.core.errors import ArgumentError
from clearhead.explain.render.terminal import printed, visible

# A map of more words than this does not fit a screen; the query's row is shown all the same
MOST = 24
# As many words as a row shows, the heaviest
ROWS = 16


def explain_text(text: str, model: str, query: str | None, layer: int | None, head: str | None, as_json: bool) -> None:
    """Print how the words of a text attend to one another in a model: the mean of all heads, or the ones chosen."""
    from clearhead.integrations.local_models import load
    from clearhead.watching import meaning

    loaded = load(model)
    read, _ = meaning.read(loaded, text)
    weights, which = _chosen(read, layer, inputs.chosen_head(head))
    if query is None:
        candidates = list(read.candidates())
        at = read.candidates()[read.rarest(candidates)] if candidates else 0
    else:
        at = inputs.chosen_query(query if query in read.words else query.lower(), read.words)
    if as_json:
        found = {"model": loaded.name, "text": text, "words": list(read.words), "of": which, "query": at}
        typer.echo(json.dumps(found | {"weights": weights.astype(float).round(6).tolist()}))
        return
    console = Console(highlight=False)
    coloured = console.color_system is not None and not console.no_color
    facts = f"{visible(loaded.name)}: {len(read.layers)} layers of {read.weights.shape[1]} heads; here {which}"
    page = _page(read, weights, at, f"{facts}", coloured, console.width)
    printed(console, Group(*page))


def _chosen(read: Any, layer: int | None, head: Any) -> tuple[np.ndarray, str]:
    """One map out of all: a head, the mean of a layer's heads, or of everything."""
    weights, count = read.weights, read.weights.shape[1]
    if layer is not None and layer not in read.layers:
        raise ArgumentError("--layer", f"is {layer}, expected one of {', '.join(map(str, read.layers))}")
    if head is not None:
        if isinstance(head, tuple) or not -count <= head < count:
            raise ArgumentError("--head", f"is {head}, expected a number from 0 to {count - 1}")
        if layer is None:
            raise ArgumentError("--head", "is given without --layer: every layer has such a head")
    if layer is None:
        return weights.mean(axis=(0, 1)), "the mean of all of them"
    of_layer = weights[read.layers.index(layer)]
    if head is None:
        return of_layer.mean(axis=0), f"the mean of layer {layer}"
    return of_layer[head], f"layer {layer}, head {head % count}"


def _page(read: Any, weights: np.ndarray, at: int, facts: str, coloured: bool, width: int) -> Iterable[RenderableType]:
    word = visible(read.words[at])
    yield Rule(Text(visible(read.text), style="bold"), style="dim")
    yield Text(facts)
    yield Text()
    allowed = weights > 0  # a model that only looks back leaves the rest at exactly 0
    blocks = []
    if len(read.words) <= MOST:
        drawn = heat_map(read.words, read.words, weights, allowed, coloured, width, at)
        blocks.append(block("Attention map", "queries on rows, keys on columns", drawn, width))
    heaviest = sorted(np.argsort(-weights[at], kind="stable")[:ROWS].tolist())
    names = [read.words[j] for j in heaviest]
    row = bars(names, weights[at, heaviest].tolist(), allowed[at, heaviest].tolist(), width)
    blocks.append(block(f'What "{word}" attends to', "its row of weights", [row], width))
    blocks.append(block(f'Where "{word}" looks most', "for each word, its best head", _best(read, at, width), width))
    yield side_by_side(blocks)


def _best(read: Any, at: int, width: int) -> list[RenderableType]:
    """For each other word the head that gives it most: a mean over heads hides what one of them does."""
    row = read.weights[:, :, at]  # (layers, heads, words)
    places = [j for j, special in enumerate(read.special) if not special and j != at]
    most = {j: float(row[..., j].max()) for j in places}
    order = sorted(places, key=lambda j: -most[j])[:8]
    cells = []
    for j in order:
        layer, head = divmod(int(row[..., j].argmax()), row.shape[1])
        cells.append([number(most[j]), Text(str(read.layers[layer])), Text(str(head))])
    if not cells:
        return [Text("there is no other word", style="dim")]
    return matrix([read.words[j] for j in order], ["weight", "layer", "head"], cells, width)
