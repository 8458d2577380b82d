"""An attention map in the terminal: a row for each query, a column for each key, weights as shades."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType
from rich.text import Text

from clearhead.core.grid import bins
from clearhead.explain.render.terminal import visible

SHADES = " ░▒▓█"
# names take no more than this share of the line
NAMES = 0.35


def attention_map(
    weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], width: int
) -> Iterator[RenderableType]:
    """The lines of a map of weights (queries, keys); where keys do not fit they are pooled, and that is said.

    >>> for line in attention_map(np.array([[1.0, 0.0], [0.25, 0.75]]), ["the", "bank"], ["the", "bank"], 40):
    ...     print(line)
             0  1
    0 the   ██
    1 bank  ░░ ▓▓
    darkest 1.00; columns are keys by number
    """
    names = [f"{place} {visible(name)}" for place, name in enumerate(queries)]
    left = min(max(map(cell_len, names), default=0), max(int(width * NAMES), 4)) + 2
    cell = max(len(str(len(keys) - 1)), 2) + 1
    most = max((width - left) // cell, 1)
    across, down = bins(len(keys), most), [range(i, i + 1) for i in range(len(queries))]
    pooled = len(across) < len(keys)
    if pooled and len(queries) == len(keys):  # a sequence on itself keeps its diagonal
        down = bins(len(queries), len(across))
    cells = np.array([[weights[np.ix_(rows, columns)].mean() for columns in across] for rows in down])
    largest = float(cells.max(initial=0.0))
    yield Text(" " * left + "".join(f"{columns[0]:>{cell - 1}} " for columns in across).rstrip(), style="dim")
    for rows, line in zip(down, cells, strict=True):
        shades = [SHADES[int(w / largest * (len(SHADES) - 1) + 0.5)] if largest else " " for w in line]
        row = "".join((shade * 2).rjust(cell - 1) + " " for shade in shades).rstrip()
        yield Text((set_cell_size(names[rows[0]], left - 2) + "  " + row).rstrip())
    what = (
        f"the mean of up to {len(down[0])} × {len(across[0])} weights a cell"
        if pooled
        else "columns are keys by number"
    )
    yield Text(f"darkest {largest:.2f}; {what}", style="dim", overflow="fold")
