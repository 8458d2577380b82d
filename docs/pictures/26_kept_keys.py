"""
What a cache keeps
==================

A cache that may hold twelve tokens of thirty: the first four, on which models leave their weight, and the last
eight (StreamingLLM; Xiao et al. 2023). Needs PyTorch.
"""

import torch

import clearhead as ch
from clearhead.nn.eviction import StreamingLLM

torch.manual_seed(0)
layers = [ch.nn.MultiHeadAttention(32, 2, causal=True).eval() for _ in range(2)]
caches = [ch.nn.KVCache(keep=StreamingLLM(keep=12, sinks=4)) for _ in layers]
x = torch.randn(1, 30, 32)
with torch.no_grad():
    for place in range(30):  # a token at a time, as a model writes
        step = x[:, place : place + 1]
        for layer, cache in zip(layers, caches, strict=True):
            step = step + layer(step, cache=cache)
picture = ch.plot_kept(caches)
picture
