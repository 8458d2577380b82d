"""
Causal mask
===========

A word sees itself and what came before it: what a language model needs, whose next word is not there yet.
"""

import clearhead as ch

mask = ch.causal()
picture = ch.plot_mask(mask, 16)
picture
