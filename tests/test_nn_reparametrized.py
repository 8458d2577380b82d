"""Modules whose weights are computed when they are asked for (parametrized, normed, pruned), hooked or replaced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import clearhead as ch
from clearhead.nn import (
    GPT,
    DifferentialAttention,
    GPTConfig,
    KVCache,
    LatentAttention,
    MultiHeadAttention,
    TransformerBlock,
)


class Low(nn.Module):
    """W + B A, as LoRA has it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(2, n) * 0.3) for n in (weight.shape[1], weight.shape[0]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b.mT @ self.a


def old_weight_norm(module: nn.Module, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module, name)


def low_rank(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Low(getattr(module, name)))


WAYS: dict[str, Callable[[nn.Module, str], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "low_rank": low_rank,
    "old_weight_norm": old_weight_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda module, name: prune.random_unstructured(module, name, amount=0.4),
}


def multi_head(**options: Any) -> nn.Module:
    return MultiHeadAttention(16, 4, **options)


# a module, and each of its weights that may be one of these
MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[str, str]]]] = {
    "joined": (multi_head, {"in": ("", "in_proj_weight"), "out": ("out_proj", "weight")}),
    "grouped": (lambda: multi_head(kv_heads=2, causal=True), {"in": ("", "in_proj_weight")}),
    "apart": (
        lambda: multi_head(kdim=12, vdim=20),
        {"q": ("", "q_proj_weight"), "k": ("", "k_proj_weight"), "v": ("", "v_proj_weight")},
    ),
    "relative": (lambda: multi_head(positions="relative"), {"table": ("", "relative_table")}),
    "latent": (
        lambda: LatentAttention(16, 4, kv_rank=8, rotary_dim=4),
        {"up": ("kv_up", "weight"), "down": ("kv_down", "weight"), "out": ("out_proj", "weight")},
    ),
    "absorbed": (lambda: LatentAttention(16, 4, kv_rank=8, rotary_dim=4, absorb=True), {"up": ("kv_up", "weight")}),
    "differential": (
        lambda: DifferentialAttention(16, 2, causal=True),
        {"q": ("q_proj", "weight"), "lambda": ("", "lambda_q")},
    ),
    "block": (
        lambda: TransformerBlock(16, 4, causal=True, activation="swiglu"),
        {"in": ("attention", "in_proj_weight"), "gate": ("feed_forward.gate", "weight")},
    ),
}
CASES = [(name, which) for name, (_, places) in MODULES.items() for which in places]


def given(name: str) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    return tuple(torch.randn(2, 5, width) for width in ((16, 12, 20) if name == "apart" else (16,)))


def set_up(name: str) -> nn.Module:
    torch.manual_seed(1)
    module = MODULES[name][0]()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "which"), CASES)
def test_effective_weights_are_what_counts(name, which, way):
    """Forward and gradients, against the plain module that is called with the weights that come out."""
    plain, module = set_up(name), set_up(name)
    path, weight = MODULES[name][1][which]
    owner = module.get_submodule(path)
    torch.manual_seed(9)
    WAYS[way](owner, weight)
    module.eval()  # spectral norms turn their vectors only while training
    inputs = given(name)
    with torch.no_grad():  # what was computed when it was registered is not what counts: an optimizer steps on
        for parameter in owner.parameters(recurse=True):
            parameter.mul_(1.25)
        module(*inputs)  # hooks compute the weight as the module runs
    output = module(*inputs)
    effective = {f"{path}.{weight}".strip("."): getattr(owner, weight)}
    own = {n: p for n, p in module.named_parameters() if n in dict(plain.named_parameters())}
    expected = torch.func.functional_call(plain, {**own, **effective}, inputs)
    torch.testing.assert_close(output, expected)
    parameters = list(module.parameters())
    dout = torch.randn_like(output)
    got, wanted = (
        torch.autograd.grad(o, parameters, dout, retain_graph=True, allow_unused=True) for o in (output, expected)
    )
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_as_pytorch_has_it(way):
    """The same reparametrization on PyTorch's module, whose state it takes over, key by key."""
    torch.manual_seed(1)
    theirs, mine = nn.MultiheadAttention(16, 4, batch_first=True), MultiHeadAttention(16, 4)
    for module in (theirs, mine):
        torch.manual_seed(9)
        WAYS[way](module, "in_proj_weight")
        module.eval()
    assert set(theirs.state_dict()) == set(mine.state_dict())
    mine.load_state_dict(theirs.state_dict())
    (x,) = given("joined")
    torch.testing.assert_close(mine(x), theirs(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(mine(x, x.flip(1)), theirs(x, x.flip(1), x.flip(1), need_weights=False)[0])
    again = MultiHeadAttention(16, 4)
    WAYS[way](again, "in_proj_weight")
    again.load_state_dict(mine.state_dict())
    assert torch.equal(again.eval()(x), mine(x))
    if not way.startswith(("old", "pruned")):  # which keep a tensor that PyTorch does not copy
        assert torch.equal(copy.deepcopy(mine)(x), mine(x))


def test_pruning_and_parametrizing_can_be_taken_back():
    (x,) = given("joined")
    module = set_up("joined")
    prune.l1_unstructured(module, "in_proj_weight", amount=0.5)
    prune.l1_unstructured(module, "in_proj_bias", amount=0.5)
    sparse = module(x)
    prune.remove(module, "in_proj_weight")
    prune.remove(module, "in_proj_bias")
    assert torch.equal(module(x), sparse)
    parametrizations.weight_norm(module, "in_proj_weight")
    module(x)
    parametrize.remove_parametrizations(module, "in_proj_weight")
    torch.testing.assert_close(module(x), sparse)
    assert module.extra_repr() == "16, 4"


def test_a_whole_model_trains_and_decodes_under_weight_norm():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=11, context=16, layers=2, heads=2, width=16))
    for block in model.blocks:
        parametrizations.weight_norm(block.attention, "in_proj_weight")
        old_weight_norm(block.attention.out_proj, "weight")
        prune.random_unstructured(block.feed_forward.up, "weight", amount=0.3)
    tokens = torch.randint(11, (2, 9))
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.loss(tokens).item()
    for _ in range(5):
        steps.zero_grad()
        model.loss(tokens).backward()
        steps.step()
    assert model.loss(tokens).item() < before
    kept, afresh = (model.generate(tokens, 4, temperature=0, cache=cache) for cache in (True, False))
    assert torch.equal(kept, afresh)


class Wrapped(nn.Module):
    """A projection in the place of another: it adds a product of low rank, and has no weight of its own."""

    def __init__(self, inner: nn.Linear, bias: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.low = nn.Sequential(
            nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.low(x)


def merged(wrapped: Wrapped) -> nn.Linear:
    plain = copy.deepcopy(wrapped.inner)
    with torch.no_grad():
        plain.weight += wrapped.low[1].weight @ wrapped.low[0].weight
    return plain


REPLACED = {
    "joined": ["out_proj"],
    "latent": ["q_up", "kv_down", "kv_up", "out_proj"],
    "absorbed": ["kv_up"],
    "differential": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "block": ["feed_forward.up", "attention.out_proj"],
}


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in REPLACED.items() for path in paths])
def test_projections_can_be_replaced(name, path):
    module, plain = set_up(name), set_up(name)
    wrapped = Wrapped(module.get_submodule(path))
    module.set_submodule(path, wrapped)
    plain.set_submodule(path, merged(wrapped))
    torch.testing.assert_close(module(*given(name)), plain(*given(name)))
    if name in ("latent", "absorbed"):
        results = []
        for one in (module, plain):
            cache = KVCache()
            with torch.no_grad():
                parts = [one(part, cache=cache) for part in given(name)[0].split((3, 1, 1), dim=1)]
            results.append(torch.cat(parts, dim=1))
        torch.testing.assert_close(*results)


def test_a_projection_with_a_bias_is_not_absorbed():
    module = set_up("latent")
    module.kv_up = Wrapped(module.kv_up, bias=True)
    (x,) = given("latent")
    cache = KVCache()
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.split((3, 1, 1), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), module(x))
        module.absorb = True
        with pytest.raises(
            ch.ArgumentError, match="absorb: is True, and kv_up is a Wrapped that adds to what it projects"
        ):
            module(x)


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in REPLACED.items() for path in paths])
def test_hooks_on_projections_are_called(name, path):
    module = set_up(name)
    plain = module(*given(name))
    seen = []
    handle = module.get_submodule(path).register_forward_hook(lambda m, a, out: seen.append(out.shape))
    torch.testing.assert_close(module(*given(name)), plain)
    assert seen, "a forward hook sees the projection"
    handle.remove()
    handle = module.get_submodule(path).register_forward_hook(lambda m, a, out: 2 * out)
    assert not torch.allclose(module(*given(name)), plain), "and may change what comes out"
    handle.remove()
    assert torch.equal(module(*given(name)), plain)


def test_watching_leaves_latents_absorbed():
    module = set_up("latent")
    cache = KVCache()
    with torch.no_grad(), ch.watch(module, want={"keep": True}) as seen:
        module(given("latent")[0][:, :1], cache=cache)
    assert seen[0].kept.k.shape[-3] == 1, "one shared head of latents, as without a watch"
