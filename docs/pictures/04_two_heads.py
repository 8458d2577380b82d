"""
Two heads, one sentence
=======================

The four features of the shared example dealt out to two heads of two features each: on one scale of colours, so
that heads can be compared.
"""

import clearhead as ch
from clearhead.textbook import EXAMPLES

two = EXAMPLES["cat_sat_2_heads"]
seen = ch.observe(two.q, two.k, two.v, weights=True)
picture = ch.plot_heads(seen, two.tokens)
picture
