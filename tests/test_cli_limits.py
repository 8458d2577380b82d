"""Inputs of the command line that are far too large, long or deep: one line, status 2, and no memory taken."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.cli.files import MOST_BYTES
from clearhead.core.spelling import DEEPEST, LONGEST, MASKS, read_mask


def run(*arguments: str, stdin: bytes | None = None, **env: str) -> tuple[int, str]:
    surroundings = {"COLUMNS": "80", "TERM": "dumb", **env}
    result = CliRunner().invoke(app, list(arguments), input=stdin, env=surroundings)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def refused(*arguments: str, **options: Any) -> str:
    status, output = run(*arguments, **options)
    assert status == 2, output[:500]
    assert output.startswith("clearhead: ")
    assert output.count("\n") == 1
    assert len(output) < 500
    return output


def header(shape: str, dtype: str = "<f8") -> bytes:
    """The start of a .npy file, with a shape as it is spelled."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def bomb(path: Path, numbers: int) -> None:
    """An archive of zeros that takes a thousandth of what it unpacks to."""
    block = bytes(2**20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in "qkv":
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(header(f"({numbers // 8}, 8)"))
                for _ in range(numbers * 8 // len(block)):
                    member.write(block)


def test_an_archive_is_not_unpacked_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    bomb(path, 2**21)  # 16 MiB each
    assert path.stat().st_size < 2**20
    small = {"CLEARHEAD_MAX_BYTES": str(2**24)}
    tracemalloc.start()
    output = refused("plan", "--npz", str(path), **small)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 2**23
    whole = 3 * (2**24 + 128)
    assert f"bomb.npz unpacked holds {whole:,} bytes, expected at most {2**24:,}; CLEARHEAD_MAX_BYTES may" in output
    status, output = run("plan", "--npz", str(path), CLEARHEAD_MAX_BYTES=str(whole))
    assert status == 0, output


def test_the_limit_holds_by_what_an_archive_says_before_it_is_opened(tmp_path: Path) -> None:
    """Three gibibytes by the archive's own table, without the minutes that packing them takes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "qkv":
            archive.writestr(f"{name}.npy", header("(134217728, 1)") + bytes(2**16))
    raw = bytearray(file.getvalue())
    for info in zipfile.ZipFile(io.BytesIO(raw)).infolist():
        place = raw.rfind(b"PK\x01\x02", 0, raw.rfind(info.filename.encode()))
        raw[place + 24 : place + 28] = (2**30).to_bytes(4, "little")
    path = tmp_path / "says.npz"
    path.write_bytes(bytes(raw))
    assert sum(info.file_size for info in zipfile.ZipFile(path).infolist()) > 2**30
    assert f"expected at most {MOST_BYTES:,}" in refused("explain", "--npz", str(path))


def test_files_of_numbers_are_not_read_beyond_the_limit(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "qkv"]
    for path in paths:
        with path.open("wb") as file:
            file.write(header("(67108864, 1)"))
            file.truncate(2**29 + 128)  # a hole: it takes no room on the disk
    tracemalloc.start()
    output = refused("plan", "--npy", *map(str, paths))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 2**23
    assert f"holds {3 * (2**29 + 128):,} bytes, expected at most {2**30:,}" in output


def test_tensors_are_not_read_beyond_the_limit_and_others_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    arrays = {name: np.zeros((4, 8), np.float32) for name in "qkv"}
    save_file(arrays | {"model.weight": np.zeros((1000, 100), np.float32)}, path)
    assert run("plan", "--safetensors", str(path), CLEARHEAD_MAX_BYTES="384")[0] == 0
    output = refused("plan", "--safetensors", str(path), CLEARHEAD_MAX_BYTES="383")
    assert "q, k, v holds 384 bytes, expected at most 383" in output


def test_text_is_not_read_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "call.json"
    raw = json.dumps({name: [[1.0] * 50] for name in "qkv"}).encode()
    path.write_bytes(raw)
    limit = {"CLEARHEAD_MAX_BYTES": "800"}
    assert f"has {len(raw):,} bytes of text, expected at most 100" in refused(
        "plan", "--json-input", str(path), **limit
    )
    assert "is longer than 100 bytes" in refused("plan", "--json-input", "-", stdin=raw, **limit)
    names = tmp_path / "names"
    names.write_text("a\n" * 100, encoding="utf-8")
    assert "has 200 bytes of text" in refused("explain", "--tokens", f"@{names}", **limit)
    assert "bytes of text" in refused("explain", "--tokens", "@/dev/zero", **limit)


@pytest.mark.parametrize("given_", ["-1", "many", "1e9", "²", "9" * 40, ""])
def test_a_limit_that_is_no_number_is_refused(tmp_path: Path, given_: str) -> None:
    np.savez(tmp_path / "call.npz", **{name: np.zeros((2, 2)) for name in "qkv"})
    output = refused("plan", "--npz", str(tmp_path / "call.npz"), CLEARHEAD_MAX_BYTES=given_)
    assert "CLEARHEAD_MAX_BYTES: is" in output


@pytest.mark.parametrize(
    "shape",
    [
        "(3000000000000, 4)",
        f"({'9' * 5000},)",
        "(-1, 4)",
        "(0, 9223372036854775807, 4)",
        "(" * 900,
        "(2.5, 4)",
        "[3, 4]",
    ],
)
def test_headers_that_promise_anything_are_not_believed(tmp_path: Path, shape: str) -> None:
    paths = [tmp_path / f"{name}.npy" for name in "qkv"]
    for path in paths:
        path.write_bytes(header(shape) + bytes(64))
    refused("plan", "--npy", *map(str, paths))
    with zipfile.ZipFile(tmp_path / "call.npz", "w") as archive:
        for path in paths:
            archive.write(path, path.name)
    refused("plan", "--npz", str(tmp_path / "call.npz"))


@pytest.mark.parametrize("digits", [309, 5000, 200_000])
def test_whole_numbers_of_very_many_digits_are_refused(digits: int) -> None:
    for one in ("9" * digits, "-" + "9" * digits):
        for raw in (f'{{"q": [[{one}]], "k": [[1]], "v": [[1]]}}', f'{{"tokens": {one}}}', one):
            assert "digits, expected" in refused("explain", "--json-input", "-", stdin=raw.encode())


def test_whole_numbers_beyond_64_bits_are_read_as_float64() -> None:
    raw = b'{"q": [[1]], "k": [[0]], "v": [[123456789012345678901234567890]]}'
    status, output = run("explain", "--json-input", "-", "--json", stdin=raw)
    assert status == 0
    assert json.loads(output)["output"] == [123456789012345678901234567890.0]


@pytest.mark.parametrize("depth", [70, 900, 100_000])
def test_deep_lists_are_refused(depth: int) -> None:
    for name in ("q", "tokens"):
        raw = dict.fromkeys("qkv", "[[1]]") | {name: "[" * depth + "1" + "]" * depth}
        text = "{" + ", ".join(f'"{key}": {value}' for key, value in raw.items()) + "}"
        refused("explain", "--json-input", "-", stdin=text.encode())


DEEP = {
    "tildes": "~" * 900 + "causal()",
    "tildes and brackets": "~(" * 300 + "causal()" + ")" * 300,
    "brackets": "(" * 900 + "causal()" + ")" * 900,
    "brackets that are not closed": "(" * 1900,
    "lists": "lengths(" + "[" * 900 + "1" + "]" * 900 + ")",
    "lists in another way": "lengths(" + "[" * 150 + "1" + "]" * 150 + ")",
    "minus signs": "window(" + "-" * 900 + "1)",
    "dots": "causal" + ".a" * 900 + "()",
    "calls": "causal" + "()" * 900,
    "powers": "2" + "**2" * 600,
    "a million characters": "~" * 10**6 + "causal()",
    "a number of many digits": f"window({'9' * 1900})",
    "a number above the limit": f"window({2**40})",
    "a range of everything": "global_tokens(range(0, 1099511627775))",
    "lists of other lengths": "lengths([[1], [2, 3]])",
    "no characters": "",
    "a null": "causal(\x00)",
    "words": "lengths('a')",
}


@pytest.mark.parametrize("name", DEEP)
def test_masks_that_are_deep_or_long_are_refused(name: str) -> None:
    for command in (("explain",), ("plan", "random:4,4,4"), ("profile", "--lengths", "16")):
        assert refused(*command, "--mask", DEEP[name]).startswith("clearhead: ")


def test_masks_at_the_limits_are_read_and_work() -> None:
    q = np.random.default_rng(0).standard_normal((3, 5, 4))
    unions = "|".join(["causal()"] * (DEEPEST - 1))
    assert len(unions) < LONGEST
    for text in ("~" * (DEEPEST - 2) + "causal()", unions, "&".join(["window(1)"] * (DEEPEST - 1))):
        mask = read_mask(text)
        assert repr(mask)
        assert mask.picture(5)
        assert mask.explain(2, 2).startswith("query 2 may attend")
        for kernel in ("compiled", "tiled", "dense"):
            found = ch.attention(q, q, q, mask=mask, kernel=kernel)
            want = ch.attention(q, q, q, mask=ch.where(mask.dense(5)[0]), kernel="dense")
            np.testing.assert_allclose(found, want, atol=1e-12)
        assert run("explain", "--mask", text)[0] == 0
        assert run("plan", "--mask", text, "--json")[0] == 0


SIGNS = ["(", ")", "[", "]", "~", "&", "|", ",", " ", "-", "*", "**", ":", "."]
WORDS_OF_MASKS = ["range", "offset=", "seed=", "count=", "align=", "'start'", "True", "None"]
PIECES = st.sampled_from([*MASKS, *SIGNS, *WORDS_OF_MASKS, "0", "1", "7", "1099511627775", "1.5"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=20))
@example("random_blocks(1099511627775,count=1099511627775)")
@example("global_tokens([],offset=1099511627775)")
@example("documents([[]])")
@example("lengths([])")
@example("window(7,offset=[])")
def test_any_mask_is_answered_or_refused_in_one_line(text: str) -> None:
    if "\x00" in text or any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        return  # no process can be given these
    for command in (("explain", "--json"), ("plan",)):
        status, output = run(*command, f"--mask={text}")
        assert status in (0, 2)
        if status == 2:
            assert output.startswith("clearhead: ")
            assert output.count("\n") == 1


WORDS = st.sampled_from(
    ["nan", "inf", "-inf", "1e999", "-1", "0", "1e-320", "9" * 30, "9" * 5000, "x", "", "²", "0x10"]
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_number_on_the_command_line_is_answered_or_refused_in_one_line(data: st.DataObject) -> None:
    options = {
        "explain": ["--scale", "--temperature", "--softcap", "--keys", "--query", "--head"],
        "plan": ["--scale", "--softcap", "--kernel"],
        "scaling": ["--d-k", "--keys", "--queries", "--sigma", "--temperature"],
        "profile": ["--lengths", "--heads", "--features", "--dtype"],
    }
    command = data.draw(st.sampled_from(sorted(options)))
    option, word = data.draw(st.sampled_from(options[command])), data.draw(WORDS)
    given_ = [command, f"{option}={word}"]
    if command == "profile":
        given_ += [] if option == "--lengths" else ["--lengths=16"]
        given_ += ["--seconds=1"]
    status, output = run(*given_)
    assert status in (0, 2), output
    if status == 2:
        assert output.startswith("clearhead: ")
        assert output.count("\n") == 1


@pytest.mark.parametrize("example_", ["random:0,1,1", f"random:{'9' * 9},{'9' * 9},1", f"random:{'9' * 5000},1,1", "²"])
def test_examples_of_any_size_are_refused(example_: str) -> None:
    refused("explain", example_)
