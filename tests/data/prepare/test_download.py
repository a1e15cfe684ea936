"""Fetching, under everything a connection and a disk may do."""

import errno
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from caaseg.data.prepare.download import download
from caaseg.data.sample import BadFileError
from tests.data.datasets.test_coco_stuff import quiet
from tests.data.prepare.server import Server, serving

CONTENT = np.random.default_rng(0).bytes(1_000_000)
SHA1 = hashlib.sha1(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.files["a.zip"] = CONTENT
        yield server


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_whole_and_leaves_nothing_beside(server: Server, tmp_path: Path) -> None:
    steps = []
    target = tmp_path / "new" / "a.zip"
    download(server.url("a.zip"), target, sha1=SHA1, report=lambda *step: steps.append(step))
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["a.zip"]
    assert ("fetching a.zip", len(CONTENT), len(CONTENT)) in steps
    assert steps[-1] == ("verifying a.zip.part", len(CONTENT), len(CONTENT))
    assert server.asked == [None]


def test_a_cut_connection_is_continued(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 100_000]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, report=quiet)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=400000-"]


def test_a_run_that_gave_up_is_continued_by_the_next(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 0, 0, 0]
    message = r"a\.zip: the connection was cut, 3 times without a new byte; run the same command again .* 300,000 bytes"
    with pytest.raises(ConnectionError, match=message):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, report=quiet)
    assert names(tmp_path) == ["a.zip.part", "a.zip.part.tag"]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, report=quiet)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.asked[-1] == "bytes=300000-"
    assert names(tmp_path) == ["a.zip"]


def test_a_file_that_changed_meanwhile_is_fetched_from_its_beginning(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 0, 0, 0]
    with pytest.raises(ConnectionError):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, report=quiet)
    server.files["a.zip"], server.tag = CONTENT[::-1], '"2"'
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, report=quiet)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT[::-1]


def test_a_server_that_gives_no_parts_is_asked_for_all(server: Server, tmp_path: Path) -> None:
    server.ranges, server.tag, server.cuts = False, None, [300_000]
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, report=quiet)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert names(tmp_path) == ["a.zip"]


def test_what_came_whole_before_the_kill_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT)
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, report=quiet)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.asked == ["bytes=1000000-"]


def test_more_than_there_is_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT + b"of another file")
    download(server.url("a.zip"), tmp_path / "a.zip", sha1=SHA1, report=quiet)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=rf"a\.zip\.part: its SHA-1 is {SHA1}; expected 0{{40}}; it is damaged"):
        download(server.url("a.zip"), tmp_path / "a.zip", sha1="0" * 40, report=quiet)
    assert names(tmp_path) == []


def test_a_file_that_is_not_there_is_said_with_what_to_do(server: Server, tmp_path: Path) -> None:
    message = rf"none\.zip: the server answered 404 Not Found;.*--addresses none\.zip=ADDRESS, or put .* at {tmp_path}"
    with pytest.raises(ConnectionError, match=message):
        download(server.url("none.zip"), tmp_path / "none.zip", sha1=None, report=quiet)


def test_a_server_that_is_not_there_is_said(tmp_path: Path) -> None:
    with serving() as gone:
        pass
    with pytest.raises(ConnectionError, match=r"Connection refused, 3 times without a new byte"):
        download(gone.url("a.zip"), tmp_path / "a.zip", sha1=None, report=quiet)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://host/a.zip", "a.zip", ""])
def test_only_web_addresses_are_opened(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="is no address of a file; expected one that begins with http:// or https://"):
        download(address, tmp_path / "a.zip", sha1=None, report=quiet)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_fills_up_ends_it_at_once(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").symlink_to("/dev/full")  # every write there says that no space is left
    with pytest.raises(OSError, match="No space left on device") as caught:
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, report=quiet)
    assert caught.value.errno == errno.ENOSPC
    assert len(server.asked) == 1


def test_a_disk_too_small_is_said_before_anything_is_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))
    with pytest.raises(OSError, match="1,000,000 bytes to come and 1,000 free") as caught:
        download(server.url("a.zip"), tmp_path / "a.zip", sha1=None, report=quiet)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []
