"""PyTorch modules over `clearhead.attention`: attention layers, caches, blocks, and a small GPT.

attend = clearhead.nn.MultiHeadAttention(512, 8, kv_heads=2, positions=clearhead.rotary(), causal=True)
output = attend(x)                                    # x (batch, positions, 512)
"""

try:
    import torch as _torch
except ImportError as missing:
    from clearhead.core.installing import brings

    raise ImportError(
        f"clearhead.nn needs PyTorch, which is not installed: {brings('torch')}", name="torch"
    ) from missing

from clearhead.nn import eviction, functional
from clearhead.nn.block import FeedForward, TransformerBlock
from clearhead.nn.cache import KVCache
from clearhead.nn.differential import DifferentialAttention
from clearhead.nn.gpt import GPT, GPTConfig
from clearhead.nn.latent import LatentAttention
from clearhead.nn.multihead import MultiHeadAttention
from clearhead.nn.single import ScaledDotProductAttention
from clearhead.torch_bridge import traced as _traced

__all__ = [
    "GPT",
    "DifferentialAttention",
    "FeedForward",
    "GPTConfig",
    "KVCache",
    "LatentAttention",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "TransformerBlock",
    "eviction",
    "functional",
]

# importing `traced` has told PyTorch about the operators: programs that were exported with them can be loaded
del _torch, _traced
