"""A real HTTP server on this machine that serves one file, and misbehaves on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Remote:
    """What is served, how, and what was asked for."""

    content: bytes
    etag: str = '"first"'
    modified: str = "Wed, 01 Jan 2020 00:00:00 GMT"
    ranges: bool = True
    heeds_if_range: bool = True
    never_past: int | None = None  # the connection is cut at this byte of the file
    cuts: list[int] = field(default_factory=list)  # of the next answers, after so many bytes
    answers: list[int] = field(default_factory=list)  # status codes of the next answers
    shifts: list[int] = field(default_factory=list)  # of the next pieces, from where asked
    redirect: str = ""  # where to send requests for anything but /file
    hold: threading.Event | None = None  # what to wait for instead of cutting

    port: int = 0
    asked: list[str | None] = field(default_factory=list)  # the Range of each request
    conditions: list[str | None] = field(default_factory=list)  # the If-Range of each
    sent: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/file"


class Handler(BaseHTTPRequestHandler):
    server: QuietServer

    @property
    def remote(self) -> Remote:
        return self.server.remote

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/file" and self.remote.redirect:
            self.send_response(302)
            self.send_header("Location", self.remote.redirect)
            self.end_headers()
            return
        self.remote.asked.append(self.headers.get("Range"))
        self.remote.conditions.append(self.headers.get("If-Range"))
        if self.remote.answers:
            self.send_error(self.remote.answers.pop(0))
            return
        start = self.start()
        if start > len(self.remote.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.describe(start)
        self.send(start)

    def start(self) -> int:
        asked = self.headers.get("Range")
        known = self.headers.get("If-Range") in (None, self.remote.etag, self.remote.modified)
        if (
            not self.remote.ranges
            or asked is None
            or (self.remote.heeds_if_range and not known)
        ):
            return 0
        shift = self.remote.shifts.pop(0) if self.remote.shifts else 0
        return int(asked.removeprefix("bytes=").removesuffix("-")) + shift

    def describe(self, start: int) -> None:
        size = len(self.remote.content)
        self.send_header("Content-Length", str(size - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        if self.remote.etag:
            self.send_header("ETag", self.remote.etag)
        if self.remote.modified:
            self.send_header("Last-Modified", self.remote.modified)
        self.end_headers()

    def send(self, start: int) -> None:
        body = self.remote.content[start : self.remote.never_past]
        if self.remote.cuts:
            body = body[: self.remote.cuts.pop(0)]
        self.remote.sent += len(body)  # first: the client may be done before write returns
        self.wfile.write(body)
        if self.remote.hold is not None and start + len(body) < len(self.remote.content):
            self.remote.hold.wait(30)


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
