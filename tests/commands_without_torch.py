"""Run several commands in one process and print what each imported: a JSON list of exit code, packages and seconds.

python -m tests.commands_without_torch COMMAND_LINE...
"""

import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

from caaseg.cli import main

HEAVY = ("lightning_fabric", "timm", "torchvision", "matplotlib", "torch")


def exit_code(arguments: list[str]) -> int:
    """Return the exit code of a command, whose output is dropped."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            return main(arguments)
        except SystemExit as ended:  # help
            return int(ended.code or 0)


if __name__ == "__main__":
    found = []
    for line in sys.argv[1:]:
        start = time.process_time()
        code = exit_code(line.split())
        found.append((code, [name for name in HEAVY if name in sys.modules], time.process_time() - start))
    print(json.dumps(found))
