"""
Rotary positions
================

Queries and keys are turned by an angle that grows with their position, so a score depends on the distance alone (Su
et al. 2021). The score of two equal vectors, whatever their place: it falls, and it wavers.
"""

import numpy as np
from matplotlib.figure import Figure

import clearhead as ch

distances = np.arange(512)
picture = Figure(figsize=(7, 4), layout="constrained").subplots()
for start in (0, 1000):
    turned = ch.rotary()(np.ones((513, 64)), offset=start)      # the same vector at 513 places
    picture.plot(distances, turned[0] @ turned[:512].T / 64, label=f"from position {start:,}", linewidth=4 if not start else 1.5)
picture.set(title="rotary()", xlabel="distance", ylabel="q · k, by what it is at distance 0")
picture.legend()
