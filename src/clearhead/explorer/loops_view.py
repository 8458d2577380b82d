"""What the code view asks for beside NumPy: the formula in loops, and what each line gave in each pass."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, Subject, keep, route, spelled
from clearhead.explorer.code_view import begin, called
from clearhead.explorer.scene import Scene

MOST_PASSES = 4000  # of one line in a loop, each with its value


def loops(q, k, v, scale, allowed):  # type: ignore[no-untyped-def]  # shown as a learner writes it
    """Attention, one number at a time."""
    output = []
    for i in range(len(q)):
        scores = []
        for j in range(len(k)):
            dot = 0.0
            for c in range(len(q[i])):
                dot = dot + q[i][c] * k[j][c]
            score = scale * dot if allowed[i][j] else -math.inf
            scores.append(score)
        largest = max(scores)
        if largest == -math.inf:
            output.append([0.0] * len(v[0]))
            continue
        e = [math.exp(s - largest) for s in scores]
        total = sum(e)
        weights = [x / total for x in e]
        row = [0.0] * len(v[0])
        for j in range(len(k)):
            for c in range(len(row)):
                row[c] = row[c] + weights[j] * v[j][c]
        output.append(row)
    return output


@route("/loops")
def looped(scene: Scene, params: Params) -> Any:
    """The same in loops: each line of `loops`, and what it gave in each pass, with the counters it was at."""
    scene = scene.edited(params)
    names = called(scene, params)
    other = next((one for one in ("softcap", "bias", "sink") if names[one] is not None), None)
    if other is not None:
        raise ArgumentError(other, "is given, which the loops do not have: look at the lines of NumPy")
    work = scene.queries * scene.keys * max(scene.q.shape[-1], scene.v.shape[-1])
    if work > MOST_PASSES:
        raise ArgumentError("loops", f"would take {work:,} passes, expected at most {MOST_PASSES:,}")
    allowed = np.ones((scene.queries, scene.keys), bool) if names["allowed"] is None else names["allowed"]
    lists = [names[name].tolist() for name in "qkv"]
    source, first = inspect.getsourcelines(loops)
    passes, output = watched(bound(source), first, (*lists, names["scale"], allowed.tolist()))
    shown = [line.rstrip().split("  # type:")[0] for line in source]
    lines = [{"line": line, "passes": passes.get(i, [])} for i, line in enumerate(shown)]
    first_lines = begin(scene, params, {**names, "allowed": allowed})
    program = ["import math", "", *first_lines, "", "", *shown, "", "", "print(loops(q, k, v, scale, allowed))"]
    return {"lines": lines, "output": output, "python": "\n".join(program)}


class Bound(NamedTuple):
    """What a line binds or changes, and the counters of the loops that it is in; `counts` where it is a loop's head."""

    name: str
    counters: tuple[str, ...]
    counts: bool


def bound(source: list[str]) -> dict[int, Bound]:
    """Of each line of a function, by its number from 0: the name it binds, `x` of `x.append(…)` and `x[c] = …` too."""
    found: dict[int, Bound] = {}

    def read(body: list[ast.stmt], counters: tuple[str, ...]) -> None:
        for one in body:
            match one:
                case ast.For(target=ast.Name(id=name)):
                    found[one.lineno - 1] = Bound(name, counters, True)
                    read(one.body, (*counters, name))
                case ast.If():
                    read(one.body, counters)
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))])
                ):
                    found[one.lineno - 1] = Bound(name, counters, False)
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
                    found[one.lineno - 1] = Bound(name, counters, False)

    function = ast.parse("".join(source)).body[0]
    assert isinstance(function, ast.FunctionDef)
    read(function.body, ())
    return found


def watched(binds: Mapping[int, Bound], first: int, given: tuple[Any, ...]) -> tuple[dict[int, list[Any]], Any]:
    """`loops` run while Python tells of every line: what each gave, pass by pass; and the output."""
    found: dict[int, list[Any]] = {}
    last: list[int] = []

    def tracer(frame: types.FrameType, event: str, value: Any) -> Any:
        if frame.f_code is not loops.__code__:
            return None
        now = frame.f_lineno - first
        if last and last[0] in binds:
            one = binds[last[0]]
            if not one.counts or now == last[0] + 1:  # a loop's head that ends the loop gives nothing
                counters = {name: frame.f_locals[name] for name in one.counters}
                told = {"name": one.name, "at": counters, "value": frozen(frame.f_locals[one.name])}
                found.setdefault(last[0], []).append(told)
        last[:] = [now]
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        output = loops(*given)  # type: ignore[no-untyped-call]  # as people write it
    finally:
        sys.settrace(before)
    return found, output


def frozen(value: Any) -> Any:
    """A value as it is now: lists go on changing."""
    return [frozen(one) for one in value] if isinstance(value, list) else value


@keep
def kept(subject: Subject) -> list[str]:
    """What a saved file holds of it: the loops of every head, where they are short enough to be shown."""
    return [spelled("/loops", head=head or None) for head in range(subject.scene({}).heads)]
