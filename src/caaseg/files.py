"""Atomic file writes, locks between processes, and reading of untrusted YAML and JSON files."""

import glob
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from caaseg.errors import CaasegError

MAX_TEXT_BYTES = 1 << 20
"""Largest YAML or JSON file. Recipes, class tables and model configs have a few KB."""
MAX_DEPTH = 20
"""Deepest nesting of a YAML or JSON file. Later code walks through the values recursively."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds, delete it if the block fails.

    Concurrent writers of the same file use different temporary paths; the last rename wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keep the suffix, because writers choose the format by it. A process id is not unique across machines.
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}.part{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # before the rename: a power cut must not leave the name without its content
        temporary.replace(path)
    except OSError as error:
        if error.filename == str(temporary):  # report the path that the caller knows
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale_temporaries(path: Path) -> None:
    """Delete temporary files of killed writers of `path`. Call only while holding the lock on `path`."""
    unique = "[0-9a-f]" * 12  # does not match temporary files of other paths with the same prefix
    for temporary in path.parent.glob(f".{glob.escape(path.stem)}.{unique}.part{glob.escape(path.suffix)}"):
        temporary.unlink(missing_ok=True)


def hash_files(*paths: Path) -> str:
    """Return the SHA-256 of the concatenated content of one or several files, as a hexadecimal string."""
    hashed = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while content := file.read(1 << 20):
                hashed.update(content)
    return hashed.hexdigest()


@contextmanager
def lock_name(directory: Path, name: str, *, wait: bool) -> Iterator[bool]:
    """Hold a lock on a name among all processes that use a directory. Yields False if another process holds it.

    The operating system releases the lock of a killed process; the next use of the lock deletes its empty lock file.

    Args:
        directory: an existing directory, for the lock file.
        name: any text, such as the name of an image.
        wait: wait until the lock is free, instead of yielding False.
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    path = directory / f".{digest[:32]}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):  # Windows cannot delete a file that another process has open
            path.unlink(missing_ok=True)  # while locked: a waiting process notices, and creates the file again
        lock.release()


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses deep nesting and aliases. Nested aliases can expand a small file to any size."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_yaml(path: Path, advice: str) -> Any:
    """Return the content of a YAML file. CaasegError if it is damaged, too large, too deep or has aliases.

    Args:
        path: the file.
        advice: end of the error message, which says what to do.
    """
    # Invalid tags and dates raise other exceptions than YAMLError.
    errors = (OSError, yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
    try:
        return yaml.load(_read_text(path), Loader=_Loader)
    except errors as error:
        raise CaasegError(f"{path}: cannot be read as YAML ({_reason(error)}); {advice}") from error


def read_json(path: Path, advice: str) -> Any:
    """Return the content of a JSON file. CaasegError if it is damaged, too large or too deep.

    Args:
        path: the file.
        advice: end of the error message, which says what to do.
    """
    try:
        content = json.loads(_read_text(path))
        _check_depth(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CaasegError(f"{path}: cannot be read as JSON ({_reason(error)}); {advice}") from error
    return content


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"more than {MAX_TEXT_BYTES:,} bytes")
    return content.decode("utf-8")


def _check_depth(content: Any) -> None:
    level, depth = [content], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [item for value in containers for item in (value.values() if isinstance(value, dict) else value)]


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_DEPTH} deep"
    return " ".join(str(error).split()) or type(error).__name__
