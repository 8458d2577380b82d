"""
Attention in the plane
======================

One query, three keys: how far each key points the query's way, the weights that the softmax makes of it, and the
values, each as long as its weight says, laid tip to tail.
"""

import clearhead as ch
from clearhead.textbook import EXAMPLES

it = EXAMPLES["it_animal"]
picture = ch.plot_geometry(it.q, it.k, it.v, tokens=it.tokens, query_tokens=it.query_tokens)
picture
