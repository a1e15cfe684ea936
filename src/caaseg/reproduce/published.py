"""Numbers of mmsegmentation 1.2.2 for ResNet-101: mean IoU in %, at a single scale, and at several scales with flips.

They come from its files configs/*/metafile.yaml. Each is the result of one training run. For heads, datasets and
schedules that are missing here, mmsegmentation publishes no number.
"""

from collections.abc import Mapping
from typing import NamedTuple


class MMSegHead(NamedTuple):
    """A head of mmsegmentation."""

    title: str
    configuration: str  # start of the names of its configurations with ResNet-101


class Scores(NamedTuple):
    """Mean IoU in %."""

    single: float
    multi: float


MMSEG_HEADS = {
    "fcn": MMSegHead("FCN", "fcn_r101-d8"),
    "psp": MMSegHead("PSPNet", "pspnet_r101-d8"),
    "deeplabv3": MMSegHead("DeepLabV3", "deeplabv3_r101-d8"),
    "deeplabv3plus": MMSegHead("DeepLabV3+", "deeplabv3plus_r101-d8"),
    "upernet": MMSegHead("UPerNet", "upernet_r101"),
    "nonlocal": MMSegHead("non-local network", "nonlocal_r101-d8"),
    "encnet": MMSegHead("EncNet", "encnet_r101-d8"),
    "danet": MMSegHead("DANet", "danet_r101-d8"),
    "ccnet": MMSegHead("CCNet", "ccnet_r101-d8"),
    "ann": MMSegHead("ANN", "ann_r101-d8"),
    "emanet": MMSegHead("EMANet", "emanet_r101-d8"),
    "ocr": MMSegHead("OCRNet", "ocrnet_r101-d8"),
}
"""Heads by our names. SegFormer is missing: mmsegmentation has no configuration of it with a ResNet."""

NUMBERS: Mapping[str, Mapping[str, Mapping[int, Scores]]] = {
    "ade20k": {
        "fcn": {80: Scores(39.61, 40.83), 160: Scores(39.91, 41.40)},
        "psp": {80: Scores(43.57, 44.35), 160: Scores(44.39, 45.35)},
        "deeplabv3": {80: Scores(44.08, 45.19), 160: Scores(45.00, 46.66)},
        "deeplabv3plus": {80: Scores(44.60, 46.06), 160: Scores(45.47, 46.35)},
        "upernet": {80: Scores(42.91, 43.96), 160: Scores(43.82, 44.85)},
        "nonlocal": {80: Scores(42.90, 44.27), 160: Scores(44.63, 45.79)},
        "encnet": {80: Scores(42.11, 43.61), 160: Scores(42.61, 44.01)},
        "danet": {80: Scores(43.64, 45.19), 160: Scores(44.17, 45.02)},
        "ccnet": {80: Scores(43.97, 45.13), 160: Scores(43.71, 45.04)},
        "ann": {80: Scores(42.94, 44.18), 160: Scores(42.94, 44.06)},
    },
    "voc2012": {
        "fcn": {20: Scores(71.16, 73.57), 40: Scores(69.91, 72.38)},
        "psp": {20: Scores(78.47, 79.25), 40: Scores(78.52, 79.57)},
        "deeplabv3": {20: Scores(78.70, 79.95), 40: Scores(77.92, 79.18)},
        "deeplabv3plus": {20: Scores(77.22, 78.59), 40: Scores(78.62, 79.53)},
        "upernet": {20: Scores(77.10, 78.29), 40: Scores(77.43, 78.56)},
        "nonlocal": {20: Scores(78.15, 78.86), 40: Scores(78.27, 79.12)},
        "danet": {20: Scores(76.02, 77.23), 40: Scores(76.51, 77.32)},
        "ccnet": {20: Scores(77.27, 79.02), 40: Scores(77.87, 78.90)},
        "ann": {20: Scores(77.47, 78.70), 40: Scores(76.70, 78.06)},
    },
}
"""Scores by dataset, head and thousands of training steps."""

DATASET_NAMES = {"ade20k": "ade20k-512x512", "voc2012": "voc12aug-512x512"}
"""The end of the name of a configuration: dataset and crop."""


def configuration(head: str, dataset: str, thousand_steps: int) -> str:
    """Return the name of mmsegmentation's configuration of a model."""
    return f"{MMSEG_HEADS[head].configuration}_4xb4-{thousand_steps}k_{DATASET_NAMES[dataset]}"
