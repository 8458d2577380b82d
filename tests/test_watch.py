"""watch: models as people write them, seen without a change to what they compute."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched import Gpt, Vit, doubled, held, ids, left_behind, watched

import clearhead as ch

ALL = {"weights": True, "received": True, "top": 5, "distance": True}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def encoder(layers: int = 2, *, batch_first: bool = True, **options) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(20, 2, 32, dropout=0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=batch_first).eval()


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores if mask is None else scores.masked_fill(~mask, -math.inf), dim=-1)


@torch.no_grad()
def test_nano_gpt_is_seen_call_by_call():
    model = Gpt()
    seen = watched(model, ids(), keys=13, watch_want=ALL)
    assert seen.names == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert [call.kind for call in seen] == ["CausalSelfAttention"] * 3
    assert seen.missed == {}
    assert not left_behind(model)
    call = seen["h.1.attn"]
    assert call.shape == (2, 3, 13, 13)
    assert call.layer == 1
    assert call.kernel == "compiled"
    assert torch.equal(call.weights, call.weights.tril())
    assert call.observed.output.shape == (2, 3, 13, 0)


@torch.no_grad()
def test_weights_are_those_of_the_model():
    model = Gpt(layers=1)
    captured = {}
    model.h[0].attn.c_attn.register_forward_hook(lambda module, args, output: captured.update(qkv=output))
    with ch.watch(model, want=ALL) as seen:
        model(ids())
    q, k, _ = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in captured["qkv"].chunk(3, dim=-1))
    allowed = torch.ones(13, 13, dtype=torch.bool).tril()
    exact = weights_of(q.double(), k.double(), allowed)
    held(seen[0].weights, weights_of(q, k, allowed), exact, 13, "weights")
    held(seen[0].received, weights_of(q, k, allowed).sum(-2), exact.sum(-2), 13, "received")
    n = torch.arange(13)
    far = (n[:, None] - n).abs()
    held(seen[0].distance, (weights_of(q, k, allowed) * far).sum(-1), (exact * far).sum(-1), 13, "distance")


@torch.no_grad()
def test_vision_transformer_is_seen():
    seen = watched(Vit(), torch.randn(2, 3, 16, 20), keys=21, watch_want=ALL)
    assert seen.names == ["blocks.0.attn", "blocks.1.attn"]
    assert seen.missed == {}
    n = torch.arange(21)
    weights = seen[0].weights.double()
    far = (weights * (n[:, None] - n).abs()).sum(-1)
    held(seen[0].distance, (seen[0].weights * (n[:, None] - n).abs()).sum(-1), far, 21, "distance on both sides")


@pytest.mark.parametrize("grad", [False, True], ids=["fast path", "slow path"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_transformer_encoder_both_paths(grad, padded):
    model = encoder()
    padding = torch.zeros(3, 11, dtype=torch.bool)
    padding[1, 7:] = True
    kwargs = {"src_key_padding_mask": padding} if padded else {}
    with torch.set_grad_enabled(grad):
        seen = watched(model, torch.randn(3, 11, 20), keys=11, watch_want=ALL, **kwargs)
    assert seen.names == ["layers.0.self_attn", "layers.1.self_attn"]
    if padded:
        assert not seen[0].weights[1, :, :, 7:].any()
        assert (seen[0].received[1, :, 7:] == 0).all()
    assert not left_behind(model)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padding_is_normalised_as_the_fast_path_does():
    layer = nn.TransformerEncoderLayer(20, 2, 32, dropout=0.0, batch_first=True)
    norm = nn.LayerNorm(20)
    nn.init.normal_(norm.bias)
    model = nn.TransformerEncoder(layer, 2, norm=norm).eval()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 3:] = True
    x = torch.randn(2, 7, 20)
    plain = model(x, src_key_padding_mask=padding)
    with ch.watch(model):
        got = model(x, src_key_padding_mask=padding)
    assert torch.equal(plain[0, 3:], got[0, 3:])
    right_aligned = padding.flip(1)
    watched(model, x, keys=7, src_key_padding_mask=right_aligned)


@torch.no_grad()
def test_causal_hint_of_the_encoder_is_followed():
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    seen = watched(encoder(batch_first=False), torch.randn(9, 2, 20), keys=9, watch_want=ALL, mask=mask, is_causal=True)
    assert torch.equal(seen[0].weights, seen[0].weights.tril())


@torch.no_grad()
def test_decoder_is_seen_with_its_cross_attention():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(20, 2, 32, dropout=0.0, batch_first=True), 2).eval()
    seen = watched(model, torch.randn(2, 5, 20), torch.randn(2, 8, 20), keys=8, watch_want=ALL)
    assert seen.names == [f"layers.{i}.{kind}" for i in (0, 1) for kind in ("self_attn", "multihead_attn")]
    assert seen["layers.0.multihead_attn"].shape == (2, 2, 5, 8)
    assert seen["layers.0.multihead_attn"].distance is None, "there is no distance between two sequences"
    assert [call.name for call in seen.layer(1)] == ["layers.1.self_attn", "layers.1.multihead_attn"]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention_that_gives_weights(average, grad):
    module = nn.MultiheadAttention(20, 2, add_bias_kv=True, batch_first=True).eval()
    q, k = torch.randn(2, 5, 20), torch.randn(2, 8, 20)
    call = {"need_weights": True, "average_attn_weights": average, "attn_mask": torch.rand(5, 8) < 0.3}
    with torch.set_grad_enabled(grad):
        plain = module(q, k, k, **call)
        with ch.watch(module, want=ALL) as seen:
            got = module(q, k, k, **call)
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True)), "what it gives back is its own"
    assert [c.name for c in seen] == [""]
    assert seen.missed == {}
    mine = seen[0].weights.mean(1) if average else seen[0].weights
    exact = module.double()(q.double(), k.double(), k.double(), **call)[1]
    held(mine, got[1], exact, 9, "weights")


def test_dropout_stays_the_models_own_and_weights_are_those_before_it():
    model = Gpt(dropout=0.5).train()
    torch.manual_seed(3)
    plain = model(ids())
    torch.manual_seed(3)
    with ch.watch(model, want=ALL) as seen:
        got = model(ids())
    assert torch.equal(plain, got)
    sums = seen[0].weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_gradients_are_the_models_own():
    model = Gpt()
    model(ids()).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with ch.watch(model, want=ALL) as seen:
        model(ids()).sum().backward()
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(plain, model.parameters(), strict=True))
    assert not seen[0].weights.requires_grad


def test_checkpoints_are_seen_once():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Gpt):
        def forward(self, given: Tensor) -> Tensor:
            x = self.wte(given)
            for block in self.h:
                x = checkpoint(block, x, use_reentrant=False)
            return self.lm_head(x)

    model = Checkpointed()
    with ch.watch(model) as seen:
        model(ids()).sum().backward()
    assert [call.name for call in seen] == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert not left_behind(model)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # a CPU without bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype):
    model = Vit().to(dtype)
    x = torch.randn(1, 3, 16, 16).to(dtype)
    with ch.watch(model, want=ALL) as seen:
        assert model(x).dtype == dtype
    assert seen[0].entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if dtype != torch.float64:
        watched(model, x, keys=17)


@torch.inference_mode()
def test_inference_mode():
    seen = watched(Gpt(layers=1), ids(), keys=13, watch_want={**ALL, "keep": True})
    assert seen.rollout(-1).shape == (2, 13)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_autocast_is_followed():
    model = Gpt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(ids())
        with ch.watch(model, want={"output": True}) as seen:
            got = model(ids())
    assert seen[0].observed.output.dtype == torch.bfloat16
    held(got, plain, model.double()(ids()), 13, "autocast")


class Direct(nn.Module):
    """One call, with whatever it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


def tensors(queries: int = 5, keys: int = 7, heads: int = 4, key_heads: int = 4) -> tuple[Tensor, ...]:
    return (
        torch.randn(2, heads, queries, 8),
        torch.randn(2, key_heads, keys, 8),
        torch.randn(2, key_heads, keys, 8),
    )


SOME = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.6
SOME[..., 0] = True
CALLS = {
    "causal is top-left": ({"is_causal": True}, {}),
    "boolean mask": ({"attn_mask": SOME}, {}),
    "two-axis mask": ({"attn_mask": SOME[0, 0]}, {}),
    "float mask": ({"attn_mask": torch.randn(5, 7).masked_fill(~SOME[0, 0], -math.inf)}, {}),
    "lowest float mask": (
        {"attn_mask": torch.zeros(2, 1, 5, 7).masked_fill(~SOME, torch.finfo(torch.float32).min)},
        {},
    ),
    "grouped": ({"enable_gqa": True, "is_causal": True}, {"key_heads": 2}),
    "one key head": ({"attn_mask": SOME}, {"key_heads": 1}),
    "scale": ({"scale": 0.3}, {}),
    "mask and causal": ({"attn_mask": SOME, "is_causal": True}, {}),
    "one query": ({}, {"queries": 1}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_every_way_of_calling(name):
    options, sizes = CALLS[name]
    q, k, v = tensors(**sizes)
    seen = watched(Direct(), q, k, v, keys=7, watch_want=ALL, **options)
    assert len(seen) == 1
    assert seen.missed == {}
    if k.shape[1] != q.shape[1]:
        return
    if name == "mask and causal":  # of PyTorch's ways only one takes both, and it takes them as one mask
        options = {"attn_mask": SOME.tril()}
    precise = {option: doubled(value) for option, value in options.items()}
    places = torch.eye(7).expand(2, 4, 7, 7)  # values that give the weights back
    exact = F.scaled_dot_product_attention(q.double(), k.double(), places.double(), **precise)
    held(seen[0].weights, F.scaled_dot_product_attention(q, k, places, **options), exact, 7, "weights")


@torch.no_grad()
def test_positional_arguments_and_the_operator_itself_are_seen():
    class Operator(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            one = F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
            return one + torch.ops.aten.scaled_dot_product_attention(q, k, v)

    seen = watched(Operator(), *tensors(), keys=7)
    assert len(seen) == 2
    assert seen.missed == {}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_a_query_that_may_attend_to_nothing_gives_zero_as_pytorch_does(kind):
    q, k, v = tensors()
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(5, 7).masked_fill(~mask, -math.inf)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    model = Direct()
    with ch.watch(model, want=ALL) as seen:
        got = model(q, k, v, attn_mask=mask)
    assert not plain[:, :, 2].any()
    assert not got[:, :, 2].any()
    assert not seen[0].weights[:, :, 2].any()
    assert (seen[0].lse[:, :, 2] == -math.inf).all()
    assert seen[0].distance[:, :, 2].isnan().all()


@torch.no_grad()
def test_some_layers_by_number_and_name():
    model = Gpt(layers=4)
    for layers, expected in ((2, ["h.2.attn"]), ([0, "h.3.*"], ["h.0.attn", "h.3.attn"]), ("h.1.attn", ["h.1.attn"])):
        with ch.watch(model, layers=layers) as seen:
            model(ids())
        assert seen.names == expected
        assert seen.missed == {}


@torch.no_grad()
def test_some_heads_are_the_same_as_those_of_all():
    model = Direct()
    q, k, v = tensors(key_heads=2)
    mask = torch.rand(1, 4, 5, 7) < 0.7
    mask[..., 0] = True
    plain = model(q, k, v, attn_mask=mask, enable_gqa=True)
    with ch.watch(model, want=ALL) as everything, ch.watch(model, want=ALL, heads=[3, 0]) as some:
        model(q, k, v, attn_mask=mask, enable_gqa=True)
    with ch.watch(model, heads=1) as one:
        assert torch.equal(model(q, k, v, attn_mask=mask, enable_gqa=True), plain), "the model's own call"
    assert some[0].heads == (3, 0)
    assert one[0].entropy.shape == (2, 1, 5)
    assert torch.equal(some[0].weights, everything[0].weights[:, [3, 0]])
    assert [(line.head, line.layer) for line in some.summary().lines] == [(3, 0), (0, 0)]


@torch.no_grad()
def test_steps_are_calls_of_the_model():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Gpt(layers=1), Gpt(layers=1)

        def forward(self, given: Tensor) -> Tensor:
            return self.decoder(given)

    model = Parts()
    with ch.watch(model) as seen:
        model.encoder(ids())  # as generate() runs an encoder before its first step
        for length in (3, 4, 5):
            model(ids(length=length))
    assert [(call.name, call.step) for call in seen] == [
        ("encoder.h.0.attn", 0), ("decoder.h.0.attn", 0), ("decoder.h.0.attn", 1), ("decoder.h.0.attn", 2),
    ]  # fmt: skip
    assert seen.steps == 3
    assert seen.step(-1)["decoder.h.0.attn"].shape[-1] == 5
    assert seen.named("decoder.*").steps == 3
    with pytest.raises(KeyError, match=r"made 3 calls, in steps 0 to 2: say seen\.step\(n\)"):
        seen["decoder.h.0.attn"]


@torch.no_grad()
def test_queries_that_a_step_does_not_have_are_left_out():
    model = Gpt(layers=1)
    with ch.watch(model, want={"queries": [0, 4, -1]}) as seen:
        model(ids(length=5))
        model(ids(length=2))
    assert np.asarray(seen[0].queries.indices).tolist() == [0, 4, 4]
    assert np.asarray(seen[1].queries.indices).tolist() == [0, 1]


def test_what_is_wrong_is_said():
    model = Gpt(layers=1)
    for options, words in (
        (
            {"want": {"tops": 3}},
            "want: has 'tops', expected some of top, received, received_max, removal, map, queries, weights, distance",
        ),
        ({"want": {"top": 0}}, "top: is 0, expected a whole number of at least 1"),
        ({"want": {"keep": 1}}, "want: has keep=1, expected True or False"),
        ({"want": "weights"}, "want: is a str, expected a dict"),
        ({"layers": [-1]}, "layers: has -1, expected numbers from 0, or names of modules"),
        ({"heads": [True]}, "heads: has True, expected numbers from 0"),
        ({"heads": []}, "heads: is empty, expected at least one number"),
        ({"tokens": "a b"}, "tokens: is a str, expected a list of tokens, or a tokenizer"),
    ):
        with pytest.raises(ch.ArgumentError) as error:
            ch.watch(model, **options)
        assert str(error.value).startswith(words)
    with pytest.raises(ch.ArgumentError, match=r"model: is a function, expected a torch\.nn\.Module"):
        ch.watch(lambda x: x)
    with ch.watch(model) as seen:
        model(ids())
    with pytest.raises(ch.ArgumentError, match="layer: is 7, and the calls that were seen have 0 to 0"):
        seen.layer(7)
    with pytest.raises(KeyError, match=r"'attn' made no call that was seen; these did: h\.0\.attn"):
        seen["attn"]
