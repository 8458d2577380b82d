"""
ALiBi: far is less
==================

A penalty that grows with distance is added to the scores, steeper in some heads than in others (Press et al. 2021).
Here is the third head of eight.
"""

import clearhead as ch

picture = ch.plot_bias(ch.alibi(8), 24, heads=8, head=2)
picture
