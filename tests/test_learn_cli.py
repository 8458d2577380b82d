"""`clearhead learn`: the list, a task, files that are checked in a process of their own, and progress that is kept."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import solutions
from elsewhere import python
from rich.cells import cell_len
from typer.testing import CliRunner, Result

import clearhead as ch
from clearhead.cli import app
from clearhead.learning import progress
from clearhead.learning.contents import EXERCISES

RIGHT = "import numpy as np\n" + solutions.RIGHT[3][0]
WRONG = "import numpy as np\n" + solutions.WRONG[3]["scale-d"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home"
    monkeypatch.setenv("CLEARHEAD_HOME", str(place))
    monkeypatch.chdir(tmp_path)
    return place


def learn(*arguments: str, columns: int = 80, typed: str | None = None) -> Result:
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner().invoke(app, ["learn", *arguments], env=environment, input=typed)


def test_the_list_at_every_width() -> None:
    for columns in (24, 40, 80, 120, 200):
        text = learn(columns=columns).output
        assert max(map(cell_len, text.splitlines())) <= columns
        assert "0 of 30 exercises" in text
        for exercise in EXERCISES.values():
            assert str(exercise.number) in text
    assert len(learn(columns=120).output.splitlines()) < 25 < len(learn(columns=80).output.splitlines())


@pytest.mark.parametrize("number", EXERCISES)
def test_every_task_at_every_width_and_as_json(number: int) -> None:
    for columns in (40, 80, 120):
        text = learn(str(number), columns=columns).output
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("def ")]  # code stays whole
        assert max(map(cell_len, lines)) <= columns
    told = json.loads(learn(str(number), "--json").output)
    assert told["number"] == number
    assert bool(told["typed"]) == (not told["functions"])
    if told["start"]:
        compile(told["start"], "start", "exec")
        for line in told["start"].splitlines():
            assert len(line) <= 120
    assert "right" not in told


def test_json_of_the_list() -> None:
    told = json.loads(learn("--json").output)
    assert [one["number"] for one in told["exercises"]] == list(range(1, 31))
    assert told["exercises"][2] == {
        "number": 3, "title": "scaled scores", "lesson": "03_scaling", "typed": False,
        "functions": ["scaled_scores(q, k)"], "solved": None, "tries": 0,
    }  # fmt: skip


def test_a_file_to_start_from_is_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    done = learn("10", "--start", "mine.py")
    assert (done.exit_code, done.output) == (0, "wrote mine.py; check it with: clearhead learn 10 mine.py\n")
    before = file.read_text()
    assert "def split_heads(x, heads):" in before
    assert "def merge_heads(y):" in before
    again = learn("10", "--start", "mine.py")
    assert again.exit_code == 2
    assert "is there already" in again.output
    assert file.read_text() == before
    for wrong in ("1 --start a.py", "--start a.py", "3 --start a.txt", "3 x.py --start a.py", "3 --start nowhere/a.py"):
        done = learn(*wrong.split())
        assert done.exit_code == 2
        assert done.output.startswith("clearhead: --start: ")
        assert done.output.count("\n") == 1
    checked = learn("10", "mine.py")
    assert checked.exit_code == 1
    assert "not-written-yet" in checked.output


def test_a_right_and_a_wrong_file(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    done = learn("3", "wrong.py")
    assert done.exit_code == 1
    assert "scale-d: the scores are divided by D, not by √D" in done.output
    assert "expected [[4.9497]]" in done.output
    assert "got      [[3.5000]]" in done.output
    # another name, a helper beside it, prints, and an end by sys.exit
    (tmp_path / "helper.py").write_text("import numpy as np\nroot = np.sqrt\n")
    (tmp_path / "right.py").write_text(
        "import sys\nfrom helper import root\nprint('loud')\ndef mine(q, k):\n    print(q)\n"
        "    return q @ k.T / root(q.shape[-1])\nif True:\n    sys.exit(0)\n"
    )
    done = learn("3", "right.py")
    assert (done.exit_code, done.output.splitlines()[0]) == (0, "Exercise 3, scaled scores: right")
    assert learn("3", "right.py:mine", "--json").exit_code == 0
    told = json.loads(learn("--json").output)["exercises"][2]
    assert told["tries"] == 3
    assert told["solved"]
    assert "✓  3" in learn().output
    assert "loud" not in done.output


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def scaled_scores(q, k):\n    while True:\n        pass\n", "took-too-long"),
        ("while True:\n    pass\n", "took-too-long"),
        ("import os\ndef scaled_scores(q, k):\n    os._exit(0)\n", "ended-python"),
        ("import os, signal\ndef scaled_scores(q, k):\n    os.kill(os.getpid(), signal.SIGKILL)\n", "ended-python"),
    ],
)
def test_what_does_not_come_back(tmp_path: Path, code: str, name: str) -> None:
    (tmp_path / "odd.py").write_text(code)
    done = learn("3", "odd.py", *(("--seconds", "3") if name == "took-too-long" else ()))
    assert done.exit_code == 1
    assert name in done.output
    assert ("it had not answered after 3 seconds" in done.output) == (name == "took-too-long")


def test_what_a_solution_began_is_ended_with_it(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "with open('pid', 'w') as file:\n    file.write(str(child.pid))\nos._exit(0)\n"
    )
    assert learn("3", "odd.py").exit_code == 1
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and " Z " in Path(f"/proc/{pid}/stat").read_text():
            return  # it has ended, and nobody has looked yet
        time.sleep(0.1)
    raise AssertionError("a process was left behind")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def scaled_scores(q, k)\n    return q\n", "is no Python: expected ':' in line 1"),
        ("import nowhere_at_all\n", "could not be loaded: ModuleNotFoundError"),
        ("x = 1\n", "defines no scaled_scores: expected scaled_scores(q, k)"),
        ("scaled_scores = 3\n", "defines no scaled_scores"),
        ("def one(q, k): ...\ndef two(q, k): ...\n", "defines no scaled_scores"),
        ("\0", "is no Python"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "odd.py").write_text(code)
    done = learn("3", "odd.py")
    assert done.exit_code == 2
    assert words in done.output
    assert done.output.startswith("clearhead: FILE: ")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    ["31", "0", "three", "1 a b c", "1 0.5", "3 0.5", "3 a.py b.py", "3 no.py", "3 no.py --seconds 0", "--forget 77"],
)
def test_bad_input_is_one_sentence_and_two(arguments: str) -> None:
    done = learn(*arguments.split())
    assert done.exit_code == 2
    assert done.output.startswith("clearhead: ")
    assert done.output.count("\n") == 1


def test_typed_answers_and_what_follows() -> None:
    done = learn("1", "0.2447", "0.09", "0.6652")
    assert done.exit_code == 0
    assert "Next: exercise 2" in done.output
    assert learn("1", "0.1", "0.2", "0.7").exit_code == 1
    assert learn("1", "--json", "--", "-1", "0.2", "0.7").exit_code == 1
    solved = json.loads(learn("--json").output)["exercises"][0]
    assert (solved["tries"], bool(solved["solved"])) == (3, True)


def test_forgetting_asks() -> None:
    learn("1", "0.2447", "0.09", "0.6652")
    learn("29", "0.35", "0.22")
    assert "nothing was forgotten" in learn("--forget", typed="n\n").output
    assert progress.read().solved.keys() == {1, 29}
    assert learn("--forget", typed="").exit_code != 0
    assert "forgot exercise 1" in learn("1", "--forget", typed="y\n").output
    assert progress.read().solved.keys() == {29}
    assert learn("--forget", "--yes").output == "forgot all exercises\n"
    assert learn("--forget", "--yes").output == "there was nothing to forget\n"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "solved": [], "tries": {}}', "\0\xff"]
)
def test_a_damaged_file_is_told_and_kept(home: Path, text: str) -> None:
    home.mkdir()
    file = home / "progress.json"
    file.write_bytes(text.encode("latin-1"))
    shown = learn(columns=200)
    assert shown.exit_code == 0
    assert "is damaged" in " ".join(shown.output.split())
    assert file.read_bytes() == text.encode("latin-1")  # looking changes nothing
    done = learn("1", "0.2447", "0.09", "0.6652", columns=200)
    assert done.exit_code == 0
    assert "The file of progress was damaged; it is now progress-damaged-1.json" in " ".join(done.output.split())
    assert (home / "progress-damaged-1.json").read_bytes() == text.encode("latin-1")
    assert progress.read().solved.keys() == {1}


def test_a_folder_that_cannot_be_written_is_told(home: Path) -> None:
    home.write_text("a file where the folder should be")
    done = learn("1", "0.2447", "0.09", "0.6652", columns=200)
    assert done.exit_code == 0
    assert "Progress could not be kept" in done.output
    assert learn().exit_code == 0


def test_progress_is_written_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress.note(2, True)
    before = progress.place().read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    assert "No space left on device" in progress.note(3, True)
    assert progress.place().read_bytes() == before
    assert [path.name for path in home.iterdir()] == ["progress.json"]


def test_where_progress_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEARHEAD_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("/somebody"))
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setattr(sys, "platform", "linux")
    assert progress.place() == Path("/data/clearhead/progress.json")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert progress.folder() == Path("/somebody/.local/share/clearhead")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert progress.folder() == Path("/somebody/Library/Application Support/clearhead")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert progress.folder() == Path("/local/clearhead")


def test_importing_the_library_brings_no_exercise() -> None:
    code = "import sys, clearhead; print(sorted(m for m in sys.modules if m.startswith('clearhead.learning')))"
    assert python("-c", code).stdout == "[]\n"
    assert "learn" in dir(ch)
