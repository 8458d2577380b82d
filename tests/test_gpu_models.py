"""What is built on attention, on a GPU: modules, compiled functions, Hugging Face models, watched ones."""

from __future__ import annotations

import copy
from typing import Any

import hf_models as hf
import pytest
import torch
from budget import within
from on_gpu import MARKS, THERE
from torch import Tensor, nn

import clearhead as ch
from clearhead.integrations import huggingface
from clearhead.nn import GPT, GPTConfig, MultiHeadAttention

pytestmark = MARKS
DEVICE = "cuda" if THERE else "cpu"

huggingface.register()


def here(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


def real(name: str, tensor: Tensor, axis: int) -> Tensor:
    """Without what belongs to padded queries, which are along `axis`."""
    mask = hf.real(name)
    shape = [mask.shape[0] if n == 0 else mask.shape[1] if n == axis else 1 for n in range(tensor.ndim)]
    return torch.where(mask.reshape(shape), tensor.cpu(), 0.0)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert"])
@torch.no_grad()
def test_a_watched_model_gives_its_weights(name: str) -> None:
    model = hf.build(name)
    with hf.in_full():
        exact = hf.precise(model)(**hf.doubles(hf.inputs(name)), output_attentions=True)
    model = model.to(DEVICE)
    model.set_attn_implementation("eager")
    plain = model(**here(hf.inputs(name)), output_attentions=True)
    model.set_attn_implementation("sdpa")
    with ch.watch(model, want={"weights": True, "received": True, "top": 2}) as seen:
        got = model(**here(hf.inputs(name)))
    within(*(real(name, hf.result(output), 1) for output in (got, exact, plain)), 17, name)
    assert seen.missed == {}
    assert len(seen) == len(exact.attentions)
    for call, best, theirs in zip(seen, exact.attentions, plain.attentions, strict=True):
        within(*(real(name, weights, 2) for weights in (call.weights, best, theirs)), 17, call.name)
        torch.testing.assert_close(call.received.cpu(), call.weights.cpu().sum(-2))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_a_model_on_clearhead_gives_what_eager_gives(name: str) -> None:
    model = hf.build(name)
    with hf.in_full():
        exact = hf.result(hf.precise(model)(**hf.doubles(hf.inputs(name))))
    model = model.to(DEVICE)
    outputs = []
    for implementation in ("clearhead", "eager"):
        model.set_attn_implementation(implementation)
        outputs.append(hf.result(model(**here(hf.inputs(name)))))
    got, plain = outputs
    within(*(real(name, logits, 1) for logits in (got, exact, plain)), 17, name)


def test_modules_learn_what_they_learn_on_the_cpu() -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(48, 6, kv_heads=2, causal=True)
    x = torch.randn(2, 70, 48)

    def trained(module: nn.Module, x: Tensor) -> list[Tensor]:
        output = module(x)
        output.square().sum().backward()
        return [output.detach().cpu(), *(parameter.grad.cpu() for parameter in module.parameters())]

    exact = trained(copy.deepcopy(module).double(), x.double())
    plain = trained(copy.deepcopy(module), x)
    got = trained(copy.deepcopy(module).to(DEVICE), x.to(DEVICE))
    for number, (mine, best, theirs) in enumerate(zip(got, exact, plain, strict=True)):
        within(mine, best, theirs, 2 * 70, f"number {number}")


@pytest.mark.parametrize("options", [{}, {"positions": "alibi", "kv_heads": 2}, {"window": 3}], ids=str)
def test_generating_with_a_cache_is_generating_without(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocabulary=29, context=40, layers=2, heads=4, width=32, **options)).eval()
    for parameter in gpt.parameters():  # large enough that tokens differ
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    gpt = gpt.to(DEVICE)
    prompt = torch.randint(29, (3, 5), device=DEVICE)
    without = gpt.generate(prompt, 8, cache=False, temperature=0)
    assert torch.equal(gpt.generate(prompt, 8, temperature=0), without)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own compiler imports what PyTorch has deprecated
@pytest.mark.skipif(" " in torch.__file__, reason="PyTorch's compiler does not quote the path to itself")
@pytest.mark.parametrize("mask", [None, ch.causal(), ch.window(20)], ids=str)
def test_compiled_in_one_graph(mask: ch.Mask | None) -> None:
    torch._dynamo.reset()
    q, k, v, dout = torch.randn((4, 1, 4, 130, 64), device=DEVICE, dtype=torch.bfloat16).unbind(0)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ch.attention(q, k, v, mask=mask) * 2

    found = []
    for run in (twice, torch.compile(twice, fullgraph=True)):
        output = run(q, k, v)
        found.append([output, *torch.autograd.grad(output, (q, k, v), dout)])
    exact = ch.attention(*(x.detach().cpu().double() for x in (q, k, v)), mask=mask, kernel="dense") * 2
    within(found[1][0].cpu(), exact, found[0][0].cpu(), 130)
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right)
