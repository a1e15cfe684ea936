"""A local web server with configurable failures."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Server:
    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    tag: str | None = '"1"'
    """ETag of the files."""
    ranges: bool = True
    """Whether range requests are supported."""
    cuts: list[int] = field(default_factory=list)
    """Number of bytes after which each of the next connections is cut."""
    redirect: str | None = None
    """Address that every request is redirected to."""
    answers: list[int] = field(default_factory=list)
    """Status codes of the next answers; then the files."""
    has_length: bool = True
    """Whether the length of the content is sent."""
    length: int | None = None
    """Length that is sent instead of the right one."""
    requests: list[str | None] = field(default_factory=list)
    """Range headers so far; None for a whole file."""

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = server.files.get(self.path.removeprefix("/"))
            requested = self.headers.get("Range")
            server.requests.append(requested)
            if server.redirect is not None:
                self.send_response(302)
                self.send_header("Location", server.redirect)
                self.end_headers()
                return
            if content is None or server.answers:
                self.send_error(server.answers.pop(0) if server.answers else 404)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", requested)[1]) if requested and server.ranges else 0  # type: ignore[index]
            if start >= len(content) > 0:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            if self.headers.get("If-Range") not in (None, server.tag):
                start = 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if server.tag:
                self.send_header("ETag", server.tag)
            if server.has_length:
                length = len(content) - start if server.length is None else server.length
                self.send_header("Content-Length", str(length))
            self.end_headers()
            end = start + server.cuts.pop(0) if server.cuts else len(content)
            self.wfile.write(content[start:end])

        def log_message(self, *_: object) -> None: ...

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.address = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
