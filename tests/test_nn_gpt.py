"""TransformerBlock against PyTorch's layer, and a GPT that learns a text and says it back."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from budget import within
from torch import nn

import clearhead as ch
from clearhead.nn import (
    GPT,
    DifferentialAttention,
    FeedForward,
    GPTConfig,
    KVCache,
    LatentAttention,
    TransformerBlock,
)
from clearhead.nn.gpt import sample

TEXT = "attention is all you need, and every head looks where it likes. " * 2


@pytest.mark.parametrize("norm", ["pre", "post", None])
@pytest.mark.parametrize(("bias", "activation"), [(True, "gelu"), (False, "gelu"), (True, "relu")])
def test_a_block_is_pytorchs_encoder_layer(norm: Any, bias: bool, activation: Any) -> None:
    theirs = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre", bias=bias
    )
    if norm is None:
        theirs.norm1 = theirs.norm2 = nn.Identity()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    mine = TransformerBlock(12, 3, norm=norm, hidden=20, bias=bias, activation=activation)
    names = {"self_attn.": "attention.", "linear1.": "feed_forward.up.", "linear2.": "feed_forward.down."}
    state = {}
    for name, tensor in theirs.state_dict().items():
        for theirs_name, mine_name in names.items():
            name = name.replace(theirs_name, mine_name)
        state[name] = tensor
    mine.load_state_dict(state)
    x = torch.randn(2, 5, 12)
    exact = copy.deepcopy(theirs).double().train()(x.double())
    within(mine(x), exact, theirs.train()(x), 5)


def test_swiglu_and_sizes() -> None:
    part = FeedForward(12, activation="swiglu", bias=False)
    x = torch.randn(5, 12)
    gate, up, down = (getattr(part, name).weight for name in ("gate", "up", "down"))
    want = (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(part(x), want)
    assert gate.shape == (32, 12)
    assert FeedForward(12).up.weight.shape == (48, 12)


@pytest.mark.parametrize(
    "attention",
    [LatentAttention(12, 2, kv_rank=8, rotary_dim=4), DifferentialAttention(12, 2, causal=True)],
    ids=lambda module: type(module).__name__,
)
def test_a_block_takes_other_attention(attention: nn.Module) -> None:
    block = TransformerBlock(12, 2, attention=attention, rms=True, activation="swiglu").double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    cache = KVCache()
    with torch.no_grad():
        got = torch.cat([block(part, cache=cache) for part in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(got, block(x))


def test_dropout_of_a_block_follows_training() -> None:
    block, x = TransformerBlock(12, 3, dropout=0.5), torch.randn(2, 5, 12)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    assert block.extra_repr() == "norm='pre', dropout=0.5"


def model(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocabulary": 29, "context": 40, "layers": 2, "heads": 4, "width": 32, **options}
    made = GPT(GPTConfig(**sizes)).eval()
    for parameter in made.parameters():  # large enough that tokens differ
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return made


KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"positions": "learned"},
    "sinusoidal, ReLU": {"positions": "sinusoidal", "activation": "relu"},
    "alibi, grouped": {"positions": "alibi", "kv_heads": 2},
    "relative, SwiGLU, RMSNorm": {"positions": "relative", "activation": "swiglu", "rms": True, "bias": False},
    "window, multi-query, normed": {"window": 3, "kv_heads": 1, "qk_norm": True, "tied": False},
}


def test_sinusoidal_positions_are_those_of_the_library() -> None:
    gpt = model(positions="sinusoidal", layers=1).double()
    tokens = torch.randint(29, (2, 50), generator=torch.Generator().manual_seed(1))  # more than context: no table ends
    stream = gpt.tokens(tokens) * 32**0.5 + torch.tensor(ch.sinusoidal(50, 32))
    want = gpt.head(gpt.norm(gpt.blocks[0](stream)))
    torch.testing.assert_close(gpt(tokens), want, rtol=1e-12, atol=1e-12)
    # it can tell where tokens stand, which without positions it cannot
    same = torch.full((1, 6), 7)
    assert not torch.allclose(gpt(same)[0, 0], gpt(same)[0, 5])
    blind = model(positions=None, layers=1)
    torch.testing.assert_close(blind(same)[0, 0], blind(same)[0, 5])
    assert set(gpt.state_dict()) == set(blind.state_dict())  # nothing is learnt, and nothing is saved


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_generating_with_a_cache_is_generating_without(options: dict[str, Any]) -> None:
    gpt = model(**options)
    prompt = torch.randint(29, (3, 5), generator=torch.Generator().manual_seed(2))
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 4, "top_k": 5, "temperature": 0.7}]
    for how in [*ways, {"seed": 5, "top_p": 0.6}, {"temperature": 0, "lengths": [5, 2, 4]}]:
        without = gpt.generate(prompt, 5, cache=False, **how)
        makers = [lambda: gpt.caches(), lambda: gpt.caches(40), lambda: gpt.caches(window=30)]
        if "window" in options:
            makers.append(lambda: gpt.caches(window=4))
        for make in makers:
            assert torch.equal(gpt.generate(prompt, 5, cache=make, **how), without)
    assert without.shape == (3, 10)


def test_each_row_goes_on_where_its_prompt_ends() -> None:
    gpt = model()
    prompt = torch.randint(29, (2, 6), generator=torch.Generator().manual_seed(2))
    together = gpt.generate(prompt, 7, temperature=0, lengths=[6, 3])
    for row, n in enumerate((6, 3)):
        alone = gpt.generate(prompt[row, :n], 7, temperature=0)
        assert torch.equal(together[row, : n + 7], alone)


def test_rows_that_end_early_are_filled_with_their_last_token() -> None:
    gpt = model()
    prompt = torch.randint(29, (2, 6), generator=torch.Generator().manual_seed(2))
    for new, stop in ((7, None), (0, None), (7, range(29))):
        found = gpt.generate(prompt, new, temperature=0, lengths=[6, 3], stop=stop)
        drawn = 1 if stop else new
        assert found.shape == (2, 6 + drawn)
        assert (found[1, 3 + drawn :] == found[1, 2 + drawn]).all()


def test_tokens_of_any_whole_dtype() -> None:
    gpt = model()
    prompt = torch.randint(29, (2, 6), generator=torch.Generator().manual_seed(2))
    found = gpt.generate(prompt.int(), 4, temperature=0)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), gpt.generate(prompt, 4, temperature=0))
    assert torch.equal(gpt.loss(prompt.int()), gpt.loss(prompt))


def test_generating_leaves_every_module_in_its_mode() -> None:
    gpt = model(dropout=0.5).train()
    gpt.blocks[0].eval()
    before = {name: module.training for name, module in gpt.named_modules()}
    first = gpt.generate(ONE, 6, temperature=0)
    assert {name: module.training for name, module in gpt.named_modules()} == before
    assert torch.equal(gpt.generate(ONE, 6, temperature=0), first)


def test_a_ring_with_sinks_foretells_as_the_mask_it_stands_for() -> None:
    gpt = model(layers=1).double()
    tokens = torch.randint(29, (2, 20), generator=torch.Generator().manual_seed(2))
    caches = gpt.caches(window=5, sinks=2)
    with torch.no_grad():
        got = torch.cat([gpt(one, caches=caches) for one in tokens.split(1, dim=1)], dim=1)
        x = gpt.blocks[0](gpt.tokens(tokens), mask=ch.window(5) | ch.prefix(2))
        torch.testing.assert_close(got, gpt.head(gpt.norm(x)))


def test_stopping() -> None:
    gpt = model()
    prompt = torch.randint(29, (3, 4), generator=torch.Generator().manual_seed(2))
    free = gpt.generate(prompt, 10, temperature=0)
    stop = int(free[0, 6])
    stopped = gpt.generate(prompt, 10, temperature=0, stop=stop)
    for row in range(3):
        new = free[row, 4:].tolist()
        end = new.index(stop) if stop in new else None
        mine = stopped[row, 4:].tolist()
        assert mine == (new[: len(mine)] if end is None else (new[: end + 1] + [stop] * 10)[: len(mine)])
    alone = gpt.generate(prompt[0], 10, temperature=0, stop={stop, 999})
    assert alone[-1] == stop
    assert stop not in alone[4:-1]


def test_sampling() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20000, 4)
    generator = torch.Generator().manual_seed(0)

    def shares(**how: Any) -> list[float]:
        drawn = sample(logits, generator=generator, **how)
        return (torch.bincount(drawn, minlength=4) / 20000).tolist()

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert shares(top_p=0.8) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert shares(top_p=0.81)[2] > 0
    cold = shares(temperature=0.5)
    assert cold == pytest.approx([w**2 / 0.365 for w in (0.5, 0.3, 0.15, 0.05)], abs=0.02)
    assert shares(temperature=0) == shares(temperature=1e-40) == [1, 0, 0, 0]
    assert shares(top_k=99) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)


def test_it_learns_a_text_and_says_it_back() -> None:
    letters = sorted(set(TEXT))
    tokens = torch.tensor([letters.index(c) for c in TEXT])
    torch.manual_seed(0)
    sizes = {"vocabulary": len(letters), "context": 64, "layers": 2, "heads": 4, "width": 32}
    gpt = GPT(GPTConfig(**sizes, activation="swiglu", rms=True))
    assert abs(float(gpt.loss(tokens[None]).detach()) - math.log(len(letters))) < 0.1  # nothing is known yet
    optimiser = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(120):
        starts = torch.randint(len(tokens) - 48, (8,), generator=generator)
        loss = gpt.loss(torch.stack([tokens[s : s + 48] for s in starts]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.25
    said = gpt.generate(tokens[:10], 54, temperature=0)
    assert "".join(letters[i] for i in said) == TEXT[:64]
    assert gpt.training


def test_state_copies_and_moves() -> None:
    gpt = model(positions="learned")
    tokens = torch.randint(29, (2, 7))
    assert gpt.head.weight is gpt.tokens.weight
    other = model(positions="learned")
    nn.init.zeros_(other.tokens.weight)
    other.load_state_dict(gpt.state_dict())
    for same in (other, copy.deepcopy(gpt), pickle.loads(pickle.dumps(gpt))):
        assert torch.equal(same(tokens), gpt(tokens))
        assert same.head.weight is same.tokens.weight
    assert copy.deepcopy(gpt).half()(tokens).dtype == torch.float16
    assert GPT(gpt.config, device="meta")(tokens.to("meta")).shape == (2, 7, 29)
    assert gpt.extra_repr() == f"{sum(p.numel() for p in gpt.parameters()):,} parameters"


def test_compiled_in_one_graph_and_exported() -> None:
    torch._dynamo.reset()
    gpt = model(kv_heads=2, qk_norm=True)
    tokens = torch.randint(29, (2, 7))
    compiled = torch.compile(gpt, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), gpt(tokens))
    found = [torch.autograd.grad(run(tokens).square().mean(), list(gpt.parameters())) for run in (compiled, gpt)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    length = torch.export.Dim("length", min=2, max=40)
    program = torch.export.export(gpt, (tokens,), dynamic_shapes={"tokens": {1: length}})
    for n in (7, 19):
        more = torch.randint(29, (2, n))
        torch.testing.assert_close(program.module()(more), gpt(more))


ONE, TWO = torch.tensor([1]), torch.tensor([[1, 2], [3, 4]])
REFUSED: dict[str, Any] = {
    "norm: is 'sandwich', expected 'pre', 'post' or None": lambda: TransformerBlock(12, 3, norm="sandwich"),
    "rms: is True, and norm is None: there is no norm to be one": lambda: TransformerBlock(12, 3, norm=None, rms=True),
    "activation: is 'tanh', expected 'gelu', 'relu' or 'swiglu'": lambda: FeedForward(12, activation="tanh"),
    "positions: are sinusoidal over 33 features, expected an even number": (
        lambda: model(positions="sinusoidal", width=33, heads=3)
    ),
    "attention: is given together with window, which it has its own of": (
        lambda: TransformerBlock(12, 3, attention=nn.Identity(), window=3)
    ),
    "attention: is given together with attention_dropout, which it has its own of": (
        lambda: TransformerBlock(12, 3, attention=nn.Identity(), attention_dropout=0.5)
    ),
    "layers: is 0, expected a whole number of at least 1": lambda: model(layers=0),
    "tokens: has shape (5,), expected whole numbers (batch, positions)": lambda: model()(
        torch.zeros(5, dtype=torch.int64)
    ),
    "tokens: come to 41 positions, expected at most context, 40": (
        lambda: model(positions="learned")(torch.zeros(1, 41, dtype=torch.int64))
    ),
    "temperature: is -1, expected a finite number of at least 0": lambda: model().generate(
        torch.tensor([1]), 2, temperature=-1
    ),
    "temperature: is nan, expected a finite number of at least 0": (
        lambda: model().generate(ONE, 2, temperature=math.nan)
    ),
    "lengths: is [3, 2], expected 2 numbers from 1 to 2": lambda: model().generate(TWO, 2, lengths=[3, 2]),
    "lengths: is [0, 2], expected 2 numbers from 1 to 2": lambda: model().generate(TWO, 2, lengths=[0, 2]),
    "lengths: is [2], expected 2 numbers from 1 to 2": lambda: model().generate(TWO, 2, lengths=[2], cache=False),
    "new: is -1, expected a whole number of at least 0": lambda: model().generate(ONE, -1),
    "prompt: has shape (2, 0) and dtype torch.int64, expected whole numbers (batch, positions), at least one each": (
        lambda: model().generate(TWO[:, :0], 2)
    ),
    "seed: is given together with generator, expected one of them": (
        lambda: model().generate(ONE, 2, seed=1, generator=torch.Generator())
    ),
    "stop: is 'x', expected a whole number or a list of them": lambda: model().generate(ONE, 2, stop="x"),
    "caches: are 1, expected one for each of 2 layers": lambda: model()(TWO, caches=[KVCache()]),
    "tokens: has shape (2, 1), expected (batch, at least 2 positions)": lambda: model().loss(TWO[:, :1]),
    "top_k: is 0, expected a whole number of at least 1": lambda: model().generate(ONE, 2, top_k=0),
    "top_p: is 0.0, expected a number above 0 and up to 1": lambda: model().generate(ONE, 2, top_p=0.0),
}


@pytest.mark.parametrize(("text", "mistake"), REFUSED.items(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_mistake_is_refused_in_one_sentence(text: str, mistake: Any) -> None:
    with pytest.raises(ch.ArgumentError) as refusal:
        mistake()
    assert str(refusal.value) == text


# PyTorch's own compiler still imports what PyTorch has deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(" " in torch.__file__, reason="PyTorch's compiler does not quote the path to itself")
def test_compiled_by_the_default_compiler() -> None:
    torch._dynamo.reset()
    block, x = TransformerBlock(12, 3, causal=True), torch.randn(2, 5, 12)
    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))
    found = [torch.autograd.grad(run(x).square().sum(), list(block.parameters())) for run in (compiled, block)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
