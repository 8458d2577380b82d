"""explore(): a call as a page in the browser, in a notebook, or in one file."""

from __future__ import annotations

import os
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.explain.tracing import Trace
from clearhead.explorer import (
    call_views,
    code_view,
    compare_view,
    geometry_view,
    heat_view,
    long_view,
    loops_view,
    mask_view,
    model_view,
    pooled_view,
    scaling_view,
)
from clearhead.explorer.model import Model
from clearhead.explorer.notebook import HEIGHT, colab, frame
from clearhead.explorer.pooled import Pooled, pooled_of, pooled_seen
from clearhead.explorer.saved import page
from clearhead.explorer.scene import Scene, scene_of
from clearhead.explorer.server import Server
from clearhead.watching.seen import Seen

# What each view asks for: to import one adds what it answers to
VIEWS = (
    call_views,
    code_view,
    compare_view,
    geometry_view,
    heat_view,
    long_view,
    loops_view,
    mask_view,
    model_view,
    pooled_view,
    scaling_view,
)


class Explorer:
    """The page of one call. A notebook shows it; `open()` serves it, `save(path)` writes it.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> ch.explore(q, k, v)
    Explorer of call, 7 queries over 7 keys; .open() shows it, .save('page.html') writes it
    """

    def __init__(self, subject: Scene | Model | Pooled) -> None:
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
        url = self.serve(port, run_code=run_code).url
        if browser:
            webbrowser.open(url)
        return url

    def serve(self, port: int, **options: Any) -> Server:
        """The server of this page, started where there is none yet."""
        if self.server is None:
            self.server = Server(self.subject, port=port, **options)
            threading.Thread(target=self.server.serve_forever, name="clearhead explore", daemon=True).start()
        return self.server

    def close(self) -> None:
        """End what `open` began."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def _ipython_display_(self) -> None:
        output = colab()
        if output is None:
            raise NotImplementedError  # by which IPython goes on to the page in a frame
        server = self.serve(0, proxied=True)
        output.serve_kernel_port_as_iframe(server.server_port, path=f"/{server.token}/", height=str(HEIGHT))

    def _repr_html_(self) -> str:
        return frame(page(self.subject))

    def __repr__(self) -> str:
        if isinstance(self.subject, Pooled):
            queries, keys = map(len, self.subject.known)
        else:
            scene = self.subject.scene({})
            queries, keys = scene.queries, scene.keys
        sizes = f"{queries:,} queries over {keys:,} keys"
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

    >>> import numpy as np, clearhead as ch
    >>> from clearhead.textbook import EXAMPLES
    >>> cat = EXAMPLES["cat_sat"]
    >>> ch.explore(cat.q, cat.k, cat.v, tokens=cat.tokens, mask=ch.causal())
    Explorer of call, 5 queries over 5 keys; .open() shows it, .save('page.html') writes it

    `q`, `k` and `v` are those of `attention`, and so are the options; or one value: a `Trace`; a `Seen`, every view of
    which is there where it was watched with want={"keep": True}; or an `Observed`, or one for each layer, of which what
    was observed is shown: maps, what keys received, their top keys, entropy.

    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 16))
    >>> ch.explore(ch.observe(q, k, v, map=(64, 64), received=True, top=2))
    Explorer of observed, 300 queries over 300 keys; .open() shows it, .save('page.html') writes it
    """
    if isinstance(q, Seen):
        refuse_beside("a Seen has its own", tokens=tokens, query_tokens=query_tokens, k=k, v=v, **options)
        return Explorer(of_seen(q))
    if isinstance(q, Trace):
        return Explorer(of_trace(q))
    many = isinstance(q, list | tuple) and len(q) > 0 and all(isinstance(one, Observed) for one in q)
    if isinstance(q, Observed) or many:
        refuse_beside("an Observed has none", k=k, v=v, **options)
        return Explorer(pooled_of(q, tokens, query_tokens))
    if k is None or v is None:
        kind = type(q).__name__
        expected = "expected a call's arrays, a Trace, a Seen or an Observed"
        raise ArgumentError("q", f"is a {kind} without k and v, {expected}")
    return Explorer(scene_of(q, k, v, tokens=tokens, query_tokens=query_tokens, **options))


def of_seen(seen: Seen) -> Model | Pooled:
    """What was seen of a model: as calls that can be computed anew, or where those were not kept as it was observed."""
    if len(seen) and any(call.kept is None for call in seen):
        return pooled_seen(seen)
    return Model("model", seen)


def refuse_beside(why: str, **given: Any) -> None:
    """Words, where an argument is given that what is explored has already, or cannot have."""
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(name, f"is given beside what was observed: {why}")


def of_trace(steps: Trace) -> Scene:
    """The scene of the call that a trace is of."""
    problem = steps.problem
    options = {name: getattr(problem, name) for name in ("mask", "bias", "scale", "softcap", "sinks")}
    tokens = None if steps.tokens == tuple(f"key {i}" for i in range(problem.grid.keys)) else steps.tokens
    return scene_of(problem.q, problem.k, problem.v, tokens=tokens, **options)
