"""The command line in a process of its own: keys, interruptions, and what is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from elsewhere import python

DRIVER = """
import os, pty, signal, sys, termios, time
child, master = pty.fork()
if child == 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job is started with it ignored
    os.execv(sys.executable, [sys.executable, "-m", "clearhead", "explain", "random:3,3,3", "--walk"])
before, output = termios.tcgetattr(master), b""
while b"any key" not in output:
    output += os.read(master, 1 << 16)
time.sleep(0.3)
while_walking = termios.tcgetattr(master)
for key in eval(sys.argv[1]):
    os.write(master, bytes([key]) if isinstance(key, int) else key)
    time.sleep(0.1)
try:
    while chunk := os.read(master, 1 << 16):
        output += chunk
except OSError:
    pass
after = termios.tcgetattr(master)  # the terminal outlives the program
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
lines = output.decode().splitlines()
numbers = [int(line.split()[0]) for line in lines if line.split()[:1] and line.split()[0].isdigit()]
print([status, after == before, while_walking == before, output.decode().count(" = "), numbers[:8]])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no terminals of this kind")
@pytest.mark.parametrize(("typed", "status", "shown"), [(b"  q", 0, 3), (b" a", 0, 30), (b"\x03", 130, 1)])
def test_walking_leaves_the_terminal_as_it_was(typed: bytes, status: int, shown: int) -> None:
    # in a process of its own: a terminal needs a fork, and JAX has threads
    found = json.loads(python("-c", DRIVER, repr(typed)).stdout.lower())
    assert found[:4] == [status, True, False, shown]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no terminals of this kind")
def test_walking_goes_back_and_obeys_the_arrows() -> None:
    left, right, up_in_another_mode = b"\x1b[D", b"\x1b[C", b"\x1bOA"
    typed = [b" ", right, left, b"b", b"b", b" ", up_in_another_mode, b"q"]
    found = json.loads(python("-c", DRIVER, repr(typed)).stdout.lower())
    assert found == [0, True, False, 8, [1, 2, 3, 2, 1, 1, 2, 1]]


INTERRUPTED = """
import os, pty, signal, sys, time
child, master = pty.fork()
if child == 0:
    os.environ["TERM"] = "xterm-256color"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-m", "clearhead", "profile", "--lengths", "1024,2048,4096"])
output = b""
while b"\\x1b[?25l" not in output:
    output += os.read(master, 1 << 16)
time.sleep(0.5)
os.write(master, b"\\x03")
try:
    while chunk := os.read(master, 1 << 16):
        output += chunk
except OSError:
    pass
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print([status, output.rfind(b"\\x1b[?25h") > output.rfind(b"\\x1b[?25l"), b"Traceback" in output])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no terminals of this kind")
def test_interrupting_a_progress_bar_shows_the_cursor_again() -> None:
    found = json.loads(python("-c", INTERRUPTED).stdout.lower())
    assert found == [130, True, False]


MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "safetensors", "torch", "jax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from clearhead.cli import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("explain", 0, ""),
        ("check clearhead:attention", 0, ""),
        ("plot attention -o never.png", 2, "clearhead: plot: plots need matplotlib: pip install matplotlib\n"),
        (
            "explain --safetensors x",
            2,
            "clearhead: --safetensors: needs the package safetensors: pip install safetensors\n",
        ),
    ],
)
def test_what_is_not_installed_is_said_in_one_line(tmp_path: Path, arguments: str, status: int, words: str) -> None:
    done = python("-c", MISSING, *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (status, words)
    assert list(tmp_path.iterdir()) == []
