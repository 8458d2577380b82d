"""
Why scores are divided by √d
============================

Without the division, scores spread as the square root of the features, one key takes all the weight, and the
gradient dies. With it, nothing changes as features grow.
"""

import clearhead as ch

picture = ch.plot_scaling(ch.scaling([1, 4, 16, 64, 256, 1024]))
picture
