"""The drop-in: PyTorch's scaled_dot_product_attention and ours, argument by argument."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import within

import clearhead as ch
from clearhead.nn.functional import scaled_dot_product_attention as mine
from clearhead.nn.functional import shaped

GENERATOR = torch.Generator().manual_seed(7)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=GENERATOR)


SHAPES = {
    "2-D": ((5, 4), (7, 4), (7, 6)),
    "3-D": ((3, 5, 4), (3, 7, 4), (3, 7, 6)),
    "4-D": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    "5-D": ((2, 1, 3, 5, 4), (2, 1, 3, 7, 4), (2, 1, 3, 7, 6)),
    "batch broadcasts": ((2, 3, 5, 4), (1, 3, 7, 4), (3, 7, 6)),
    "heads of keys broadcast": ((2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 6)),
    "heads of queries broadcast": ((2, 1, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    "heads of values broadcast": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 1, 7, 6)),
    "more queries than keys": ((2, 3, 11, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    "no keys": ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 6)),
}
GROUPED = {
    "grouped": ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    "grouped, 3-D": ((6, 5, 4), (2, 7, 4), (2, 7, 6)),
    "other groups of values": ((2, 6, 5, 4), (2, 3, 7, 4), (2, 2, 7, 6)),
}
MASKS = {
    "none": lambda t, s: None,
    "boolean": lambda t, s: torch.rand(t, s, generator=GENERATOR) < 0.6,
    "row of keys": lambda t, s: torch.rand(1, s, generator=GENERATOR) < 0.6,
    "column of queries": lambda t, s: torch.rand(t, 1, generator=GENERATOR) < 0.6,
    "floating-point": lambda t, s: normal(t, s),
    "floating-point, by head": lambda t, s: normal(1, 1, s),
    "−inf": lambda t, s: torch.where(torch.rand(t, s, generator=GENERATOR) < 0.4, -torch.inf, 0.0).double(),
}


def both(shapes: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Ours and PyTorch's in one precision against PyTorch's in float64: output and gradients, within budget."""
    given = [normal(*shape).to(dtype) for shape in shapes]
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    runs = {}
    calls = {"mine": (mine, dtype), "theirs": (F.scaled_dot_product_attention, dtype)}
    for name, (call, to) in {**calls, "exact": (F.scaled_dot_product_attention, torch.float64)}.items():
        inputs = [a.detach().clone().to(to).requires_grad_() for a in given]
        added = None if mask is None else mask.to(to, copy=True) if mask.is_floating_point() else mask
        if added is not None and added.is_floating_point() and added.isfinite().all() and added.numel():
            inputs.append(added.requires_grad_())
        output = call(*inputs[:3], attn_mask=added, **options)
        dout = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(to)
        runs[name] = (output, torch.autograd.grad(output, inputs, dout, allow_unused=True))
    keys = max(shapes[0][-2], shapes[1][-2])
    assert runs["mine"][0].dtype == runs["theirs"][0].dtype
    within(runs["mine"][0], runs["exact"][0], runs["theirs"][0], keys)
    size = sizes([a.double() for a in given], mask, options, dout)
    found = zip(("dq", "dk", "dv", "dmask"), *(runs[name][1] for name in ("mine", "exact", "theirs")), strict=False)
    for name, got, exact, theirs in found:
        if exact is not None:  # PyTorch gives none where there are no keys
            assert got.dtype == theirs.dtype
            within(got, exact, theirs, keys, name, size.get(name))


def sizes(inputs: list[torch.Tensor], mask: Any, options: dict[str, Any], dout: torch.Tensor) -> dict[str, float]:
    """The size of the terms that are summed in each gradient, as `budget.py` has it, by letting PyTorch sum them."""
    q, k, v = shaped(*inputs, options.get("enable_gqa", False))
    k, v = (a if a.ndim == 2 else a.repeat_interleave(q.shape[-3] // a.shape[-3], dim=-3) for a in (k, v))
    how: dict[str, Any] = {"mask": ch.causal(align="start")} if options.get("is_causal") else {}
    if mask is not None:
        how["bias" if mask.is_floating_point() else "mask"] = mask.double() if mask.is_floating_point() else mask
    scale = options.get("scale") or q.shape[-1] ** -0.5
    weights = ch.observe(q, k, v, **how, scale=scale, weights=True).weights
    dweights = dout.abs() @ v.abs().mT
    terms = weights * (dweights + (weights * dweights).sum(-1, keepdim=True))
    leaves = [torch.zeros_like(a, requires_grad=True) for a in inputs]
    zq, zk, _ = shaped(*leaves, options.get("enable_gqa", False))
    zk = zk if zk.ndim == 2 else zk.repeat_interleave(q.shape[-3] // zk.shape[-3], dim=-3)
    total = (terms * scale * (zq @ k.abs().mT + q.abs() @ zk.mT)).sum()
    found = dict(zip(("dq", "dk"), torch.autograd.grad(total, leaves[:2]), strict=True))
    if mask is not None and mask.is_floating_point():
        found["dmask"] = terms.sum_to_size(mask.shape)
    return {name: float(size.max()) if size.numel() else 0.0 for name, size in found.items()}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_same_as_pytorch(shapes: str, mask: str) -> None:
    sizes = SHAPES[shapes]
    made = MASKS[mask](sizes[0][-2], sizes[1][-2])
    if made is not None and made.ndim > len(sizes[0]):
        made = made[0]
    both(sizes, {"attn_mask": made}, torch.float32)


@pytest.mark.parametrize("shapes", [*SHAPES, *GROUPED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_causal_aligns_the_first_ones(shapes: str, dtype: torch.dtype) -> None:
    sizes = {**SHAPES, **GROUPED}[shapes]
    if sizes[1][-2] == 0:
        return  # PyTorch has no causal attention over no keys
    both(sizes, {"is_causal": True, "enable_gqa": shapes in GROUPED, "scale": 0.4}, dtype)


def test_the_signature_is_pytorchs() -> None:
    assert str(inspect.signature(mine, eval_str=True)) == (
        "(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,"
        " dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False)"
        " -> torch.Tensor"
    )
    theirs = " ".join(F.scaled_dot_product_attention.__doc__.split())
    assert theirs.startswith("scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal")
    assert "is_causal=False, scale=None, enable_gqa=False) -> Tensor" in theirs


def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients() -> None:
    q, k, v = (normal(2, 3, 5, 4).requires_grad_() for _ in range(3))
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2:] = True
    for given in (mask, torch.where(mask, 0.0, -torch.inf).double()):
        outputs = [call(q, k, v, attn_mask=given) for call in (mine, F.scaled_dot_product_attention)]
        assert all((output[:, :, :2] == 0).all() for output in outputs)
        torch.testing.assert_close(*outputs)
        found = [torch.autograd.grad(output.square().sum(), (q, k, v)) for output in outputs]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_dropout_is_always_applied_and_follows_the_seed() -> None:
    q = torch.zeros(1, 1, 200, 4)
    v = torch.ones(1, 1, 200, 3)
    torch.manual_seed(0)
    first, second = (mine(q, q, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(mine(q, q, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - 1.0) < 0.02
    assert (mine(q, q, v, dropout_p=1.0) == 0).all()
    assert (F.scaled_dot_product_attention(q, q, v, dropout_p=1.0) == 0).all()


X = torch.zeros(2, 3, 5, 4)
REFUSED: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "attn_mask: is given together with is_causal=True, expected one of them": (
        (X, torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 6)),  # PyTorch's fused kernel takes both in silence
        {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True},
    ),
    "attn_mask: has dtype torch.int64, expected torch.bool, torch.float32 or torch.float32 as query": (
        (X, X, X),
        {"attn_mask": torch.ones(5, 5, dtype=torch.int64)},
    ),
    "attn_mask: has dtype torch.float64, expected torch.bool, torch.float32 or torch.float32 as query": (
        (X, X, X),
        {"attn_mask": torch.ones(5, 5, dtype=torch.float64)},
    ),
    "attn_mask: has shape (5, 6), which does not broadcast to (2, 3, 5, 5)": (
        (X, X, X),
        {"attn_mask": torch.ones(5, 6, dtype=torch.bool)},
    ),
    "attn_mask: has shape (4, 1, 5, 5), which does not broadcast to (2, 3, 5, 5)": (
        (X, X, X),
        {"attn_mask": torch.ones(4, 1, 5, 5)},
    ),
    "attn_mask: is a list, expected a tensor": ((X, X, X), {"attn_mask": [True]}),
    "dropout_p: is 1.5, expected a number from 0 to 1": ((X, X, X), {"dropout_p": 1.5}),
    "query: has shape (4,), expected a tensor (…, positions, features)": ((X[0, 0, 0], X, X), {}),
    "k: has dtype float64, expected float32 as q has": ((X, X.double(), X), {}),
    "k: has 3 features (shape (2, 3, 5, 3)), expected 4 as q has": ((X, X[..., :3], X), {}),
    "key, value: have 3 and 3 heads where query has 6, expected equal numbers, or enable_gqa=True": (
        (X.repeat(1, 2, 1, 1), X, X),
        {},
    ),
    "k: has 3 heads, expected a number that divides the 4 heads of q": (
        (torch.zeros(2, 4, 5, 4), X, X),
        {"enable_gqa": True},
    ),
}


@pytest.mark.parametrize(("text", "call"), REFUSED.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_pytorch_refuses_is_refused_in_words(text: str, call: Any) -> None:
    inputs, options = call
    with pytest.raises(ch.ArgumentError) as refusal:
        mine(*inputs, **options)
    assert str(refusal.value) == text
    with pytest.raises((RuntimeError, IndexError, TypeError)):
        F.scaled_dot_product_attention(*inputs, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_mask_made_under_autocast_is_taken(dtype: torch.dtype, given: torch.dtype) -> None:
    x, mask = normal(2, 3, 5, 4), normal(5, 5)
    half = x.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = mine(half, half, half, attn_mask=mask.to(given))
        theirs = F.scaled_dot_product_attention(half, half, half, attn_mask=mask.to(given))
    assert got.dtype == theirs.dtype == torch.bfloat16
    within(got, F.scaled_dot_product_attention(x, x, x, attn_mask=mask), theirs, 5)


def test_compiles_exports_and_maps() -> None:
    q, k, v = (normal(2, 3, 5, 4) for _ in range(3))
    mask = torch.rand(5, 5, generator=GENERATOR) < 0.7
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    for options in itertools.chain(({"is_causal": flag} for flag in (False, True)), [{"attn_mask": mask}]):
        assert torch.equal(compiled(q, k, v, **options), mine(q, k, v, **options))
    mapped = torch.func.vmap(lambda q, k, v: mine(q, k, v, is_causal=True))(q, k, v)
    torch.testing.assert_close(mapped, mine(q, k, v, is_causal=True))
    assert mine(*(a.to("meta") for a in (q, k, v))).shape == (2, 3, 5, 4)


def test_nn_comes_when_asked_for_and_says_what_is_missing() -> None:
    program = """
import sys
import clearhead
assert "torch" not in sys.modules
print(clearhead.nn.functional.__name__, "torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "clearhead.nn.functional True\n"
    without = "import sys; sys.modules['torch'] = None\nimport clearhead.nn"
    ran = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    said = "ImportError: clearhead.nn needs PyTorch, which is not installed: pip install torch"
    assert ran.stderr.strip().splitlines()[-1] == said
