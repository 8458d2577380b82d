"""Refusals: one sentence each, which names the argument, what it is and what was expected. The texts are pinned."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.formula import attention_loops

X = np.zeros((2, 3, 5, 4), np.float32)


def call(q=X, k=X, v=X, **options):
    return ch.attention(q, k, v, **options)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64)


REFUSALS = {
    "q: is a list, expected a NumPy, PyTorch, JAX or array-API array": lambda: call([[1.0]]),
    "k: has dtype int64, expected one of float16, bfloat16, float32, float64": lambda: call(k=ints(2, 3, 5, 4)),
    "q: has dtype complex64, expected one of float16, bfloat16, float32, float64": lambda: call(X + 1j),
    "q: has shape (4,), expected (…, heads, positions, features)": lambda: call(X[0, 0, 0]),
    "v: is a torch array, expected numpy as q is": lambda: call(v=torch.zeros(2, 3, 5, 4)),
    "k: has dtype float64, expected float32 as q has": lambda: call(k=X.astype(np.float64)),
    "k: has shape (5, 4) where q has (2, 3, 5, 4): only one of them has a head axis": lambda: call(k=X[0, 0]),
    "k: has 3 features (shape (2, 3, 5, 3)), expected 4 as q has": lambda: call(k=X[..., :3]),
    "v: has 2 positions (shape (2, 3, 2, 4)), expected 5 as k has": lambda: call(v=X[..., :2, :]),
    "v: has 1 heads (shape (2, 1, 5, 4)), expected 3 as k has": lambda: call(v=X[:, :1]),
    "k: has 2 heads, expected a number that divides the 3 heads of q": lambda: call(k=X[:, :2], v=X[:, :2]),
    "q, k, v: have batch axes (2,), (3,), (3,), expected equal sizes or sizes of one": lambda: call(
        k=np.zeros((3, 3, 5, 4), np.float32), v=np.zeros((3, 3, 5, 4), np.float32)
    ),
    "mask: has dtype float32, expected bool: lets(array) for 1 where a query may attend, hides(array) for 1 where it"
    " may not, bias= for what is added to scores": lambda: call(mask=np.zeros((5, 5), np.float32)),
    "mask: has dtype int64, expected bool: lets(array) for 1 where a query may attend, hides(array) for 1 where it"
    " may not": lambda: call(mask=ints(5, 5)),
    "mask: lets each query attend to what comes after it and hides what comes before, the mirror image of causal():"
    " True means may attend; give hides(mask) where True hides, or where(mask) if it is meant": (
        lambda: call(mask=np.triu(np.ones((5, 5), bool), 1))
    ),
    "lets: has -inf, expected True and False, or 1 and 0; what is added to scores goes into bias=": lambda: ch.lets(
        np.array([[0.0, -np.inf]])
    ),
    "hides: has 2, expected True and False, or 1 and 0": lambda: ch.hides(ints(2, 2) + 2),
    "hides: is a list, expected an array of True and False, or 1 and 0": lambda: ch.hides([[1]]),
    "hides: is causal(), expected an array; the opposite of a mask value is ~mask": lambda: ch.hides(ch.causal()),
    "padding: has shape (1, 1, 5), expected (batch, keys) or (keys,), 1 where a token is real": lambda: ch.padding(
        ints(1, 1, 5)
    ),
    "padding: has rows of different lengths, expected (batch, keys)": lambda: ch.padding([[1, 0], [1]]),
    "mask: window(2) is neither true nor false, as an array is not: masks are joined by & | ~, not by and, or, not": (
        lambda: ch.window(2) and ch.causal()
    ),
    "lengths: has -1, expected whole numbers of at least 0": lambda: ch.lengths([3, -1]),
    "prefix: has -2, expected whole numbers of at least 0": lambda: ch.prefix(-2),
    "indices: has -1, expected whole numbers of at least 0": lambda: ch.global_tokens([0, -1]),
    "global_tokens: has position 99, expected positions below 5: of keys there are 5": lambda: call(
        mask=ch.window(1) | ch.global_tokens([0, 99])
    ),
    "lengths: is a sparse tensor, expected whole numbers as they are: .to_dense() gives them": lambda: ch.lengths(
        torch.tensor([1, 2]).to_sparse()
    ),
    "mask: has shape (4, 4), which does not broadcast to (1, 8, 4): (batch (), heads 1, queries 8, keys 4)": (
        lambda: ch.where(np.eye(4, dtype=bool)).explain(7, 2)
    ),
    "mask: has shape (4, 4), which does not broadcast to (1, 8, 8): (batch (), heads 1, queries 8, keys 8)": (
        lambda: (ch.causal() & ch.where(np.eye(4, dtype=bool))).picture(8)
    ),
    "mask: has shape (4, 4), which does not broadcast to (1, 3, 3): (batch (), heads 1, queries 3, keys 3)": (
        lambda: (~ch.where(np.eye(4, dtype=bool))).dense(3)
    ),
    "is_causal: is no argument of attention: give mask=causal(); with unequal numbers PyTorch aligns the first ones,"
    " causal(align='start')": lambda: call(is_causal=True),
    "causal: is no argument of attention: give mask=causal()": lambda: call(causal=True),
    "attn_mask: is no argument of gradients: give mask=, True where a query may attend, or bias= for one that is added"
    " to the scores": lambda: ch.gradients(X, X, X, X, attn_mask=None),
    "key_padding_mask: is no argument of observe: give mask=padding(~key_padding_mask), for True hides there": (
        lambda: ch.observe(X, X, X, key_padding_mask=None)
    ),
    "dropout_p: is no argument of attention: give dropout=(probability, seed)": lambda: call(dropout_p=0.1),
    "enable_gqa: is no argument of attention: leave it out, for fewer heads of keys are always shared": (
        lambda: call(enable_gqa=True)
    ),
    "need_weights: is no argument of observe: give weights=True": lambda: ch.observe(X, X, X, need_weights=True),
    "mask: is a str, expected a boolean array or a mask value": lambda: call(mask="causal"),
    "mask: has shape (5, 7), which does not broadcast to (2, 3, 5, 5): (batch (2,), heads 3, queries 5, keys 5)": (
        lambda: call(mask=np.ones((5, 7), bool))
    ),
    "mask: has shape (4, 2, 3, 5, 5), which does not broadcast to (2, 3, 5, 5):"
    " (batch (2,), heads 3, queries 5, keys 5)": lambda: call(mask=np.ones((4, 2, 3, 5, 5), bool)),
    "lengths: has shape (3,), expected one number or the batch shape (2,)"
    " (axes before heads, positions and features are batch)": lambda: call(mask=ch.lengths([1, 2, 3])),
    "offset: has shape (3,), expected one number or the batch shape (2,)"
    " (axes before heads, positions and features are batch)": lambda: call(mask=~ch.causal(offset=[1, 2, 3])),
    "batch: is not given, and where(array(2, 1, 1, 3)) has batch rows: give batch=(2,)": (
        lambda: ch.padding([[1, 1, 0], [1, 0, 0]]).explain(0, 1)
    ),
    "batch: is not given, and causal() & lengths([2, 1]) has batch rows: give batch=(2,)": (
        lambda: (ch.causal() & ch.lengths([2, 1])).picture(2)
    ),
    "batch: is not given, and documents([[0, 1], [0, 0]]) has batch rows: give batch=(2,)": (
        lambda: ch.documents([[0, 1], [0, 0]]).dense(2)
    ),
    "mask: has shape (2, 1, 1, 3), which does not broadcast to (3, 1, 3, 3):"
    " (batch (3,), heads 1, queries 3, keys 3)": lambda: ch.padding([[1, 1, 0], [1, 0, 0]]).picture(3, batch=(3,)),
    "lengths: is 2.5, expected a whole number or an array of them": lambda: ch.lengths(2.5),
    "align: is 'middle', expected 'end' or 'start'": lambda: ch.causal(align="middle"),
    "back: is -1, expected a whole number of at least 0": lambda: ch.window(-1),
    "block: is 0, expected a whole number of at least 1": lambda: ch.random_blocks(0, count=1),
    "documents: has keys ids of shape (4,), expected 5 along the last axis": lambda: call(mask=ch.documents([0] * 4)),
    "documents: needs ids for the queries: 5 queries, 3 keys": lambda: call(
        k=X[:, :, :3], v=X[:, :, :3], mask=ch.documents([0, 0, 1])
    ),
    "documents: is 3, expected one id for each key": lambda: ch.documents(3),
    "query, key: (9, 2) lies outside 4 queries × 4 keys": lambda: ch.causal().explain(9, 2, queries=4, keys=4),
    "bias: is a str, expected a floating-point array or a bias value": lambda: call(bias="alibi"),
    "bias: has dtype bool, expected one of float16, bfloat16, float32, float64": lambda: call(bias=np.ones(5, bool)),
    "bias: has shape (6,), which does not broadcast to (2, 3, 5, 5): (batch (2,), heads 3, queries 5, keys 5)": (
        lambda: call(bias=np.zeros(6))
    ),
    "alibi: is for 8 heads, but the queries have 3": lambda: call(bias=ch.alibi(8)),
    "relative_bias: is for 2 heads, but the queries have 3": lambda: call(bias=ch.relative_bias(np.zeros((32, 2)))),
    "table: has shape (32,), expected (buckets, heads), buckets at least 4": lambda: ch.relative_bias(np.zeros(32)),
    "scale: is nan, expected a finite number": lambda: call(scale=float("nan")),
    "scale: is 'big', expected a finite number": lambda: call(scale="big"),
    "softcap: is 0.0, expected a finite number above 0": lambda: call(softcap=0.0),
    "sinks: has shape (2,), expected (3,): one logit for each query head": lambda: call(sinks=np.zeros(2)),
    "dropout: is 0.1, expected (probability, seed)": lambda: call(dropout=0.1),
    "dropout: has probability 1.0, expected a number from 0 up to, not with, 1": lambda: call(dropout=(1.0, 1)),
    "dropout: has seed tensor(1.5000), expected a whole number from 0 to 2**64 - 1": lambda: call(
        dropout=(0.1, torch.tensor(1.5))
    ),
    "dropout: has seed -1, expected a whole number from 0 to 2**64 - 1": lambda: call(dropout=(0.1, -1)),
    (
        "kernel: is 'fast', expected one of 'compiled', 'vendor', 'hopper', 'triton', 'tiled', 'dense', "
        "or None to have one chosen"
    ): (lambda: call(kernel="fast")),
    "count: is 0, expected a whole number from 1 to 4096, or None for all cores": lambda: ch.set_threads(0),
    "top: is 0, expected a whole number of at least 1": lambda: ch.observe(X, X, X, top=0),
    "received: is 0, expected True or a number of last queries, at least 1": lambda: ch.observe(X, X, X, received=0),
    "map: is 64, expected (rows, columns), each at least 1": lambda: ch.observe(X, X, X, map=64),
    "queries: has position 5, expected -5 to 4": lambda: ch.observe(X, X, X, queries=[5]),
    "queries: is [0.5], expected the positions of queries as whole numbers": lambda: ch.observe(X, X, X, queries=[0.5]),
    "weights: is 1, expected True or False": lambda: ch.observe(X, X, X, weights=1),
    "dlse: has shape (2, 3, 5, 4), expected (2, 3, 5) as the log-sum-exp": lambda: ch.gradients(X, X, X, X, dlse=X),
    "dout: has shape (2, 3, 5, 3), expected (2, 3, 5, 4) as the output": lambda: ch.gradients(X, X, X, X[..., :3]),
    "dout: is numpy of dtype float64, expected numpy of float32 as the output": lambda: ch.gradients(
        X, X, X, X.astype(float)
    ),
    "partials: is empty, expected at least one Partial": lambda: ch.merge(),
    "partials[0]: is a ndarray, expected a Partial": lambda: ch.merge(X),
    "partials[0].lse: has shape (2, 3), expected (2, 3, 5) as its output has rows": lambda: ch.merge(
        ch.Partial(X, X[:, :, 0, 0])
    ),
    "partials[1].output: has shape (3, 5, 4), expected (2, 3, 5, 4)": lambda: ch.merge(
        ch.Partial(X, X[..., 0]), ch.Partial(X[0], X[0, ..., 0])
    ),
    "layout: is 'pairs', expected 'half' or 'interleaved'": lambda: ch.rotary(layout="pairs"),
    "dimension: is 3, expected an even number of at least 2": lambda: ch.rotary(dimension=3),
    "x: has 4 features, of which 6 cannot be turned in pairs": lambda: ch.rotary(dimension=6)(X),
    "q: has shape (3, 5, 4), expected (positions, features)": lambda: attention_loops(X[0], X[0], X[0]),
    "q: is a masked array, expected a plain one: give its numbers, .data, and mask= what it hides": (
        lambda: attention_loops(np.ma.array(X[0, 0]), X[0, 0], X[0, 0])
    ),
    "k: has 3 features, expected 4 as q has": lambda: attention_loops(X[0, 0], X[0, 0, :, :3], X[0, 0]),
    "v: has 2 positions, expected 5 as k has": lambda: attention_loops(X[0, 0], X[0, 0], X[0, 0, :2]),
    "d: is 5, expected an even number": lambda: ch.sinusoidal(3, 5),
    "heads: is 0, expected a whole number of at least 1": lambda: ch.alibi(0),
}


@pytest.mark.parametrize(
    ("text", "mistake"), REFUSALS.items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_mistake_is_refused_in_one_sentence(text: str, mistake) -> None:
    with pytest.raises(ch.ArgumentError) as refusal:
        mistake()
    assert str(refusal.value) == text
    assert isinstance(refusal.value, ValueError)


def test_a_kernel_asked_for_by_name_refuses_in_words() -> None:
    bias = torch.zeros(5, 5, requires_grad=True)
    x = torch.zeros(2, 3, 5, 4)
    with pytest.raises(ch.KernelRefused) as refusal:
        ch.attention(x, x, x, bias=bias, kernel="tiled")
    assert str(refusal.value) == "kernel 'tiled' refused: it gives no gradient for a bias; `dense` does"
    assert refusal.value.kernel == "tiled"


@pytest.mark.parametrize("call", [ch.attention, ch.observe, ch.plan, ch.trace, ch.shuffle_weights])
def test_arguments_of_other_libraries_are_answered_first(call: Any) -> None:
    q, options = np.ones((3, 4)), {"query": 0} if call is ch.trace else {}
    with pytest.raises(TypeError, match=r"is_causal: is no argument of \w+: give mask=causal"):
        call(q, q, q, foo=1, is_causal=True, **options)
    with pytest.raises(TypeError, match="'foo'"):
        call(q, q, q, foo=1, **options)
    assert "others" not in inspect.signature(call).parameters


LOOPS = np.ones((5, 2))


@pytest.mark.parametrize(
    ("arrays", "mask", "words"),
    [
        ((3, 3, 3), None, "q: is no table of numbers"),
        ((None, LOOPS, LOOPS), None, "q: is no table of numbers"),
        ((LOOPS * 1j, LOOPS, LOOPS), None, "q: has shape"),
        ((LOOPS, LOOPS, LOOPS), ch.causal(), "mask: is no table of numbers"),
        ((LOOPS, LOOPS, LOOPS), np.ones((3, 3)), r"mask: has shape \(3, 3\), expected \(5, 5\)"),
    ],
)
def test_loops_refuse_in_words(arrays: Any, mask: Any, words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=words):
        attention_loops(*arrays, mask=mask)


def test_loops_without_features_attend_equally() -> None:
    none = np.ones((2, 0))
    assert attention_loops(none, none, np.eye(2)).output == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("seed: is -1, expected a whole number", lambda: ch.scaling([4], seed=-1)),
        ("lengths: is 16, expected a list", lambda: ch.profile(lengths=16)),
        ("memory: is 'x', expected", lambda: ch.profile([16], memory="x")),
        ("memory: is -1, expected", lambda: ch.profile([16], memory=-1)),
        ("lets: has dtype float8_e4m3fn, expected", lambda: ch.lets(torch.ones(2, 2).to(torch.float8_e4m3fn))),
    ],
)
def test_measurements_refuse_in_words(words: str, refused: Any) -> None:
    with pytest.raises(ch.ArgumentError, match=words):
        refused()
