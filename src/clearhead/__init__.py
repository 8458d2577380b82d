"""Exact scaled dot-product attention that you can see through."""

from clearhead.attention import attention, gradients, observe
from clearhead.dropout import Dropout
from clearhead.errors import ArgumentError, KernelRefused
from clearhead.mask import Mask
from clearhead.masks import causal, documents, global_tokens, lengths, prefix, random_blocks, where, window
from clearhead.observe import Observed
from clearhead.partial import Partial, merge
from clearhead.plan import Plan, plan
from clearhead.positions import Linear, Yarn, alibi, relative_bias, rotary, sinusoidal
from clearhead.trace import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Dropout",
    "KernelRefused",
    "Linear",
    "Mask",
    "Observed",
    "Partial",
    "Plan",
    "Trace",
    "Yarn",
    "alibi",
    "attention",
    "causal",
    "documents",
    "global_tokens",
    "gradients",
    "lengths",
    "merge",
    "observe",
    "plan",
    "prefix",
    "random_blocks",
    "relative_bias",
    "rotary",
    "sinusoidal",
    "trace",
    "where",
    "window",
]
