"""Files are written whole or not at all, by however many at once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from caaseg.files import atomic_write, remove_stale_temporaries


def test_a_file_is_there_when_it_is_whole_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    with atomic_write(path) as aside:
        aside.write_text("1")
        assert aside.suffix == ".json"
        assert not path.exists()
    assert [found.name for found in path.parent.iterdir()] == ["table.json"]


def test_what_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("before")

    def write_half() -> None:
        with atomic_write(path) as aside:
            aside.write_text("half")
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_half()
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["table.json"]


def test_two_processes_write_the_same_file_and_it_is_always_one_of_theirs(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    program = """
import sys
from pathlib import Path
from caaseg.files import atomic_write
for _ in range(200):
    with atomic_write(Path(sys.argv[1])) as aside, aside.open("w") as file:
        for _ in range(20):
            file.write(sys.argv[2] * 1000)
            file.flush()
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), letter]) for letter in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            seen.add(path.read_text())
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen | {path.read_text()} <= {"a" * 20_000, "b" * 20_000}
    assert [found.name for found in tmp_path.iterdir()] == ["table.md"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "table.json"

    def write() -> None:
        with atomic_write(path) as aside:
            raise PermissionError(13, "Permission denied", str(aside))

    with pytest.raises(PermissionError, match=re.escape(f"Permission denied: {str(path)!r}")):
        write()


def test_what_a_killed_process_left_of_a_file_is_cleared_and_nothing_of_others(tmp_path: Path) -> None:
    left = [".a[1].0123456789ab.part.png", ".a[1].ba9876543210.part.png"]
    others = [".a[1].b.0123456789ab.part.png", ".a1.0123456789ab.part.png", ".a[1].0123456789ab.part.jpg", "a[1].png"]
    for name in left + others:
        (tmp_path / name).touch()
    remove_stale_temporaries(tmp_path / "a[1].png")
    assert {found.name for found in tmp_path.iterdir()} == set(others)
    remove_stale_temporaries(tmp_path / "nowhere" / "a.png")
