"""Keras 3 on its JAX and PyTorch back ends: `keras.layers.MultiHeadAttention` by this library's kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from clearhead.calls import attention, observe
from clearhead.core.array_masks import lets
from clearhead.core.arrays import Array
from clearhead.core.errors import ArgumentError
from clearhead.core.masks import causal

__all__ = ["use"]

BACK_ENDS = ("jax", "torch")


def use(model: Any) -> int:
    """Let every MultiHeadAttention of a model, or one such layer, attend by `clearhead.attention`; how many there are.

    >>> import keras  # doctest: +SKIP
    >>> model = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8)  # doctest: +SKIP
    >>> use(model)  # doctest: +SKIP
    1

    The environment variable KERAS_BACKEND is "jax" or "torch" before Keras is first imported, which is why the example
    is not run where it stands; `tests/test_keras.py` runs its like.
    Weights that are asked for (`return_attention_scores=True`) are those before dropout. A query that may attend to
    nothing gives 0, and not the mean of all values. While weights are dropped in training, Keras's own steps run.
    """
    keras: Any = importlib.import_module("keras")  # which imports the back end that the environment names
    if keras.backend.backend() not in BACK_ENDS:
        raise ArgumentError(
            "model", f"runs on Keras's back end {keras.backend.backend()!r}, expected {' or '.join(BACK_ENDS)}"
        )
    if not isinstance(model, keras.layers.Layer):
        raise ArgumentError("model", f"is a {type(model).__name__}, expected a Keras model or layer")
    found = 0
    for layer in _layers(model):
        if isinstance(layer, keras.layers.MultiHeadAttention):
            layer._compute_attention = partial(_attend, layer)
            found += 1
    if not found:
        raise ArgumentError("model", f"is a {type(model).__name__} without any keras.layers.MultiHeadAttention")
    return found


def _layers(model: Any) -> Iterator[Any]:
    """A layer and those inside it."""
    yield from model._flatten_layers()


def _attend(
    layer: Any,
    query: Array,
    key: Array,
    value: Array,
    attention_mask: Array | None = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> tuple[Array, Array | None]:
    """What Keras lets a layer do its own way: queries (B, T, N, D), keys and values alike."""
    keras: Any = sys.modules["keras"]
    if (training and layer._dropout > 0.0) or len(query.shape) != 4:  # attention over several axes is Keras's own
        own = type(layer)._compute_attention
        more = {"use_causal_mask": True} if use_causal_mask else {}
        return own(layer, query, key, value, attention_mask, training, return_attention_scores, **more)
    q, k, v = (keras.ops.swapaxes(a, 1, 2) for a in (query, key, value))
    mask = None
    if attention_mask is not None:
        allowed = keras.ops.cast(attention_mask, "bool")
        mask = lets(allowed if len(allowed.shape) == 4 else keras.ops.expand_dims(allowed, 1))  # (B, T, S)
    elif use_causal_mask:
        mask = causal(align="start")
    scale = float(layer._inverse_sqrt_key_dim)
    if not return_attention_scores:
        return keras.ops.swapaxes(attention(q, k, v, mask=mask, scale=scale), 1, 2), None
    seen = observe(q, k, v, mask=mask, scale=scale, weights=True)
    return keras.ops.swapaxes(seen.output, 1, 2), seen.weights
