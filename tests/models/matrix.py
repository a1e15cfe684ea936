"""Trains, evaluates, saves, loads and exports every head with every family of backbones.

    python -m tests.models.matrix OUT [--part 0/2]

Writes a line per pair to OUT, with the seconds that it took, or with the error. Pairs with a line are not repeated. Two
processes share the work with --part 0/2 and --part 1/2.
"""

import argparse
import logging
import sys
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path

from caaseg.models.heads import HEADS
from tests.models.families import BACKBONES, options
from tests.models.round_trip import check_round_trip


def check_pair(head: str, backbone: str) -> str:
    """Return "equal" after a round trip of a model, or its error."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        try:
            check_round_trip(Path(directory), *options(head, backbone))
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", default="0/1")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    logging.disable(logging.WARNING)
    known = arguments.out.read_text(encoding="utf-8").splitlines() if arguments.out.exists() else []
    done = {tuple(line.split()[:2]) for line in known}
    failed = 0
    for number, (backbone, head) in enumerate(product(BACKBONES, HEADS)):
        if number % parts != part or (head, backbone) in done:
            continue
        start = time.monotonic()
        found = check_pair(head, backbone)
        failed += found != "equal"
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(f"{head} {backbone} {found} {time.monotonic() - start:.1f} s\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
