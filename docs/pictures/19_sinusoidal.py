"""
Positions as waves
==================

The Transformer's position encodings: each position has its own pattern of slow and fast waves, and how alike two
patterns are depends on how far apart they stand.
"""

import matplotlib.pyplot as plt

import clearhead as ch

positions = ch.sinusoidal(64, 64)  # (positions, features)
_, picture = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
picture[0].imshow(positions, cmap="RdBu_r", vmin=-1, vmax=1)
picture[0].set(title="sinusoidal(64, 64)", xlabel="feature", ylabel="position")
alike = picture[1].imshow(positions @ positions.T / 32, cmap="Blues")
picture[1].set(title="how alike two positions are", xlabel="position", ylabel="position")
alike.figure.colorbar(alike, ax=picture[1], shrink=0.8)
picture
