"""A small member of each supported family of timm backbones, and recipes with it."""

from caaseg.models.heads import head_class

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
TESTED = (*DILATED, *PYRAMIDS, "test_vit")
"""Backbones of the slow tests. The other ViTs take a minute or more to export; `tests.models.matrix` runs all."""


def options(head: str, backbone: str) -> list[str]:
    """Return the options of a recipe with a head and a backbone, joined by a neck if that is needed.

    A head that reads several feature maps takes those of a pyramid as they are.
    """
    is_single = head_class(head).levels is None
    neck = "sfp" if backbone in PLAIN else "resize" if backbone in PYRAMIDS and is_single else "none"
    stride = "32" if backbone in PYRAMIDS and not is_single else "16"
    names = ("--model.head", head, "--model.backbone", backbone)
    return [*names, "--model.neck", neck, "--model.output-stride", stride]
