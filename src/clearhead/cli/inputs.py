"""What every command is given: an embedded example or files, tokens, a query, a head, and the options of the call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from clearhead.cli import files
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask
from clearhead.core.masks import causal
from clearhead.core.spelling import read_mask
from clearhead.explain.layers import trace_layer
from clearhead.explain.tokens import position_of
from clearhead.textbook.examples import EXAMPLES
from clearhead.textbook.layers import LAYERS, LayerExample

NAMES = (*EXAMPLES, *LAYERS)

# random:T,S,D is for looking, not for benchmarks
MOST_NUMBERS = 2**26

ExampleName = Annotated[
    str, typer.Argument(metavar="EXAMPLE", help=f"An embedded example: {', '.join(NAMES)}, or random:T,S,D.")
]
Npz = Annotated[Path | None, typer.Option(help="Arrays q, k and v, and maybe tokens, of a .npz file.", metavar="FILE")]
Npy = Annotated[
    tuple[Path, Path, Path] | None, typer.Option(help="Three .npy files: queries, keys, values.", metavar="Q K V")
]
Safetensors = Annotated[Path | None, typer.Option(help="Tensors q, k and v of a .safetensors file.", metavar="FILE")]
JsonInput = Annotated[
    Path | None, typer.Option(help='{"q": …, "k": …, "v": …, "tokens": …} in a file; - is stdin.', metavar="FILE")
]
Tokens = Annotated[
    str | None, typer.Option(help='Names of the keys: "a,b,c", "a b c", or @file with one a line.', metavar="NAMES")
]
Query = Annotated[
    str | None, typer.Option(help="The query to look at, its token or position.", metavar="INDEX_OR_TOKEN")
]
Head = Annotated[str | None, typer.Option(help="The head, or batch,…,head.", metavar="INDEX")]
MaskText = Annotated[str | None, typer.Option("--mask", help='As in Python: "causal() & window(128)".', metavar="MASK")]
Causal = Annotated[bool, typer.Option("--causal", help="Let each token see only itself and those before.")]
Scale = Annotated[float | None, typer.Option(help="What scores are multiplied with; 1/√D unless given.")]
Temperature = Annotated[float | None, typer.Option(help="What the scale is divided by; above 1 weights even out.")]
Softcap = Annotated[float | None, typer.Option(help="c · tanh(score / c), before the mask.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, eq=False)
class Given:
    """The arrays of a call, what they are called, and its options."""

    name: str
    about: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    tokens: tuple[str, ...] | None
    query_tokens: tuple[str, ...] | None
    options: dict[str, Any]
    layer: LayerExample | None = None

    @property
    def mask(self) -> Mask | None:
        """The mask of the call."""
        return self.options.get("mask")


def given(
    example: str,
    npz: Path | None,
    npy: tuple[Path, Path, Path] | None,
    safetensors: Path | None,
    json_input: Path | None,
    tokens: str | None,
    mask: str | None,
    causally: bool,
    scale: float | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
) -> Given:
    """One call out of all the ways it may be given; only one of them at a time."""
    ways = {"--npz": npz, "--npy": npy, "--safetensors": safetensors, "--json-input": json_input}
    named = [name for name, value in ways.items() if value is not None]
    if len(named) > 1:
        raise ArgumentError(named[1], f"is given beside {named[0]}, expected one of them")
    found: dict[str, Any]
    about = ""
    if npz is not None:
        name, found = npz.name, files.read_npz("--npz", npz)
    elif npy is not None:
        name, found = npy[0].name, files.read_npy("--npy", npy)
    elif safetensors is not None:
        name, found = safetensors.name, files.read_safetensors("--safetensors", safetensors)
    elif json_input is not None:
        name, found = json_input.name, files.read_json("--json-input", json_input)
    else:
        name, about, found = _embedded(example)
    names = found.get("tokens") if tokens is None else files.read_tokens("--tokens", tokens)
    queries = found.get("query_tokens")
    if queries is None and names is not None and found["q"].shape[-2:-1] == found["k"].shape[-2:-1]:
        queries = names
    options: dict[str, Any] = {"mask": _mask(mask, causally), "scale": scale, "softcap": softcap}
    options["temperature"] = temperature
    return Given(
        name,
        about,
        found["q"],
        found["k"],
        found["v"],
        _named("--tokens", names),
        _named("--tokens", queries),
        {option: value for option, value in options.items() if value is not None},
        found.get("layer"),
    )


def _named(option: str, names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, np.ndarray):
        if names.ndim != 1 or names.dtype.kind not in "US":
            raise ArgumentError(option, "in the file are no list of words")
        names = [n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in names]
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(option, "are no list of words")
    return tuple(name.encode("utf-8", "replace").decode("utf-8") for name in names)


def _mask(text: str | None, causally: bool) -> Mask | None:
    spelled = None if text is None else read_mask(text, "--mask")
    if not causally:
        return spelled
    return causal() if spelled is None else causal() & spelled


def _embedded(name: str) -> tuple[str, str, dict[str, Any]]:
    if name in EXAMPLES:
        chosen = EXAMPLES[name]
        found = {"q": chosen.q, "k": chosen.k, "v": chosen.v}
        return name, chosen.about, found | {"tokens": chosen.tokens, "query_tokens": chosen.query_tokens}
    if name in LAYERS:
        layer = LAYERS[name]
        problem = trace_layer(**layer.arguments, query=0).heads[0].problem  # q, k and v of all heads
        found = {"q": problem.q, "k": problem.k, "v": problem.v}
        return name, layer.about, found | {"tokens": layer.tokens, "query_tokens": layer.tokens, "layer": layer}
    match = re.fullmatch(r"random:(\d{1,9}),(\d{1,9}),(\d{1,9})", name)
    if match is None:
        raise ArgumentError("EXAMPLE", f"is {name[:60]!r}, expected one of {', '.join(NAMES)}, random:T,S,D")
    queries, keys, features = map(int, match.groups())
    if min(queries, keys, features) < 1 or (queries + 2 * keys) * features > MOST_NUMBERS:
        raise ArgumentError(
            "EXAMPLE", f"is {name!r}, expected sizes of at least 1, and {MOST_NUMBERS:,} numbers in all"
        )
    draw = np.random.default_rng(0).standard_normal
    found = {"q": draw((queries, features)), "k": draw((keys, features)), "v": draw((keys, features))}
    return name, "numbers from a normal distribution, seed 0", found


def chosen_query(query: str | None, tokens: Sequence[str]) -> int:
    """The position of a query given by its token or position; the second one unless given."""
    if query is None:
        return min(1, len(tokens) - 1)
    whole = query not in tokens and re.fullmatch(r"-?\d{1,9}", query)
    return position_of("--query", int(query) if whole else query, tokens)


def chosen_head(head: str | None) -> tuple[int, ...] | int | None:
    """A head, or batch,…,head."""
    if head is None:
        return None
    if not re.fullmatch(r"-?\d{1,9}(,-?\d{1,9})*", head):
        raise ArgumentError("--head", f"is {head[:60]!r}, expected a number, or batch,…,head")
    numbers = tuple(map(int, head.split(",")))
    return numbers[0] if len(numbers) == 1 else numbers
