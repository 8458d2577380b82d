"""
What the matrix costs
=====================

Time and memory of the formula with its matrix, and of the kernel that never builds it, measured on the machine that
built this page.
"""

import clearhead as ch

picture = ch.plot_profile(ch.profile([256, 512, 1024, 2048], heads=2))
picture
