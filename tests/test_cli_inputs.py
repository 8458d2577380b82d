"""What the command line reads: every kind of file, masks as they are spelled, and no mistake that is not one line."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elsewhere import python
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.core.spelling import MASKS, read_mask

RNG = np.random.default_rng(0)
ARRAYS = {
    "q": RNG.standard_normal((2, 3, 5, 4)),
    "k": RNG.standard_normal((2, 3, 7, 4)),
    "v": RNG.standard_normal((2, 3, 7, 6)),
}
NAMES = ["a", "b", "c", "d", "e", "f", "g"]


def run(*arguments: str, status: int = 0, stdin: bytes | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


def write(folder: Path, kind: str) -> list[str]:
    if kind == "--npz":
        np.savez(folder / "call.npz", **ARRAYS, tokens=np.array(NAMES))
        return [kind, str(folder / "call.npz")]
    if kind == "--npy":
        for name, array in ARRAYS.items():
            np.save(folder / f"{name}.npy", np.asfortranarray(array) if name == "k" else array)
        return [kind, *(str(folder / f"{name}.npy") for name in ARRAYS)]
    if kind == "--safetensors":
        save_file({name: np.ascontiguousarray(array) for name, array in ARRAYS.items()}, folder / "call.safetensors")
        return [kind, str(folder / "call.safetensors")]
    data = {name: array.tolist() for name, array in ARRAYS.items()} | {"tokens": NAMES}
    (folder / "call.json").write_text(json.dumps(data), encoding="utf-8")
    return [kind, str(folder / "call.json")]


@pytest.mark.parametrize("kind", ["--npz", "--npy", "--safetensors", "--json-input"])
def test_every_kind_of_file_gives_the_same_numbers(tmp_path: Path, kind: str) -> None:
    options = ["--query", "3", "--head", "1,2", "--mask", "causal() & window(2)", "--json"]
    found = json.loads(run("explain", *write(tmp_path, kind), *options))
    seen = ch.observe(**ARRAYS, mask=ch.causal() & ch.window(2), queries=[3])
    np.testing.assert_allclose(found["weights"], seen.queries.weights[1, 2, 0], rtol=1e-12)
    np.testing.assert_allclose(found["output"], seen.output[1, 2, 3], rtol=1e-12)
    assert found["tokens"] == (NAMES if kind in ("--npz", "--json-input") else [f"key {i}" for i in range(7)])


def test_json_from_stdin_and_tokens_from_a_file(tmp_path: Path) -> None:
    data = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1], [2]]}
    (tmp_path / "names").write_text("left\nright\n", encoding="utf-8")
    raw = json.dumps(data).encode()
    text = run("explain", "--json-input", "-", "--tokens", f"@{tmp_path / 'names'}", "--query", "0", stdin=raw)
    assert "left" in text
    assert "right" in text


def test_plan_is_that_of_the_library() -> None:
    text = run("plan", "random:600,700,8", "--causal", "--json")
    q, k = np.zeros((600, 8)), np.zeros((700, 8))
    expected = ch.plan(q, k, k, mask=ch.causal())
    found = json.loads(text)
    assert found["kernel"] == expected.kernel
    assert found["pairs"] == expected.pairs
    assert run("plan", "random:600,700,8", "--causal").splitlines() == str(expected).splitlines()


@pytest.mark.parametrize("flag", ["--markdown", "--latex", "--json", "--walk"])
def test_explain_has_other_forms(flag: str) -> None:
    cat = run("explain", flag, "--query", "cat")
    start = {"--markdown": "## Attention of", "--latex": "\\begin{aligned}", "--json": "{", "--walk": '"cat" (query 1)'}
    assert cat.startswith(start[flag])


def test_html_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    run("explain", "--html", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "cannot write" in run("explain", "--html", str(tmp_path / "no" / "page.html"), status=2)


RIGHT = "import numpy as np\nfrom clearhead import attention\n"
WRONG = "def mine(q, k, v):\n    s = q @ k.swapaxes(-1, -2)\n    return s @ v\n\nprint('imported')\n"


def test_check_exit_status_is_0_1_or_2(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    assert "attention is right" in run("check", f"{tmp_path / 'right.py'}:attention")
    assert "no-softmax" in run("check", f"{tmp_path / 'wrong.py'}:mine", status=1)
    assert "could not be loaded" in run("check", f"{tmp_path / 'quits.py'}:mine", status=2)
    assert "expected such as" in run("check", "nonsense", status=2)
    assert "no such file" in run("check", f"{tmp_path / 'absent.py'}:mine", status=2)
    assert "could not be called" in run("check", "math:sqrt", status=2)


def test_check_json_is_only_json(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    done = python("-m", "clearhead", "check", "wrong.py:mine", "--json", cwd=tmp_path)
    assert done.returncode == 1
    names = [finding["name"] for finding in json.loads(done.stdout)["findings"]]
    assert names[:2] == ["no-scale", "no-softmax"]


MISTAKES = {
    "explain --npz absent.npz": "--npz: cannot read absent.npz: No such file",
    "explain --npy a b": "Option '--npy' requires 3 arguments",
    "explain --npz a --json-input b": "--json-input: is given beside --npz, expected one of them",
    "explain random:0,1,1": "expected sizes of at least 1",
    "explain random:999999,999999,999": "numbers in all",
    "explain random:3,3": "expected one of cat_sat",
    "explain --head x": "--head: is 'x'",
    "explain --head 1": "head: has 1, expected -1 to 0",
    "explain --tokens a,b": "names, expected one for each of 5",
    "explain --mask where(q)": "--mask: has 'where(q)'",
    "explain --scale nan": "scale: is nan",
    "explain --keys 0": "'--keys'",
    "explain --tokens @absent": "--tokens: cannot read absent",
    "plan --kernel dog": "kernel: is 'dog'",
    "check math:dog": "could not be loaded: AttributeError",
    "check clearhead:attention --layout DT": "layout: is 'DT'",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistake_is_one_line_and_status_2(arguments: str) -> None:
    output = run(*arguments.split(), status=2)
    assert MISTAKES[arguments] in output
    assert output.startswith("clearhead: ")
    assert output.count("\n") == 1


# masks as they are spelled


@pytest.mark.parametrize(
    "text",
    [
        "causal()",
        "causal(align='start') & window(3, 1)",
        "~(prefix(2) | causal())",
        "window(2, 2) | global_tokens([0, 3])",
        "random_blocks(2, count=1, seed=3)",
        "documents([0, 0, 1, 1])",
        "lengths(3) & ~window(1, offset=-2)",
    ],
)
def test_masks_are_read_as_python_reads_them(text: str) -> None:
    mask = read_mask(text)
    assert repr(mask) == repr(eval(text, {name: getattr(ch, name) for name in MASKS}))
    assert (mask.dense(4) == eval(text, {name: getattr(ch, name) for name in MASKS}).dense(4)).all()


OF_THE_MASK = ("window(True)", "window(1.5)", "lengths('3')", "causal(align=[])")
HOSTILE = [
    "__import__('os').system('true')",
    "causal().__class__",
    "[m for m in ()]",
    "causal(*[1])",
    "causal(**{'align': 'end'})",
    "(lambda: 1)()",
    "window(10**9**9)",
    "window(" + "9" * 400 + ")",
    "causal(" * 500,
    "~" * 1500 + "causal()",
    "&".join(["causal()"] * 190),
    "window(True)",
    "window(1.5)",
    "global_tokens(range(10**12))",
    "global_tokens(range(0, 10, 0))",
    "lengths('3')",
    "causal() and causal()",
    "causal() + causal()",
    "1()",
    "\x00",
    "",
    " ",
    "\ud800",
    "f'{causal()}'",
    "window(1)(2)",
    "causal(align=[])",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_masks_are_refused_in_words(text: str) -> None:
    output = run("explain", "--mask", text, status=0 if text == HOSTILE[10] else 2)
    if text != HOSTILE[10]:  # long, and a mask
        assert output.startswith("clearhead: --mask: " if text not in OF_THE_MASK else "clearhead: ")
        assert output.count("\n") == 1
        assert len(output) < 700


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from([*"()&|~,[]-=0159 ", "causal", "window", "range", "**", "."])).map("".join)
)
def test_any_mask_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ch.ArgumentError):
        read_mask(text)


# files that are broken in every way


def npz_bytes(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def npy_bytes(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def says_it_is_huge() -> bytes:
    raw = npy_bytes(np.zeros((3, 4)))
    return raw.replace(b"(3, 4)", b"(3000000000, 4)").replace(b" " * 8, b"", 1)


BROKEN: dict[str, tuple[str, bytes]] = {
    "pickled": ("--npz", npz_bytes({"q": np.array([{}, 1], dtype=object), "k": 1, "v": 1})),
    "empty": ("--npz", b""),
    "no zip": ("--npz", b"PK\x03\x04" + bytes(40)),
    "names missing": ("--npz", npz_bytes({"q": np.zeros((2, 2))})),
    "integers": ("--npz", npz_bytes({name: np.zeros((2, 2), int) for name in "qkv"})),
    "complex": ("--npz", npz_bytes({name: np.zeros((2, 2), complex) for name in "qkv"})),
    "records": ("--npz", npz_bytes({name: np.zeros((2, 2), "f4,i4") for name in "qkv"})),
    "no axes": ("--npz", npz_bytes({name: np.zeros(()) for name in "qkv"})),
    "one axis": ("--npz", npz_bytes({name: np.zeros(3) for name in "qkv"})),
    "no queries": ("--npz", npz_bytes({name: np.zeros((0, 3)) for name in "qkv"})),
    "no heads": ("--npz", npz_bytes({name: np.zeros((0, 2, 3)) for name in "qkv"})),
    "other sizes": ("--npz", npz_bytes({"q": np.zeros((2, 3)), "k": np.zeros((2, 4)), "v": np.zeros((2, 4))})),
    "other ranks": ("--npz", npz_bytes({"q": np.zeros((2, 3)), "k": np.zeros((1, 2, 3)), "v": np.zeros((2, 3))})),
    "tokens are numbers": ("--npz", npz_bytes({name: np.zeros((2, 3)) for name in "qkv"} | {"tokens": np.zeros(2)})),
    "no JSON": ("--json-input", b"{"),
    "JSON list": ("--json-input", b"[1, 2]"),
    "JSON of words": ("--json-input", b'{"q": "a", "k": "b", "v": "c"}'),
    "JSON ragged": ("--json-input", b'{"q": [[1], [1, 2]], "k": [[1]], "v": [[1]]}'),
    "JSON deep": ("--json-input", b"[" * 100000),
    "JSON huge number": ("--json-input", b'{"q": [[1e999]], "k": [[1' + b"0" * 400 + b']], "v": [[1]]}'),
    "not UTF-8": ("--json-input", b'{"q": "\xff\xfe"}'),
    "surrogate token": ("--json-input", b'{"q": [[1]], "k": [[1]], "v": [[1]], "tokens": [1]}'),
    "no safetensors": ("--safetensors", b"\xff" * 64),
    "safetensors cut short": ("--safetensors", b"\x10\x00"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_one_line(tmp_path: Path, name: str) -> None:
    option, raw = BROKEN[name]
    path = tmp_path / "broken"
    path.write_bytes(raw)
    output = run("explain", option, str(path), status=2)
    assert output.startswith("clearhead: ")
    assert output.count("\n") == 1
    assert "Traceback" not in output


def test_a_file_that_says_it_is_huge_is_not_believed(tmp_path: Path) -> None:
    for name in "qkv":
        (tmp_path / name).write_bytes(says_it_is_huge())
    assert "says it holds" in run("explain", "--npy", *(str(tmp_path / name) for name in "qkv"), status=2)


def test_a_header_that_ends_in_the_middle_is_one_line(tmp_path: Path) -> None:
    option, *paths = write(tmp_path, "--npy")
    first = Path(paths[0])
    first.write_bytes(first.read_bytes().replace(b")", b" ", 1))
    output = run("explain", option, *paths, status=2)
    assert "is no NumPy array" in output
    assert output.count("\n") == 1


def test_nan_is_shown_and_not_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "nan.json"
    path.write_text('{"q": [[NaN, 1], [1, 2]], "k": [[1, Infinity], [1, 1]], "v": [[1], [2]]}', encoding="utf-8")
    for query in "01":
        assert "NaN" in run("explain", "--json-input", str(path), "--query", query)
        json.loads(run("explain", "--json-input", str(path), "--query", query, "--json"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["--npz", "--npy", "--safetensors", "--json-input"]))
def test_damaged_files_give_numbers_or_one_line(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    option, *paths = write(tmp_path, kind)
    target = Path(data.draw(st.sampled_from(paths)))
    raw = bytearray(target.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    target.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(app, ["explain", option, *paths, "--head", "0,0", "--json"])
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 2:
        assert result.output.startswith("clearhead: ")
        assert result.output.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.text(max_size=30),
    query=st.text(max_size=8) | st.integers(-9, 9).map(str),
    head=st.text(max_size=6),
    scale=st.floats() | st.text(max_size=3),
)
@example(tokens="\udcff,b,c,d,e", query="1", head="0", scale=1.0)
@example(tokens="\x1b[2J,b,c,d,e", query="0", head="0", scale=1.0)
@example(tokens="ａ,👩‍👩‍👧,ה,\u202e,e", query="0", head="0", scale=1.0)
def test_any_words_on_the_command_line_are_answered_or_refused(tokens: str, query: str, head: str, scale: Any) -> None:
    arguments = [f"--tokens={tokens}", f"--query={query}", f"--head={head}", f"--scale={scale}"]
    if any("\x00" in argument for argument in arguments):
        return  # no process can be given these
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code in (0, 2), result.output
    assert "\x1b" not in result.output
