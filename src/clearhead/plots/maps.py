"""Maps: weights, heads, masks, biases and entropies; queries down, keys across, and hidden cells hatched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from clearhead.calls import observe
from clearhead.core.arrays import Array, is_array, plain_numbers, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Grid, part
from clearhead.core.mask import Mask, as_mask
from clearhead.core.observations import Observed
from clearhead.core.positions import Bias, as_bias
from clearhead.explain.tokens import names_for
from clearhead.plots.canvas import SIGNED, WEIGHTS, hatched, label_positions, new_axes
from clearhead.watching.call import NEEDS, Call
from clearhead.watching.record import Record
from clearhead.watching.summary import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colours = Literal["auto", "linear", "log", "sink"]
# A key that takes more than this share of the weight, where there are at least this many to choose from, hides
# everything else on a linear scale
SINK, CHOICE = 0.5, 4
# A long call is drawn in so many blocks a side
MOST_CELLS = 128
# A mask is drawn pair by pair up to this many positions, and block by block beyond
WHOLE = 512


def plot_attention(
    weights: Array | Observed | Call,
    tokens: Sequence[str] | None = None,
    *,
    query_tokens: Sequence[str] | None = None,
    head: int | tuple[int, ...] | None = None,
    mask: Mask | Array | None = None,
    colours: Colours = "auto",
    ax: Axes | None = None,
) -> Axes:
    """Draw the weights of one head as a map: query on rows, key on columns.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 8))
    >>> ax = ch.plot_attention(ch.observe(q, k, v, mask=ch.causal(), weights=True))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('key', 'query')

    `weights` is an array (…, T, S), or an `Observed` that has `weights`, or a pooled `map`, or a call that was watched,
    `seen[0]`, which brings its tokens. Cells that `mask` hides are
    hatched; without a mask, those that are exactly 0, as a softmax gives nowhere else. Where one key takes most of the
    weight, colours="sink" spends them on the others, and says so; "log" is a logarithmic scale; "auto" decides.
    """
    matrix, pooled = _weights(weights)
    matrix = _one(matrix, head)
    if isinstance(weights, Call):
        tokens, query_tokens = _named(weights, tokens, query_tokens, head)
    hidden = _hidden(matrix, None if pooled else mask)
    ax = new_axes()[0, 0] if ax is None else ax
    queries, keys = matrix.shape
    _draw(ax, matrix, hidden, colours)
    names = None if pooled else names_for("tokens", tokens, keys, "keys") if tokens is not None else None
    rows = names_for("query_tokens", query_tokens, queries, "queries") if query_tokens is not None else None
    if rows is None and names is not None and queries == keys:
        rows = names
    label_positions(ax, names or keys, rows or queries)
    if pooled:
        ax.set_xlabel("key (blocks)")
        ax.set_ylabel("query (blocks)")
    return ax


def _weights(given: Array | Observed | Call) -> tuple[np.ndarray, bool]:
    if isinstance(given, Call):
        return _of_call(given)
    if isinstance(given, Observed):
        if given.weights is not None:
            return to_numpy(given.weights), False
        if given.map is not None:
            return to_numpy(given.map.mean), True
        raise ArgumentError("weights", "is an Observed with neither weights nor a map: ask observe for one of them")
    if not is_array(given) or given.ndim < 2:
        raise ArgumentError("weights", "is no array of (…, queries, keys) and no Observed")
    return plain_numbers("weights", given), False


def _of_call(call: Call) -> tuple[np.ndarray, bool]:
    """What a call's map is drawn from: its weights, those that its queries and keys give, or a pooled map."""
    if call.weights is None and call.map is not None:
        return to_numpy(call.map.mean), True
    if call.weights is not None or (call.kept is not None and max(call.shape[-2:]) <= WHOLE):
        return call.rows(range(call.shape[-2])), False
    if call.kept is not None:
        kept = call.kept
        pooled = observe(kept.q, kept.k, kept.k[..., :1], **kept.options, map=(MOST_CELLS, MOST_CELLS)).map
        assert pooled is not None
        return to_numpy(pooled.mean), True
    raise ArgumentError("weights", f"is a call with nothing to draw: {NEEDS}, or want={{'map': (64, 64)}}")


def _named(
    call: Call, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None, head: Any = None
) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """The tokens of a call where none are given: those of the batch row that is drawn."""
    lead = call.shape[:-3]
    batch = int(np.ravel_multi_index(head[:-1], lead)) if lead and isinstance(head, tuple) and len(head) > 1 else 0
    queries, keys = call.names(batch)
    if tokens is None and call.keys_named is not None:
        tokens = keys
    if query_tokens is None and call.queries_named is not None:
        query_tokens = queries
    return tokens, query_tokens


def _one(matrix: np.ndarray, head: int | tuple[int, ...] | None) -> np.ndarray:
    matrix = matrix.astype(np.float64)
    lead = matrix.shape[:-2]
    if head is None:
        if math.prod(lead) != 1:
            raise ArgumentError("head", f"is not given, and there are {lead} of them; plot_heads draws them all")
        head = (0,) * len(lead)
    index = head if isinstance(head, tuple) else (head,)
    index = (*(0,) * (len(lead) - len(index)), *index) if math.prod(lead[:-1]) == 1 else index
    if len(index) != len(lead) or not all(-n <= i < n for i, n in zip(index, lead, strict=True)):
        raise ArgumentError("head", f"is {head!r}, expected an index for each of {lead}")
    return matrix[index]


def _hidden(matrix: np.ndarray, mask: Mask | Array | None) -> np.ndarray:
    if mask is None:
        return matrix == 0
    if isinstance(mask, Mask):
        return ~mask.dense(*matrix.shape)[0]
    allowed = plain_numbers("mask", mask)
    if allowed.dtype != bool:
        raise ArgumentError("mask", f"has dtype {allowed.dtype}, expected bool, True where a query may attend")
    return ~np.broadcast_to(allowed[(0,) * (allowed.ndim - 2)], matrix.shape)


def _draw(ax: Axes, matrix: np.ndarray, hidden: np.ndarray, colours: str, *, most: float | None = None) -> Any:
    """The map, its colour bar, and a hatched ground that shows through where cells are hidden."""
    from matplotlib.colors import LogNorm, Normalize

    if colours not in ("auto", "linear", "log", "sink"):
        raise ArgumentError("colours", f"is {colours!r}, expected 'auto', 'linear', 'log' or 'sink'")
    shown = np.ma.masked_array(matrix, hidden | ~np.isfinite(matrix))
    received = np.nan_to_num(matrix)[(~hidden).sum(-1) >= CHOICE].sum(0)
    sink = int(received.argmax()) if received.size else 0
    rest = np.delete(shown, sink, axis=1)
    sinking = rest.count() > 0 and received[sink] > SINK * received.sum()
    if colours == "auto":
        colours = "sink" if sinking and most is None else "linear"
    largest = float(shown.max()) if shown.count() else 1.0
    extend, label = "neither", "weight"
    norm: Normalize
    if colours == "log" and shown.count() and largest > 0:
        positive = shown.compressed()[shown.compressed() > 0]
        norm = LogNorm(max(float(positive.min()), largest * 1e-6), largest)
    elif colours == "sink" and rest.count():
        norm, extend = Normalize(0.0, float(rest.max()) or 1.0), "max"
        label = f"weight (key {sink} takes {received[sink] / max(received.sum(), 1e-300):.0%}, off the scale)"
    else:
        norm = Normalize(0.0, (largest if most is None else most) or 1.0)
    hatched(ax)
    image = ax.imshow(shown, cmap=WEIGHTS, norm=norm, aspect="equal", interpolation="nearest", zorder=1)
    if most is None:
        ax.figure.colorbar(image, ax=ax, label=label, extend=extend, shrink=0.85)
    return image


def plot_heads(
    weights: Array | Observed | Call,
    tokens: Sequence[str] | None = None,
    *,
    mask: Mask | Array | None = None,
    columns: int | None = None,
    axes: Any = None,
) -> np.ndarray:
    """Draw every head of one batch row, side by side on one colour scale; the axes come back as an array.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 5, 8))
    >>> ch.plot_heads(ch.observe(q, k, v, weights=True)).shape
    (4,)

    `weights` is what `plot_attention` takes; a call that was watched, `seen[0]`, brings its tokens.
    """
    matrix, pooled = _weights(weights)
    if matrix.ndim < 3 or math.prod(matrix.shape[:-3]) != 1:
        raise ArgumentError("weights", f"has shape {matrix.shape}, expected (heads, queries, keys)")
    query_tokens: Sequence[str] | None = None
    if isinstance(weights, Call):
        tokens, query_tokens = _named(weights, tokens, None)
    numbers = weights.heads if isinstance(weights, Call) and weights.heads else range(matrix.shape[-3])
    heads = matrix.astype(np.float64)[(0,) * (matrix.ndim - 3)]
    count = len(heads)
    across = columns or min(count, math.ceil(math.sqrt(count)))
    if axes is None:
        down = math.ceil(count / across)
        axes = new_axes(down, across, width=2.8, height=2.6)
        for spare in axes.ravel()[count:]:
            spare.remove()
    axes = np.asanyarray(axes).ravel()[:count]
    if len(axes) < count:
        raise ArgumentError("axes", f"has {len(axes)}, expected one for each of {count} heads")
    names = None if tokens is None or pooled else names_for("tokens", tokens, heads.shape[-1], "keys")
    down_named = None if query_tokens is None or pooled else tuple(query_tokens)
    image = None
    for i, ax, one in zip(numbers, axes, heads, strict=True):
        image = _draw(ax, one, _hidden(one, None if pooled else mask), "linear", most=float(np.nanmax(heads)))
        square = names if one.shape[0] == one.shape[1] else None
        rows = down_named or square or one.shape[0]
        label_positions(ax, names or one.shape[1], rows, room=14)
        ax.set_title(f"head {i}", fontsize="medium")
        ax.label_outer()
    axes[0].figure.colorbar(image, ax=list(axes), label="weight", shrink=0.7)
    return axes


def plot_mask(
    mask: Mask | Array,
    queries: int,
    keys: int | None = None,
    *,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw which query may attend to which key; past 512 positions block by block, in grey where only some may.

    >>> import clearhead as ch
    >>> ch.plot_mask(ch.causal() & ch.window(3), 12).get_title()
    'causal() & window(3)'
    """
    from matplotlib.colors import Normalize

    mask = as_mask("mask", mask)
    keys = queries if keys is None else keys
    mask.check(Grid((), 1, queries, keys))
    ax = new_axes()[0, 0] if ax is None else ax
    if max(queries, keys) <= WHOLE:
        seen = mask.dense(queries, keys)[0].astype(float)
        names = None if tokens is None else names_for("tokens", tokens, keys, "keys")
        label_positions(ax, names or keys, names if names is not None and queries == keys else queries)
    else:
        signs = {"■": 1.0, "·": 0.0, "▒": 0.5}
        picture = mask.picture(queries, keys, side=128)
        seen = np.array([[signs[sign] for sign in line.split()] for line in picture.splitlines()])
        ax.set_xlabel(f"key (blocks of {math.ceil(keys / seen.shape[1]):,})")
        ax.set_ylabel(f"query (blocks of {math.ceil(queries / seen.shape[0]):,})")
    hatched(ax)
    shown = np.ma.masked_equal(seen, 0.0)
    ax.imshow(shown, cmap=WEIGHTS, norm=Normalize(0, 1.3), interpolation="nearest", aspect="equal", zorder=1)
    ax.set_title(repr(mask), fontsize="medium")
    return ax


def plot_bias(
    bias: Bias | Array,
    queries: int,
    keys: int | None = None,
    *,
    heads: int = 1,
    head: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw what a bias adds to the scores of one head: blue below zero, red above.

    >>> import clearhead as ch
    >>> ch.plot_bias(ch.alibi(8), 12, heads=8, head=2).get_title()
    'alibi(8), head 2'
    """
    from matplotlib.colors import Normalize

    bias = as_bias(bias)
    grid = Grid((), heads, queries, queries if keys is None else keys)
    bias.check(grid)
    if not -heads <= head < heads:
        raise ArgumentError("head", f"is {head}, expected {-heads} to {heads - 1}")
    tile = to_numpy(bias.tile(range(grid.queries), range(grid.keys), grid))
    added = np.broadcast_to(part(tile, (head % heads,)), (grid.queries, grid.keys)).astype(np.float64)
    finite = np.abs(added[np.isfinite(added)])
    most = float(finite.max()) if finite.size else 0.0
    ax = new_axes()[0, 0] if ax is None else ax
    norm = Normalize(-(most or 1.0), most or 1.0)
    image = ax.imshow(added, cmap=SIGNED, norm=norm, interpolation="nearest", aspect="equal")
    ax.figure.colorbar(image, ax=ax, label="added to the score", shrink=0.85)
    label_positions(ax, grid.keys, grid.queries)
    ax.set_title(f"{bias!r}" + (f", head {head}" if heads > 1 else ""), fontsize="medium")
    return ax


def plot_entropy(
    entropy: Array | Sequence[Observed] | Record, *, keys: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the mean entropy of each layer's heads: dark where a head looks at few keys.

    >>> import numpy as np, clearhead as ch
    >>> ch.plot_entropy(np.random.default_rng(0).random((4, 8))).get_ylabel()
    'layer'

    `entropy` is (layers, heads) in nats, or one `Observed` for each layer, whose queries and batch rows are averaged,
    or what `watch` has seen, where padding is left out. With `keys` the scale ends at ln(keys), the entropy of looking
    at all alike.
    """
    layers: list[str] | None = None
    if isinstance(entropy, Record):
        table, layers = _entropies(entropy)
    elif is_array(entropy):
        table = plain_numbers("entropy", entropy).astype(np.float64)
    else:
        if not entropy or not all(isinstance(one, Observed) for one in entropy):
            raise ArgumentError("entropy", "is no (layers, heads) array and no list of Observed")
        rows = [to_numpy(one.entropy) for one in entropy]
        heads = [row[None] if row.ndim == 1 else row for row in rows]
        table = np.stack([row.mean(axis=(*range(row.ndim - 2), -1)) for row in heads])
    if table.ndim != 2 or not table.size:
        raise ArgumentError("entropy", f"has shape {table.shape}, expected (layers, heads)")
    ax = new_axes()[0, 0] if ax is None else ax
    most = math.log(keys) if keys else None
    image = ax.imshow(table, cmap=f"{WEIGHTS}_r", vmin=0.0, vmax=most, interpolation="nearest", aspect="equal")
    ax.figure.colorbar(image, ax=ax, label="entropy in nats", shrink=0.85)
    label_positions(ax, table.shape[1], layers or table.shape[0])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return ax


def _entropies(seen: Record) -> tuple[np.ndarray, list[str]]:
    """The mean entropy of each head of each module, NaN where there is none, and the numbers of their layers."""
    lines = summary(seen).lines
    names = list(dict.fromkeys(line.name for line in lines))
    heads = sorted({line.head for line in lines})
    table = np.full((len(names), len(heads)), np.nan)
    for line in lines:
        table[names.index(line.name), heads.index(line.head)] = np.nan if line.entropy is None else line.entropy
    return table, [str(next(line.layer for line in lines if line.name == name)) for name in names]
