"""What a head adds to a logit directly, held to the same computed by hand; models where it adds nothing are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import hf_models as hf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from watched import Gpt, ids

import clearhead as ch


@cache
def built(name: str) -> nn.Module:
    return hf.build(name)


def caught(model: nn.Module, names: list[str], *args: Any, **kwargs: Any) -> list[Tensor]:
    """What modules are given in a run."""
    found: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: found.__setitem__(name, args[0].double())
        )
        for name in names
    ]
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return [found[name] for name in names]


# the out projections, the last norm, the unembedding; are weights (in, out), as GPT-2's; is the mean taken off
FORMS = {
    "llama": ("model.layers.{}.self_attn.o_proj", "model.norm", "lm_head", False, False),
    "gpt_oss": ("model.layers.{}.self_attn.o_proj", "model.norm", "lm_head", False, False),
    "gpt2": ("transformer.h.{}.attn.c_proj", "transformer.ln_f", "lm_head", True, True),
}


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FORMS)
def test_contributions_are_those_computed_by_hand(name: str, way: str) -> None:
    model = built(name)
    model.set_attn_implementation("eager" if name == "gpt_oss" else way)
    projection, norm, last, flipped, centred = FORMS[name]
    got = ch.contributions(model, **hf.inputs(name), token=5, position=-2, batch=1)
    heads0, heads1, stream = caught(model, [projection.format(0), projection.format(1), norm], **hf.inputs(name))
    with torch.no_grad():
        x = stream[1, -2]
        x = x - x.mean() if centred else x
        module: Any = model.get_submodule(norm)
        eps = module.eps if centred else module.variance_epsilon
        scale = module.weight.double() / (x.square().mean() + eps).sqrt()
        row = model.get_submodule(last).weight[5].double()
        expected = []
        for layer, given in enumerate((heads0, heads1)):
            weight = model.get_submodule(projection.format(layer)).weight.double()
            weight = weight.T if flipped else weight  # (width, heads · features)
            for head in range(4):
                part = weight[:, 6 * head : 6 * head + 6] @ given[1, -2, 6 * head : 6 * head + 6]
                part = part - part.mean() if centred else part
                expected.append(float(row @ (scale * part)))
        logits = model(**hf.inputs(name)).logits
    assert [line.logit for line in got.lines] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [(line.layer, line.head) for line in got.lines] == [(i, h) for i in (0, 1) for h in range(4)]
    assert got.logit == pytest.approx(float(logits[1, -2, 5]), abs=1e-6)
    assert got.rest == pytest.approx(got.logit - sum(expected), abs=1e-5)


def test_heads_embeddings_and_biases_make_up_the_logit_where_there_is_nothing_else() -> None:
    model = Gpt().eval()
    with torch.no_grad():
        for block in model.h:
            block.mlp[2].weight.zero_()
            block.mlp[2].bias.zero_()
    got = ch.contributions(model, ids(), token=(3, 8), position=6)
    with torch.no_grad():
        row = (model.lm_head.weight[3] - model.lm_head.weight[8]).double()
        x = model.wte(ids()[0, 6]) + model.wpe(torch.tensor(6)) + sum(block.attn.c_proj.bias for block in model.h)
        logits = model(ids())[0, 6]
    assert got.rest == pytest.approx(float(row @ x.double()), abs=1e-5)
    assert got.logit == pytest.approx(float(logits[3] - logits[8]), abs=1e-6)
    assert abs(got.best(1)[0].logit) == max(abs(line.logit) for line in got.lines)
    assert "is not from heads directly" in str(got)


def test_torchs_own_module_and_a_layer_norm() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.out = nn.Embedding(9, 12), nn.LayerNorm(12), nn.Linear(12, 9)
            self.attn = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, given: Tensor) -> Tensor:
            x = self.embed(given)
            return self.out(self.norm(x + self.attn(x, x, x, need_weights=False)[0]))

    model, given = One().eval(), torch.tensor([[1, 2, 3, 4]])
    got = ch.contributions(model, given, token=2)
    (x,) = caught(model, ["norm"], given)
    with torch.no_grad(), ch.watch(model, want={"output": True}) as seen:
        model(given)
    with torch.no_grad():
        scale = model.norm.weight.double() / (x[0, -1].var(correction=0) + model.norm.eps).sqrt()
        for head, line in enumerate(got.lines):
            part = model.attn.out_proj.weight[:, 4 * head : 4 * head + 4] @ seen[0].observed.output[0, head, -1]
            expected = model.out.weight[2].double() @ (scale * (part - part.mean()))
            assert line.logit == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_models_whose_heads_are_normed_on_the_way_are_refused(name: str) -> None:
    with pytest.raises(ch.ArgumentError, match="model: does not end in one norm of a residual stream"):
        ch.contributions(built(name), **hf.inputs(name), token=5)


def test_a_layer_that_is_normed_later_is_refused_by_name() -> None:
    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)]
            self.layers, self.norms = nn.ModuleList(layers), nn.ModuleList([nn.LayerNorm(8) for _ in range(2)])
            self.out = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = norm(x + layer(x, x, x, need_weights=False)[0])
            return self.out(x)

    with pytest.raises(ch.ArgumentError, match=r"model: does not add what 'layers.0' gives to the residual stream as"):
        ch.contributions(Post().eval(), torch.randn(1, 4, 8), token=1)


def test_what_cannot_be_asked_is_said() -> None:
    model = Gpt().eval()
    for wrong, words in (
        ({"token": 31}, "token: is 31, expected a number below 31, or two"),
        ({"token": 1, "position": 13}, "position: is 13, expected -13 to 12"),
        ({"token": 1, "batch": 2}, "batch: is 2, expected 0 to 1"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            ch.contributions(model, ids(), **wrong)
    bert = transformers.BertModel(transformers.BertConfig(**hf.ENCODER, vocab_size=37)).eval()
    with pytest.raises(ch.ArgumentError, match="unembedding: did not run on"):
        ch.contributions(bert, hf.IDS, token=1)
    assert not any(module._forward_hooks for module in model.modules())


class Small(nn.Module):
    """One attention and a last norm; `change` is done to what is followed on the way."""

    def __init__(self, change: Any = None, *, where: str = "stream", width: int = 12, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.norm, self.out = nn.Embedding(9, width), norm(width), nn.Linear(width, 9)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.attn = nn.MultiheadAttention(width, 3, batch_first=True)
        self.change, self.where = change, where

    def forward(self, given: Tensor) -> Tensor:
        x = self.embed(given)
        added = self.attn(x, x, x, need_weights=False)[0]
        if self.where == "projected" and self.change:
            added = self.change(added)
        x = x + added
        if self.where == "stream" and self.change:
            x = self.change(x)
        x = self.norm(x)
        if self.where == "normed" and self.change:
            x = self.change(x)
        return self.out(x)


GIVEN = torch.tensor([[1, 2, 3, 4]])


def in_place(x: Tensor) -> Tensor:
    x *= 3.0
    return x


def by_a_view(x: Tensor) -> Tensor:
    x.view(-1).mul_(3.0)
    return x


CHANGES: dict[str, Any] = {
    "in place": in_place,
    "by a view": by_a_view,
    "divided": lambda x: x.div_(2.0),
    "relu": lambda x: x.relu_(),
    "rolled": lambda x: x.roll(1, -1),
    "flipped": lambda x: x.flip(-1),
    "selected": lambda x: x.index_select(-1, torch.arange(11, -1, -1)),
    "features interleaved": lambda x: x.unflatten(-1, (2, 6)).transpose(-1, -2).flatten(-2),
    "dropped": lambda x: nn.functional.dropout(x, 0.5, training=True),
    "dropped in place": lambda x: nn.functional.dropout(x, 0.5, training=True, inplace=True),
    "twice": lambda x: x + x,
}


@pytest.mark.parametrize("where", ["projected", "stream", "normed"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_on_the_way_is_refused(change: str, where: str) -> None:
    model = Small(CHANGES[change], where=where).eval()
    with pytest.raises(ch.ArgumentError, match="model: does not"):
        ch.contributions(model, GIVEN, token=2)


@pytest.mark.parametrize("where", ["projected", "stream"])
@pytest.mark.parametrize(
    "same",
    [
        lambda x: nn.functional.dropout(x, 0.5, training=False, inplace=True),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.flatten(0, 1).view(x.shape),
        lambda x: x.add_(torch.ones_like(x)),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_stays_the_same_is_followed(same: Any, where: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        found = ch.contributions(Small(same, where=where).eval(), GIVEN, token=2)
    assert len(found.lines) == 3


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_an_odd_width(norm: Any) -> None:
    model = Small(width=15, norm=norm).eval().double()
    got = ch.contributions(model, GIVEN, token=2)
    (x,) = caught(model, ["norm"], GIVEN)
    with torch.no_grad(), ch.watch(model, want={"output": True}) as seen:
        model(GIVEN)
    with torch.no_grad():
        centre = norm is nn.LayerNorm
        y = x[0, -1] - (x[0, -1].mean() if centre else 0.0)
        scale = model.norm.weight / (y.square().mean() + (model.norm.eps or torch.finfo(torch.float64).eps)).sqrt()
        for head, line in enumerate(got.lines):
            part = model.attn.out_proj.weight[:, 5 * head : 5 * head + 5] @ seen[0].observed.output[0, head, -1]
            expected = model.out.weight[2] @ (scale * (part - (part.mean() if centre else 0.0)))
            assert line.logit == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where a processor has no bfloat16 PyTorch says so once
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_half_precision_is_read(name: str, dtype: torch.dtype) -> None:
    model = hf.build(name)
    model.set_attn_implementation("sdpa")
    exact = ch.contributions(model, **hf.inputs(name), token=5, batch=1)
    got = ch.contributions(model.to(dtype), **hf.inputs(name), token=5, batch=1)
    most = max(abs(line.logit) for line in exact.lines)
    for one, two in zip(got.lines, exact.lines, strict=True):
        assert one.logit == pytest.approx(two.logit, abs=8 * torch.finfo(dtype).eps * most)


def test_logits_of_the_last_position_alone_are_refused_in_words() -> None:
    model = built("llama")
    with pytest.raises(ch.ArgumentError, match=r"unembedding: was given 1 of 9 positions, .* leave out logits_to_keep"):
        ch.contributions(model, **hf.inputs("llama"), token=5, logits_to_keep=1)


def test_tokens_are_taken_as_people_have_them() -> None:
    model = Small().eval()
    one, two = ch.contributions(model, GIVEN, token=5), ch.contributions(model, GIVEN, token=(5, 3))
    for token, expected in (
        (np.int64(5), one),
        (torch.tensor(5), one),
        ([5], one),
        ([5, 3], two),
        (torch.tensor([5, 3]), two),
        (np.array([5, 3]), two),
    ):
        assert ch.contributions(model, GIVEN, token=token).lines == expected.lines
    for wrong in (True, 5.0, torch.tensor(5.0), "5", [[5]], [], [1, 2, 3], -1, np.int64(9)):
        with pytest.raises(ch.ArgumentError, match=r"token: is .*expected a number below 9, or two"):
            ch.contributions(model, GIVEN, token=wrong)
