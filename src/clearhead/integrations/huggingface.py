"""Hugging Face transformers: `attn_implementation="clearhead"`, and weights or observations without eager attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

try:
    import torch
    from torch import Tensor, nn
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError:
    from clearhead.core.installing import brings

    raise ImportError(f"Hugging Face models need transformers and PyTorch: {brings('huggingface')}") from None

from clearhead.calls import attention, observe
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.distributed.current import current
from clearhead.integrations.huggingface_split import split_inside
from clearhead.integrations.promised import Promised, mask_for
from clearhead.watching import mode
from clearhead.watching.given import Given
from clearhead.watching.wants import OWN, Wanted, wanted

__all__ = ["register"]

# where transformers 5 says that a run is to give attentions; private there, so looked for and not relied on
collector: Any = None
with suppress(ImportError, AttributeError):
    collector = import_module("transformers.utils.output_capturing")._active_collector


def register(name: str = "clearhead", *, want: Mapping[str, Any] | None = None) -> None:
    """Make `attn_implementation=name` known to transformers: its attention function, and the masks that go with it.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> register()
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=1, vocab_size=11, attn_implementation="clearhead")
    >>> output = LlamaModel(config).eval()(torch.tensor([[1, 2, 3]]), output_attentions=True)
    >>> output.attentions[0].shape
    torch.Size([1, 2, 3, 3])

    With `output_attentions=True` a model gives its weights, as eager attention does, and otherwise builds none. With
    `want`, the options of `observe`, it gives an `Observed` for each layer in their place, in O(n) memory:

    >>> register("clearhead-top", want={"top": 2, "received": True})
    >>> model = LlamaModel(config).eval()
    >>> model.set_attn_implementation("clearhead-top")
    >>> model(torch.tensor([[1, 2, 3]]), output_attentions=True).attentions[0].top.indices.shape
    torch.Size([1, 2, 3, 2])

    Softcaps, sliding windows, sinks, learned biases, grouped heads, and static, dynamic and sliding caches are taken as
    the model gives them. Weights are those before dropout, and no gradient flows through them. Registering a name again
    replaces what it means.

    A model that attends without transformers' interface, as BLOOM and MPT do, is refused by name when it first uses its
    mask. Falcon, GPT-J and others look the name up in a table of their own, and raise a KeyError when they are built.
    """
    if not isinstance(name, str) or not name or name in ("eager", "sdpa", "flex_attention"):
        raise ArgumentError("name", f"is {name!r}, expected a name that transformers does not use itself")
    chosen = None if want is None else wanted(want)
    if chosen is not None and want is not None and any(own in want for own in OWN if own != "output"):
        raise ArgumentError("want", "has an option of watch; here it takes those of observe")
    AttentionInterface.register(name, _forward(chosen))
    # without it padding and windows would vanish in silence: transformers would make no mask
    AttentionMaskInterface.register(name, mask_for)
    split_inside()


def _forward(want: Wanted | None) -> Callable[..., tuple[Tensor, Any]]:
    def clearhead_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """(output (B, L, H, D), weights, observations or None) of one attention layer."""
        given = read(module, query, key, value, attention_mask, scaling, options)
        evicting = getattr(key, "evicting", None)
        if evicting is not None:
            # its cache keeps some tokens only, and is told what was attended to
            return evicting.attend(given, _asked(module, options)).transpose(1, 2).contiguous(), None
        beside = dropout > 0 and module.training
        asked = _asked(module, options)
        found: Observed | None = None
        how = None
        if asked:
            how = {"weights": True} if want is None else want.for_length(given.queries)
        split = getattr(key, "split_over", None)
        if split is not None and split.here is not None:
            # of its cache every rank holds a part
            output, found = split.attend(given, how)
            return output.transpose(1, 2).contiguous(), _shown(found, want, query.dtype)
        if how is not None:
            with torch.no_grad():
                quiet = given.detached()
                found = observe(quiet.q, quiet.k, quiet.v, **quiet.options, **how)

        def plain() -> Tensor:
            seed = int(torch.randint(2**31, ())) if beside else 0
            dropped = (dropout, seed) if beside else None
            ranks = current() if split is None else split.ranks
            if ranks is not None and ranks.placement is not None:
                raise ArgumentError(
                    "placement", "is given to parallel(…), and this model makes its masks for whole inputs"
                )
            attend = attention if ranks is None else ranks.attend
            return attend(given.q, given.k, given.v, **given.options, dropout=dropped)

        tensors = (given.q, given.k, given.v, given.bias, given.sinks)
        grads = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in tensors)
        watched = not torch.compiler.is_compiling() and bool(mode.active.recorders)
        if found is not None and not beside and not grads and not watched:
            output = found.output
        else:
            output = plain()  # which a watch sees by itself
        if split is not None:
            split.keep()
        return output.transpose(1, 2).contiguous(), _shown(found, want, query.dtype)

    return clearhead_attention


def read(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> Given:
    """A call of transformers in the terms of `observe`.

    The mask is a promise of `promised.py`, or a boolean one, True where a query may attend, or an additive one that the
    model's user made, or None; `is_causal` then aligns the first query with the first key, and one query sees all. A
    module that does not say `is_causal` and has no mask sees everything, as in eager attention.
    """
    causal: Any = options.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    if isinstance(mask, Promised):
        causal, mask = (mask.causal, mask.allowed) if mask.made is None else (False, mask.made)
    boolean = mask is not None and mask.dtype == torch.bool
    if mask is not None and mask.shape[-1] > key.shape[-2]:
        mask = mask[..., : key.shape[-2]]
    bias = None if mask is None or boolean else mask
    causal = bool(causal) and mask is None and query.shape[-2] > 1
    given = Given(query, key, value, causal=causal, mask=mask if boolean else None, bias=bias, scale=scaling)
    return given.with_transformers(options)


def _asked(module: nn.Module, options: dict[str, Any]) -> bool:
    """Does this run give attentions?"""
    if options.get("output_attentions"):
        return True
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    collected = None if collector is None else collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def _shown(found: Observed | None, want: Wanted | None, dtype: torch.dtype) -> Any:
    if found is None:
        return None
    if want is None:
        return None if found.weights is None else found.weights.to(dtype)
    return found if want.output else replace(found, output=found.output[..., :0].clone())
