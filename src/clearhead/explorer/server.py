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
PORTS = 20  # that are tried after the one asked for
SECONDS = 30  # that a connection may keep silent
AT_ONCE = 8  # answers that are computed side by side; others wait


class Server(ThreadingHTTPServer):
    """One call or model, served until `shutdown`."""

    daemon_threads = True

    def __init__(self, subject: Subject, host: str = "127.0.0.1", port: int = 8707) -> None:
        self.subject = subject
        self.token = secrets.token_urlsafe(16)
        self.files: Mapping[str, bytes] = web_files()
        self.turns = threading.Semaphore(AT_ONCE)
        for number in [*range(port, port + PORTS), 0] if port else [0]:
            try:
                super().__init__((host, number), Handler)
            except OSError:
                if number == 0:
                    raise
                continue
            break
        names = {host, "localhost"} if host in ("127.0.0.1", "::1") else {host, "127.0.0.1", "localhost"}
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

    def trusted(self) -> bool:
        """True for a request of the page itself, which knows the token and comes from where it is served."""
        origin = self.headers.get("Origin")
        if len(self.path) > LONGEST:
            self.refuse(414, "This address is too long.")
        elif self.headers.get("Host", "") not in self.server.hosts:
            self.refuse(403, "This server answers to its own address only.")
        elif origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}:
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
            ("Content-Security-Policy", POLICY),
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
