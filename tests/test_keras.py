"""Keras 3: its MultiHeadAttention by our kernels, on each of the two back ends in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")

PROGRAM = """
import numpy as np, keras
from budget import Expected, check
import clearhead as ch
from clearhead.integrations.keras import use
x, y = np.random.default_rng(0).standard_normal((2, 3, 7, 8)).astype("float32")
numbers = keras.ops.convert_to_numpy
padding = np.ones((3, 7), bool); padding[1, 4:] = False
inner = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, value_dim=5, dropout=0.1)
inputs = keras.Input((7, 8))
model = keras.Model(inputs, inner(inputs, inputs, use_causal_mask=True))
wide = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, value_dim=5, dropout=0.1, dtype="float64")
wide.build((3, 7, 8), (3, 7, 8))
wide.set_weights(inner.get_weights())
assert all(np.array_equal(numbers(a), numbers(b)) for a, b in zip(wide.weights, inner.weights, strict=True))
x64, y64 = x.astype("float64"), y.astype("float64")

def held(got, plain, exact):
    "Within the error that `budget.py` derives from what Keras gives in float32 and in float64."
    got, plain, exact = map(numbers, (got, plain, exact))
    assert (got.dtype, exact.dtype) == ("float32", "float64")
    check(got, Expected(exact, plain, float(np.finfo("float32").eps)), 7, "")

options = [{}, {"use_causal_mask": True}, {"attention_mask": np.tri(7, dtype=bool)[None]}, {"value_mask": padding},
           {"use_causal_mask": True, "key_mask": padding}]
own = [numbers(inner(x, y, **option)) for option in options] + [numbers(model(x))]
exact = [wide(x64, y64, **option) for option in options] + [wide(x64, x64, use_causal_mask=True)]
scores, exact_scores = (a(*b, return_attention_scores=True) for a, b in ((inner, (x, y)), (wide, (x64, y64))))
assert use(model) == 1
asked = []
original = ch.calls.attention
import clearhead.integrations.keras as module
module.attention = lambda *a, **k: asked.append(1) or original(*a, **k)
ours = [numbers(inner(x, y, **option)) for option in options] + [numbers(model(x))]
assert len(asked) == 6, asked
for found in zip(ours, own, exact, strict=True):
    held(*found)
for found in zip(inner(x, y, return_attention_scores=True), scores, exact_scores, strict=True):
    held(*found)
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
    environment = {**os.environ, "KERAS_BACKEND": back_end, "CUDA_VISIBLE_DEVICES": "", "JAX_ENABLE_X64": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
