"""Atomic writes: a file is complete or absent, also with concurrent writers."""

import multiprocessing
import os
import re
from pathlib import Path

import pytest

from caaseg.files import atomic_write, remove_stale_temporaries


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    with atomic_write(path) as temporary:
        temporary.write_text("1")
        assert temporary.suffix == ".json"
        assert not path.exists()
    assert [found.name for found in path.parent.iterdir()] == ["table.json"]


def test_an_error_leaves_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("before")

    def write_half() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_half()
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["table.json"]


def test_the_content_is_on_disk_before_the_file_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "table.json", []

    def fsync(descriptor: int) -> None:
        assert not path.exists()
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(path) as temporary:
        temporary.write_text("1")
    assert synced == [path.stat().st_ino]


def write_repeatedly(path: Path, letter: str) -> None:
    for _ in range(100):
        with atomic_write(path) as temporary, temporary.open("w") as file:
            for _ in range(20):
                file.write(letter * 1000)
                file.flush()


def test_a_file_with_two_concurrent_writers_always_has_the_content_of_one(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_repeatedly, args=(path, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    contents = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            contents.add(path.read_text())
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert contents | {path.read_text()} <= {"a" * 20_000, "b" * 20_000}
    assert [found.name for found in tmp_path.iterdir()] == ["table.md"]


def test_an_error_names_the_requested_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"

    def write() -> None:
        with atomic_write(path) as temporary:
            raise PermissionError(13, "Permission denied", str(temporary))

    with pytest.raises(PermissionError, match=re.escape(f"Permission denied: {str(path)!r}")):
        write()


def test_only_temporary_files_of_the_path_are_removed(tmp_path: Path) -> None:
    stale = [".a[1].0123456789ab.part.png", ".a[1].ba9876543210.part.png"]
    others = [".a[1].b.0123456789ab.part.png", ".a1.0123456789ab.part.png", ".a[1].0123456789ab.part.jpg", "a[1].png"]
    for name in stale + others:
        (tmp_path / name).touch()
    remove_stale_temporaries(tmp_path / "a[1].png")
    assert {found.name for found in tmp_path.iterdir()} == set(others)
    remove_stale_temporaries(tmp_path / "nowhere" / "a.png")
