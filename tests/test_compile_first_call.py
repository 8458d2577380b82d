"""Compiled by PyTorch at the first call, though tables grow while it compiles: `sys.modules`, and every one of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import hf_models as hf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import nn as ours
from clearhead.integrations.huggingface import register

# what is asked for by name and may come at any time; PyTorch's own compiler imports JAX where it is installed
LATE = ("jax", "numpy.ma")
THERE: dict[str, ModuleType] = {name: import_module(name) for name in LATE}


def tables() -> Iterator[dict[Any, Any] | list[Any] | set[Any]]:
    """Every dictionary, list and set that a module of ours holds, but for what Python keeps there itself."""
    for name, module in list(sys.modules.items()):
        if name == "clearhead" or name.startswith("clearhead."):
            for held, value in list(vars(module).items()):
                if type(value) in (dict, list, set) and not held.startswith("__"):
                    yield value


class Growing:
    """A back end while whose work everything grows that may."""

    def __init__(self) -> None:
        self.grown: list[Any] = []
        self.mark = object()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        compiled = aot_eager(graph, inputs)
        sys.modules.update(THERE)
        for table in tables():
            self.grown.append(table)
            if isinstance(table, dict):
                table[self.mark] = self.mark
            elif isinstance(table, list):
                table.append(self.mark)
            else:
                table.add(self.mark)
        return compiled

    def shrink(self) -> None:
        for table in self.grown:
            if isinstance(table, dict):
                table.pop(self.mark, None)
            elif self.mark in table:
                table.remove(self.mark)


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Growing]:
    torch._dynamo.reset()
    for name in LATE:
        monkeypatch.delitem(sys.modules, name)
    backend = Growing()
    try:
        yield backend
    finally:
        backend.shrink()
    assert backend.grown, "nothing was compiled"


def own(name: str) -> Any:
    """A model whose attention is ours."""
    register()
    model: Any = hf.build(name)
    model.set_attn_implementation("clearhead")
    return model


def test_a_hugging_face_model_that_learns(growing: Growing) -> None:
    model, plain = (own("llama").train() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, fullgraph=True, backend=growing)
    found = []
    for run, parts in ((compiled, model), (plain, plain)):
        loss = run(hf.IDS, labels=hf.IDS).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in parts.parameters())])
        growing.shrink()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert"])
def test_a_hugging_face_model_that_infers(growing: Growing, name: str) -> None:
    model = own(name)
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend=growing)(**hf.inputs(name))[0]
        growing.shrink()
        torch.testing.assert_close(found, model(**hf.inputs(name))[0])


NUMBERS = np.random.default_rng(0)
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "causal": lambda: {"mask": ch.causal()},
    "array": lambda: {"mask": NUMBERS.random((5, 7)) < 0.8},
    "lengths": lambda: {"mask": ch.lengths([3, 7]) & ch.window(4)},
    "documents": lambda: {"mask": ch.documents(np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 1, 1, 1]))},
    "biases": lambda: {"bias": ch.alibi(4), "softcap": 3.0, "sinks": np.zeros(4, np.float32)},
    "added": lambda: {"bias": NUMBERS.standard_normal((5, 7)).astype(np.float32), "temperature": 1.5},
    "dropout": lambda: {"dropout": (0.25, 7), "scale": 0.5},
    "dense": lambda: {"kernel": "dense", "mask": ch.causal()},
}


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_function_with_options(growing: Growing, name: str, learns: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6))
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=learns) for shape in shapes)
    options = OPTIONS[name]()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ch.attention(q, k, v, **options)

    results = []
    for run in (torch.compile(call, fullgraph=True, backend=growing), call):
        output = run(q, k, v)
        results.append([output, *(torch.autograd.grad(output.square().sum(), (q, k, v)) if learns else ())])
        growing.shrink()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("make", [
    lambda: ours.MultiHeadAttention(8, 2, causal=True, positions=ch.rotary()), lambda: ours.TransformerBlock(8, 2),
], ids=["layer", "block"])  # fmt: skip
def test_a_layer_that_learns(growing: Growing, make: Callable[[], nn.Module]) -> None:
    layer = make()
    x = torch.randn(2, 5, 8)
    found = []
    for run in (torch.compile(layer, fullgraph=True, backend=growing), layer):
        output = run(x)
        found.append([output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()))])
        growing.shrink()
    torch.testing.assert_close(*found)
