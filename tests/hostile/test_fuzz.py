"""Generated models, checkpoints, recipes, options, images, archives and servers: one message, or success, each."""

from pathlib import Path

import pytest

from tests.hostile.runner import AREAS, failures

FAST = {"models": 40, "checkpoints": 8, "recipes": 80, "images": 30, "archives": 25, "servers": 17}
SLOW = {"models": 400, "checkpoints": 60, "recipes": 800, "images": 300, "archives": 300, "servers": 200}
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
