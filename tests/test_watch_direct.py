"""What a head adds to a logit directly, held to the same computed by hand; models where it adds nothing are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import hf_models as hf
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
            ch.contributions(model, ids(), **wrong)  # type: ignore[arg-type]
    bert = transformers.BertModel(transformers.BertConfig(**hf.ENCODER, vocab_size=37)).eval()
    with pytest.raises(ch.ArgumentError, match="unembedding: did not run on"):
        ch.contributions(bert, hf.IDS, token=1)
    assert not any(module._forward_hooks for module in model.modules())
