"""
Sliding window
==============

A word sees itself and the five words before it. Masks are values, joined by ``&`` (and), ``|`` (or) and ``~``
(not).
"""

import clearhead as ch

mask = ch.causal() & ch.window(5)
picture = ch.plot_mask(mask, 16)
picture
