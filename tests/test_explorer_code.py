"""Functions that are pasted into the explorer: run only when switched on, by their own page, in time; what is told."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli.explores import explore
from clearhead.explorer.given import given_scene
from clearhead.explorer.pasted import LONGEST, chosen, examined, told
from clearhead.explorer.scene import scene_of
from clearhead.explorer.server import LARGEST, Handler, Server
from clearhead.textbook import EXAMPLES

CAT = EXAMPLES["cat_sat"]
RIGHT = """
import numpy as np
def attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v
"""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(scene_of(CAT.q, CAT.k, CAT.v), port=0)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def post(server: Server, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    given = {"Origin": f"http://127.0.0.1:{server.server_port}", "Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, text, {name: value for name, value in given.items() if value})
    reply = connection.getresponse()
    words = reply.read().decode()
    connection.close()
    return reply.status, json.loads(words) if words.startswith("{") else words


def test_nothing_runs_before_the_switch_is_on(server: Server, tmp_path: Path) -> None:
    base, trap = urlsplit(server.url).path, tmp_path / "ran"
    source = f"open({str(trap)!r}, 'w')\ndef attention(q, k, v): return v"
    assert post(server, base + "switch", {}) == (200, {"on": False, "may": True})
    status, said = post(server, base + "check", {"source": source})
    assert status == 422
    assert "the switch" in said["error"]
    assert not trap.exists()
    assert post(server, base + "switch", {"on": True})[1]["on"]
    status, found = post(server, base + "check", {"source": RIGHT})
    assert (status, found["right"]) == (200, True)
    assert post(server, base + "switch", {"on": False})[1] == {"on": False, "may": True}
    assert post(server, base + "check", {"source": source})[0] == 422
    assert not trap.exists()


def test_only_the_page_itself_may_ask_for_it(server: Server) -> None:
    base = urlsplit(server.url).path
    assert post(server, base + "switch", {"on": True}, Origin="http://example.org")[0] == 403
    assert post(server, base + "switch", {"on": True}, Origin="")[0] == 403, "a request that does not say whence"
    assert post(server, base + "switch", {"on": True}, Host="example.org")[0] == 403
    assert post(server, base + "switch", {"on": True}, Content_Type="text/plain")[0] == 403, "what a form can send"
    assert post(server, "/switch", {"on": True})[0] == 403
    assert post(server, f"/{'x' * 22}/switch", {"on": True})[0] == 403
    assert post(server, base + "data/about", {})[0] == 404
    assert post(server, base + "switch", {}, Content_Length=str(LARGEST + 1))[0] == 413
    assert post(server, base + "switch", b"no json")[0] == 422
    assert post(server, base + "switch", [1])[0] == 422
    assert post(server, base + "check", {})[0] == 422
    assert not server.runs


def test_elsewhere_than_on_this_machine_only_who_starts_it_may_allow_it() -> None:
    scene = scene_of(CAT.q, CAT.k, CAT.v)
    for host, run_code, may, runs in (
        ("127.0.0.1", None, True, False),
        ("127.0.0.1", False, False, False),
        ("127.0.0.1", True, True, True),
        ("0.0.0.0", None, False, False),
        ("0.0.0.0", True, True, True),
    ):
        made = Server(scene, host, 0, run_code=run_code)
        assert (made.may_run, made.runs) == (may, runs), (host, run_code)
        made.server_close()


def test_a_connection_that_keeps_silent_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.3)
    for begun in (b"", b"GET /", f"POST {urlsplit(server.url).path}check HTTP/1.1\r\nContent-Length: 9\r\n".encode()):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as silent:
            silent.sendall(begun)
            assert silent.recv(100) == b""


def test_the_command_line_warns_of_what_others_could_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    explore(host="0.0.0.0", port=0, no_browser=True, run_code=True)
    assert "and can run code on this machine" in capsys.readouterr().err
    explore(host="0.0.0.0", port=0, no_browser=True)
    said = capsys.readouterr().err
    assert "can see the page" in said
    assert "run code" not in said
    explore(port=0, no_browser=True)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("http://127.0.0.1:")


def test_a_server_that_may_not_run_code_cannot_be_switched_on() -> None:
    made = Server(scene_of(CAT.q, CAT.k, CAT.v), port=0, run_code=False)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    base = urlsplit(made.url).path
    status, said = post(made, base + "switch", {"on": True})
    assert status == 422
    assert "--code" in said["error"]
    assert post(made, base + "check", {"source": RIGHT})[0] == 422
    made.shutdown()
    made.server_close()


def test_it_is_ended_in_time_with_all_that_it_began(tmp_path: Path) -> None:
    noted = tmp_path / "child"
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(noted)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
        "def attention(q, k, v): return v"
    )
    began = time.perf_counter()
    with pytest.raises(ch.ArgumentError, match="was given up after 3 seconds"):
        examined(source, seconds=3)
    assert time.perf_counter() - began < 20
    left = int(noted.read_text())
    for _ in range(50):
        if not _alive(left):
            break
        time.sleep(0.1)
    assert not _alive(left), "a process of a process"


def _alive(number: int) -> bool:
    state = Path(f"/proc/{number}/stat")
    if state.parent.parent.is_dir():
        return state.is_file() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "defines nothing"),
        ("def f(:", "is no Python: .* in line 1"),
        ("x = 1", "expected such as def attention"),
        ("import os\nos._exit(7)\ndef f(q, k, v): return v", "ended Python without an answer .exit status 7."),
        ("raise ValueError('not today')\ndef f(q, k, v): return v", "could not be loaded: ValueError: not today"),
        ("def f(q, k, v): raise OSError('no')", "could not be called in any of"),
        ("#" * (LONGEST + 1), "expected at most 64,000"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(source: str, words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=words) as refused:
        examined(source, seconds=30)
    assert "\n" not in str(refused.value)


def test_the_last_function_is_meant_unless_one_is_named() -> None:
    source = "def one(q, k, v): ...\nclass Two: ...\nx = 1\n"
    assert chosen(source) == "Two"
    assert chosen(source, "one") == "one"
    with pytest.raises(ch.ArgumentError, match="expected one of one, Two"):
        chosen(source, "three")


def test_the_cell_that_is_opened_is_the_one_that_is_wrong() -> None:
    def next_one(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            scores = np.where(np.tri(*scores.shape[-2:], k=1) > 0, scores, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) @ v

    finding = told(next_one)["findings"][0]
    assert finding["name"] == "causal-sees-the-next"
    scene = given_scene(finding["cell"]["given"])
    query, key = finding["cell"]["query"], finding["cell"]["key"]
    assert not scene.trace(query).row.may(key), "a key that the mask hides, and the function saw"
    example = ch.check(next_one).findings[0].example
    assert example is not None
    right = ch.attention(scene.q[0], scene.k[0], scene.v[0], **scene.options)
    np.testing.assert_allclose(right, example.expected, rtol=1e-5)
    assert not np.allclose(right[query], np.asarray(example.got)[query])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no call"),
        ("[1]", "is no call"),
        ('{"q": [[1]], "k": [[1]]}', "has no v"),
        ('{"q": [], "k": [], "v": []}', "has no q"),
        ('{"q": [["x"]], "k": [[1]], "v": [[1]]}', "has no q"),
        ('{"q": [[1, 2]], "k": [[1]], "v": [[1]]}', "k"),
        ('{"q": [[1]], "k": [[1]], "v": [[1]], "tokens": ["a", "b"]}', "tokens"),
        ('{"q": [[1]], "k": [[1]], "v": [[1]], "mask": "import os"}', "given"),
    ],
)
def test_a_call_that_the_page_hands_over_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=words):
        given_scene(text)
