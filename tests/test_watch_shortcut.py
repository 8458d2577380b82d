"""transformers' function for "sdpa" is not run again for a call of a kind that was met, and else always."""
# ruff: noqa: F811  # who asks for a fixture that is imported has an argument of its name

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hf_models as hf
import pytest
import torch
from interpreted import MARKS
from test_watch_again import TOP, gpu, same  # noqa: F401  # `gpu` is a fixture, asked for by its name

import clearhead as ch
from clearhead.watching import familiar, shortcut

pytestmark = MARKS
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The options of each time that the function is run."""
    found: list[Any] = []
    own = shortcut.direct

    def counted(function: Any, run: Any) -> Any:
        def running(*args: Any, **options: Any) -> Any:
            found.append(options)
            return run(*args, **options)

        return own(function, running)

    from clearhead.watching import eager

    eager.changed.cache_clear()
    monkeypatch.setattr(shortcut, "direct", counted)
    yield found
    eager.changed.cache_clear()


@pytest.mark.usefixtures("interpreting")
def test_a_call_that_was_met_is_made_without_it_and_is_the_same(gpu: list[Any], runs: list[Any]) -> None:
    model: Any = hf.build("llama")
    others = torch.tensor([[2, 7, 1, 8, 2, 8, 1]])
    with torch.no_grad():
        plain = [model(ids).logits for ids in (IDS, others)]
        for _ in range(3):  # known, learnt, played
            with ch.watch(model, want=TOP):
                model(IDS)
        before, played = len(runs), len(gpu)
        with ch.watch(model, want=TOP) as seen:
            outputs = [model(ids).logits for ids in (IDS, others)]
        assert len(runs) == before, "the function was not run"
        assert len(gpu) == played + 4
        assert not seen.missed
        familiar.forget(model)
        with ch.watch(model, want={**TOP, "weights": True}) as slowly:
            model(IDS)
            model(others)
    for one, other in zip(outputs, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    same(seen, slowly)


@pytest.mark.usefixtures("interpreting")
@pytest.mark.parametrize("change", ["mask", "causality", "groups", "an option it reads", "length"])
def test_it_is_run_where_anything_else_is_asked(gpu: list[Any], runs: list[Any], change: str) -> None:
    model: Any = hf.build("llama")
    options: dict[str, Any] = {}
    ids = IDS
    with torch.no_grad():
        for _ in range(3):
            with ch.watch(model, want={}):
                model(IDS)
        before = len(runs)
        first = model.model.layers[0].self_attn
        if change == "mask":
            options["attention_mask"] = torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)
        elif change == "causality":
            first.is_causal = False
        elif change == "groups":
            first.num_key_value_groups = torch.tensor(first.num_key_value_groups)  # equal, and not known to be
        elif change == "an option it reads":
            options["output_attentions"] = True
        else:
            ids = IDS[:, :5]
        plain = model(ids, **options).logits
        with ch.watch(model, want={}) as seen:
            output = model(ids, **options).logits
    assert len(runs) > before
    torch.testing.assert_close(output, plain, atol=1e-5, rtol=1e-5)
    assert len(seen) == 2


def test_a_function_that_names_something_else_is_always_run() -> None:
    def plain(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), kwargs.get("cache")

    def another(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return module.attend(query, key, value), None

    found = shortcut.direct(plain, plain)
    assert found.reads is not None
    assert {"dropout", "cache"} <= found.reads
    assert shortcut.direct(another, another).reads is None
    x = torch.randn(1, 2, 3, 4)
    assert shortcut.direct(another, another).kind(torch.nn.Identity(), (x, x, x, None), {}) is None


def test_what_lies_otherwise_is_not_remembered() -> None:
    q, k, v, output = (torch.randn(1, 2, 3, 4) for _ in range(4))
    given = (q, k, v, None)
    assert shortcut.same([output, q, k, v], given, shortcut.laid_out(output))
    assert not shortcut.same([output, q, k[:], v], given, shortcut.laid_out(output))
    assert not shortcut.same([output, q, k, v], given, (output.transpose(1, 2), None))
    assert not shortcut.same([output, q, k, v], given, (output.contiguous(), None))
    assert not shortcut.same([output, q, k, v], given, (shortcut.laid_out(output)[0], output))
