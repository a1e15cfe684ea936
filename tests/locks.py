"""A process that holds a lock, for tests. Imports no torch, so that it starts quickly."""

import time
from pathlib import Path
from typing import Any

from caaseg.files import lock_name


def hold_lock(directory: Path, name: str, ready: Any) -> None:
    """Report to a queue whether the lock is held, and hold it until the process is killed."""
    with lock_name(directory, name, wait=False) as locked:
        ready.put(locked)
        time.sleep(60)
