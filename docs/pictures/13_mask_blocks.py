"""
Chosen blocks
=============

A table says which blocks of keys each block of queries sees. What is not chosen is neither computed nor read.
"""

import clearhead as ch

table = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [0, 1, 1, 0, 0, 0],
    [1, 0, 1, 1, 0, 0],
    [0, 0, 0, 1, 1, 0],
    [1, 0, 1, 0, 1, 1],
]
mask = ch.blocks(table, 4)
picture = ch.plot_mask(mask, 24)
picture
