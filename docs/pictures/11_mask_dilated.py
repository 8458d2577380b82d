"""
Dilated window
==============

Every third position, four to each side: the window reaches further for the same price.
"""

import clearhead as ch

mask = ch.dilated(3, 4, 4)
picture = ch.plot_mask(mask, 24)
picture
