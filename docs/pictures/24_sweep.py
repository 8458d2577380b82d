"""
How far from exact?
===================

Efficient variants are approximations. The more features they get the nearer they come, and the dotted line says how
fast chance alone would bring them there.
"""

import numpy as np

import clearhead as ch

q, k, v = np.random.default_rng(0).standard_normal((3, 256, 16))
found = ch.sweep([ch.performer(), ch.nystrom(), ch.linformer()], q / 2, k / 2, v, at=[8, 16, 32, 64, 128])
picture = ch.plot_sweep(found)
picture
