"""Models that are known by what transformers' registry hands their modules: looked at lightly, and missed never."""

from __future__ import annotations

import copy
import threading
from typing import Any

import hf_models as hf
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import clearhead as ch
from clearhead.watching import familiar, mode
from clearhead.watching.familiar import Way

IDS = hf.IDS


def known(name: str = "llama") -> Any:
    """A model that was seen."""
    model: Any = hf.build(name)
    with torch.no_grad(), ch.watch(model):
        model(IDS)
    assert set(familiar.known(model)[""].values()) == {Way.DIRECT}
    return model


def lightly(watching: Any) -> set[str]:
    """The modules that are looked at only as they are entered."""
    return {name for name, handles in watching.handles.items() if len(handles) == 1}


def test_a_known_model_is_looked_at_lightly_and_seen_the_same() -> None:
    model = known()
    with torch.no_grad():
        plain = model(IDS).logits
        watching = ch.watch(model, want={"top": 2})
        with watching as seen:
            assert lightly(watching) == {f"model.layers.{n}.self_attn" for n in range(2)}
            output = model(IDS).logits
            model(IDS, attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0))
        torch.testing.assert_close(output, plain)
        familiar.forget(model)
        with ch.watch(model, want={"top": 2}) as stranger:
            model(IDS)
            model(IDS, attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0))
    assert not seen.missed
    assert [(call.name, call.step, call.kind) for call in seen] == [(c.name, c.step, c.kind) for c in stranger]
    for one, other in zip(seen, stranger, strict=True):
        assert torch.equal(one.lse, other.lse)
    assert mode.active.near == mode.active.recorders == mode.active.standing == []


def test_a_part_by_itself_is_seen_and_so_is_the_whole_after_it() -> None:
    model = known()
    attend = model.model.layers[1].self_attn
    x = torch.randn(1, 5, 24)
    places = model.model.rotary_emb(x, torch.arange(5)[None])
    with torch.no_grad():
        watching = ch.watch(model)
        with watching as seen:
            attend(x, position_embeddings=places, attention_mask=None)
            assert lightly(watching) == {"model.layers.0.self_attn"}
            model(IDS)
            model.model.layers[0](x, position_embeddings=places)
    assert not seen.missed
    assert [call.layer for call in seen] == [1, 0, 1, 0]
    assert [call.step for call in seen] == [0, 0, 0, 1]


def test_a_module_to_which_nothing_is_handed_any_more_is_missed_by_name() -> None:
    model = known()
    attend = model.model.layers[1].self_attn
    with torch.no_grad():
        with ch.watch(model) as seen:
            attend.forward = lambda hidden_states, **options: (hidden_states, None)
            model(IDS)
        assert list(seen.missed) == ["model.layers.1.self_attn"]
        assert [call.layer for call in seen] == [0]
        assert familiar.recall(model) is None
        del attend.forward
        with ch.watch(model) as seen:
            model(IDS)
        assert not seen.missed
        assert len(seen) == 2


def test_somebody_elses_attention_in_the_place_of_pytorchs_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = known()
    own, called = F.scaled_dot_product_attention, []

    def theirs(*args: Any, **options: Any) -> torch.Tensor:
        called.append(len(args))
        return own(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
    assert called == [3, 3]
    assert len(seen) == 2
    monkeypatch.undo()
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
        assert called == [3, 3]
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)  # while a watch is open
        model(IDS)
        monkeypatch.undo()
    assert called == [3] * 4
    assert len(seen) == 4


def test_another_way_of_attention_is_a_stranger_and_a_changed_structure_too() -> None:
    model = known()
    assert familiar.recall(model) is not None
    model.train()
    assert familiar.recall(model) is None
    model.eval()
    assert familiar.recall(model) is not None
    model.config._attn_implementation = "eager"
    assert familiar.recall(model) is None
    model.config._attn_implementation = "sdpa"
    last = model.model.layers[1].mlp
    model.model.layers[1].mlp = nn.Identity()
    assert familiar.recall(model) is None
    model.model.layers[1].mlp = last
    found = familiar.recall(model)
    assert found is not None
    assert found[1]["model.layers.1.self_attn"] is model.model.layers[1].self_attn
    other = copy.deepcopy(model.model.layers[1], {id(model.config): model.config})
    model.model.layers[1] = other  # the same structure: what is looked at is what stands there now
    found = familiar.recall(model)
    assert found is not None
    assert found[1]["model.layers.1.self_attn"] is other.self_attn
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
    assert len(seen) == 2


def test_a_model_that_runs_inside_another_is_not_taken_for_it() -> None:
    model, guest, held = known(), known(), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *given: held.append(guest(IDS).logits))
    with torch.no_grad():
        with ch.watch(model) as seen:
            model(IDS)
        assert [call.layer for call in seen] == [0, 1]
        with ch.watch(model) as outer, ch.watch(guest) as inner:
            model(IDS)
    assert len(outer) == len(inner) == len(held) == 2
    assert not outer.missed
    assert not inner.missed


def test_a_run_that_was_interrupted_does_not_stay() -> None:
    model = known()
    stop = model.model.layers[1].mlp.register_forward_pre_hook(lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with torch.no_grad(), ch.watch(model) as seen:
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        stop.remove()
        model(IDS)
    assert [(call.step, call.layer) for call in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not seen.missed
    assert mode.active.near == []


def test_what_fails_inside_is_left_as_it_was() -> None:
    model = known()
    with torch.no_grad(), ch.watch(model) as seen:
        with pytest.raises(RuntimeError):
            model(inputs_embeds=torch.zeros(1, 3, 7))
        model(IDS)
    assert [(call.step, call.layer) for call in seen] == [(1, 0), (1, 1)]
    assert mode.active.near == mode.active.recorders == []


def test_threads_are_seen_each_and_copies_not() -> None:
    model = known()
    twin = copy.deepcopy(model)

    def run() -> None:
        with torch.no_grad():
            model(IDS)
            twin(IDS)

    with ch.watch(model) as seen:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(call.layer for call in seen) == [0, 0, 0, 1, 1, 1]
    assert not seen.missed


def test_a_replica_of_a_model_is_seen_by_its_hooks() -> None:
    """As `nn.DataParallel` makes them: other modules, with the same hooks."""
    model = known()
    with torch.no_grad(), ch.watch(model) as seen:
        replica = model._replicate_for_data_parallel()
        replica.model = model.model._replicate_for_data_parallel()
        replica.model.layers = nn.ModuleList(layer._replicate_for_data_parallel() for layer in model.model.layers)
        for layer in replica.model.layers:
            layer.self_attn = layer.self_attn._replicate_for_data_parallel()
        replica(IDS)
    assert [call.name for call in seen] == [f"model.layers.{n}.self_attn" for n in range(2)]
    assert not seen.missed


def test_a_checkpoint_is_not_seen_twice() -> None:
    model: Any = hf.build("llama").train()
    if hasattr(model, "activation_checkpointing_enable"):  # as it is called since transformers 5.23
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):  # a stranger, and known
        with ch.watch(model, want={"max_score": True}) as seen:
            model(IDS, use_cache=False).logits.sum().backward()
        assert [call.layer for call in seen] == [0, 1]
        assert not seen.missed


def test_generating_is_seen_step_by_step() -> None:
    model = known()
    with torch.no_grad(), ch.watch(model, want={"received": True}) as seen:
        model.generate(IDS, max_new_tokens=3, do_sample=False, use_cache=True)
    assert [(call.step, call.layer) for call in seen] == [(step, layer) for step in range(3) for layer in range(2)]
    assert [call.keys for call in seen.layer(0)] == [IDS.shape[1] + n for n in range(3)]
    assert not seen.missed


def test_every_so_manyth_run_is_looked_at_lightly_too() -> None:
    model = known()
    with torch.no_grad(), ch.watch(model, every=2) as seen:
        for _ in range(3):
            model(IDS)
    assert [(call.step, call.layer) for call in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not seen.missed


FOLDED = {"none": 0, "shared": 1, "by head": 4, "by query": 1, "by key head": 2}  # heads of a mask


@pytest.mark.parametrize("mask", FOLDED)
def test_heads_that_were_made_queries_are_seen_as_heads(mask: str) -> None:
    """As transformers does since 5.23 for one query: its function has them laid as queries of the keys they share."""
    model: Any = hf.build("llama")
    expected: list[torch.Tensor] = []

    def folding(module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any) -> Any:
        query = query * 1.5  # what was handed over is not what is attended with
        group, (batch, heads, _, width) = module.num_key_value_groups, query.shape
        queries = group if mask == "by query" else 1
        bias = torch.randn(batch, FOLDED[mask], queries, key.shape[2]) if FOLDED[mask] else None
        if bias is not None and mask == "by head":
            bias = bias.reshape(batch, heads // group, group, -1)
        folded = query.reshape(batch, heads // group, group, width)
        scores = folded @ key.mT * scaling
        weights = (scores if bias is None else scores + bias).softmax(-1)
        # a mask that differs by what heads of one query have not is of the call that was made
        expected.append(weights if mask in ("by query", "by key head") else weights.reshape(batch, heads, 1, -1))
        output = F.scaled_dot_product_attention(folded, key, value, bias, scale=scaling)
        return output.reshape(batch, heads, 1, -1).transpose(1, 2), None

    transformers.AttentionInterface.register("folding", folding)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(IDS[:, :5], past_key_values=cache)
    model.set_attn_implementation("folding")

    def step() -> torch.Tensor:
        torch.manual_seed(4)  # masks are drawn
        with torch.no_grad():
            return model(IDS[:, 5:6], past_key_values=copy.deepcopy(cache)).logits

    plain = step()
    for _ in range(2):  # a stranger, and known
        expected.clear()
        with ch.watch(model, want={"weights": True}) as seen:
            torch.testing.assert_close(step(), plain)
        assert not seen.missed
        for call, weights in zip(seen, expected, strict=True):
            torch.testing.assert_close(call.weights, weights, rtol=1e-5, atol=1e-6)


def test_a_query_of_every_batch_row_is_seen_as_it_is_attended_with() -> None:
    """One learned query for all rows: PyTorch gives each row its own output of it."""

    class Attends(nn.Module):
        num_key_value_groups = 2

        def forward(self, query: torch.Tensor, key: torch.Tensor) -> Any:
            attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
            return attend(self, query, key, key, torch.ones(3, 1, 1, 7, dtype=torch.bool), scaling=0.5)[0]

    torch.manual_seed(8)
    query, key, model = torch.randn(1, 4, 1, 8), torch.randn(3, 2, 7, 8), Attends()
    plain = model(query, key)
    for learns in (False, True):  # by the kernel that observes, and by the model's own call beside it
        with ch.watch(model) as seen:
            torch.testing.assert_close(model(query.requires_grad_(learns), key), plain)
        assert [call.shape for call in seen] == [(3, 4, 1, 7)]


def test_a_head_of_a_group_is_silenced_as_one_generates() -> None:
    """The output of one query's heads is changed by head, however transformers has them laid."""
    model = known()
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        before, after = copy.deepcopy(cache), copy.deepcopy(cache)
        token = IDS[:, :1]
        with ch.ablate(model, layer=1, head=3):
            edited = model(token, past_key_values=before).logits
        o_proj = model.model.layers[1].self_attn.o_proj
        width = o_proj.in_features // 4
        o_proj.weight[:, 3 * width :] = 0  # the same of the projection that follows
        torch.testing.assert_close(edited, model(token, past_key_values=after).logits, rtol=1e-5, atol=1e-6)
