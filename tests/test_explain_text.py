"""`clearhead explain --text`: a trained model's attention map, which is the model's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

from clearhead.cli import app
from clearhead.integrations import local_models

TEXT = "I saw the bank near the river"


def explained(*arguments: str, columns: int = 100, status: int = 0) -> str:
    env = {"COLUMNS": str(columns), "TERM": "dumb"}
    done = CliRunner().invoke(app, ["explain", "--text", TEXT, *arguments], env=env)
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture(scope="module")
def own() -> np.ndarray:
    """What the model says of itself, in transformers' own words: (layers, heads, tokens, tokens)."""
    loaded = local_models.load("minilm")
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        found = loaded.model(**loaded.tokenizer(TEXT, return_tensors="pt"), output_attentions=True)
    return torch.cat(found.attentions).numpy()


def test_the_map_is_the_models_own(own: np.ndarray) -> None:
    found = json.loads(explained("--json"))
    assert found["words"] == ["[CLS]", *TEXT.lower().split(), "[SEP]"]
    assert found["words"][found["query"]] == "bank"  # the rarest word, unless another is asked for
    np.testing.assert_allclose(found["weights"], own.mean((0, 1)), atol=2e-6)
    found = json.loads(explained("--json", "--layer", "2", "--head", "7", "--query", "river"))
    np.testing.assert_allclose(found["weights"], own[2, 7], atol=2e-6)
    assert (found["of"], found["query"]) == ("layer 2, head 7", 7)


def test_bank_finds_river_in_a_trained_model(own: np.ndarray) -> None:
    row = own[:, :, 4]
    layer, head = divmod(int(row[..., 7].argmax()), own.shape[1])
    weight = row[layer, head, 7]
    assert weight > 0.7
    text = explained()
    assert re.search(rf"river +{weight:.4f} +{layer} +{head}\n", text)
    text = explained("--layer", str(layer), "--head", str(head))
    assert re.search(rf"river  {weight:.4f}  █{{28,}}\n", text)
    assert re.search(rf"▸ bank .*██ {weight:.2f}", text)


@pytest.mark.parametrize("columns", [20, 40])
def test_it_stays_within_the_terminal(columns: int) -> None:
    text = explained("--layer", "0", columns=columns)
    assert max(map(cell_len, text.splitlines())) <= columns


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--layer 6", "--layer: is 6, expected one of 0, 1, 2, 3, 4, 5"),
        ("--layer 0 --head 12", "--head: is 12, expected a number from 0 to 11"),
        ("--head 1", "--head: is given without --layer: every layer has such a head"),
        ("--causal", "--text: is given beside --causal, which is for arrays: the model has its own"),
        ("it_animal", "--text: is given beside it_animal, which is for arrays: the model has its own"),
        ("--query dog", "--query: is 'dog', expected one of [CLS], i, saw, the, bank, near, the, …"),
    ],
)
def test_mistakes_are_one_sentence(arguments: str, words: str) -> None:
    said = explained(*arguments.split(), status=2)
    assert said.startswith(f"clearhead: {words}")
    assert said.count("\n") == 1


def test_a_model_needs_a_text(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["explain", "--model", "minilm"])
    assert (done.exit_code, done.output) == (2, "clearhead: --model: is for --text, which is not given\n")
