"""Attention in steps is named wherever it is computed, and what only looks like it, or is called so, is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched import CausalSelfAttention

import clearhead as ch
from clearhead.watching.mode import active

# where nothing of a model is seen, watch also warns; here it is `missed` that is looked at
pytestmark = pytest.mark.filterwarnings("ignore:watch saw no attention")

WORDS = "ran, but not by scaled_dot_product_attention: in steps, softmax(a @ b) @ c"


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)  # (batch, heads, T, 4)


def by_operators(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(4), dim=-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd, bhkd -> bhqk", q, k) * 0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def by_implicit_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without an arrow the axes that are left come in the order of their letters."""
    return torch.einsum("...qk,...kz", torch.einsum("...qd,...kd->...qk", q, k).softmax(-1), v)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [t.reshape(-1, *t.shape[-2:]) for t in (q, k, v)]
    weights = F.softmax(torch.bmm(flat[0], flat[1].mT), dim=2)
    return torch.bmm(weights, flat[2]).view_as(v)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [t.reshape(-1, *t.shape[-2:]) for t in (q, k, v)]
    bias = torch.zeros(flat[0].shape[0], q.shape[-2], k.shape[-2])
    scores = torch.baddbmm(bias, flat[0], flat[1].transpose(1, 2), beta=1.0, alpha=0.5)
    return scores.view(*q.shape[:-1], -1).softmax(-1).matmul(v)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q.matmul(k.mT)).masked_fill(~seen, float("-inf")).softmax(dim=-1).matmul(v)


def by_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.matmul(torch.where(seen, q @ k.mT, torch.finfo(q.dtype).min).softmax(-1), v)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores /= 2.0
    scores += torch.zeros(k.shape[-2])
    scores.masked_fill_(torch.ones(q.shape[-2], k.shape[-2]).triu(1).bool(), -1e9)
    scores[..., 0] = 0.5
    weights = scores.softmax(-1)
    weights.mul_(1.0)
    return weights @ v


def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax((q.half() @ k.half().mT).float(), dim=-1, dtype=torch.float32).to(torch.float16)
    return (weights @ v.half()).float()


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(q @ k.mT, -1), 0.1, training=True) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * torch.tanh(q @ k.mT / 5)).softmax(-1) @ v


def stabilised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def with_a_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT, torch.zeros(*q.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values on the left, (D, S) times (S, T)."""
    return (v.mT @ (q @ k.mT).softmax(-1).transpose(-1, -2)).mT


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax over the keys that stand in rows."""
    return (v.mT @ (k @ q.mT).softmax(-2)).mT


def by_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one = [F.linear(F.linear(a, b).softmax(-1), c.mT) for a, b, c in zip(q[0], k[0], v[0], strict=True)]
    return torch.stack(one)[None].expand(q.shape[0], -1, -1, -1)


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.reshape(q.shape[0], 1, -1, 4) @ k[:, :1].mT).softmax(-1)
    return (weights @ v[:, :1]).view_as(q)


def talking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), torch.eye(2)) @ v


def renormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-9)) @ v


STYLES: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    by_operators, by_einsum, by_implicit_einsum, by_bmm, by_baddbmm, masked, by_where, in_place, upcast, dropped,
    capped, stabilised, with_a_sink, transposed, keys_first, by_linear, shared_keys, talking, renormalised,
]  # fmt: skip


class Mixer(nn.Module):
    """A layer that nobody would know by its name."""

    def __init__(self, style: Callable[..., Tensor], width: int = 8) -> None:
        super().__init__()
        self.style, self.qkv, self.out = style, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.style(q, k, v).transpose(1, 2).flatten(2))


def missed(model: nn.Module, *given: Tensor, **options: Any) -> dict[str, str]:
    torch.manual_seed(2)
    plain = model(*given)
    torch.manual_seed(2)
    with ch.watch(model, **options) as seen:
        watched = model(*given)
    assert torch.equal(
        plain if isinstance(plain, Tensor) else plain[0], watched if isinstance(watched, Tensor) else watched[0]
    )
    return dict(seen.missed)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_attention_in_steps_is_named_where_it_happens(style, gradients):
    model = nn.Sequential(nn.Linear(8, 8), Mixer(style), nn.ReLU(), nn.Sequential(Mixer(style)))
    with torch.set_grad_enabled(gradients):
        found = missed(model, torch.randn(2, 5, 8))
    assert found == {"1": f"Mixer {WORDS}", "3.0": f"Mixer {WORDS}"}


def test_it_is_named_beside_calls_that_are_seen_and_on_every_step():
    model = nn.Sequential(CausalSelfAttention(8, 2), Mixer(masked))
    x = torch.randn(2, 5, 8)
    with torch.no_grad(), ch.watch(model) as seen:
        model(x)
        model(x)
    assert seen.names == ["0"]
    assert len(seen) == 2
    assert seen.missed == {"1": f"Mixer {WORDS}"}


class Split(nn.Module):
    """Scores in one module, softmax in another, the values in a third."""

    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT

    class Mix(nn.Module):
        def forward(self, weights: Tensor, v: Tensor) -> Tensor:
            return weights @ v

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.soft, self.drop, self.mix = self.Scores(), nn.Softmax(dim=-1), nn.Dropout(0.1), self.Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.drop(self.soft(self.scores(x, x))), x)


def test_it_is_followed_through_modules_and_a_loop_over_heads():
    assert missed(nn.Sequential(Split()), torch.randn(2, 5, 8)) == {"0.mix": f"Mix {WORDS}"}

    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            parts = x.split(4, dim=-1)
            weights = torch.stack([part @ part.mT for part in parts], 1)
            return torch.cat([w.softmax(-1) @ p for w, p in zip(weights.unbind(1), parts, strict=True)], -1)

    assert missed(nn.Sequential(Loop()), torch.randn(2, 5, 8)) == {"0": f"Loop {WORDS}"}


@pytest.mark.parametrize("views", [False, True])
def test_a_cache_of_keys_is_an_activation(views):
    class Decoder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            room = torch.zeros(2, 8, 8)
            if views:
                room[:, : x.shape[1]].copy_(x)
            else:
                room[:, : x.shape[1]] = x
            return (x @ room.mT).softmax(-1) @ room

    assert missed(nn.Sequential(Decoder()), torch.randn(2, 5, 8)) == {"0": f"Decoder {WORDS}"}


class Of(nn.Module):
    """A module made of a function over a few parameters and a buffer."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.does = does
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.inner = nn.Linear(8, 8)
        self.register_buffer("grid", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


class Gate(Of):
    """No attention, and not called so."""


class ChannelAttention(Of):
    """No attention between positions, whatever it is called."""


def router(m: Any, x: Tensor) -> Tensor:
    """Experts by a softmax over a linear layer."""
    gates = m.inner(x).softmax(-1)
    experts = torch.stack([F.linear(x, w) for w in m.experts], -2)  # (batch, T, experts, 8)
    return torch.einsum("bte,bted->btd", gates, experts)


def prototypes(m: Any, x: Tensor) -> Tensor:
    """A codebook that is compared and read: its keys and values are parameters, also where they are normed first."""
    keys = F.normalize(m.keys, dim=-1)
    return (x @ keys.mT / 0.1).softmax(-1) @ m.values


def classifier(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.mean(1), m.head).softmax(-1)


def similarity(m: Any, x: Tensor) -> Tensor:
    """Probabilities of pairs, which nothing is multiplied by."""
    return (x @ x.mT).softmax(-1)


def pooling(m: Any, x: Tensor) -> Tensor:
    """Positions by a learned score each."""
    return (F.linear(x, m.score).mT.softmax(-1) @ x).expand_as(x)


def expectation(m: Any, x: Tensor) -> Tensor:
    """Where the largest similarity lies, on a grid."""
    places = torch.arange(x.shape[1], dtype=x.dtype)
    return ((x @ x.mT).softmax(-1) @ places)[..., None].expand_as(x)


def graph_pool(m: Any, x: Tensor) -> Tensor:
    """Nodes to clusters: a softmax over clusters, summed over nodes."""
    neighbours = torch.relu(x @ x.mT)
    assigned = ((neighbours @ x) @ m.cluster).softmax(-1)
    return assigned.mT @ x


def mixture(m: Any, x: Tensor) -> Tensor:
    return (m.mix.softmax(-1)[:, None, None, None] * torch.stack([x, m.inner(x)])).sum(0)


def deep_classifier(m: Any, x: Tensor) -> Tensor:
    """Products of activations far above a softmax do not make it one of scores."""
    x = torch.relu(m.inner((x @ x.mT) @ x))
    return F.linear(x, m.head).softmax(-1) @ x.new_ones(3, 8)


def squeeze(m: Any, x: Tensor) -> Tensor:
    """Channels by a gate of their own."""
    return x * torch.sigmoid(m.inner(x.mean(1, keepdim=True)))


def channel_softmax(m: Any, x: Tensor) -> Tensor:
    return x * torch.softmax(m.inner(x.amax(1, keepdim=True)), -1)


NOT: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, tuple[int, ...]]]] = {
    "router": (router, {"experts": (8, 8, 8)}),
    "prototypes": (prototypes, {"keys": (6, 8), "values": (6, 8)}),
    "classifier": (classifier, {"head": (3, 8)}),
    "similarity": (similarity, {}),
    "pooling": (pooling, {"score": (1, 8)}),
    "expectation": (expectation, {}),
    "graph pool": (graph_pool, {"cluster": (8, 3)}),
    "mixture": (mixture, {"mix": (2,)}),
    "deep classifier": (deep_classifier, {"head": (3, 8)}),
    "squeeze": (squeeze, {}),
    "channel softmax": (channel_softmax, {}),
    "a buffer": (lambda m, x: (x @ m.grid).softmax(-1) @ m.grid, {}),
}


@pytest.mark.parametrize("name", NOT)
def test_what_only_looks_like_it_is_not_named(name):
    does, shapes = NOT[name]
    words = "Sequential ran and made no attention call that can be seen"
    for first in (nn.Linear(8, 8), nn.Identity()):
        assert missed(nn.Sequential(first, Gate(does, **shapes)), torch.randn(2, 5, 8)) == {"": words}
    assert missed(nn.Sequential(CausalSelfAttention(8, 2), Gate(does, **shapes)).eval(), torch.randn(2, 5, 8)) == {}


@pytest.mark.parametrize("name", ["squeeze", "channel softmax", "mixture", "classifier"])
def test_what_is_only_called_attention_is_not_named(name):
    does, shapes = NOT[name]
    model = nn.Sequential(nn.Linear(8, 8), ChannelAttention(does, **shapes))
    assert list(missed(model, torch.randn(2, 5, 8))) == [""]


class FusedAttention(nn.Module):
    """Numbers that come from where PyTorch's functions do not go."""

    def __init__(self, into_empty: bool) -> None:
        super().__init__()
        self.into_empty = into_empty

    def forward(self, x: Tensor) -> Tensor:
        if self.into_empty:
            output = torch.empty_like(x)
            output.detach().numpy()[...] = 1.0
        else:
            output = torch.from_dlpack(x.detach().numpy() + 1.0)
        return output.view(x.shape) * 2


@pytest.mark.parametrize("into_empty", [True, False])
def test_a_kernel_that_no_function_shows_is_named_by_what_it_is_called(into_empty):
    found = missed(nn.Sequential(nn.Linear(8, 8), FusedAttention(into_empty)), torch.randn(2, 5, 8))
    words = "FusedAttention ran, but not by scaled_dot_product_attention: in steps, or in a kernel of its own"
    assert found == {"1": words}


def test_attention_by_another_softmax_is_named_by_what_it_is_called():
    class LinearAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.elu(x) @ (F.elu(x).mT @ x)

    assert list(missed(nn.Sequential(LinearAttention()), torch.randn(2, 5, 8))) == ["0"]


def test_tensors_are_not_kept_alive():
    x, alive = torch.randn(2, 5, 8), []

    class Alive(Mixer):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(entry[0]() is not None for entry in active.steps.tags.values()))
            return super().forward(x)

    model = nn.Sequential(*(Alive(masked) for _ in range(40)))
    with torch.no_grad(), ch.watch(model):
        model(x)
        assert not active.steps.tags, "nothing is known between two runs"
    assert max(alive) < 10


def test_many_tensors_that_live_are_not_looked_through_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.watching import steps

    monkeypatch.setattr(steps, "MANY", 8)
    followed, alive, rebuilt = steps.Steps(most=8), [], 0
    for _ in range(200):
        before = followed.tags
        alive.append(torch.zeros(1))
        followed.know([alive[-1]], steps.PLAIN)
        rebuilt += followed.tags is not before
    assert len(followed.tags) == 200
    assert rebuilt <= 6
