"""
Rotary positions
================

Queries and keys are turned by an angle that grows with their position, so a score depends on the distance alone (Su
et al. 2021). The score of two equal vectors, whatever their place: it falls, and it wavers.
"""

import matplotlib.pyplot as plt
import numpy as np

import clearhead as ch

distances = np.arange(512)
_, picture = plt.subplots(figsize=(7, 4), layout="constrained")
for start, width in ((0, 4.0), (1000, 1.5)):
    turned = ch.rotary()(np.ones((512, 64)), offset=start)  # the same vector at 512 places
    picture.plot(distances, turned[0] @ turned.T / 64, linewidth=width, label=f"from position {start:,}")
picture.set(title="rotary()", xlabel="distance", ylabel="q · k, by what it is at distance 0")
picture.legend()
picture
