"""Arguments that attention has in other libraries: each is answered by the one it is here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from clearhead.core.errors import ArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])

WEIGHTS = "observe(q, k, v, weights=True).weights gives the weights"
WINDOW = "give mask=window(back), which counts the keys before a query's own"
# by their names in PyTorch, Hugging Face, JAX, FlashAttention and textbooks
ATTENTION = {
    "is_causal": "give mask=causal(); with unequal numbers PyTorch aligns the first ones, causal(align='start')",
    "causal": "give mask=causal()",
    "attn_mask": "give mask=, True where a query may attend, or bias= for one that is added to the scores",
    "attention_mask": "give mask=padding(attention_mask), 1 where a token is real",
    "key_padding_mask": "give mask=padding(~key_padding_mask), for True hides there",
    "key_mask": "give mask=padding(key_mask), 1 where a token is real",
    "valid_lens": "give mask=lengths(valid_lens)",
    "key_value_seq_lengths": "give mask=lengths(key_value_seq_lengths)",
    "dropout_p": "give dropout=(probability, seed)",
    "dropout_rate": "give dropout=(probability, seed)",
    "enable_gqa": "leave it out, for fewer heads of keys are always shared",
    "window_size": WINDOW,
    "local_window_size": WINDOW,
    "sliding_window": WINDOW,
    "window": WINDOW,
    "softmax_scale": "give scale=",
    "scaling": "give scale=",
    "logits_soft_cap": "give softcap=",
    "alibi_slopes": "give bias=alibi(heads)",
    "need_weights": WEIGHTS,
    "return_weights": WEIGHTS,
    "return_attention": WEIGHTS,
    "output_attentions": WEIGHTS,
}
# for `observe`, which gives them
OBSERVE = {name: "give weights=True" if words == WEIGHTS else words for name, words in ATTENTION.items()}


class UnknownArgument(ArgumentError, TypeError):
    """An argument of another library; a TypeError too, as an unknown argument is everywhere in Python."""


def refuse_others(function: str, others: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Refuse arguments that a function has not: in our words where it is known what is meant, else as Python does."""
    name = next((name for name in others if name in instead), None)
    if name is not None:
        raise UnknownArgument(name, f"is no argument of {function}: {instead[name]}")
    for name in others:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def closed(function: Function) -> Function:
    """The function itself, showing no place for the arguments that it takes in only to refuse them."""
    signature = inspect.signature(function)
    shown = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # which inspect reads
    return function
