"""All layers and heads of what was seen, as one self-contained HTML file: nothing is fetched, light and dark.

Each head is a small map; the one that is chosen is shown large, with its tokens. Past 64 positions maps are pooled:
each cell is the mean of a block of weights. The script draws numbers that stand in the file; it computes no attention.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.arrays import to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import bins
from clearhead.watching.call import NEEDS, Call, of_batch
from clearhead.watching.page_parts import SCRIPT, STYLE
from clearhead.watching.record import Record
from clearhead.watching.summary import Line, line_of

# cells a side: 12 layers of 12 heads are then 1.6 MB
SIDE = 64
# maps that a page has room for
MOST_MAPS = 4096


def page(seen: Record, *, batch: int = 0, title: str = "What a model attended to") -> str:
    """The page for one batch row; watching must have kept weights, a pooled `map`, or queries and keys.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> with ch.watch(model, want={"keep": True}, tokens=["the", "bank", "closed"]) as seen:
    ...     output = model(torch.zeros(1, 3, 16))
    >>> "http" in seen.html(), "<canvas" in seen.html()
    (False, True)
    """
    if not len(seen):
        raise ArgumentError("seen", "has no calls")
    count = sum(call.shape[-3] if len(call.shape) > 2 else 1 for call in seen)
    if count > MOST_MAPS:
        raise ArgumentError(
            "seen", f"has {count:,} maps, and a page has room for {MOST_MAPS:,}: choose a step() or layer()"
        )
    many = len({call.step for call in seen}) > 1
    calls = [_plain(call, batch, f"{call.step} · {call.layer}" if many else str(call.layer)) for call in seen]
    numbers = json.dumps(calls, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    kinds = "each row is a step and a layer" if many else "each row is a layer"
    about = f"{len(seen)} calls of {len(seen.names)} modules, {count} heads: {kinds}, each column a head."
    reading = (
        "Queries go down, keys across. The stronger a cell's colour, the larger its weight, by each head's own scale."
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{about}</p><p>{reading}</p>"
        "<noscript><p>The maps are drawn by a script, which is switched off here.</p></noscript></header>"
        '<section id="heads" aria-label="All heads"></section>'
        '<section id="one" aria-live="polite"><h2 id="name"></h2><p id="facts"></p>'
        '<div id="map"><div id="down"></div><canvas id="large"></canvas><div id="across"></div></div>'
        '<p id="says"></p></section></main>'
        f'<script type="application/json" id="numbers">{numbers}</script><script>{SCRIPT}</script></body></html>\n'
    )


def _plain(call: Call, batch: int, title: str) -> dict[str, Any]:
    queries, keys = call.names(batch)
    maps = of_batch(_maps(call), batch).astype(np.float64)  # (heads, rows, columns)
    rows, columns = maps.shape[-2:]
    pooled = (rows, columns) != (len(queries), len(keys))
    down, across = math.ceil(len(queries) / rows), math.ceil(len(keys) / columns)
    heads = []
    for place, (head, one) in enumerate(zip(call.heads or range(len(maps)), maps, strict=True)):
        most = float(np.nanmax(one, initial=0.0))
        # in parts of the largest: at a long length every weight is small
        cells = np.round(np.nan_to_num(one) / (most or 1.0) * 65535).astype("<u2")
        heads.append(
            {
                "head": int(head),
                "most": most,
                "facts": _facts(line_of(call, place, batch), most),
                "data": base64.b64encode(cells.tobytes()).decode(),
            }
        )
    found = {"name": call.name or call.kind, "title": title, "rows": rows, "columns": columns, "heads": heads}
    found |= {"queries": _blocks(queries, rows), "keys": _blocks(keys, columns)}
    found["pooled"] = f"A cell is the mean of up to {down} × {across} weights." if pooled else ""
    return found


def _maps(call: Call) -> np.ndarray:
    """Weights or pooled weights (…, heads, at most 64, at most 64)."""
    small = max(call.shape[-2:]) <= SIDE
    if call.weights is not None and small:
        return to_numpy(call.weights)
    if call.map is not None and max(call.map.mean.shape[-2:]) <= SIDE:
        return to_numpy(call.map.mean)
    if call.weights is not None:
        return _pooled(to_numpy(call.weights))
    if call.kept is not None:
        kept = call.kept
        if small:
            return call.rows(range(call.shape[-2]))
        found = observe(kept.q, kept.k, kept.k[..., :1], **kept.options, map=(SIDE, SIDE)).map
        assert found is not None
        return to_numpy(found.mean)
    raise ArgumentError(
        "want", f"kept nothing of {call.name!r} that can be drawn: {NEEDS}, or want={{'map': (64, 64)}}"
    )


def _pooled(weights: np.ndarray) -> np.ndarray:
    """Means of blocks, as `observe(map=…)` has them."""
    for axis in (-1, -2):
        parts = [weights.take(block, axis).mean(axis, dtype=np.float64) for block in bins(weights.shape[axis], SIDE)]
        weights = np.stack(parts, axis)
    return weights


def _blocks(names: Sequence[str], count: int) -> list[str]:
    """What the cells of an axis are called: a token, or the first and the last of a block."""
    if count == len(names):
        return list(names)
    return [f"{names[block[0]]} … {names[block[-1]]}" for block in bins(len(names), count)]


def _facts(line: Line, most: float) -> str:
    facts = [] if line.entropy is None else [f"entropy {line.entropy:.3f} nats"]
    facts += [] if line.first is None else [f"{line.first:.1%} on the first token"]
    facts += [] if line.distance is None else [f"mean distance {line.distance:.2f}"]
    return " · ".join([*facts, f"strongest colour {most:.3g}"])
