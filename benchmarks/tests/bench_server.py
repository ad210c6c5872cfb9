"""A real HTTP server on this machine that serves one file, and misbehaves on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Remote:
    """What is served, how, and how often it was asked for."""

    content: bytes
    cuts: list[int] = field(default_factory=list)  # of the next answers, after so many bytes
    answers: list[int] = field(default_factory=list)  # status codes of the next answers
    hold: threading.Event | None = None  # what to wait for instead of cutting
    port: int = 0
    asked: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/file"


class Handler(BaseHTTPRequestHandler):
    server: QuietServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        remote = self.server.remote
        remote.asked += 1
        if remote.answers:
            self.send_error(remote.answers.pop(0))
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(remote.content)))
        self.end_headers()
        if not remote.cuts:
            self.wfile.write(remote.content)
            return
        self.wfile.write(remote.content[: remote.cuts.pop(0)])
        if remote.hold is not None:
            remote.hold.wait(30)


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, remote: Remote) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.remote = remote
        remote.port = self.server_address[1]

    def handle_error(self, *_: object) -> None:
        """A client that goes away is what is tested."""


@contextmanager
def serving(remote: Remote) -> Iterator[Remote]:
    server = QuietServer(remote)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield remote
    finally:
        if remote.hold is not None:
            remote.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
