"""
BigBird's pattern
=================

A window, global tokens, and for each block of queries a few blocks at random, the same ones whenever the seed is
the same (Zaheer et al. 2020).
"""

import clearhead as ch

mask = ch.window(2, 2) | ch.global_tokens([0, 1]) | ch.random_blocks(2, count=2, seed=1)
picture = ch.plot_mask(mask, 24)
picture.set_title("window | global tokens | random blocks")
picture
