"""Run a caaseg command that kills itself with SIGKILL while it writes a checkpoint.

python -m tests.reproduce.killed_command NUMBER ARGUMENTS...

NUMBER is the number of the checkpoint, from 1, that is left half-written.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from caaseg.cli import main

if __name__ == "__main__":
    save, paths, number = torch.save, list[Path](), int(sys.argv[1])

    def save_and_die(state: Any, path: Path) -> None:
        save(state, path)
        paths.append(path)
        if len(paths) == number:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    torch.save = save_and_die  # type: ignore[assignment]
    sys.exit(main(sys.argv[2:]))
