"""What the views of one call ask for: what it is, one query's numbers, one pair, every operation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Where
from clearhead.explain.row import Row
from clearhead.explain.walk import Operation
from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.scene import Scene

SHOWN = 2048  # numbers of q, k or v that can be changed one by one
MOST_WALKED = 20_000  # operations of a walk, of all queries
WORDS = 12  # of a step's sentence


@route("/about")
def about(scene: Scene, params: Params) -> Any:
    """What is explored, in names and sizes."""
    scene = scene.edited(params)
    first = scene.trace(0).row
    return {
        "name": scene.name,
        "tokens": scene.tokens,
        "query_tokens": scene.query_tokens,
        "heads": scene.heads,
        "shapes": {name: getattr(scene, name).shape for name in ("q", "k", "v")},
        **{name: getattr(scene, name) if getattr(scene, name).size <= SHOWN else None for name in ("q", "k", "v")},
        "mask": None if scene.options.get("mask") is None else repr(scene.options["mask"]),
        "scale": first.scale,
        "softcap": scene.options.get("softcap"),
        "formula": scene.trace(0).page(1).formula,
        "given": given(scene),
        "options": spelled_options(scene),
        "python": python(scene),
    }


@route("/row")
def row(scene: Scene, params: Params) -> Any:
    """Every number of one query, in the order they come to be."""
    scene = scene.edited(params)
    found = scene.trace(whole(params, "query", scene.queries), whole(params, "head", scene.heads)).row
    numbers = {field.name: getattr(found, field.name) for field in fields(found)}
    numbers["contributions"] = np.array([found.contribution(j) for j in range(found.keys)])
    return {name: value for name, value in numbers.items() if value is not None}


@route("/cell")
def cell(scene: Scene, params: Params) -> Any:
    """One pair with its whole computation, in the words and figures of `trace`."""
    scene = scene.edited(params)
    steps = scene.trace(whole(params, "query", scene.queries), whole(params, "head", scene.heads))
    found = steps.cell(whole(params, "key", scene.keys))
    return {field.name: getattr(found, field.name) for field in fields(found)}


@route("/walk")
def walked(scene: Scene, params: Params) -> Any:
    """Every single operation of one head, query after query."""
    scene = scene.edited(params)
    head = whole(params, "head", scene.heads)
    a_query = scene.keys * (scene.q.shape[-1] + scene.v.shape[-1] + 4)
    if a_query * scene.queries > MOST_WALKED:
        raise ArgumentError(
            "walk", f"would have some {a_query * scene.queries:,} steps, expected at most {MOST_WALKED:,}"
        )
    told = []
    for i in range(scene.queries):
        steps = scene.trace(i, head)
        for one, (phase, key, feature) in zip(steps.walk(), places(steps.row), strict=True):
            said = {
                "query": i,
                "phase": phase,
                "kind": one.kind,
                "sentence": brief(one, key, scene),
                "value": one.value,
            }
            more = {
                "key": key,
                "feature": feature,
                "detail": one.sentence if said["sentence"] != one.sentence else None,
            }
            told.append(said | {name: value for name, value in more.items() if value is not None})
    return told


def places(row: Row) -> Iterator[tuple[str, int | None, int | None]]:
    """For each operation of a row's walk, in its order: the phase it belongs to, its key, its feature."""
    for j in range(row.keys):
        yield from (("score", j, c) for c in range(row.features))
        yield "scale", j, None
        for phase, there in (("softcap", row.capped is not None), ("bias", row.bias is not None)):
            if there:
                yield phase, j, None
        if not row.may(j):
            yield "mask", j, None
    seen = [j for j in range(row.keys) if row.may(j)]
    if not seen and row.sink is None:
        yield "output", None, None
        return
    yield "largest", None, None
    yield from (("exponential", j, None) for j in seen)
    if row.sink is not None:
        yield "exponential", None, None
    yield from (("total", j, None) for j in seen)
    yield from (("weight", j, None) for j in seen)
    if row.kept is not None:
        yield from (("dropout", j, None) for j in seen)
    yield from (("output", j, c) for c in range(row.v.shape[-1]) for j in seen)


def brief(one: Operation, key: int | None, scene: Scene) -> str:
    """The sentence of a step in at most a dozen words; what is left out is shown beside it."""
    if len(one.sentence.split()) <= WORDS:
        return one.sentence
    if one.kind == "mask" and key is not None:
        return f"{scene.tokens[key]}: −∞, hidden by the mask."
    return "No key may be attended to: the output is 0." if one.kind == "nothing" else one.sentence


def python(scene: Scene) -> str:
    """The call that reproduces what is seen, as one would write it."""
    return f"{given(scene)}\nch.observe(q, k, v{spelled_options(scene)}, weights=True)\n"


def given(scene: Scene) -> str:
    """The lines that define q, k and v."""
    lines = ["import numpy as np", "import clearhead as ch", ""]
    for name in ("q", "k", "v"):
        array = getattr(scene, name)
        if array.size > SHOWN:
            lines.append(f"{name} = ...  # {array.shape}, as it was given")
        else:
            alone = all(len(getattr(scene, other)) == 1 for other in "qkv")
            numbers = re.sub(r"nan|inf", r"np.\g<0>", str((array[0] if alone else array).tolist()))
            lines.append(f"{name} = np.array({numbers})")
    return "\n".join(lines) + "\n"


def spelled_options(scene: Scene) -> str:
    """The options of the call, as arguments after q, k and v: `, mask=ch.causal()`."""
    return "".join(f", {name}={spelled_value(value)}" for name, value in scene.options.items())


def spelled_value(value: Any) -> str:
    """A mask, a bias, an array or a number as Python takes it; what is too long for a line is left open."""
    if isinstance(value, Where) and value.array.size <= SHOWN:
        return f"ch.where(np.array({np.asarray(value.array).tolist()}))"
    if isinstance(value, np.ndarray):
        return f"np.array({value.tolist()})" if value.size <= SHOWN else "..."
    return re.sub(r"\b([a-z]\w*)\(", r"ch.\1(", repr(value)) if "array(" not in repr(value) else "..."
