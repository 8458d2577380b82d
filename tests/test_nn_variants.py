"""LatentAttention and DifferentialAttention against their formulas, in steps; caches; absorbed projections."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from budget import within

import clearhead as ch
from clearhead.nn import DifferentialAttention, KVCache, LatentAttention, MultiHeadAttention

N = 13
CACHES: dict[str, tuple[Any, Any]] = {
    "growing": (lambda: KVCache(), None),
    "preallocated": (lambda: KVCache(max_length=N), None),
    "ring with sinks": (lambda: KVCache(window=4, sinks=2), ch.window(4) | ch.prefix(2)),
}


def latent(**options: Any) -> LatentAttention:
    torch.manual_seed(3)
    return LatentAttention(24, 3, kv_rank=10, head_dim=6, rotary_dim=4, value_dim=5, **options)


def differential(**options: Any) -> DifferentialAttention:
    torch.manual_seed(3)
    module = DifferentialAttention(24, 3, depth=2, causal=True, positions=ch.rotary(), **options)
    torch.nn.init.normal_(module.norm.weight)
    return module


def softmax_rows(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal weights, by definition."""
    scores = (q @ k.mT) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("q_rank", [None, 7])
def test_latent_attention_by_its_formula(q_rank: int | None) -> None:
    module = latent(q_rank=q_rank, positions=ch.rotary(layout="interleaved")).double()
    x = torch.randn(2, N, 24, dtype=torch.float64)
    turn = ch.rotary(layout="interleaved")
    inner = x if q_rank is None else module.q_norm(x @ module.q_down.weight.T)
    down = x @ module.kv_down.weight.T
    c, r = module.kv_norm(down[..., :10]), turn(down[..., 10:])
    heads = []
    for h in range(3):
        q = inner @ module.q_up.weight[10 * h : 10 * h + 10].T
        up = c @ module.kv_up.weight[11 * h : 11 * h + 11].T
        q = torch.cat([q[..., :6], turn(q[..., 6:])], dim=-1)
        heads.append(softmax_rows(q, torch.cat([up[..., :6], r], dim=-1), 10**-0.5) @ up[..., 6:])
    want = torch.cat(heads, dim=-1) @ module.out_proj.weight.T
    within(module(x), want, want, N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absorbed_projections_give_the_same_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(2, N, 24)
    made, absorbed = (latent(absorb=flag).to(dtype) for flag in (False, True))
    exact = latent(absorb=False).double()(x.double())
    within(absorbed(x.to(dtype)), exact, made(x.to(dtype)), N)
    found = [
        torch.autograd.grad(module(x.to(dtype)).square().sum(), list(module.parameters()))
        for module in (made, absorbed)
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_few_queries_are_absorbed_and_many_are_not() -> None:
    module = LatentAttention(5120, 128, kv_rank=512, head_dim=128, rotary_dim=64, device="meta")
    assert [module.cheaper(n) for n in (1, 170, 171, 4096)] == [True, True, False, False]


def test_a_cache_of_latents_is_small() -> None:
    module = LatentAttention(1024, 16, kv_rank=128, head_dim=64, rotary_dim=32)
    common = MultiHeadAttention(1024, 16, causal=True)
    caches = KVCache(max_length=64), KVCache(max_length=64)
    x = torch.randn(1, 8, 1024)
    with torch.no_grad():
        module(x, cache=caches[0])
        common(x, cache=caches[1])
    assert caches[0].bytes == 64 * (128 + 32) * 4
    assert caches[1].bytes == 64 * 2 * 1024 * 4
    assert caches[1].bytes / caches[0].bytes == 12.8


@pytest.mark.parametrize("first", [False, True], ids=["", "with a shared value head"])
def test_differential_attention_by_its_formula(first: bool) -> None:
    module = differential(kv_heads=1 if first else None).double()
    x = torch.randn(2, N, 24, dtype=torch.float64)
    turn = ch.rotary()
    q, k, v = (x @ p.weight.T for p in (module.q_proj, module.k_proj, module.v_proj))
    init = 0.8 - 0.6 * math.exp(-0.3 * 1)
    a, b = ((module.lambda_q[i] * module.lambda_k[i]).sum().exp() for i in range(2))
    heads = []
    for h in range(3):
        shared = 0 if first else h
        cut, key_cut = slice(8 * h, 8 * h + 8), slice(8 * shared, 8 * shared + 8)
        (q1, q2), (k1, k2) = ((turn(t[..., :4]), turn(t[..., 4:])) for t in (q[..., cut], k[..., key_cut]))
        weights = softmax_rows(q1, k1, 0.5) - (a - b + init) * softmax_rows(q2, k2, 0.5)
        head = weights @ v[..., key_cut]
        head = head / (head.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.norm.weight
        heads.append(head * (1 - init))
    want = torch.cat(heads, dim=-1) @ module.out_proj.weight.T
    within(module(x), want, want, N)


@pytest.mark.parametrize("make_module", [latent, differential, lambda: latent(absorb=False)])
@pytest.mark.parametrize(("make", "mask"), CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("chunks", [[1] * N, [6] + [1] * (N - 6), [3, 5, 1, 4]], ids=str)
def test_decoding_is_the_full_forward(make_module: Any, make: Any, mask: Any, chunks: list[int]) -> None:
    module = make_module()
    x = torch.randn(2, N, 24)
    exact = copy.deepcopy(module).double()(x.double(), mask=mask)
    cache = make()
    with torch.no_grad():
        got = torch.cat([module(part, cache=cache) for part in x.split(chunks, dim=1)], dim=1)
    within(got, exact, module(x, mask=mask), N)


@pytest.mark.parametrize("make_module", [latent, differential])
def test_rows_of_different_length(make_module: Any) -> None:
    module = make_module().double()
    x = torch.randn(2, N, 24, dtype=torch.float64)
    cache = KVCache()
    with torch.no_grad():
        prompt = module(x[:, :5], cache=cache, lengths=[5, 2])
        step = module(torch.stack([x[0, 5], x[1, 2]])[:, None], cache=cache)
    for row, n in enumerate((5, 2)):
        alone = module(x[row : row + 1, : n + 1])[0]
        torch.testing.assert_close(torch.cat([prompt[row, :n], step[row]]), alone)


@pytest.mark.parametrize("make_module", [latent, differential])
def test_trains_compiles_exports_copies_and_moves(make_module: Any) -> None:
    torch._dynamo.reset()
    module, x = make_module(), torch.randn(2, 5, 24)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    found = [torch.autograd.grad(run(x).square().sum(), list(module.parameters())) for run in (compiled, module)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), module(x))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    fresh = make_module()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(x), module(x))
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_observed() -> None:
    x = torch.randn(2, 5, 24)
    for absorb in (False, True):
        output, seen = latent(absorb=absorb)(x, observe={"weights": True})
        torch.testing.assert_close(output, latent()(x))
        assert seen.weights.shape == (2, 3, 5, 5)
    output, (added, taken) = differential()(x, observe={"weights": True})
    torch.testing.assert_close(output, differential()(x))
    assert added.weights.shape == taken.weights.shape == (2, 3, 5, 5)
    assert not torch.equal(added.weights, taken.weights)


def test_dropout_follows_training() -> None:
    x = torch.randn(2, 5, 24)
    for module in (latent(dropout=0.5), differential(dropout=0.5)):
        assert not torch.equal(module(x), module(x))
        module.eval()
        assert torch.equal(module(x), module(x))


def test_printed_and_refused() -> None:
    assert latent(q_rank=7).extra_repr() == "24, 3, kv_rank=10, head_dim=6, rotary_dim=4, value_dim=5, q_rank=7"
    assert differential().extra_repr() == "24, 3, depth=2, lambda_init=0.3555, causal=True"
    refusals = {
        "num_heads: is 5, expected a number that divides embed_dim, 24": lambda: LatentAttention(24, 5, kv_rank=4),
        "kv_rank: is 0, expected a whole number of at least 1": lambda: LatentAttention(24, 3, kv_rank=0),
        "x: has shape (5, 24), expected (batch, positions, 24)": lambda: latent()(torch.zeros(5, 24)),
        "num_heads: is 24, expected a number of which twice divides embed_dim, 24": (
            lambda: DifferentialAttention(24, 24)
        ),
        "kv_heads: is 2, expected a number that divides num_heads, 3": (
            lambda: DifferentialAttention(24, 3, kv_heads=2)
        ),
        "positions: is 'alibi', expected rotary(…)": lambda: latent(positions="alibi"),
        "positions: is 'relative', expected rotary(…)": (lambda: DifferentialAttention(24, 3, positions="relative")),
        "cache: is given to attention that is not causal self-attention": (
            lambda: DifferentialAttention(24, 3)(torch.zeros(1, 2, 24), cache=KVCache())
        ),
    }
    for text, mistake in refusals.items():
        with pytest.raises(ch.ArgumentError) as refusal:
            mistake()
        assert str(refusal.value) == text
