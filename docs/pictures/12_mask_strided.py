"""
Strided attention
=================

The last few words, and before them every fourth: the Sparse Transformer's pattern (Child et al. 2019).
"""

import clearhead as ch

mask = ch.strided(4)
picture = ch.plot_mask(mask, 24)
picture
