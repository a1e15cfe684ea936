"""Generated models, checkpoints, recipes, options, images, archives, servers and exports: success, or one message."""

from pathlib import Path

import pytest

from tests.hostile.runner import AREAS, failures

FAST = {"models": 30, "checkpoints": 8, "recipes": 65, "images": 25, "archives": 22, "servers": 15, "exports": 35}
SLOW = {
    "models": 220,
    "checkpoints": 40,
    "recipes": 400,
    "images": 180,
    "archives": 180,
    "servers": 120,
    "exports": 220,
}
FIRST_SLOW, CHUNKS = 1000, 4


@pytest.mark.parametrize("area", AREAS)
def test_hostile_input_ends_with_success_or_one_message(area: str, tmp_path: Path) -> None:
    found = failures(area, range(FAST[area]), tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_much_more_hostile_input_ends_with_success_or_one_message(area: str, chunk: int, tmp_path: Path) -> None:
    seeds = range(FIRST_SLOW + chunk, FIRST_SLOW + SLOW[area], CHUNKS)
    found = failures(area, seeds, tmp_path)
    assert not found, "\n".join(found)
