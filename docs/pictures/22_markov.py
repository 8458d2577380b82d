"""
Attention, step after step
==========================

Each row of weights is a step of a random walk from word to word. After a few steps it no longer matters where the
walk began: the rows become one. The scores are taken three times as large as usual, or one step would do.
"""

import numpy as np

import clearhead as ch
from clearhead.textbook import EXAMPLES

cat = EXAMPLES["cat_sat"]
weights = ch.observe(cat.q, cat.k, cat.v, scale=1.5, weights=True).weights
steps = (1, 2, 4, 8)
powers = ch.powers(weights, 8)
picture = ch.plot_heads(np.stack([powers[step - 1] for step in steps]), cat.tokens, columns=2)
for step, ax in zip(steps, picture, strict=True):
    ax.set_title(f"after {step} step" + "s" * (step > 1))
picture
