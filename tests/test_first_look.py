"""What somebody meets first: completion, the version, help, full disks, closed pipes, and names without PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from elsewhere import python
from rich.cells import cell_len
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.cli.application import COMMANDS
from clearhead.core.installing import PACKAGES, brings, builds

ROOT = Path(__file__).parents[1]
FULL = Path("/dev/full")
NAMES = sorted(command.__name__ for command in COMMANDS)
COMPLETED = """
import json, sys
for name in sys.argv[1:]:
    sys.modules[name] = None
import clearhead as ch, rlcompleter
ask = rlcompleter.Completer({"ch": ch}).complete
print(json.dumps({t: ask(t, 0) for t in ("ch.wat", "ch.che", "ch.plot", "ch.nn", "ch.text")}))
"""


def told(*arguments: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("missing", ["", "torch matplotlib jax"])
def test_names_complete_with_and_without_their_libraries(missing: str) -> None:
    found = json.loads(python("-c", COMPLETED, *missing.split()).stdout)
    wanted = {
        "ch.wat": "watch(",
        "ch.che": "check(",
        "ch.plot": "plot_attention(",
        "ch.nn": "nn",
        "ch.text": "textbook",
    }
    assert found == {asked: f"ch.{name}" for asked, name in wanted.items()}


def test_what_is_listed_is_what_may_be_used() -> None:
    assert not {"Any", "TYPE_CHECKING", "import_module", "_LATER"} & set(dir(ch))
    assert all(hasattr(ch, name) for name in dir(ch))


def test_everything_is_imported_without_pytorch_and_says_what_is_missing() -> None:
    code = """
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
sys.modules["torch"] = None
from clearhead import *
print(causal(), sorted(name for name in ("watch", "check", "plot_mask") if name in globals()))
modules = ("from clearhead import nn", "import clearhead; clearhead.nn")
for use in ("watch(None)", "ablate()", "patch()", "contributions()", *modules):
    try:
        exec(use)
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error)
"""
    done = python("-c", code)
    assert done.stdout.splitlines() == [
        "causal() ['check', 'plot_mask', 'watch']",
        "ImportError watch needs PyTorch: pip install torch",
        "ImportError ablate and patch need PyTorch: pip install torch",
        "ImportError ablate and patch need PyTorch: pip install torch",
        "ImportError contributions needs PyTorch: pip install torch",
        "ImportError clearhead.nn needs PyTorch, which is not installed: pip install torch",
        "AttributeError clearhead.nn needs PyTorch, which is not installed: pip install torch",
    ], done.stderr


def test_every_hint_names_what_an_extra_brings() -> None:
    # said in one place, so that it is right for how clearhead came here
    sources = sorted(Path(ch.__file__).parent.rglob("*.py"))
    hints = {path.name for path in sources if "pip install" in path.read_text(encoding="utf-8")}
    assert hints == {"installing.py"}
    asked = {name for path in sources for name in re.findall(r"brings\('(\w+)'\)", path.read_text(encoding="utf-8"))}
    assert asked == set(PACKAGES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, packages in PACKAGES.items():
        wanted = {re.split("[<>=]", one)[0] for one in project["optional-dependencies"][extra]}
        assert set(packages.split()) - {"--no-deps"} <= wanted, extra


@pytest.mark.parametrize(
    ("origin", "plot", "kernel"),
    [
        (None, 'pip install "clearhead[plot]"', " --no-binary clearhead clearhead`"),
        ('{"dir_info": {"editable": true}, "url": "file:///x"}', "pip install matplotlib", "` of the same source"),
        (PackageNotFoundError(), "pip install matplotlib", "` of the same source"),
    ],
    ids=["an index", "a checkout", "the path alone"],
)
def test_hints_are_right_for_how_it_was_installed(
    monkeypatch: pytest.MonkeyPatch, origin: str | Exception | None, plot: str, kernel: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin

    def distribution(name: str) -> Installed:
        assert name == "clearhead"
        if isinstance(origin, Exception):
            raise origin
        return Installed()

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    assert brings("plot") == plot
    assert builds().endswith(kernel)


def test_version_and_short_help() -> None:
    assert told("--version") == f"clearhead {ch.__version__}\n"
    assert told("-h") == told("--help") == told()
    for name in NAMES:
        assert told(name, "-h") == told(name, "--help")


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_help_stays_within_the_terminal(columns: int) -> None:
    for name in ("", *NAMES):
        text = told(*name.split(), "--help", columns=columns)
        assert max(map(cell_len, text.splitlines())) <= columns, name
        for option in re.findall(r"--[a-z-]+", told(*name.split(), "--help", columns=200)):
            assert option in text  # nothing is cut short


def test_a_broken_command_is_still_the_command() -> None:
    text = told("plot", "--help", columns=40)
    pasted = re.sub(r" \\\n +", " ", text)
    assert 'clearhead plot mask random:64,64,1 -o mask.png --mask "window(8) | global_tokens([0])"' in pasted


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full on this system")
@pytest.mark.parametrize("arguments", ["explain", "plan --json"])
def test_a_full_disk_is_one_sentence(arguments: str) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "clearhead", *arguments.split()], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "clearhead: cannot write what was asked for: No space left on device\n"


@pytest.mark.parametrize("arguments", ["explain", "explain random:300,300,8 --json"])
def test_a_reader_that_has_seen_enough_is_no_mistake(arguments: str) -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head -0` would
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", *arguments.split()], stdout=write, stderr=subprocess.PIPE, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_plan_takes_heads_dtype_and_device() -> None:
    found = json.loads(told("plan", "random:64,96,8", "--heads", "6", "--dtype", "float16", "--json"))
    assert found["problem"] == "numpy float16 · heads 6 · 64 queries × 96 keys · 8 features"
    assert found["all_pairs"] == 6 * 64 * 96
    found = json.loads(told("plan", "random:64,96,8", "--dtype", "bfloat16", "--device", "cpu", "--json"))
    assert found["problem"].startswith("torch bfloat16")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dtype int8", "clearhead: --dtype: is 'int8', expected one of float16, bfloat16, float32, float64\n"),
        ("--device nowhere", "clearhead: --device: is 'nowhere', and PyTorch says: "),
        ("--heads 0", "clearhead: Invalid value for '--heads'"),
    ],
)
def test_plan_refuses_in_one_sentence(arguments: str, words: str) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments.split()])
    assert done.exit_code == 2
    assert done.output.startswith(words)
    assert done.output.count("\n") == 1


def test_a_picture_may_be_a_pdf_and_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.pdf", "b.pdf"):
        told("plot", "attention", "-o", str(tmp_path / name))
    first, second = ((tmp_path / name).read_bytes() for name in ("a.pdf", "b.pdf"))
    assert first.startswith(b"%PDF-")
    assert first == second
