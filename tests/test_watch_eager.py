"""Hugging Face models on "eager" are watched through transformers' registry, exactly; what cannot be is said aloud."""

from __future__ import annotations

import threading
import warnings
from functools import cache

import hf_models as hf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from watched import Gpt, held, ids, left_behind

import clearhead as ch
from clearhead.watching.mode import active


@cache
def eager(name: str) -> nn.Module:
    one = hf.build(name)
    one.set_attn_implementation("eager")
    return one


@pytest.mark.parametrize("name", hf.MODELS)
@torch.no_grad()
def test_eager_attention_is_seen_and_the_model_computes_what_it_did(name: str) -> None:
    one = eager(name)
    plain = one(**hf.inputs(name), output_attentions=True)
    with hf.in_full():
        exact = hf.precise(one)(**hf.doubles(hf.inputs(name)), output_attentions=True)
    before = left_behind(one)
    with ch.watch(one, want={"weights": True}) as seen:
        got = one(**hf.inputs(name))
    assert torch.equal(hf.result(got), hf.result(plain)), "its own function computes the result"
    assert seen.missed == {}
    assert left_behind(one) == before
    kinds = {kind: list(zip(*(getattr(o, kind, None) or () for o in (plain, exact)), strict=True)) for kind in hf.KINDS}
    assert len(seen) == sum(map(len, kinds.values())) > 0
    for call in seen:
        crossing = "cross" in call.name or "EncDec" in call.name or "encoder_attn" in call.name
        kind = "cross_attentions" if crossing else f"{'de' if 'decoder' in call.name else 'en'}coder_attentions"
        weights = kinds[kind if name in ("t5", "whisper") else "attentions"].pop(0)
        live = torch.isfinite(call.lse)[..., None]  # a padded query gets the mean of everything by eager attention
        held(*(torch.where(live, w, 0.0) for w in (call.weights, *weights)), 17, call.name)


@torch.no_grad()
def test_generation_on_eager_is_seen_step_by_step() -> None:
    one = eager("gpt_oss")
    given = {"input_ids": hf.IDS, "attention_mask": hf.LEFT}
    plain = one.generate(**given, max_new_tokens=3, do_sample=False)
    with ch.watch(one, want={"weights": True, "keep": True}) as seen:
        got = one.generate(**given, max_new_tokens=3, do_sample=False)
    assert torch.equal(plain, got)
    assert [call.shape[-2:] for call in seen.layer(1)] == [(9, 9), (1, 10), (1, 11)]
    np.testing.assert_allclose(seen[-1].rows([0]), seen[-1].weights, atol=1e-6)


def test_training_with_dropout_is_seen_before_dropout_and_has_its_gradients() -> None:
    one = transformers.GPT2Model(
        transformers.GPT2Config(n_embd=24, n_layer=1, n_head=4, vocab_size=37, attn_pdrop=0.5, **hf.NONE)
    ).train()
    one.set_attn_implementation("eager")
    found = []
    for look in (False, True):
        one.zero_grad()
        torch.manual_seed(3)
        if look:
            with ch.watch(one, want={"weights": True}) as seen:
                one(hf.IDS).last_hidden_state.sum().backward()
        else:
            one(hf.IDS).last_hidden_state.sum().backward()
        found.append([parameter.grad.clone() for parameter in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert seen.missed == {}
    torch.testing.assert_close(seen[0].weights.sum(-1), torch.ones(2, 4, 9))


@torch.no_grad()
def test_eager_attention_that_means_something_else_is_refused_by_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    one = eager("llama")
    module = transformers.models.llama.modeling_llama
    right = module.eager_attention_forward

    def shrunk(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        output, weights = right(*args, **kwargs)
        return output * 0.99, weights

    monkeypatch.setattr(module, "eager_attention_forward", shrunk)
    with ch.watch(one) as seen:
        one(hf.IDS)
    assert not len(seen)
    assert "computes something other than" in seen.missed["model.layers.0.self_attn"]


@torch.no_grad()
def test_tensors_without_numbers_run_and_are_missed() -> None:
    meta = transformers.LlamaModel(transformers.LlamaConfig(**hf.DECODER, attn_implementation="eager")).to("meta")
    with ch.watch(meta) as seen:
        assert meta(hf.IDS.to("meta")).last_hidden_state.shape == (2, 9, 24)
    assert seen.missed["layers.0.self_attn"] == "its tensors are on the meta device and hold no numbers"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # PyTorch's own, where the CPU has no bfloat16
@torch.no_grad()
def test_half_precision_and_autocast_are_seen() -> None:
    one = hf.build("llama")
    one.set_attn_implementation("eager")
    with torch.autocast("cpu", torch.bfloat16):
        plain = one(hf.IDS).logits
        with ch.watch(one, want={"weights": True}) as seen:
            assert torch.equal(one(hf.IDS).logits, plain)
    assert seen.missed == {}
    assert len(seen) == 2
    one = one.bfloat16()
    with ch.watch(one) as seen:
        one(hf.IDS)
    assert seen.missed == {}


@torch.no_grad()
def test_a_thread_that_nobody_watches_gets_the_function_itself() -> None:
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = transformers.AttentionInterface.get_interface
    found = []
    with ch.watch(eager("llama")), ch.watch(eager("gpt2")):
        other = threading.Thread(target=lambda: found.append(interface.get_interface("eager", test_a_thread)))
        other.start()
        other.join()
        assert transformers.AttentionInterface.get_interface is not before
    assert found == [test_a_thread]
    assert transformers.AttentionInterface.get_interface is before
    assert not active.quiet


def test_a_thread() -> None:
    """A function to ask for by name."""


class InSteps(nn.Module):
    """A layer that attends by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


def test_a_model_of_which_nothing_is_seen_warns_once_and_says_why() -> None:
    one = nn.Sequential(InSteps(), InSteps())
    words = "watch saw no attention. 0: InSteps ran, but not by"
    with pytest.warns(UserWarning, match=words) as told, ch.watch(one) as seen:
        one(torch.ones(1, 3, 4))
    assert len(told) == 1
    assert told[0].filename == __file__
    with pytest.raises(IndexError, match=r"seen\[0\] is not there: nothing was seen. 0: InSteps ran.*and 1 more in"):
        seen[0]


@torch.no_grad()
def test_a_model_without_the_interface_is_told_what_helps() -> None:
    config = transformers.GPTJConfig(n_embd=24, n_layer=1, n_head=4, rotary_dim=4, vocab_size=37, **hf.NONE)
    one = transformers.GPTJModel(config).eval()
    words = r"set_attn_implementation\('sdpa'\) lets it be seen; Gemma-2, GPT-OSS"
    with pytest.warns(UserWarning, match=words), ch.watch(one) as seen:
        one(hf.IDS)
    assert "huggingface.register()" in next(iter(seen.missed.values()))


@torch.no_grad()
def test_calls_that_are_not_there_are_explained() -> None:
    one = Gpt().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ch.watch(one) as seen:
            with pytest.raises(IndexError, match="nothing was seen; a model is seen when it runs inside"):
                seen[0]
            one(ids())
    with pytest.raises(IndexError, match=r"seen\[7\] is not there: 3 calls were seen, seen\[0\] to seen\[2\]"):
        seen[7]
    assert seen[-1] is seen[2]
    assert list(seen) == [seen[i] for i in range(3)]
