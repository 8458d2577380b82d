"""
An attention map
================

Each row is a query, each column a key, and a row adds up to 1: it says how one word spreads its attention over all
of them. *cat* looks mostly at *The*.
"""

import clearhead as ch
from clearhead.textbook import EXAMPLES

cat = EXAMPLES["cat_sat"]
seen = ch.observe(cat.q, cat.k, cat.v, weights=True)
picture = ch.plot_attention(seen, cat.tokens)
picture
