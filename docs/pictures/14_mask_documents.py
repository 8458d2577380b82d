"""
Documents in one sequence
=========================

Short texts packed into one sequence: each word sees the words of its own text that came before it, and no padding
is computed.
"""

import clearhead as ch

mask = ch.documents([0] * 5 + [1] * 8 + [2] * 3 + [3] * 8) & ch.causal()
picture = ch.plot_mask(mask, 24)
picture
