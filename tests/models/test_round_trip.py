"""Every head with two backbones, and most families of backbones with two heads, from training to export."""

from collections import Counter
from pathlib import Path

import pytest

from caaseg.models.heads import HEADS
from tests.models.families import TESTED, options
from tests.models.round_trip import check_round_trip

# Backbone i has heads 2i and 2i + 1, so that the heads take turns. `tests.models.matrix` runs all pairs.
PAIRS = [(list(HEADS)[(2 * i + k) % len(HEADS)], backbone) for i, backbone in enumerate(TESTED) for k in range(2)]


def test_the_pairs_have_every_head_and_every_family_twice() -> None:
    heads, backbones = (Counter(names) for names in zip(*PAIRS, strict=True))
    assert min(heads[name] for name in HEADS) >= 2
    assert set(backbones.values()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(("head", "backbone"), PAIRS)
def test_a_model_is_trained_evaluated_saved_loaded_and_exported(head: str, backbone: str, tmp_path: Path) -> None:
    check_round_trip(tmp_path, *options(head, backbone))
