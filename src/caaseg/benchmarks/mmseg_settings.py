"""mmsegmentation's heads by our names: their configuration files, and our settings that equal them.

Does not import torch: the tables of published numbers use these settings too.
"""

from collections.abc import Mapping
from typing import Any

CONFIGURATIONS = {
    "fcn": "fcn_r50-d8",
    "danet": "danet_r50-d8",
    "psp": "pspnet_r50-d8",
    "deeplabv3": "deeplabv3_r50-d8",
    "deeplabv3plus": "deeplabv3plus_r50-d8",
    "ocr": "ocrnet_r50-d8",
    "ccnet": "ccnet_r50-d8",
    "emanet": "emanet_r50-d8",
    "ann": "ann_r50-d8",
    "encnet": "encnet_r50-d8",
    "nonlocal": "nonlocal_r50-d8",
    "upernet": "upernet_r50",
    "segformer": "segformer_mit-b0",
}
"""Our name of a head -> file in mmsegmentation's configs/_base_/models."""

DEFAULTS: Mapping[str, Any] = {"output_stride": 8, "aux": True, "aux_stage": 3, "channels": 512}
"""Architecture settings that most of its models share."""
DIFFERENT: Mapping[str, Mapping[str, Any]] = {
    "fcn": {"num_convs": 2, "concat_input": True},
    "ocr": {"aux": False, "aux_stage": None},  # its regions come from the third stage
    "upernet": {"output_stride": 32},
    "segformer": {"output_stride": 32, "channels": 256},
}
"""Settings of single heads that differ from the defaults here, or from ours."""


def mmseg_settings(head: str) -> dict[str, Any]:
    """Return the architecture settings with which our head equals mmsegmentation's."""
    return {**DEFAULTS, **DIFFERENT.get(head, {})}
