"""
Mechanisms side by side
=======================

The same queries, keys and values under nine mechanisms, by one scale of colours; below each name stands how far its
output is from that of full attention.
"""

import numpy as np

import clearhead as ch

q, k, v = np.random.default_rng(2).standard_normal((3, 24, 8))
mechanisms = {
    "full": None,
    "causal": ch.causal(),
    "window": ch.window(4, 4),
    "Longformer": ch.window(2, 2) | ch.global_tokens([0]),
    "strided": ch.strided(4),
    "ALiBi": ch.alibi(1),
    "rotary": ch.rotary(),
    "linear": ch.linear(),
    "Performer": ch.performer(64),
}
picture = ch.plot_comparison(ch.compare(q, k, v, mechanisms), columns=3)
picture
