"""Only numbers in memory reach a kernel: every kind of tensor is right or refused in words, and none crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensor_kinds import KINDS, USES, negated, problem
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import clearhead as ch
import clearhead.nn

# kinds that hold their numbers, in memory or behind it: they are right in every place
RIGHT = (
    "plain", "parameter", "negative", "zeros without memory", "transposed", "lazy copy", "inference", "marked",
    "sparse", "sparse rows", "mkldnn", "functional",
)  # fmt: skip
# where other kinds are taken; everywhere else they are refused
CALLS = {"attention", "tiled", "dense", "plan", "sdpa"}
TAKEN = {
    "wrapped": CALLS | {"q alone", "k alone", "mask", "bias", "sinks", "sdpa mask", "sdpa bias"},
    "deaf": {"plan"},
    "fake": CALLS,
    "meta": CALLS,
    "causal bias": {"mask", "observe mask", "sdpa mask", "sdpa bias"},
    "upper left bias": {"mask", "observe mask", "sdpa mask", "sdpa bias"},
}
# gradients that PyTorch refuses by itself before they come to us
THEIRS = (
    "sparse rows", "mkldnn", "nested", "jagged", "quantized", "complex", "uninitialised", "causal bias",
    "upper left bias", "meta",
)  # fmt: skip


def right(kind: str, use: str, got: str) -> bool:
    """Whether what became of a kind of tensor in a place is what should: right, or refused in one sentence."""
    if use == "backward" and kind in THEIRS:
        return got.startswith("raised RuntimeError")
    if kind in RIGHT or use in TAKEN.get(kind, ()):
        return got == ("shape" if kind in ("fake", "meta") and use != "plan" else "right")
    return got.startswith("refused: ") and len(got.splitlines()[0]) == len(got) < 250


def test_every_kind_of_tensor_is_right_or_refused_in_words() -> None:
    # in a process of its own, as one of them might end it; and in one, as starting takes longer than all of them
    script = Path(__file__).with_name("tensor_kinds.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    assert {(kind, use) for kind, uses in found.items() for use in uses} == set(product(KINDS, USES))
    wrong = [f"{kind}, {use}: {got}" for kind in KINDS for use, got in found[kind].items() if not right(kind, use, got)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kernel", [None, "compiled", "tiled", "dense"])
def test_gradients_flow_through_the_negative_bit(kernel: str | None) -> None:
    x = problem()
    plain = [x[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks")]
    turned = [leaf.detach().clone().requires_grad_() for leaf in plain]
    odd = [negated(leaf) for leaf in turned]
    assert all(tensor.is_neg() for tensor in odd)
    for tensors in (plain, odd):
        q, k, v, sinks = tensors
        ch.attention(q, k, v, sinks=sinks, mask=x["mask"], kernel=kernel).backward(negated(x["dout"]))
    for one, other in zip(plain, turned, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("made", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(5, 7), (5, 5), (5, 1), (1, 7)])
@pytest.mark.parametrize("call", ["sdpa", "attention", "observe", "gradients", "compiled function"])
def test_causal_bias_means_what_pytorch_means(made: Any, sizes: tuple[int, int], call: str) -> None:
    queries, keys = sizes
    q, k, v = (torch.randn(2, 3, n, 4, generator=torch.Generator().manual_seed(n)) for n in (queries, keys, keys))
    with (
        pytest.warns(UserWarning, match="Lower right")
        if queries > keys and made is causal_lower_right
        else nullcontext()
    ):
        bias = made(queries, keys)
    mine = clearhead.nn.functional.scaled_dot_product_attention
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    if call == "gradients":
        dout = torch.ones_like(theirs)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        torch.nn.functional.scaled_dot_product_attention(*leaves, bias).backward(dout)
        for got, leaf in zip(ch.gradients(q, k, v, dout, mask=bias), leaves, strict=True):
            torch.testing.assert_close(got, leaf.grad)
        return
    got = {
        "sdpa": lambda: mine(q, k, v, bias),
        "attention": lambda: ch.attention(q, k, v, mask=bias),
        "observe": lambda: ch.observe(q, k, v, mask=bias).output,
        "compiled function": lambda: torch.compile(mine, backend="eager")(q, k, v, bias),
    }[call]()
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, theirs)


def test_causal_bias_of_other_sizes_is_refused() -> None:
    x = problem()
    with pytest.raises(ch.ArgumentError, match=r"mask: is a CausalBias of sizes \(4, 7\), expected \(5, 7\)"):
        ch.attention(x["q"], x["k"], x["v"], mask=causal_upper_left(4, 7))
    with pytest.raises(ch.ArgumentError, match="attn_mask: is a CausalBias of sizes"):
        clearhead.nn.functional.scaled_dot_product_attention(x["q"], x["k"], x["v"], causal_lower_right(5, 6))
    with pytest.raises(ch.ArgumentError, match="together with is_causal"):
        clearhead.nn.functional.scaled_dot_product_attention(
            x["q"], x["k"], x["v"], causal_lower_right(5, 7), is_causal=True
        )


@pytest.mark.parametrize("place", ["q", "k", "v", "mask", "bias", "sinks", "dout", "lengths", "offset"])
def test_masked_arrays_are_refused(place: str) -> None:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in problem().items()}
    arrays |= {"lengths": np.array([3, 4]), "offset": np.array([1, 2])}
    arrays[place] = np.ma.masked_array(arrays[place], mask=np.zeros(arrays[place].shape, bool))
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    calls: dict[str, Callable[[], Any]] = {
        "lengths": lambda: ch.lengths(arrays["lengths"]),
        "offset": lambda: ch.causal(offset=arrays["offset"]),
    }
    options = {name: arrays[name] for name in ("mask", "bias", "sinks")}
    with pytest.raises(ch.ArgumentError, match=f"{place}: is a masked array"):
        calls.get(place, lambda: ch.gradients(q, k, v, dout, **options))()


def test_a_scale_that_wants_its_gradient_is_refused() -> None:
    x = problem()
    for name in ("scale", "softcap"):
        learned = torch.tensor(0.5, requires_grad=True)
        with pytest.raises(ch.ArgumentError, match=f"{name}: wants its gradient"):
            ch.attention(x["q"], x["k"], x["v"], **{name: learned})
        with (
            pytest.raises(ch.ArgumentError, match=f"{name}: wants its gradient"),
            torch.utils.flop_counter.FlopCounterMode(display=False),
        ):
            ch.attention(x["q"], x["k"], x["v"], **{name: learned})
        with torch.no_grad():
            got = ch.attention(x["q"], x["k"], x["v"], **{name: learned})
        torch.testing.assert_close(got, ch.attention(x["q"], x["k"], x["v"], **{name: 0.5}))
        torch.testing.assert_close(got, ch.attention(x["q"], x["k"], x["v"], **{name: torch.tensor(0.5)}))
