"""
Prefix language model
=====================

The question is read in both directions, the answer is written from left to right.
"""

import clearhead as ch

mask = ch.prefix(6) | ch.causal()
picture = ch.plot_mask(mask, 16)
picture
