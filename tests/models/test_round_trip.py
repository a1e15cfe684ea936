"""Every head with two backbones, and most families of backbones with two heads, from training to export."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from caaseg.models.heads import HEADS
from tests.models.families import TESTED, options
from tests.models.round_trip import check_round_trip

# An export takes up to a quarter of a minute: heads that take long have the backbones that take little time, and
# conversely. `tests.models.matrix` runs all pairs, with all stages of the backbones.
LONG_HEADS = (
    *("upernet", "ann", "psp", "encnet", "deeplabv3plus", "axial", "ocr", "emanet", "segformer", "nonlocal"),
    "deeplabv3",
)
SHORT_HEADS = tuple(head for head in HEADS if head not in (*LONG_HEADS, "fcn"))
SHORT_BACKBONES = (
    *("test_resnet", "test_efficientnet", "test_vit", "vit_small_patch14_dinov2", "test_mambaout", "fastvit_t8"),
    *("vit_tiny_patch16_dinov3_qkvb", "inception_next_atto", "repvit_m0_9", "densenet121", "pvt_v2_b0"),
)
LONG_BACKBONES = tuple(backbone for backbone in TESTED if backbone not in SHORT_BACKBONES)


def take_turns(heads: Sequence[str], backbones: Sequence[str], first: int = 0) -> list[tuple[str, str]]:
    """Return a pair per backbone, with each head in turn."""
    return [(heads[(first + i) % len(heads)], backbone) for i, backbone in enumerate(backbones)]


PAIRS = [
    *take_turns(LONG_HEADS, SHORT_BACKBONES),
    *take_turns(LONG_HEADS, SHORT_BACKBONES, 5),
    *take_turns(SHORT_HEADS, LONG_BACKBONES),
    *take_turns(["fcn"], LONG_BACKBONES),  # the fastest export
]


def test_the_pairs_have_every_head_and_every_family_twice() -> None:
    heads, backbones = (Counter(names) for names in zip(*PAIRS, strict=True))
    assert min(heads[name] for name in HEADS) >= 2
    assert set(backbones.values()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(("head", "backbone"), PAIRS)
def test_a_model_is_trained_evaluated_saved_loaded_and_exported(head: str, backbone: str, tmp_path: Path) -> None:
    check_round_trip(tmp_path, *options(head, backbone, maps=2))
