"""Downloads with failing connections, servers and disks."""

import errno
import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from caaseg.data.prepare.download import download
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError
from tests.data import trees
from tests.data.prepare.server import Server, serving

CONTENT = np.random.default_rng(0).bytes(1_000_000)
SHA1 = hashlib.sha1(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between attempts in seconds, which the tests do not wait for."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.files["a.zip"] = CONTENT
        yield server


class Usage(NamedTuple):
    free: int


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_download_leaves_no_other_files(server: Server, tmp_path: Path) -> None:
    steps = []
    target = tmp_path / "new" / "a.zip"
    download(server.url("a.zip"), target, sha1=SHA1, progress=lambda *step: steps.append(step))
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["a.zip"]
    assert ("downloading a.zip", len(CONTENT), len(CONTENT)) in steps
    assert steps[-1] == ("verifying a.zip.part", len(CONTENT), len(CONTENT))
    assert server.requests == [None]


def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 100_000]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.requests == [None, "bytes=300000-", "bytes=400000-"]


def test_the_next_run_resumes_a_failed_one(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 0, 0, 0, 0, 0]
    message = r"a\.zip: the connection was cut; given up after 6 attempts; run the same .* after 300,000 bytes, "
    with pytest.raises(ConnectionError, match=message):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert names(tmp_path) == ["a.zip.part", "a.zip.part.tag"]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.requests[-1] == "bytes=300000-"
    assert names(tmp_path) == ["a.zip"]


def test_a_changed_file_is_downloaded_from_the_start(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 0, 0, 0, 0, 0]
    with pytest.raises(ConnectionError):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, progress=trees.no_progress)
    server.files["a.zip"], server.tag = CONTENT[::-1], '"2"'
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT[::-1]


def test_a_server_without_range_requests_sends_the_whole_file(server: Server, tmp_path: Path) -> None:
    server.ranges, server.tag, server.cuts = False, None, [300_000]
    steps = []
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=lambda *step: steps.append(step))
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert {total for _, _, total in steps} == {len(CONTENT)}
    assert max(done for _, done, _ in steps) == len(CONTENT)
    assert names(tmp_path) == ["a.zip"]


def test_a_complete_part_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT)
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.requests == ["bytes=1000000-"]


def test_a_part_file_longer_than_the_file_is_discarded(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT + b"of another file")
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_no_file(server: Server, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=rf"a\.zip\.part: its SHA-1 is {SHA1}; expected 0{{40}}; it is damaged"):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1="0" * 40, progress=trees.no_progress)
    assert names(tmp_path) == []


def test_a_missing_file_is_reported_with_what_to_do(server: Server, tmp_path: Path) -> None:
    message = rf"none\.zip: the server answered 404 Not Found;.*--addresses none\.zip=ADDRESS, or put .* at {tmp_path}"
    with pytest.raises(ConnectionError, match=message):
        download(server.url("none.zip"), tmp_path / "none.zip", sha1=None, progress=trees.no_progress)


def test_an_unreachable_server_is_reported(tmp_path: Path) -> None:
    with serving() as gone:
        pass
    with pytest.raises(ConnectionError, match=r"Connection refused; given up after 5 attempts"):
        download(gone.url("a.zip"), tmp_path / "a.zip", sha1=None, progress=trees.no_progress)


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd",
        "ftp://host/a.zip",
        "a.zip",
        "",
        "http://",
        "http://[",
        "http://h:x/",
        "http://ä/",
        "http://h/a b",
        "http://h/\n",
    ],
)
def test_only_web_addresses_are_opened(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="is not a web address; expected http:// or https://"):
        download(address, tmp_path / "a.zip", sha1=None, progress=trees.no_progress)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_download_at_once(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").symlink_to("/dev/full")  # every write fails
    with pytest.raises(OSError, match="No space left on device") as caught:
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, progress=trees.no_progress)
    assert caught.value.errno == errno.ENOSPC
    assert len(server.requests) == 1


def test_free_disk_space_is_checked_before_writing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))
    with pytest.raises(OSError, match="1,000,000 bytes to download and 1,000 free") as caught:
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, progress=trees.no_progress)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_only_the_rest_of_a_resumed_download_needs_disk_space(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT[:900_000])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100_000))
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.requests == ["bytes=900000-"]


def test_progress_resets_the_number_of_failures(server: Server, tmp_path: Path) -> None:
    server.cuts = [0, 0, 0, 0, 300_000, 0, 0, 100_000, 0, 0, 0, 0]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert len(server.requests) == 13


def test_pauses_grow_until_there_is_progress_again(server: Server, tmp_path: Path, pauses: list[float]) -> None:
    server.cuts = [0, 0, 300_000, 0]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    average = [2, 4, 1, 2]  # seconds, with a random factor: many users of a server should not come back together
    assert [0.5 * a <= pause <= 1.5 * a for pause, a in zip(pauses, average, strict=True)] == [True] * 4
    assert pauses != average


def test_a_server_that_cuts_after_every_byte_gets_few_requests(server: Server, tmp_path: Path) -> None:
    server.cuts = [1] * 100
    with pytest.raises(ConnectionError, match="the connection was cut; given up after 5 attempts"):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert len(server.requests) == 5


def test_a_server_that_repeats_the_start_gets_few_requests(server: Server, tmp_path: Path) -> None:
    server.ranges, server.cuts = False, [300_000, 100_000] * 50
    with pytest.raises(ConnectionError, match="the connection was cut; given up after 6 attempts"):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert len(server.requests) == 6


def test_the_number_of_attempts_is_limited(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000] * 9
    with pytest.raises(ConnectionError, match=r"given up after 3 attempts; run .* to resume after 300,000 bytes"):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress, max_attempts=3)


class Clock:
    """A clock that moves by a number of seconds whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now = step_s, 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.mark.parametrize(
    ("step_s", "reason"), [(1e4, "only [0-9]+ bytes per second"), (1e5, "not complete after 24 hours")]
)
def test_a_server_that_crawls_is_given_up(server: Server, tmp_path: Path, step_s: float, reason: str) -> None:
    clock = Clock(step_s)
    with pytest.raises(ConnectionError, match=rf"{reason}; given up after 1 attempt; run the same command again"):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress, clock=clock)
    assert (tmp_path / "a.zip.part").exists()  # to resume from


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.answers = [503, 429]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    server.answers = [503] * 9
    with pytest.raises(ConnectionError, match="the server answered 503 Service Unavailable; given up after 5 attempts"):
        download(server.url("a.zip"), tmp_path / "b.zip", sha1=SHA1, progress=trees.no_progress)


@pytest.mark.parametrize("has_length", [True, False])
def test_a_file_larger_than_expected_is_refused(server: Server, tmp_path: Path, has_length: bool) -> None:
    server.has_length = has_length
    with pytest.raises(CaasegError, match=r"a\.zip: [0-9,]+ bytes or more; expected at most 100,000; it is"):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress, max_bytes=100_000)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://[", "Invalid IPv6 URL; given up after 5 attempts"),
        ("/a.zip", "the server answered 302 .* infinite loop"),
        ("file:///etc/passwd", "the server answered 302 .* not allowed"),
    ],
)
def test_a_redirect_to_nowhere_is_one_line(server: Server, tmp_path: Path, address: str, reason: str) -> None:
    server.redirect = address
    with pytest.raises(ConnectionError, match=rf"a\.zip: {reason}") as caught:
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, progress=trees.no_progress)
    assert "\n" not in str(caught.value)
