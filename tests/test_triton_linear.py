"""The chunked kernels of linear attention and the Performer, in Triton's interpreter and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import approximated
import interpreted
import numpy as np
import pytest
import torch
from budget import Expected, check, within

import clearhead as ch

WANTED = (
    "segment_sums", "forward", "scales", "segment_sums", "gradients_of_queries", "gradients_of_keys",
    "gradients_of_values",
)  # fmt: skip
# rows of queries, rows of keys, positions, features, values, positions of a segment
LONG, GROUPED, WIDE, ONE = (
    (2, 2, 150, 19, 23, 64),
    (2, 1, 70, 70, 5, None),
    (1, 1, 70, 130, 80, 64),
    (1, 1, 1, 3, 2, None),
)
CASES = [
    *((sizes, "elu+1", torch.float32) for sizes in (LONG, GROUPED, WIDE, ONE)),
    (GROUPED, "relu", torch.float32), (LONG, None, torch.float32), (ONE, None, torch.float32),
    (LONG, "elu+1", torch.bfloat16), (GROUPED, "elu+1", torch.float16), (ONE, "elu+1", torch.bfloat16),
]  # fmt: skip


@pytest.fixture
def chunked() -> Any:
    from clearhead.kernels.triton.linear_launch import chunked

    return chunked


def by_pairs(a: Any, b: Any, v: Any, feature: str | None, eps: float, normalized: bool) -> Any:
    """The formula from all pairs, which PyTorch differentiates."""

    def phi(x: Any) -> Any:
        if feature == "elu+1":
            return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))
        return x.relu() if feature == "relu" else x

    group = a.shape[0] // b.shape[0]
    b, v = b.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    weights = (phi(a) @ phi(b).mT).tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + eps) if normalized else weights @ v


def term_sizes(a: Any, b: Any, v: Any, dout: Any, feature: str | None, eps: float, normalized: bool) -> list[float]:
    """How large the sums of output and gradients are before terms cancel: what their rounding goes by."""
    ones = torch.ones_like(v[..., :1])
    group = a.shape[0] // b.shape[0]
    below = by_pairs(a, b, ones, feature, 0.0, False) + eps if normalized else torch.ones_like(dout[..., :1])
    output = by_pairs(a, b, v, feature, eps, normalized)
    d = (dout / below).abs()
    w = (d * output.abs()).sum(-1, keepdim=True) if normalized else 0.0
    b, v = b.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    weights = by_pairs(a, b, torch.eye(a.shape[1], dtype=a.dtype).expand(a.shape[0], -1, -1), feature, 0.0, False)
    pairs = (d @ v.abs().mT + w).tril()
    phi_a, phi_b = (one.abs() + 1 for one in (a, b))  # no feature is larger
    per_head = (pairs.mT @ phi_a, weights.abs().mT @ d)
    shared = [one.unflatten(0, (-1, group)).sum(1) for one in per_head]
    return [float(one.max()) for one in (output.abs(), pairs @ phi_b, *shared)]


class TestInterpreted:
    """What is interpreted here runs on a GPU elsewhere."""

    pytestmark = interpreted.MARKS

    @pytest.mark.parametrize(("sizes", "feature", "dtype"), CASES, ids=str)
    def test_forward_and_gradients(self, chunked: Any, sizes: tuple[Any, ...], feature: str | None, dtype: Any) -> None:
        rows, key_rows, length, features, width, segment = sizes
        generator = torch.Generator().manual_seed(0)
        shapes = ((rows, length, features), (key_rows, length, features), (key_rows, length, width))
        given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        if feature is None:
            given[:2] = [one.abs() for one in given[:2]]
        dout = torch.randn((rows, length, width), generator=generator).to(dtype)
        for normalized in (True, False) if sizes is GROUPED else (True,):
            found = []
            for kind in (dtype, torch.float64, torch.float32):
                inputs = [one.to(kind).detach().requires_grad_() for one in given]
                if kind is dtype and not found:
                    output = chunked(*inputs, feature=feature, eps=0.1, normalized=normalized, segment=segment)
                else:
                    output = by_pairs(*inputs, feature, 0.1, normalized)
                output.backward(dout.to(kind))
                found.append([output.detach(), *(one.grad for one in inputs)])
            given64 = [one.double() for one in given]
            terms = term_sizes(*given64, dout.double(), feature, 0.1, normalized)
            for name, size, got, exact, plain in zip(("output", "da", "db", "dv"), terms, *found, strict=True):
                within(got, exact, plain.to(dtype), length, f"{name}, {sizes}, {feature}, {normalized}", size)

    @pytest.mark.parametrize("method", [ch.linear(), ch.linear("relu", eps=0.1), ch.performer(21)], ids=repr)
    def test_methods_run_by_it(self, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same result as without it, gradients too; grouped heads, a batch, and keys that are not there."""
        from clearhead.kernels.triton import linear_launch

        ran = []
        run = linear_launch.chunked
        monkeypatch.setattr(linear_launch, "chunked", lambda *a, **o: ran.append(1) or run(*a, **o))
        generator = np.random.default_rng(0)
        q, k, v = (generator.standard_normal((2, h, 90, d)).astype(np.float32) for h, d in ((4, 9), (2, 9), (2, 5)))
        for mask in (ch.causal(), ch.causal() & ch.lengths([90, 33])):
            found = []
            for by_kernel in (True, False):
                tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
                monkeypatch.setenv("TRITON_INTERPRET", "1" if by_kernel else "0")
                output = method(*tensors, mask=mask)
                output.square().sum().backward()
                found.append([output.detach(), *(one.grad for one in tensors)])
            assert len(ran) == 1
            ran.clear()
            for got, plain in zip(*found, strict=True):
                size = float(plain.abs().max())
                expected = Expected(plain.double().numpy(), plain.numpy(), 2.0**-23, size)
                check(got.numpy(), expected, 90 * 90, f"{method!r}, {mask!r}")

    def test_what_it_does_not_take_goes_by_chunks(self) -> None:
        """float64, a longer past, no causality: the same method without the kernel."""
        q, k, v = (torch.randn(2, n, 6, dtype=torch.float64) for n in (5, 40, 40))
        seen = np.ones((5, 40), bool)
        exact, _ = approximated.in_heads(approximated.linear, *(a.numpy() for a in (q, k, v)), seen, np.float64)
        np.testing.assert_allclose(ch.linear()(q, k, v).numpy(), exact, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("method", [ch.linear(), ch.linear("relu", eps=0.1), ch.performer(128)], ids=repr)
@pytest.mark.parametrize("features", [64, 128])
def test_on_a_gpu(method: Any, features: int, dtype: Any) -> None:
    """Forward and gradients by the kernels, held to the same method in float64, which goes by chunks."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, 4, 1111, features), (2, 2, 1111, features), (2, 2, 1111, 64))
    given = [(torch.randn(s, generator=generator, device="cuda") / 2).to(dtype) for s in shapes]
    dout = torch.randn((2, 4, 1111, 64), generator=generator, device="cuda").to(dtype)
    found = []
    for kind in (dtype, torch.float64, torch.float32):
        inputs = [one.to(kind).detach().requires_grad_() for one in given]
        output = method(*inputs, mask=ch.causal())
        output.backward(dout.to(kind))
        found.append([one.cpu() for one in (output.detach(), *(one.grad for one in inputs))])
    for name, got, exact, plain in zip(("output", "dq", "dk", "dv"), *found, strict=True):
        within(got, exact, plain.to(dtype), 1111, f"{name}, {method!r}, {dtype}", float(exact.abs().max()))


@pytest.mark.skipif(not interpreted.INSTALLED, reason="Triton is not installed")
def test_kernels_compile_for_hopper() -> None:
    # in a process of its own: here kernels are imported to be interpreted
    script = Path(__file__).with_name("compile_linear_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(script.parents[1] / "build" / "triton")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == sorted(WANTED)
