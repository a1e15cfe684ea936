"""Atomic writes: a file is complete or absent, also with concurrent writers. Hostile YAML and JSON files."""

import ast
import errno
import os
import re
from pathlib import Path
from threading import Thread

import pytest

import caaseg
from caaseg.errors import CaasegError
from caaseg.files import atomic_write, lock_name, read_json, read_yaml, remove_stale_temporaries
from tests import processes
from tests.locks import hold_lock


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
    writers = [processes.start(write_repeatedly, path, letter) for letter in "ab"]
    contents = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            contents.add(path.read_text())
    assert processes.join(*writers) == [0, 0]
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


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, r"aliases are not supported in .*, line 2, column 10"),
        ("a: &a [*a]", "aliases are not supported"),
        ("[" * 3000 + "]" * 3000, "nested more than 20 deep"),
        ("\n".join(" " * k + f"a{k}:" for k in range(100)), "nested more than 20 deep"),
        ("[" * 21 + "]" * 21, "nested more than 20 deep"),
        ("a: " + "b" * (1 << 20), "more than 1,048,576 bytes"),
        ("a: 2024-13-99", "month must be in 1..12"),
        ("a: !!timestamp x", "NoneType"),
        ("a: !!bool x", "'x'"),
        ("a: !!int ''", "index out of range"),
        (f"a: {'1' * 5000}", "Exceeds the limit"),
        ("a: !!python/name:os.system x", "could not determine a constructor"),
        ("a: \udcff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_hostile_yaml_file_raises_one_message(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text, errors="surrogateescape")
    message = rf"^{re.escape(str(path))}: cannot be read as YAML \(.*{reason}[^\n]*\); correct it$"
    with pytest.raises(CaasegError, match=message):
        read_yaml(path, "correct it")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested more than 20 deep"),
        ('{"a": ' * 21 + "1" + "}" * 21, "nested more than 20 deep"),
        (f'["{"b" * (1 << 20)}"]', "more than 1,048,576 bytes"),
        ("1" * 5000, "Exceeds the limit"),
        ("{", "Expecting property name"),
        ("\udcff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_hostile_json_file_raises_one_message(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, errors="surrogateescape")
    message = rf"^{re.escape(str(path))}: cannot be read as JSON \(.*{reason}[^\n]*\); correct it$"
    with pytest.raises(CaasegError, match=message):
        read_json(path, "correct it")


def test_yaml_and_json_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"a": [1, 2.5, null, true, "ä"]}', encoding="utf-8")
    assert read_yaml(path, "") == read_json(path, "") == {"a": [1, 2.5, None, True, "ä"]}
    path.write_text("[" * 20 + "]" * 20)
    assert read_yaml(path, "") == read_json(path, "")


def test_a_lock_of_another_process_is_reported_or_waited_for(tmp_path: Path) -> None:
    ready = processes.CONTEXT.SimpleQueue()
    other = processes.start(hold_lock, tmp_path, "a", ready)
    results: list[bool] = []

    def wait_for_lock() -> None:
        with lock_name(tmp_path, "a", wait=True) as locked:
            results.append(locked)

    try:
        assert ready.get()
        with lock_name(tmp_path, "a", wait=False) as locked:
            assert not locked
        with lock_name(tmp_path, "b", wait=False) as locked:
            assert locked
        waiting = Thread(target=wait_for_lock)
        waiting.start()
        waiting.join(0.2)
        assert results == []
    finally:
        other.kill()  # the operating system releases its lock
        other.join()
    waiting.join()
    assert results == [True]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*table\.json'"),
        atomic_write(tmp_path / "table.json"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CaasegError, match=r"pipe: cannot be read as JSON \(not a regular file\); do it"):
        read_json(tmp_path / "pipe", "do it")
    with pytest.raises(CaasegError, match=r"pipe: cannot be read as YAML \(not a regular file\); do it"):
        read_yaml(tmp_path / "pipe", "do it")


@pytest.mark.parametrize("text", ["steps: 5\nsteps: 7\n", "model: {a: 1, b: 2, a: 3}"])
def test_a_key_that_occurs_twice_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(CaasegError, match=r"the key '(steps|a)' occurs twice"):
        read_yaml(tmp_path / "a.yaml", "correct it")


def test_text_files_have_the_same_encoding_on_every_system() -> None:
    for path in Path(caaseg.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_text = node.func.attr in ("read_text", "write_text")
                assert not is_text or "encoding" in {keyword.arg for keyword in node.keywords}, (path, node.lineno)
