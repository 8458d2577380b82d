"""explore(): a call as a page in the browser, in a notebook, or in one file."""

from __future__ import annotations

import html
import os
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core.array_masks import where
from clearhead.core.arrays import to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.explain.tracing import Trace
from clearhead.explorer import (
    call_views,
    code_view,
    compare_view,
    geometry_view,
    long_view,
    loops_view,
    mask_view,
    model_view,
    scaling_view,
)
from clearhead.explorer.model import Model
from clearhead.explorer.saved import page
from clearhead.explorer.scene import Scene, scene_of
from clearhead.explorer.server import Server
from clearhead.watching.seen import Seen

HEIGHT = 720  # pixels of the page in a notebook
MOST_OBSERVED = 1024  # keys of weights that are explored without what they came from
# What each view asks for: to import one adds what it answers to
VIEWS = (
    call_views,
    code_view,
    compare_view,
    geometry_view,
    long_view,
    loops_view,
    mask_view,
    model_view,
    scaling_view,
)


class Explorer:
    """The page of one call. A notebook shows it; `open()` serves it, `save(path)` writes it."""

    def __init__(self, subject: Scene | Model) -> None:
        self.subject = subject
        self.server: Server | None = None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page as one file that works from disk and offline."""
        target = Path(path)
        target.write_text(page(self.subject), encoding="utf-8")
        return target

    def open(self, *, port: int = 8707, browser: bool = True, run_code: bool | None = None) -> str:
        """Serve the page from this process and open it; gives its address. `close()` ends it.

        `run_code` says whether functions that are pasted into the page may be run; unless said, a switch there decides.
        """
        if self.server is None:
            self.server = Server(self.subject, port=port, run_code=run_code)
            threading.Thread(target=self.server.serve_forever, name="clearhead explore", daemon=True).start()
        if browser:
            webbrowser.open(self.server.url)
        return self.server.url

    def close(self) -> None:
        """End what `open` began."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def _repr_html_(self) -> str:
        inside = html.escape(page(self.subject), quote=True)
        style = f"width:100%;height:{HEIGHT}px;border:0;border-radius:8px"
        allowed = 'sandbox="allow-scripts allow-downloads" allow="clipboard-write"'
        return f'<iframe title="clearhead explorer" {allowed} srcdoc="{inside}" style="{style}"></iframe>'

    def __repr__(self) -> str:
        scene = self.subject.scene({})
        sizes = f"{scene.queries:,} queries over {scene.keys:,} keys"
        return f"Explorer of {self.subject.name}, {sizes}; .open() shows it, .save('page.html') writes it"


def explore(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    **options: Any,
) -> Explorer:
    """A call as a page to look at, hover, edit and walk through; every number on it is the library's own.

    >>> import clearhead as ch
    >>> from clearhead.textbook import EXAMPLES
    >>> cat = EXAMPLES["cat_sat"]
    >>> ch.explore(cat.q, cat.k, cat.v, tokens=cat.tokens, mask=ch.causal())
    Explorer of call, 5 queries over 5 keys; .open() shows it, .save('page.html') writes it

    `q`, `k` and `v` are those of `attention`, and so are the options; or one value: a `Trace`, an `Observed` with its
    weights, or a `Seen` that was watched with want={"keep": True}.
    """
    if isinstance(q, Seen):
        return Explorer(Model("model", q))
    if isinstance(q, Trace):
        return Explorer(of_trace(q))
    if isinstance(q, Observed):
        return Explorer(of_observed(q, tokens, query_tokens))
    if k is None or v is None:
        kind = type(q).__name__
        raise ArgumentError(
            "q", f"is a {kind} without k and v, expected a call's arrays, a Trace, an Observed or a Seen"
        )
    return Explorer(scene_of(q, k, v, tokens=tokens, query_tokens=query_tokens, **options))


def of_trace(steps: Trace) -> Scene:
    """The scene of the call that a trace is of."""
    problem = steps.problem
    options = {name: getattr(problem, name) for name in ("mask", "bias", "scale", "softcap", "sinks")}
    tokens = None if steps.tokens == tuple(f"key {i}" for i in range(problem.grid.keys)) else steps.tokens
    return scene_of(problem.q, problem.k, problem.v, tokens=tokens, **options)


def of_observed(seen: Observed, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None) -> Scene:
    """The scene of weights alone: of the call that has their scores for queries, and for each key its own feature.

    A softmax takes back what it gave up to one number a row, and that is the log-sum-exp: log weight + lse are the
    scores themselves. The values are the unit vectors, so that the output of a query is its weights.
    """
    if seen.weights is None:
        raise ArgumentError("q", "is an Observed without weights: observe(q, k, v, weights=True) has them")
    weights = np.asarray(to_numpy(seen.weights), np.float64)
    lse = np.asarray(to_numpy(seen.lse), np.float64)
    if weights.shape[-1] > MOST_OBSERVED or weights.ndim < 2 or not weights.size:
        raise ArgumentError("q", f"is an Observed of {weights.shape[-1]:,} keys, expected 1 to {MOST_OBSERVED:,}")
    rows = weights.reshape(-1, *weights.shape[-3:])[0] if weights.ndim > 2 else weights[None]
    peaks = lse.reshape(-1, *lse.shape[-2:])[0] if lse.ndim > 1 else lse[None]
    allowed = rows > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(allowed, np.log(rows) + peaks[..., None], 0.0)
    own = np.broadcast_to(np.eye(rows.shape[-1]), (len(rows), rows.shape[-1], rows.shape[-1]))
    mask = None if allowed.all() else where(allowed)
    names: dict[str, Any] = {"tokens": tokens, "query_tokens": query_tokens}
    return scene_of(scores, own, own, name="observed", mask=mask, scale=1.0, **names)
