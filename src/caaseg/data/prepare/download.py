"""Download a file: resume after interruptions, verify its checksum, rename it when complete."""

import errno
import hashlib
import shutil
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from caaseg.data.prepare import Progress
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError

MAX_FAILURES = 3  # consecutive attempts without a new byte
TIMEOUT_S = 60
CHUNK = 1 << 18


def download(address: str, target: Path, *, sha1: str | None, progress: Progress) -> None:
    """Download `target` to a .part file next to it; rename it when it is complete and its checksum is correct."""
    if urlsplit(address).scheme not in ("http", "https"):
        raise CaasegError(f"{address!r} is not a web address; expected http:// or https://")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    failures = 0
    while True:
        before = _size(part)
        problem: object = "the connection was cut"
        try:
            if _fetch_rest(address, part, progress):
                break
        except HTTPError as error:
            raise ConnectionError(
                f"{address}: the server answered {error.code} {error.reason}; expected the file; give another address "
                f"with --addresses {target.name}=ADDRESS, or put the file at {target}"
            ) from error
        except (URLError, HTTPException, ConnectionError, TimeoutError, SSLError) as error:
            problem = getattr(error, "reason", error)
        failures = 0 if _size(part) > before else failures + 1
        if failures == MAX_FAILURES:
            raise ConnectionError(
                f"{address}: {problem}, {MAX_FAILURES} times without a new byte; run the same command again to resume "
                f"after {_size(part):,} bytes, give another address with --addresses {target.name}=ADDRESS, or put "
                f"the file at {target}"
            )
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


def _fetch_rest(address: str, part: Path, progress: Progress) -> bool:
    """Append the missing bytes until the connection ends; return whether the file is complete."""
    have = _size(part)
    request = Request(address, headers={"User-Agent": "caaseg"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if _tag_path(part).is_file():  # if the file changed since, the server sends all of it
            request.add_header("If-Range", _tag_path(part).read_text())
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
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status == 206 and not resumed:
            part.unlink()
            return False
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        free = shutil.disk_usage(part.parent).free
        if total is not None and total - have > free:
            raise OSError(errno.ENOSPC, f"{total - have:,} bytes to download and {free:,} free", str(part))
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        _tag_path(part).unlink(missing_ok=True)
        if tag and not tag.startswith("W/"):
            _tag_path(part).write_text(tag)
        with open(part, "ab" if resumed else "wb") as file:
            while chunk := response.read1(CHUNK):
                file.write(chunk)
                have += len(chunk)
                progress(f"downloading {part.stem}", have, total)
    return total is None or have == total


def _tag_path(part: Path) -> Path:
    """Return the path of the server's version tag of a partial file."""
    return part.with_name(f"{part.name}.tag")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
