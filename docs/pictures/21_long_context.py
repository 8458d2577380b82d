"""
Four thousand positions
=======================

The weights of a long sequence are never a matrix here: they are pooled while they are computed. Rotary positions
turn one vector with some noise: near positions are alike, and far ones now and then again.
"""

import numpy as np

import clearhead as ch

rng = np.random.default_rng(0)
q, k = (ch.rotary()(0.9 + 0.5 * rng.standard_normal((4096, 64), dtype=np.float32)) for _ in range(2))
seen = ch.observe(q, k, k, mask=ch.causal(), map=(128, 128))
picture = ch.plot_attention(seen, colours="log")
picture
