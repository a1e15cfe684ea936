"""Download a file: resume after interruptions, verify its checksum, rename it when complete."""

import errno
import hashlib
import random
import shutil
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from caaseg.data.prepare import Progress
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError

MAX_FAILURES = 5
"""Consecutive attempts that bring less than MIN_PROGRESS new bytes."""
MAX_S = 24 * 3600
"""Time for all attempts together."""
MIN_PROGRESS = 1 << 16
MIN_BYTES_PER_S = 1000
"""Slowest accepted connection, on average over RATE_S."""
RATE_S = 60
FIRST_PAUSE_S = 1.0
"""Average pause after an attempt; it doubles with every failure in a row."""
TIMEOUT_S = 60
CHUNK = 1 << 18
TEMPORARY_ERRORS = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status codes of errors that may be temporary."""


class TooSlowError(ConnectionError):
    """The server sends data, but too slowly to wait for it."""


def download(
    address: str,
    target: Path,
    *,
    sha1: str | None,
    progress: Progress,
    max_bytes: int = 1 << 40,
    max_attempts: int = 200,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Download `target` to a .part file next to it; rename it when it is complete and its checksum is correct.

    A cut connection is resumed after a pause. The download is given up if the server sends nothing new, is too slow, or
    never ends.

    Args:
        address: http:// or https:// URL.
        target: path of the file.
        sha1: expected checksum; None if unknown.
        progress: called for every chunk.
        max_bytes: largest plausible size of the file.
        max_attempts: maximum number of connections.
        clock: returns the time in seconds.
    """
    if not _is_web_address(address):
        raise CaasegError(f"{address!r} is not a web address; expected http:// or https://")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    advice = f"give another address with --addresses {target.name}=ADDRESS, or put the file at {target}"
    failures, longest, deadline = 0, _size(part), clock() + MAX_S
    for attempt in range(1, max_attempts + 1):
        problem: object = "the connection was cut"
        is_too_slow = False
        try:
            if _fetch_rest(address, part, max_bytes, progress, clock, deadline):
                break
        except HTTPError as error:
            error.close()
            problem = f"the server answered {error.code} {error.reason}"
            if error.code not in TEMPORARY_ERRORS:
                raise ConnectionError(f"{address}: {_one_line(problem)}; expected the file; {advice}") from error
        except TooSlowError as error:
            is_too_slow, problem = True, error
        except (URLError, HTTPException, ConnectionError, TimeoutError, SSLError) as error:
            problem = getattr(error, "reason", error)
        failures = 0 if _size(part) >= longest + MIN_PROGRESS else failures + 1
        longest = max(longest, _size(part))  # a server without range requests may send less than before
        if is_too_slow or failures == MAX_FAILURES or attempt == max_attempts:
            raise ConnectionError(
                f"{address}: {_one_line(problem)}; given up after {attempt} attempt{'s' * (attempt > 1)}; run the same "
                f"command again to resume after {_size(part):,} bytes, {advice}"
            )
        time.sleep(FIRST_PAUSE_S * 2**failures * random.uniform(0.5, 1.5))
    try:
        check_sha1(part, sha1, progress)
    except BadFileError:
        part.unlink()
        raise
    finally:
        _tag_path(part).unlink(missing_ok=True)
    part.replace(target)  # last, so that a complete file has no leftovers next to it


def check_sha1(path: Path, expected: str | None, progress: Progress) -> None:
    """Raise BadFileError if the SHA-1 of a file differs from the expected one; None skips the check."""
    if expected is None:
        return
    digest, done, total = hashlib.sha1(usedforsecurity=False), 0, _size(path)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"verifying {path.name}", done, total)
    if digest.hexdigest() != expected:
        raise BadFileError(
            f"{path}: its SHA-1 is {digest.hexdigest()}; expected {expected}; "
            "it is damaged or another version: download it again"
        )


def _is_web_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        has_host = bool(parts.hostname) and parts.port != 0  # a port that is not a number raises ValueError
    except ValueError:
        return False
    is_plain = address.isascii() and address.isprintable() and " " not in address
    return has_host and is_plain and parts.scheme in ("http", "https")


def _fetch_rest(
    address: str, part: Path, max_bytes: int, progress: Progress, clock: Callable[[], float], deadline: float
) -> bool:
    """Append the missing bytes until the connection ends; return whether the file is complete."""
    have = _size(part)
    request = Request(address, headers={"User-Agent": "caaseg"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if _tag_path(part).is_file():  # if the file changed since, the server sends all of it
            request.add_header("If-Range", _tag_path(part).read_text(encoding="utf-8"))
    try:
        response: HTTPResponse = urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        if error.code != 416:
            raise
        error.close()  # the server has no more bytes: the file is complete, or belongs to another version
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return True
        part.unlink()
        return False
    except ValueError as error:  # a redirect to an impossible address
        raise URLError(str(error)) from error
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status == 206 and not resumed:
            part.unlink()
            return False
        have = have if resumed else 0
        total = None if response.length is None else have + response.length
        if total is not None and total > max_bytes:
            raise _too_large(address, total, max_bytes)
        free = shutil.disk_usage(part.parent).free
        if total is not None and total - have > free:
            raise OSError(errno.ENOSPC, f"{total - have:,} bytes to download and {free:,} free", str(part))
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        _tag_path(part).unlink(missing_ok=True)
        if tag and not tag.startswith("W/"):
            _tag_path(part).write_text(tag, encoding="utf-8")
        with open(part, "ab" if resumed else "wb") as file:
            window_start, window_bytes = clock(), 0
            while chunk := response.read1(CHUNK):
                file.write(chunk)
                have += len(chunk)
                progress(f"downloading {part.stem}", have, total)
                if have > max_bytes:
                    raise _too_large(address, have, max_bytes)
                window_bytes += len(chunk)
                if clock() > deadline:
                    raise TooSlowError(f"not complete after {MAX_S // 3600} hours")
                if (elapsed := clock() - window_start) > RATE_S:
                    if window_bytes < MIN_BYTES_PER_S * elapsed:
                        raise TooSlowError(f"only {window_bytes / elapsed:,.0f} bytes per second")
                    window_start, window_bytes = clock(), 0
    return total is None or have == total


def _too_large(address: str, size: int, max_bytes: int) -> CaasegError:
    return CaasegError(
        f"{address}: {size:,} bytes or more; expected at most {max_bytes:,}; it is another file: give another address"
    )


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__


def _tag_path(part: Path) -> Path:
    """Return the path of the server's version tag of a partial file."""
    return part.with_name(f"{part.name}.tag")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
