"""The live page: the standard library's threaded server, for this machine alone unless it is told otherwise.

Every address begins with a random token. Host and Origin are checked, so that no other page in the same browser can
ask. Nothing is read by a name that a request gives: what can be had is listed before the first request.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.explorer.answers import LONGEST, Answer, Subject, answer
from clearhead.explorer.web_files import MIME, web_files

POLICY = "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
# where Colab shows a port of its machine, through a proxy of its own
COLAB = "https://colab.research.google.com https://*.googleusercontent.com"
PORTS = 20  # that are tried after the one asked for
SECONDS = 30  # that a connection may keep silent
AT_ONCE = 8  # answers that are computed side by side; others wait
LARGEST = 1_000_000  # bytes that a request may bring
HERE = ("127.0.0.1", "::1", "localhost")


class Server(ThreadingHTTPServer):
    """One call or model, served until `shutdown`.

    Behind a notebook's proxy a request has other names for this machine; there the token alone says who may ask.
    """

    daemon_threads = True

    def __init__(
        self,
        subject: Subject,
        host: str = "127.0.0.1",
        port: int = 8707,
        *,
        run_code: bool | None = None,
        proxied: bool = False,
    ) -> None:
        self.subject = subject
        # the page's own switch is believed on this machine alone; elsewhere it is for who starts the server to say
        self.may_run = host in HERE and not proxied if run_code is None else run_code
        self.runs = bool(run_code)
        self.checking = threading.Lock()
        self.token = secrets.token_urlsafe(16)
        self.files: Mapping[str, bytes] = web_files()
        self.proxied = proxied
        self.policy = POLICY.replace("frame-ancestors 'none'", f"frame-ancestors {COLAB}") if proxied else POLICY
        self.turns = threading.Semaphore(AT_ONCE)
        for number in [*range(port, port + PORTS), 0] if port else [0]:
            try:
                super().__init__((host, number), Handler)
            except OSError:
                if number == 0:
                    raise
                continue
            break
        names = {host, "localhost"} if host in HERE else {host, "127.0.0.1", "localhost"}
        self.hosts = {f"{name}:{self.server_port}" for name in names}

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{self.server_name}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a page that went away before it was answered; the rest as ever."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        """Bind without asking the network for this machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = SECONDS
    disable_nagle_algorithm = True  # an answer is two packets; with it the second waits for 40 ms

    def do_GET(self) -> None:
        """A file of the page, or an answer."""
        if not self.trusted():
            return
        parts = urlsplit(self.path)
        rest = parts.path.removeprefix(f"/{self.server.token}")
        if rest in ("", "/"):
            self.send("index.html", self.server.files["index.html"]) if rest else self.moved()
        elif rest.startswith("/data/"):
            self.data(f"{rest.removeprefix('/data')}?{parts.query}" if parts.query else rest.removeprefix("/data"))
        elif rest[1:] in self.server.files:
            self.send(rest[1:], self.server.files[rest[1:]])
        else:
            self.refuse(404, "There is no such page.")

    def do_POST(self) -> None:
        """The switch that lets the page run code, and a function to be checked. Asked by the page alone."""
        length = self.headers.get("Content-Length", "")
        if not self.trusted():
            return
        rest = self.path.removeprefix(f"/{self.server.token}")
        if self.headers.get("Origin") is None or self.headers.get("Content-Type") != "application/json":
            self.refuse(403, "Pages from elsewhere are not answered.")
        elif not length.isdigit() or int(length) > LARGEST:
            self.refuse(413, f"This is too long: expected at most {LARGEST:,} bytes.")
        elif rest not in ("/switch", "/check"):
            self.refuse(404, "There is no such page.")
        else:
            try:
                given = json.loads(self.rfile.read(int(length)))
                found, status = (self.switch if rest == "/switch" else self.check)(given), 200
            except ArgumentError as refused:
                found, status = {"error": str(refused)}, 422
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                found, status = {"error": "This is no request of the page."}, 422
            self.reply(status, json.dumps(found, ensure_ascii=False).encode(), "application/json")

    def switch(self, given: dict[str, Any]) -> dict[str, bool]:
        """Turn running code on or off, or only say how it stands; on only where that is allowed."""
        if given.get("on") is True and not self.server.may_run:
            raise ArgumentError("switch", "may not be turned on from here: start it with clearhead explore --code")
        if given.get("on") is not None:
            self.server.runs = given["on"] is True
        return {"on": self.server.runs, "may": self.server.may_run}

    def check(self, given: dict[str, Any]) -> dict[str, Any]:
        """What `check` says of a function that was pasted; one at a time."""
        if not self.server.runs:
            raise ArgumentError("function", "is not run: the switch that lets this page run code is off")
        if not self.server.checking.acquire(blocking=False):
            raise ArgumentError("function", "waits: another one is being checked")
        try:
            from clearhead.explorer.pasted import examined  # the doctor is imported by who asks for it

            return examined(str(given["source"]), str(given.get("name") or ""))
        finally:
            self.server.checking.release()

    def trusted(self) -> bool:
        """True for a request of the page itself, which knows the token and comes from where it is served."""
        origin, proxied = self.headers.get("Origin"), self.server.proxied
        if len(self.path) > LONGEST:
            self.refuse(414, "This address is too long.")
        elif not proxied and self.headers.get("Host", "") not in self.server.hosts:
            self.refuse(403, "This server answers to its own address only.")
        elif not proxied and origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}:
            self.refuse(403, "Pages from elsewhere are not answered.")
        elif not secrets.compare_digest(self.path[1:].split("/", 1)[0].split("?", 1)[0], self.server.token):
            self.refuse(403, "The address lacks its token: open the one that was printed.")
        else:
            return True
        return False

    def data(self, address: str) -> None:
        """An answer, or why there is none, in one sentence."""
        with self.server.turns:
            try:
                found = answer(self.server.subject, address)
                status = 200
            except (ArgumentError, KernelRefused) as refused:
                found, status = Answer(json.dumps({"error": str(refused)}).encode(), "json"), 422
            except MemoryError:
                found, status = Answer(b'{"error":"There is not enough memory for this."}', "json"), 422
        self.reply(status, found.body, "application/json" if found.kind == "json" else "application/octet-stream")

    def send(self, name: str, body: bytes) -> None:
        """A file of the page."""
        self.reply(200, body, MIME[name.rsplit(".", 1)[-1]])

    def moved(self) -> None:
        """To the address with a slash, relative to which files are found."""
        self.send_response(301)
        self.send_header("Location", f"/{self.server.token}/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def refuse(self, status: int, words: str) -> None:
        """No, in one sentence."""
        self.close_connection = True
        self.reply(status, words.encode(), "text/plain; charset=utf-8")

    def reply(self, status: int, body: bytes, mime: str) -> None:
        """Headers and body."""
        self.send_response(status)
        for name, value in (
            ("Content-Type", mime),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self.server.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to who opened the page."""
