"""Which modules attend, by what they are called; and what is said of one that does and cannot be seen."""

from __future__ import annotations

import re

from torch import nn

ATTENTION = re.compile(r"(?i)attention|attn|(?<![a-z])mha(?![a-z])")
# a module's own name says that it attends where it ends in this: post_attention_layernorm does not
CALLED = re.compile(r"(?i)(^|_)(attention|attn|mha)\d*$")
PART = re.compile(r"(Norm|Dropout|Embeddings?|Bias|Output|Mask)$")


def attends(name: str, module: nn.Module) -> bool:
    """True for a module that calls itself attention, by its class or by its own name; PyTorch's small parts do not."""
    kind = type(module)
    if kind.__module__.startswith("torch.nn.") and kind is not nn.MultiheadAttention:
        return False
    if PART.search(kind.__name__):
        return False
    return bool(ATTENTION.search(kind.__name__) or CALLED.search(name.rpartition(".")[2]))


def silence(module: nn.Module, how: str) -> str:
    """Why a module that attends made no call."""
    words = f"{type(module).__name__} ran, but not by scaled_dot_product_attention: {how}"
    configs = (getattr(part, "config", None) for part in module.modules())
    way = next((getattr(config, "_attn_implementation", None) for config in configs if config is not None), None)
    if isinstance(way, str) and way != "sdpa":
        helps = (
            "where the model has it, model.set_attn_implementation('sdpa') lets it be seen; Gemma-2, GPT-OSS and "
            "others that attend through transformers' interface also take clearhead.integrations.huggingface."
            "register() and set_attn_implementation('clearhead')"
        )
        return f"{words} (attn_implementation is {way!r}; {helps})"
    return words
