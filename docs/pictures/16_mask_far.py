"""
A mask of a hundred thousand positions
======================================

A mask is never an array: it is drawn block by block, grey where only some of a block's pairs may attend, and costs
about what it lets through.
"""

import clearhead as ch

mask = ch.causal() & (ch.window(4_000) | ch.first_tokens(1_000))
picture = ch.plot_mask(mask, 100_000)
picture
