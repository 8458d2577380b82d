"""
T5's buckets of distances
=========================

One learnt number for each bucket of distances: near ones have a bucket each, far ones share (Raffel et al. 2020).
The table here is made up so that its buckets can be told apart.
"""

import numpy as np

import clearhead as ch

table = np.random.default_rng(0).standard_normal((32, 1))  # 32 buckets, one head
picture = ch.plot_bias(ch.relative_bias(table, max_distance=64), 64)
picture
