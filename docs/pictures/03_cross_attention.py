"""
Queries of one text, keys of another
====================================

In cross-attention the map need not be square: three words of a translation look at five words of the original. The
vectors are made so that each finds its own.
"""

import numpy as np

import clearhead as ch

original, translation = ["le", "chat", "noir", "dort", "ici"], ["the", "black", "cat"]
k = 4.0 * np.eye(5)  # every word of the original points in a direction of its own
q = k[[0, 2, 1]] + 0.5  # and each translated word asks for the one it stands for
seen = ch.observe(q, k, k, weights=True)
picture = ch.plot_attention(seen, original, query_tokens=translation)
picture
