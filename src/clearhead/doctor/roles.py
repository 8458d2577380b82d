"""Which parameter is what: queries, keys and values, masks, flags, weights; and what to give for the others."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.doctor.masks import LENGTHS
from clearhead.doctor.sizes import Sizes

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "h", "nheads", "number_of_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_kv", "n_kv")
REPEATS = ("n_rep", "num_key_value_groups", "n_groups", "num_groups", "groups", "group", "group_size", "repeats")
FEATURES = ("d_k", "dk", "head_dim", "d_head", "dim_head", "head_size", "key_dim", "dim_k", "depth", "d_q", "d_qk")
MODEL = ("d_model", "embed_dim", "dim", "n_embd", "hidden_size", "embed_size", "emb_size", "emb_dim", "model_dim", "d")
WIDTHS = ("d_v", "dv", "value_dim", "dim_v")

MASK = re.compile(r"mask|bias$", re.IGNORECASE)
CAUSAL = re.compile(r"^(is_|use_)?(causal|autoregressive)(_mask|_masking|_attention)?$", re.IGNORECASE)
FLAGS = re.compile(r"train|dropout|causal|return|need|output_|weights|verbose|determin|inference|cache", re.IGNORECASE)
GROUPED = re.compile(r"gqa|grouped", re.IGNORECASE)

_AROUND = (
    r"^(?:x|in|input|inputs|enc|dec)?_?(?:{})_?(?:s|states|layer|heads?|in|input|tensor|vec|vectors?|seq|matrix)?$"
)
INPUTS = {
    "q": re.compile(_AROUND.format("q|query|queries"), re.IGNORECASE),
    "k": re.compile(_AROUND.format("k|key|keys"), re.IGNORECASE),
    "v": re.compile(_AROUND.format("v|value|values|val|vals"), re.IGNORECASE),
}
ALONE = re.compile(
    r"^(x|xs|hidden_states?|hidden|inputs?|input_\w+|emb\w*|seq\w*|tokens?|h|src|feat\w*|data|z)$", re.IGNORECASE
)
MEMORY = re.compile(r"context|memory|kv|key_?value|encoder|cross|source|^src$|^y$|^x_?2$|other", re.IGNORECASE)
WEIGHT = re.compile(r"^(?:w|weights?)_?(q|k|v|o)\w*$|^(q|k|v|o)\w*?_?(?:w|weight|weights|proj|matrix)$", re.IGNORECASE)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Roles:
    """The parameters that take inputs, and which of q, k and v are one input: "", "kv" or, with one in all, "qkv"."""

    names: tuple[str, ...]
    shared: str = ""
    guessed: bool = False  # the names say nothing: the usual order is supposed
    weights: Mapping[str, str] = field(default_factory=dict)  # projections that are handed over: role → parameter


def roles_of(parameters: Mapping[str, inspect.Parameter]) -> Roles:
    """Who is who, by names, and by places where names say nothing.

    >>> roles_of(inspect.signature(lambda v, k, q, mask=None: None).parameters).names
    ('q', 'k', 'v')
    >>> roles_of(inspect.signature(lambda hidden_states, attention_mask: None).parameters).shared
    'qkv'
    """
    names = [name for name in parameters if not name.startswith("*")]
    found: dict[str, str] = {}
    for name in names:
        role = next((role for role, pattern in INPUTS.items() if pattern.match(name)), None)
        if role is not None:
            found.setdefault(role, name)
    if {"q", "k", "v"} <= found.keys():
        return Roles((found["q"], found["k"], found["v"]))
    weights = {role: name for name in names for role in [_weight(name)] if role is not None and name not in found}
    arrays = [name for name in names if _may_be_input(name, parameters[name]) and name not in weights.values()]
    if {"q", "k", "v"} <= weights.keys() and arrays:
        return Roles(tuple(arrays[:1]), "qkv", weights=weights)
    if len(arrays) >= 2 and (MEMORY.search(arrays[1]) or len(arrays) == 2) and not (_optional(parameters, arrays[1])):
        return Roles((arrays[0], arrays[1]), "kv")
    if len(arrays) >= 3 and not ALONE.match(arrays[0]):
        return Roles((arrays[0], arrays[1], arrays[2]), guessed=True)
    return Roles(tuple(arrays[:1] or names[:1]), "qkv")


def _optional(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return parameters[name].default is not inspect.Parameter.empty


def _weight(name: str) -> str | None:
    match = WEIGHT.match(name)
    return None if match is None else (match.group(1) or match.group(2)).lower()


def _may_be_input(name: str, parameter: inspect.Parameter) -> bool:
    """True for what may be an array of positions: required, and neither a mask nor a size nor a flag."""
    plain = name.lower()
    sizes = (*HEADS, *KEY_HEADS, *REPEATS, *FEATURES, *MODEL, *WIDTHS)
    other = (
        plain in sizes or MASK.search(plain) or LENGTHS.match(plain) or FLAGS.search(plain) or _POSITIONS.search(plain)
    )
    return parameter.default is parameter.empty and not (other or _scalar(plain))


_POSITIONS = re.compile(r"^pos|position|freqs|^cos$|^sin$|rotary|offset|^layer|^module$|^config$|^device$|^dtype$")


def _scalar(name: str) -> bool:
    return bool(re.search(r"scal|temperature|^p$|p_drop|eps|block|max_|window", name))


def masks_of(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """The parameters that may be a mask, the likeliest first: those for padding come last."""
    masks = [name for name in parameters if MASK.search(name) or LENGTHS.match(name)]
    names = [name for name in masks if name != causal_of(parameters)]
    return sorted(names, key=lambda name: ("pad" in name.lower(), name.lower().endswith("bias")))


def causal_of(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The parameter that is a causal flag, if there is one."""
    arrays = (None, inspect.Parameter.empty)  # "causal_mask=None" waits for an array, "causal_mask=False" is a flag
    for name, parameter in parameters.items():
        if CAUSAL.match(name) and not (name.lower().endswith("mask") and parameter.default in arrays):
            return name
    return None


def heads_of(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The parameter that says how many heads a packed input has, if there is one."""
    return next((name for name in parameters if name in HEADS and name != "h"), None)


class Off(float):
    """Dropout that drops nothing, whatever is expected: the probability 0, or a layer that is called."""

    def __call__(self, x: Any) -> Any:
        """The same."""
        return x


def filled(name: str, sizes: Sizes) -> Any:
    """What to give for a parameter that has no default, by its name; arrays are NumPy's."""
    plain = name.lower()
    numbers = (
        (HEADS, sizes.heads),
        (KEY_HEADS, sizes.heads // sizes.groups),
        (REPEATS, sizes.groups),
        (FEATURES, sizes.features),
        (WIDTHS, sizes.width),
        (("b", "batch", "batch_size", "bsz"), sizes.batch),
        (("d_model", "embed_dim", "n_embd", "hidden_size", "model_dim"), sizes.heads * sizes.features),
        (MODEL, sizes.features),
        (("t", "n", "seq_len", "length", "max_len", "context_length"), sizes.queries),
        (("block_size", "block", "chunk_size", "chunk", "tile_size", "tile", "block_k", "block_q", "bc", "br"), 4),
        (("s", "src_len", "kv_len"), sizes.keys),
        (("p", "dropout_p", "p_drop"), 0.0),
        (("start_pos", "offset", "layer_idx", "input_pos", "start"), 0),
        (("temperature",), 1.0),
    )
    for names, number in numbers:
        if plain in names:
            return number
    if "scal" in plain:
        return sizes.features**-0.5
    if plain == "module":  # Transformers' functions read these off the layer that calls them
        return types.SimpleNamespace(training=False, num_key_value_groups=sizes.groups, is_causal=False, config=None)
    if "dropout" in plain:
        return Off(0.0)
    return False if FLAGS.search(plain) else _unturned(plain, sizes)


def _unturned(name: str, sizes: Sizes) -> Any:
    """Positions that rotate nothing: angles of 0, whose cosine is 1 and whose sine is 0; None for what is unknown."""
    angles = np.zeros((sizes.batch, sizes.queries, sizes.features))
    if name == "position_embeddings":
        return (np.cos(angles), np.sin(angles))
    if name in ("cos", "sin"):
        return (np.cos if name == "cos" else np.sin)(angles[0])
    if name.startswith("freqs"):
        return np.ones((sizes.queries, sizes.features // 2), np.complex64)
    if re.search(r"position_ids|cache_position|^positions?$|^pos$", name):
        return np.zeros((sizes.batch, sizes.queries), np.int64)
    return None
