"""What was seen: what its positions are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from watched import Gpt, ids

import clearhead as ch


def seen_of(model: nn.Module, *args, **options) -> ch.Seen:
    with torch.no_grad(), ch.watch(model, **options) as seen:
        model(*args)
    return seen


class Letters:
    """A tokenizer, as far as watch needs one."""

    def convert_ids_to_tokens(self, given: list[int]) -> list[str]:
        return [chr(97 + i % 26) for i in given]


def test_a_tokenizer_names_the_tokens_of_every_step():
    model = Gpt(layers=1)
    with torch.no_grad(), ch.watch(model, tokens=Letters()) as seen:
        model(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert seen[0].keys_named == (("a", "b", "c"), ("d", "e", "f"))
    assert seen[0].queries_named == seen[0].keys_named
    fixed = seen_of(model, ids(1, 3), tokens=["x", "y", "z"])
    assert fixed[0].keys_named == (("x", "y", "z"),)
    assert seen_of(model, ids(1, 4), tokens=["x", "y", "z"])[0].keys_named is None


def test_texts_read_one_after_another_are_named_each_by_its_own():
    model = Gpt(layers=2)
    texts = [torch.tensor(rows) for rows in ([[0, 1, 2]], [[5, 6, 7, 8]], [[3, 4], [1, 2]])]
    with torch.no_grad(), ch.watch(model, tokens=Letters()) as seen:
        for text in texts:
            model(text)
    for step, text in enumerate(texts):
        names = tuple(tuple(Letters().convert_ids_to_tokens(row)) for row in text.tolist())
        first, second = seen.step(step)
        assert first.keys_named == first.queries_named == names
        assert second.keys_named is first.keys_named, "held once for all layers"


def test_tokens_that_do_not_fit_name_nothing():
    rows = [["x", "y", "z"], ["u", "v", "w"]]
    assert seen_of(Gpt(layers=1), ids(2, 3), tokens=rows)[0].keys_named == (("x", "y", "z"), ("u", "v", "w"))
    assert seen_of(Gpt(layers=1), ids(3, 3), tokens=rows)[0].keys_named is None
    with pytest.raises(ch.ArgumentError, match="tokens: has rows of 1 and of 2 tokens, expected one length"):
        ch.watch(Gpt(layers=1), tokens=[["a"], ["b", "c"]])
    with pytest.raises(ch.ArgumentError, match="tokens: is empty, expected a list of tokens, or a tokenizer"):
        ch.watch(Gpt(layers=1), tokens=[])
