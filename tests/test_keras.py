"""Keras 3: its MultiHeadAttention by our kernels, on each of the two back ends in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")

PROGRAM = """
import numpy as np, keras
import clearhead as ch
from clearhead.integrations.keras import use
x, y = np.random.default_rng(0).standard_normal((2, 3, 7, 8)).astype("float32")
numbers = keras.ops.convert_to_numpy
padding = np.ones((3, 7), bool); padding[1, 4:] = False
inner = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, value_dim=5, dropout=0.1)
inputs = keras.Input((7, 8))
model = keras.Model(inputs, inner(inputs, inputs, use_causal_mask=True))
options = [{}, {"use_causal_mask": True}, {"attention_mask": np.tri(7, dtype=bool)[None]}, {"value_mask": padding},
           {"use_causal_mask": True, "key_mask": padding}]
own = [numbers(inner(x, y, **option)) for option in options] + [numbers(model(x))]
scores = inner(x, y, return_attention_scores=True)
assert use(model) == 1
asked = []
original = ch.calls.attention
import clearhead.integrations.keras as module
module.attention = lambda *a, **k: asked.append(1) or original(*a, **k)
ours = [numbers(inner(x, y, **option)) for option in options] + [numbers(model(x))]
assert len(asked) == 6, asked
for got, want in zip(ours, own):
    np.testing.assert_allclose(got, want, atol=2e-6)
for got, want in zip(inner(x, y, return_attention_scores=True), scores):
    np.testing.assert_allclose(numbers(got), numbers(want), atol=2e-6)
model.compile("sgd", "mse")
before = model.evaluate(x, y, verbose=0)
model.fit(x, y, epochs=5, verbose=0)
assert model.evaluate(x, y, verbose=0) < before
try:
    use(keras.layers.Dense(3))
except ch.ArgumentError as error:
    assert "without any keras.layers.MultiHeadAttention" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.parametrize("back_end", ["jax", "torch"])
def test_a_layer_gives_the_same(back_end: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": back_end, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
