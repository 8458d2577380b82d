"""Files of what was seen that nobody saved so: each is refused in one sentence, and none costs more than it holds."""

from __future__ import annotations

import copy
import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

import clearhead as ch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray], list[Any]]:
    """The arrays and the calls of a file that holds all that a file can hold."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    want = {
        "top": 2, "received": True, "map": (2, 2), "queries": [1, 3], "weights": True, "keep": True, "distance": True,
    }  # fmt: skip
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad(), ch.watch(model, want=want, tokens=list("abcde"), heads=[1, 0]) as seen:
        model(torch.randn(3, 5, 16), mask=mask)
    path = tmp_path_factory.mktemp("seen") / "whole"
    seen.save(path)
    assert len(ch.Seen.load(path)) == 2
    return load_file(path), json.loads(header(path)["__metadata__"]["calls"])


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def write(path: Path, arrays: dict[str, np.ndarray], calls: Any, missed: Any = None, **about: str) -> Path:
    text = calls if isinstance(calls, str) else json.dumps(calls)
    known = {"format": "clearhead.seen/1", "calls": text, "missed": json.dumps(missed or {})}
    save_file(
        arrays, path, metadata={name: value for name, value in {**known, **about}.items() if value != "leave out"}
    )
    return path


def refused(path: Path, words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=words) as caught:
        ch.Seen.load(path)
    said = str(caught.value)
    assert said.startswith("path: ")
    assert "\n" not in said
    assert len(said) < 700
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "no other error is shown above it"


WRONG: dict[str, tuple[Any, str]] = {
    "no calls": (None, "calls: expected a list"),
    "calls that are a name": ("{}", "calls: expected a list"),
    "half of the text": ('[{"name": ', "its calls are no JSON that can be read"),
    "no text": ("", "its calls are no JSON that can be read"),
    "deep": ("[" * 100_000 + "]" * 100_000, "its calls are no JSON that can be read|call 0: expected a value with"),
    "deep in a field": ('[{"name": ' * 50 + "1" + "}]" * 50, "call 0: expected a field kind"),
    "digits": (f"[{'9' * 5000}]", "its calls are no JSON that can be read"),
    "a number": ("[7]", "call 0: expected a value with fields"),
    "nothing in it": ("[{}]", "call 0: expected a field name"),
}


@pytest.mark.parametrize(("calls", "words"), WRONG.values(), ids=WRONG)
def test_calls_that_are_none(calls, words, saved, tmp_path):
    refused(write(tmp_path / "wrong", saved[0], calls), words)


def changed(calls: list[Any], path: str, value: Any) -> list[Any]:
    calls = copy.deepcopy(calls)
    *way, last = path.split(".")
    place = calls[1]
    for name in way:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return calls


FIELDS: list[tuple[str, Any, str]] = [
    ("name", 3, "call 1.name: expected text"),
    ("kind", ["a"], "call 1.kind: expected text"),
    ("index", -1, "call 1.index: expected a whole number from 0"),
    ("step", True, "call 1.step: expected a whole number from 0"),
    ("layer", 1.5, "call 1.layer: expected a whole number from 0"),
    ("keys", 10**30, "call 1.keys: expected a whole number from 0"),
    ("keys", 10**15, r"call 1.received: expected an array of shape \(3, 2, 1000000000000000\) beside its lse"),
    ("keys", ..., "call 1: expected a field keys"),
    ("colour", "red", "call 1: expected none but name, .*, and there is 'colour'"),
    ("observed", {}, "call 1.observed: expected a field output"),
    ("observed", "lse", "call 1.observed: expected a value with fields"),
    ("observed.lse", 3.0, "call 1.observed.lse: expected the name of an array"),
    ("observed.lse", {"array": 7}, "call 1.observed.lse: expected the name of an array"),
    ("observed.lse", {"array": "nowhere"}, "it has no array 'nowhere'"),
    ("observed.lse", {"array": "1.kept.q"}, r"call 1.output: expected an array of shape \(3, 2, 5, 8, -1\)"),
    ("observed.kernel", None, "call 1.observed.kernel: expected text"),
    ("observed.top", {"indices": {"array": "1.observed.top.indices"}}, "call 1.observed.top: expected a field weights"),
    ("observed.top.indices", {"array": "1.observed.top.weights"}, "call 1.top.indices: expected positions below 5"),
    ("observed.map", [], "call 1.observed.map: expected a value with fields"),
    ("observed.queries.weights", {"array": "1.kept.q"}, "call 1.queries.weights: expected an array of shape"),
    ("heads", [0, 1, 2], "call 1.heads: expected one for each head of its lse"),
    ("heads", "01", "call 1.heads: expected a list of whole numbers"),
    ("distance", {"array": "1.kept.q"}, "call 1.distance: expected an array of shape"),
    ("kept.q", ..., "call 1.kept: expected a field q"),
    ("kept.causal", "yes", "call 1.kept.causal: expected true or false"),
    ("kept.scale", "1", "call 1.kept.scale: expected a number"),
    ("kept.scale", float("nan"), "call 1.kept.scale: expected a finite number"),
    ("kept.softcap", 10**400, "call 1.kept.softcap: expected a finite number"),
    ("kept.q", {"array": "1.observed.lse"}, "call 1.kept.q: expected an array of shape"),
    ("queries_named", [["a"]], "call 1.queries_named: expected 5 names for each row"),
    ("queries_named", [], "call 1.queries_named: expected 5 names for each row"),
    ("keys_named", [[1, 2, 3, 4, 5]], "call 1.keys_named: expected lists of names"),
    ("counted", -3, "call 1.counted: expected a whole number from 0"),
]


@pytest.mark.parametrize(("path", "value", "words"), FIELDS)
def test_a_field_that_is_none(path, value, words, saved, tmp_path):
    refused(write(tmp_path / "wrong", saved[0], changed(saved[1], path, value)), words)


def test_what_else_a_header_may_lack(saved, tmp_path):
    arrays, calls = saved
    refused(write(tmp_path / "a", arrays, calls, missed=["x"]), "missed: expected names and words")
    refused(write(tmp_path / "b", arrays, calls, missed={"x": 1}), "missed: expected names and words")
    refused(write(tmp_path / "c", arrays, "leave out"), "it has no calls")
    refused(write(tmp_path / "d", arrays, calls, format="clearhead.seen/9"), "its format is 'clearhead.seen/9'")
    less = {name: array for name, array in arrays.items() if name != "1.observed.entropy"}
    refused(write(tmp_path / "e", less, calls), "it has no array '1.observed.entropy'")
    other = {**arrays, "1.observed.entropy": arrays["1.observed.entropy"].astype(np.complex64)}
    refused(write(tmp_path / "f", other, calls), "call 1.observed.entropy: expected an array of numbers|cannot be read")


def rewritten(path: Path, change: Any) -> Path:
    """The same file with another header before the same numbers."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    text = json.dumps(change(json.loads(data[8 : 8 + size]))).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return path


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "I64", "F5"])
@pytest.mark.parametrize("shape", [[2**40, 2**40], [-1, 5], [3, 2, 10**12], [0, 2**63], [], None])
def test_arrays_that_claim_to_be_larger_than_the_file(shape, dtype, saved, tmp_path):
    def claim(about: dict[str, Any]) -> dict[str, Any]:
        about["1.observed.lse"] |= {"shape": shape, "dtype": dtype}
        return about

    path = rewritten(write(tmp_path / "wrong", *saved), claim)
    tracemalloc.start()
    refused(path, "path: ")
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_any_damage_is_refused_or_harmless(saved, tmp_path):
    """Bytes and values of a whole file changed at random: it loads, or is refused in words; nothing else is raised."""
    draw = random.Random(5)
    whole = write(tmp_path / "whole", *saved).read_bytes()
    path = tmp_path / "damaged"
    outcomes = {"loaded": 0, "refused": 0}
    junk = [None, -1, 0, 2**70, 1.5, "x", [], {}, [[]], {"array": "0.kept.q"}, {"array": "x"}, True, [1, "a", None]]

    def damage(value: Any) -> Any:
        if draw.random() < 0.01:
            return draw.choice(junk)
        if isinstance(value, dict):
            return {name: damage(inner) for name, inner in value.items()}
        return [damage(inner) for inner in value] if isinstance(value, list) else value

    for turn in range(300):
        if turn % 3:
            write(path, saved[0], damage(saved[1]))
        else:
            data = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
            for _ in range(draw.randrange(1, 4) if data else 0):
                data[draw.randrange(len(data))] = draw.randrange(256)
            path.write_bytes(bytes(data))
        try:
            seen = ch.Seen.load(path)
        except ch.ArgumentError:
            outcomes["refused"] += 1
        else:
            assert all(isinstance(repr(call), str) for call in seen)
            outcomes["loaded"] += 1
    assert outcomes["refused"] > 150
    assert outcomes["loaded"] > 5
