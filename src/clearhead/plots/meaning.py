"""A picture of where a word looks: every head's weight on the word that settles it, and the best head's whole row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from clearhead.plots.canvas import BLUE, GREY, ORANGE, WEIGHTS, new_axes, short

if TYPE_CHECKING:
    from clearhead.watching.meaning import Look


def plot_looks(found: Sequence[Look]) -> np.ndarray:
    """Draw for each text a map, layers down and heads across, and below it what the head in its frame looks at."""
    axes = new_axes(2, len(found), width=4.6, height=3.1)
    most = max(float(look.weights.max()) for look in found) or 1.0
    image = None
    for column, look in enumerate(found):
        upper, lower = axes[0, column], axes[1, column]
        layer, head = np.unravel_index(int(look.weights.argmax()), look.weights.shape)
        image = upper.imshow(look.weights, cmap=WEIGHTS, vmin=0.0, vmax=most, aspect="auto", interpolation="nearest")
        upper.plot([head], [layer], marker="s", markersize=13, fillstyle="none", color=ORANGE, markeredgewidth=2)
        upper.set_title(f"{short(look.word, 20)} → {short(look.settles, 20)}", fontsize="medium")
        upper.set_xlabel("head")
        upper.set_xticks(range(0, look.weights.shape[1], 1 + look.weights.shape[1] // 16))
        upper.set_yticks(range(0, look.weights.shape[0], 1 + look.weights.shape[0] // 16))
        upper.set_yticklabels([str(look.text.layers[i]) for i in upper.get_yticks().astype(int)])
        if column == 0:
            upper.set_ylabel("layer")
            lower.set_ylabel("weight")
        row = look.rows[layer, head]
        words = look.text.words
        settled = [word.lower() == look.settles for word in words]
        lower.bar(range(len(words)), row, color=[ORANGE if one else BLUE for one in settled])
        step = 1 + len(words) // 24
        lower.set_xticks(range(0, len(words), step), [short(word) for word in words[::step]], rotation=45, ha="right")
        lower.set_ylim(0.0, 1.0)
        lower.axhline(1.0 / len(words), color=GREY, linestyle=":", linewidth=1)
        lower.set_title(
            f"layer {look.text.layers[layer]}, head {head}: what {short(look.word)} looks at", fontsize="small"
        )
    axes[0, 0].figure.colorbar(image, ax=list(axes[0]), label="weight", shrink=0.85)
    return axes
