"""
Longformer's pattern
====================

A window to both sides, and one token that sees all and is seen by all (Beltagy et al. 2020).
"""

import clearhead as ch

mask = ch.window(2, 2) | ch.global_tokens([0])
picture = ch.plot_mask(mask, 24)
picture
