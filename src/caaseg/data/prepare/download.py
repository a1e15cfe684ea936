"""A file from an address, continued where an interrupted run stopped, checked, and given its name when whole."""

import errno
import hashlib
import shutil
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from caaseg.data.prepare.convert import Report
from caaseg.data.sample import BadFileError

ATTEMPTS = 3  # in a row without a new byte
TIMEOUT_S = 60
CHUNK = 1 << 18


def download(address: str, target: Path, *, sha1: str | None, report: Report) -> None:
    """Fetch `target`. What came so far lies beside it as .part; it gets its name when all of it came and is right."""
    if urlsplit(address).scheme not in ("http", "https"):
        raise ValueError(f"{address!r} is no address of a file; expected one that begins with http:// or https://")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    failures = 0
    while True:
        before = _size(part)
        problem: object = "the connection was cut"
        try:
            if _fetch_rest(address, part, report):
                break
        except HTTPError as error:
            raise ConnectionError(
                f"{address}: the server answered {error.code} {error.reason}; expected the file; give another address "
                f"with --addresses {target.name}=ADDRESS, or put the file at {target}"
            ) from error
        except (URLError, HTTPException, ConnectionError, TimeoutError, SSLError) as error:
            problem = getattr(error, "reason", error)
        failures = 0 if _size(part) > before else failures + 1
        if failures == ATTEMPTS:
            raise ConnectionError(
                f"{address}: {problem}, {ATTEMPTS} times without a new byte; run the same command again to go on from "
                f"{_size(part):,} bytes, give another address with --addresses {target.name}=ADDRESS, or put the file "
                f"at {target}"
            )
    try:
        check_sha1(part, sha1, report)
    except BadFileError:
        part.unlink()
        _tag_of(part).unlink(missing_ok=True)
        raise
    _tag_of(part).unlink(missing_ok=True)
    part.replace(target)  # last: nothing is left beside a file that has its name


def check_sha1(path: Path, expected: str | None, report: Report) -> None:
    """Refuse a file whose checksum is known and another."""
    if expected is None:
        return
    digest, done, total = hashlib.sha1(usedforsecurity=False), 0, _size(path)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report(f"verifying {path.name}", done, total)
    if digest.hexdigest() != expected:
        raise BadFileError(
            f"{path}: its SHA-1 is {digest.hexdigest()}; expected {expected}; "
            "it is damaged or of another version: fetch it again"
        )


def _fetch_rest(address: str, part: Path, report: Report) -> bool:
    """Append what is missing, as far as the connection carries; whether all of it came."""
    have = _size(part)
    request = Request(address, headers={"User-Agent": "caaseg"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if _tag_of(part).is_file():  # a file that changed meanwhile is sent from its beginning
            request.add_header("If-Range", _tag_of(part).read_text())
    try:
        response: HTTPResponse = urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        if error.code != 416:
            raise
        error.close()  # nothing lies beyond what is here: it is all, or of another file
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return True
        part.unlink()
        return False
    with response:
        continued = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status == 206 and not continued:
            part.unlink()
            return False
        have = have if continued else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        free = shutil.disk_usage(part.parent).free
        if total is not None and total - have > free:
            raise OSError(errno.ENOSPC, f"{total - have:,} bytes to come and {free:,} free", str(part))
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        _tag_of(part).unlink(missing_ok=True)
        if tag and not tag.startswith("W/"):
            _tag_of(part).write_text(tag)
        with open(part, "ab" if continued else "wb") as file:
            while chunk := response.read1(CHUNK):
                file.write(chunk)
                have += len(chunk)
                report(f"fetching {part.stem}", have, total)
    return total is None or have == total


def _tag_of(part: Path) -> Path:
    """Where the server's name for this version of the file is kept."""
    return part.with_name(f"{part.name}.tag")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
