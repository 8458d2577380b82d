"""MultiHeadAttention against PyTorch's own: state, output, training; positions, masks, observation, copies, moves."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from budget import within
from torch import nn

import clearhead as ch
from clearhead.core.positions import buckets as reference_buckets
from clearhead.nn import MultiHeadAttention, ScaledDotProductAttention
from clearhead.nn.places import buckets
from clearhead.nn.rotation import Turn


def pair(seed: int = 0, **options: Any) -> tuple[nn.MultiheadAttention, MultiHeadAttention]:
    """PyTorch's module and ours, from the same seed."""
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, **options)
    torch.manual_seed(seed)
    return theirs, MultiHeadAttention(12, 3, **options)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 7, "vdim": 5}, {"kdim": 7}], ids=str)
def test_state_and_output_are_pytorchs(options: dict[str, Any]) -> None:
    theirs, mine = pair(**options)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name  # also drawn alike
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    assert str(mine.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    query, key, value = torch.randn(2, 5, 12), torch.randn(2, 7, mine.kdim), torch.randn(2, 7, mine.vdim)
    exact = copy.deepcopy(theirs).double()(query.double(), key.double(), value.double())[0]
    plain, weights = theirs(query, key, value, average_attn_weights=False)
    got, seen = mine(query, key, value, observe={"weights": True})
    within(got, exact, plain, 7)
    torch.testing.assert_close(seen.weights, weights)
    assert str(theirs.load_state_dict(mine.state_dict())) == "<All keys matched successfully>"


def test_masks_mean_what_pytorchs_mean_the_other_way_round() -> None:
    theirs, mine = pair()
    x = torch.randn(2, 5, 12)
    hidden = torch.ones(5, 5).triu(1).bool()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    want = theirs(x, x, x, attn_mask=hidden, key_padding_mask=padding, need_weights=False)[0]
    for got in (
        mine(x, mask=ch.causal() & ch.lengths([5, 3])),
        mine(x, mask=ch.causal(), lengths=torch.tensor([5, 3])),
        mine(x, mask=~hidden & ~padding[:, None, None, :]),
    ):
        torch.testing.assert_close(got, want)


def test_trained_side_by_side_for_fifty_steps() -> None:
    runs = {}
    for name, dtype in (("theirs", torch.float32), ("mine", torch.float32), ("exact", torch.float64)):
        theirs, mine = pair(seed=4)
        model = (mine if name == "mine" else theirs).to(dtype)
        x, target = torch.randn(2, 4, 6, 12, generator=torch.Generator().manual_seed(9)).to(dtype)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(50):
            output = model(x, mask=ch.causal()) if name == "mine" else causal_of(model, x)
            loss = (output - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        runs[name] = torch.stack(losses), model.state_dict()
    within(runs["mine"][0], runs["exact"][0], runs["theirs"][0], 6 * 50, "losses")
    assert runs["mine"][0][-1] < 0.8 * runs["mine"][0][0]
    for name, tensor in runs["mine"][1].items():
        within(tensor, runs["exact"][1][name], runs["theirs"][1][name], 6 * 50, name)


def causal_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x, x, x, attn_mask=torch.ones(6, 6).triu(1).bool(), need_weights=False)[0]


def test_what_cannot_be_loaded_is_said() -> None:
    state = nn.MultiheadAttention(12, 3, add_bias_kv=True).state_dict()
    with pytest.raises(ch.ArgumentError) as refusal:
        MultiHeadAttention(12, 3).load_state_dict(state)
    assert str(refusal.value) == ("state_dict: has bias_k: a learned key and value (add_bias_kv) is not supported here")


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
def test_grouped_heads_are_repeated_ones(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    grouped = MultiHeadAttention(24, heads, kv_heads=kv_heads, bias=False).double()
    full = MultiHeadAttention(24, heads, bias=False).double()
    with torch.no_grad():
        q, k, v = torch.split(grouped.in_proj_weight, list(grouped.widths))
        spread = [w.unflatten(0, (kv_heads, 4)).repeat_interleave(heads // kv_heads, 0).flatten(0, 1) for w in (k, v)]
        full.in_proj_weight.copy_(torch.cat([q, *spread]))
        full.out_proj.weight.copy_(grouped.out_proj.weight)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(grouped(x, mask=ch.causal()), full(x, mask=ch.causal()))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, ch.Linear(2.0), ch.Yarn(4.0, 32)], ids=str)
@pytest.mark.parametrize("dimension", [None, 4])
def test_rotary_turns_as_the_librarys_does(layout: Any, scaling: Any, dimension: int | None) -> None:
    rotary = ch.rotary(layout=layout, scaling=scaling, dimension=dimension)
    turn = Turn(rotary, 8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 5, 8, dtype=dtype)
        torch.testing.assert_close(turn(x, 7 + torch.arange(5)), rotary(x, offset=7))
        rows = torch.tensor([[3], [100]]) + torch.arange(5)
        torch.testing.assert_close(turn(x, rows), rotary(x, offset=[3, 100]))


def test_positions_are_those_of_the_formula() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    table = torch.randn(32, 3, dtype=torch.float64)
    kinds: dict[str, tuple[Any, Any]] = {
        "alibi": ("alibi", ch.alibi(3)),
        "alibi value": (ch.alibi(3), ch.alibi(3)),
        "relative": (ch.relative_bias(table, max_distance=20), ch.relative_bias(table, max_distance=20)),
    }
    for name, (positions, bias) in kinds.items():
        module = MultiHeadAttention(12, 3, positions=positions).double()
        q, k, v = module.project(x, None, None)
        output = module.out_proj(ch.attention(q, k, v, bias=bias).transpose(1, 2).flatten(2))
        torch.testing.assert_close(module(x), output, msg=name)
    learnt = MultiHeadAttention(12, 3, positions="relative", causal=True).double()
    learnt(x).square().sum().backward()
    assert learnt.relative_table is not None
    assert learnt.relative_table.grad is not None
    assert (learnt.relative_table.grad != 0).any()
    assert "relative_table" in learnt.state_dict()
    distance = np.arange(-300, 300)
    for both in (True, False):
        mine = buckets(torch.from_numpy(distance), 32, both, 128).numpy()
        assert np.array_equal(mine, reference_buckets(distance, 32, bidirectional=both, most=128))


def test_window_softcap_and_norm() -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    module = MultiHeadAttention(12, 3, window=2, softcap=1.5, scale=0.7, qk_norm=True, kernel="dense").double()
    q, k, v = module.project(x, None, None)
    assert torch.allclose(q.square().mean(-1), torch.ones(2, 3, 9, dtype=torch.float64), atol=1e-4)
    output = ch.attention(q, k, v, mask=ch.window(2), softcap=1.5, scale=0.7)
    torch.testing.assert_close(module(x), module.out_proj(output.transpose(1, 2).flatten(2)))


def test_dropout_follows_training_and_the_seed() -> None:
    module = MultiHeadAttention(12, 3, dropout=0.5)
    x = torch.randn(2, 5, 12)
    torch.manual_seed(1)
    first, second = module(x), module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(x), module(x))
    single = ScaledDotProductAttention(12, dropout=0.5)
    assert not torch.equal(single(x, x, x), single(x, x, x))
    single.eval()
    torch.testing.assert_close(single(x, x, x), ch.attention(x, x, x))
    output, seen = single(x, x, x, mask=ch.causal(), observe={"top": 2})
    assert torch.equal(output, seen.output)
    assert seen.top.indices.shape == (2, 5, 2)


def test_observed_while_it_trains() -> None:
    module = MultiHeadAttention(12, 3, causal=True)
    x = torch.randn(2, 5, 12)
    output, seen = module(x, observe={"received": True, "queries": [-1]})
    torch.testing.assert_close(output, module(x))
    assert seen.received.shape == (2, 3, 5)
    output.sum().backward()
    assert module.in_proj_weight.grad is not None


@pytest.mark.parametrize("positions", [None, ch.rotary(), "alibi", "relative"], ids=str)
def test_no_positions_at_all(positions: Any) -> None:
    module, x = MultiHeadAttention(12, 3, positions=positions, causal=True), torch.randn(2, 5, 12, requires_grad=True)
    assert module(x[:, :0]).shape == (2, 0, 12)
    output = module(x, x[:, :0])  # nothing to attend to
    torch.testing.assert_close(output, module.out_proj.bias.expand_as(output))
    output.sum().backward()


def test_one_key_alone_serves_as_value_of_the_same_width() -> None:
    module = MultiHeadAttention(12, 3, kdim=7, vdim=7)
    x, key = torch.randn(2, 5, 12), torch.randn(2, 6, 7)
    assert torch.equal(module(x, key), module(x, key, key))


def test_one_sequence_without_a_batch() -> None:
    module = MultiHeadAttention(12, 3, causal=True)
    x = torch.randn(5, 12)
    torch.testing.assert_close(module(x), module(x[None])[0])
    torch.testing.assert_close(module(x, torch.ones(4, 12)), module(x[None], torch.ones(1, 4, 12))[0])


def test_copied_pickled_moved_and_printed() -> None:
    x = torch.randn(2, 5, 12)
    module = MultiHeadAttention(12, 3, kv_heads=1, positions=ch.rotary(), qk_norm=True, causal=True, dropout=0.1).eval()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        moved = copy.deepcopy(module).to(dtype)
        assert moved(x.to(dtype)).dtype == dtype
        assert all(p.dtype == dtype for p in moved.parameters())
    assert module.half()(x.half()).dtype == torch.float16
    meta = MultiHeadAttention(12, 3, device="meta")
    assert meta(x.to("meta")).shape == (2, 5, 12)
    wide = MultiHeadAttention(12, 3, kv_heads=1, head_dim=8, kdim=6, window=4, positions="alibi", bias=False)
    assert wide.extra_repr() == "12, 3, kv_heads=1, head_dim=8, kdim=6, bias=False, positions='alibi', window=4"
    assert "kv_heads=1, dropout=0.1, causal=True" in repr(module)
    assert "Turn(base=10000, features=4, layout='half')" in repr(module)
    assert repr(ScaledDotProductAttention(8, dropout=0.1)) == "ScaledDotProductAttention(8, dropout=0.1)"


def test_autocast_and_mixed_precision() -> None:
    module, x = MultiHeadAttention(12, 3, causal=True, positions="relative"), torch.randn(2, 5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert module.in_proj_weight.grad.dtype == torch.float32


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, rotary, causal": {"kv_heads": 1, "positions": ch.rotary(), "causal": True, "qk_norm": True},
    "alibi, window": {"positions": "alibi", "window": 2},
    "relative": {"positions": "relative"},
}


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compiles_in_one_graph_and_exports(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module, x = MultiHeadAttention(12, 3, **options), torch.randn(2, 5, 12)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    parameters = list(module.parameters())
    found = [torch.autograd.grad(run(x).square().sum(), parameters) for run in (compiled, module)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    if not options:
        torch.testing.assert_close(compiled(x, mask=ch.lengths([5, 3])), module(x, mask=ch.lengths([5, 3])))
    program = torch.export.export(module, (x,), dynamic_shapes=({1: torch.export.Dim("positions", min=2, max=99)},))
    for n in (5, 11):
        y = torch.randn(2, n, 12)
        torch.testing.assert_close(program.module()(y), module(y))


def test_dropout_in_a_compiled_module_is_drawn_each_time() -> None:
    torch._dynamo.reset()
    module, x = MultiHeadAttention(12, 3, dropout=0.5), torch.randn(2, 5, 12)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))
    compiled.eval()
    assert torch.equal(compiled(x), compiled(x))


def test_mapped_over_examples() -> None:
    module, x = MultiHeadAttention(12, 3, causal=True), torch.randn(4, 2, 5, 12)
    torch.testing.assert_close(torch.func.vmap(module)(x), torch.stack([module(one) for one in x]))
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (one,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, one in enumerate(x):
        for name, gradient in torch.func.grad(loss)(parameters, one).items():
            torch.testing.assert_close(each[name][i], gradient)


REFUSED: dict[str, Any] = {
    "kv_heads: is 2, expected a number that divides num_heads, 3": lambda: MultiHeadAttention(12, 3, kv_heads=2),
    "num_heads: is 5, expected a number that divides embed_dim, 12": lambda: MultiHeadAttention(12, 5),
    "embed_dim: is 0, expected a whole number of at least 1": lambda: MultiHeadAttention(0, 1),
    "dropout: is 1.0, expected a number from 0 up to, not with, 1": lambda: MultiHeadAttention(12, 3, dropout=1.0),
    "positions: are alibi(4), expected alibi(3)": lambda: MultiHeadAttention(12, 3, positions=ch.alibi(4)),
    "positions: have a table for 4 heads, expected 3": lambda: MultiHeadAttention(
        12, 3, positions=ch.relative_bias(torch.zeros(32, 4))
    ),
    "positions: is 'sine', expected rotary(…), alibi(…), relative_bias(…), 'alibi' or 'relative'": (
        lambda: MultiHeadAttention(12, 3, positions="sine")
    ),
    "positions: turn 6 features in pairs, expected at most 4, even": lambda: MultiHeadAttention(
        12, 3, positions=ch.rotary(dimension=6)
    ),
    "query: has shape (2, 5, 9), expected (batch, positions, 12)": lambda: MultiHeadAttention(12, 3)(
        torch.zeros(2, 5, 9)
    ),
    "key: has shape (7, 12), expected (batch, positions, 12)": lambda: MultiHeadAttention(12, 3)(
        torch.zeros(2, 5, 12), torch.zeros(7, 12)
    ),
    "key: has shape (1, 7, 12), expected (positions, 12)": lambda: MultiHeadAttention(12, 3)(
        torch.zeros(5, 12), torch.zeros(1, 7, 12)
    ),
    "value: has shape (2, 7, 11), expected (batch, positions, 9)": lambda: MultiHeadAttention(12, 3, vdim=9)(
        torch.zeros(2, 5, 12), torch.zeros(2, 7, 12), torch.zeros(2, 7, 11)
    ),
    "key: is not given, expected one of kdim, 7 features": lambda: MultiHeadAttention(12, 3, kdim=7, vdim=7)(
        torch.zeros(2, 5, 12)
    ),
    "value: is not given, expected one of vdim, 12 features": lambda: MultiHeadAttention(12, 3, kdim=7)(
        torch.zeros(2, 5, 12), torch.zeros(2, 5, 7)
    ),
    "value: is given without key": lambda: MultiHeadAttention(12, 3)(
        torch.zeros(2, 5, 12), value=torch.zeros(2, 5, 12)
    ),
    "query: has 5 features, expected d_k, 4": lambda: ScaledDotProductAttention(4)(*(torch.zeros(3, 2, 5)[:, None])),
}


@pytest.mark.parametrize(("text", "mistake"), REFUSED.items(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_mistake_is_refused_in_one_sentence(text: str, mistake: Any) -> None:
    with pytest.raises(ch.ArgumentError) as refusal:
        mistake()
    assert str(refusal.value) == text
