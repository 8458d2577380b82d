"""
A causal attention map
======================

The same words, when none may look ahead: what a mask hides is hatched, and what is left of each row adds up to 1
again.
"""

import clearhead as ch
from clearhead.textbook import EXAMPLES

cat = EXAMPLES["cat_sat"]
seen = ch.observe(cat.q, cat.k, cat.v, mask=ch.causal(), weights=True)
picture = ch.plot_attention(seen, cat.tokens, mask=ch.causal())
picture
