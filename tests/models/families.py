"""A small model of each supported family of timm backbones, and recipe options that select it.

Even the smallest timm model of a family often has many blocks, and `torch.export` takes time for each of them. So this
module registers models with few blocks, which use the classes and options of the originals.
"""

from copy import deepcopy
from typing import Any

from torch import nn

from caaseg.models.heads import head_class

SHALLOW: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": {"depths": (2, 1, 1, 1)},  # the windows of every second block are shifted
    "swinv2_tiny_window8_256": {"depths": (2, 1, 1, 1)},
    "inception_next_atto": {"depths": (1, 1, 1, 1)},
    "repvit_m0_9": {"depth": (1, 1, 2, 1)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "fastvit_t8": {"layers": (1, 1, 1, 1)},
    "maxvit_pico_rw_256": {"depths": (1, 1, 1, 1)},
    "davit_tiny": {"depths": (1, 1, 1, 1)},
    "xception41": {
        "block_cfg": [
            *({"in_chs": 64, "out_chs": 64, "stride": stride} for stride in (2, 2, 2, 1)),
            {"in_chs": 64, "out_chs": (64, 96, 96), "stride": 2},
            {"in_chs": 96, "out_chs": (128, 128, 192), "stride": 1, "no_skip": True, "start_with_relu": False},
        ]
    },
    "efficientvit_b0": {"depths": (1, 1, 1, 1, 1)},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "vit_small_patch14_dinov2": {"depth": 4},
    "vit_tiny_patch16_dinov3_qkvb": {"depth": 4},
    "eva02_tiny_patch14_224": {"depth": 4},
    "xcit_nano_12_p8_224": {"depth": 4},
}
"""Arguments of timm.create_model that reduce the number of blocks of a model."""


TRUNCATED = ("caformer_s18", "convformer_s18", "hgnetv2_b0")
"""Models without such arguments. Their shallow variants have only the first block of each stage."""


def shallow(name: str, *, maps: int | None = None) -> str:
    """Register a shallow variant of a timm model and return its name. If the model is small already, return `name`.

    Args:
        name: name of the timm model.
        maps: number of feature maps after which the variant ends; None for all.
    """
    if name not in SHALLOW and name not in TRUNCATED and maps is None:
        return name
    import timm  # here, because importing it before caaseg fails with some builds of torchvision

    def create(pretrained: bool = False, **options: Any) -> Any:
        if maps is not None and options.get("features_only"):
            options.setdefault("out_indices", tuple(range(maps)))
        net = timm.create_model(name, pretrained=pretrained, **deepcopy(SHALLOW.get(name, {})), **options)
        for stage in net.modules() if name in TRUNCATED else ():
            blocks = getattr(stage, "blocks", None)
            if isinstance(blocks, nn.Sequential):
                stage.blocks = blocks[:1]
        return net

    create.__name__ = f"shallow_{name}" if maps is None else f"shallow{maps}_{name}"
    if not timm.is_model(create.__name__):
        timm.models.register_model(create)
    return create.__name__


DILATED = ("test_resnet", "test_efficientnet", "test_convnext", "mobilenetv3_small_050", "xception41")
PYRAMIDS = (
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "hgnetv2_b0",
    "caformer_s18",
    "convformer_s18",
    "inception_next_atto",
    "test_mambaout",
    "efficientvit_b0",
    "fastvit_t8",
    "repvit_m0_9",
    "pvt_v2_b0",
    "maxvit_pico_rw_256",
    "davit_tiny",
    "hrnet_w18_small",
    "densenet121",
)
PLAIN = (
    "test_vit",
    "vit_small_patch14_dinov2",
    "vit_tiny_patch16_dinov3_qkvb",
    "eva02_tiny_patch14_224",
    "samvit_base_patch16_224",
    "xcit_nano_12_p8_224",
)
BACKBONES = (*DILATED, *PYRAMIDS, *PLAIN)
TESTED = tuple(name for name in BACKBONES if name != "samvit_base_patch16_224")
"""Backbones of the slow tests. Exporting SAM's ViT takes too long (over a minute); `tests.models.matrix` runs all."""


def options(head: str, backbone: str, *, maps: int | None = None) -> list[str]:
    """Return recipe options for a head and a backbone, with a neck between them if they need one.

    A head that reads several feature maps needs no neck after a backbone that returns a pyramid.

    Args:
        head: name of the head.
        backbone: one of `BACKBONES`.
        maps: number of feature maps that the neck `resize` joins; None for all. The later stages are not built.
    """
    is_single = head_class(head).levels is None
    joined = backbone in PYRAMIDS and is_single
    neck = "sfp" if backbone in PLAIN else "resize" if joined else "none"
    stride = "32" if backbone in PYRAMIDS and not is_single else "16"
    name = shallow(backbone, maps=maps if joined else None)
    return ["--model.head", head, "--model.backbone", name, "--model.neck", neck, "--model.output-stride", stride]
