"""Families of timm backbones for `caaseg models`: strides, necks, sizes and licenses. Does not import torch.

The values are those that `layout` finds for the example models, and the licenses are timm's. A test compares them.
"""

from typing import Any, Literal, NamedTuple

from caaseg.config import NeckName

Access = Literal["free", "non-commercial", "own terms", "unknown"]
FREE_LICENSES = ("apache-2.0", "bsd-3-clause", "cc-by-4.0", "mit")
NON_COMMERCIAL_LICENSES = ("cc-by-nc-4.0", "fair-noncommercial-research-license")


class Kind(NamedTuple):
    """Feature maps of a family."""

    strides: tuple[int, ...]
    output_strides: tuple[int, ...]  # without a neck
    necks: tuple[NeckName, ...]
    reason: str | None = None  # why the family cannot be used


class Family(NamedTuple):
    """A family of timm models, described by an example."""

    name: str
    example: str  # model and tag of its weights
    kind: Kind
    parameters: int  # of the example without its classifier; 0 if it cannot be used
    license: str  # of the example's weights, as timm states it

    def described(self) -> dict[str, Any]:
        """Return the fields as JSON values, like `timm_networks.describe` for the example."""
        return {
            "family": self.name,
            "name": self.example,
            "parameters": self.parameters or None,
            "strides": list(self.kind.strides),
            "output_strides": list(self.kind.output_strides),
            "necks": list(self.kind.necks),
            "reason": self.kind.reason,
            "weights": [weights_of(self.example, self.license)],
        }


DILATED = Kind((4, 8, 16, 32), (8, 16, 32), ("resize", "jpu"))
PYRAMID = Kind((4, 8, 16, 32), (32,), ("resize", "jpu"))
PATCH_8 = Kind((8,), (8,), ("resize", "sfp"))
PATCH_14 = Kind((14,), (), ("resize", "sfp"))
PATCH_16 = Kind((16,), (16,), ("resize", "sfp"))
ONE_SIZE = Kind((), (), (), "it takes images of 224 x 224 pixels only")

FAMILIES = (
    Family("ResNet", "resnet50.tv_in1k", DILATED, 23_508_032, "bsd-3-clause"),
    Family("ResNet-D, ResNet-RS", "resnet50d.ra2_in1k", DILATED, 23_527_264, "apache-2.0"),
    Family("ResNeSt", "resnest50d.in1k", DILATED, 25_434_240, "apache-2.0"),
    Family("RegNet", "regnety_016.tv2_in1k", DILATED, 10_313_430, "bsd-3-clause"),
    Family("EfficientNet", "efficientnet_b0.ra_in1k", DILATED, 3_595_388, "apache-2.0"),
    Family("EfficientNetV2", "tf_efficientnetv2_s.in21k_ft_in1k", DILATED, 19_847_248, "apache-2.0"),
    Family("MobileNetV3", "mobilenetv3_large_100.ra_in1k", DILATED, 2_971_952, "apache-2.0"),
    Family("MobileNetV4", "mobilenetv4_conv_small.e2400_r224_in1k", DILATED, 1_261_664, "apache-2.0"),
    Family("Xception", "xception65.ra3_in1k", DILATED, 37_867_312, "apache-2.0"),
    Family("ConvNeXt", "convnext_tiny.in12k_ft_in1k", DILATED, 27_818_592, "apache-2.0"),
    Family("ConvNeXt, DINOv3", "convnext_tiny.dinov3_lvd1689m", DILATED, 27_818_592, "dinov3-license"),
    Family("ConvNeXt V2", "convnextv2_tiny.fcmae_ft_in22k_in1k", DILATED, 27_864_960, "cc-by-nc-4.0"),
    Family("Swin", "swin_tiny_patch4_window7_224.ms_in22k_ft_in1k", PYRAMID, 27_517_818, "mit"),
    Family("Swin V2", "swinv2_tiny_window8_256.ms_in1k", PYRAMID, 27_576_618, "mit"),
    Family("HGNetV2", "hgnetv2_b4.ssld_stage2_ft_in1k", PYRAMID, 13_553_376, "apache-2.0"),
    Family("CAFormer", "caformer_s18.sail_in22k_ft_in1k", PYRAMID, 23_236_912, "apache-2.0"),
    Family("ConvFormer", "convformer_s18.sail_in22k_ft_in1k", PYRAMID, 23_669_704, "apache-2.0"),
    Family("InceptionNeXt", "inception_next_tiny.sail_in1k", PYRAMID, 23_974_296, "apache-2.0"),
    Family("MambaOut", "mambaout_tiny.in1k", PYRAMID, 22_904_928, "apache-2.0"),
    Family("EfficientViT", "efficientvit_b1.r224_in1k", PYRAMID, 4_643_936, "apache-2.0"),
    Family("FastViT", "fastvit_sa12.apple_in1k", PYRAMID, 10_409_472, "fastvit-license"),
    Family("RepViT", "repvit_m1_0.dist_450e_in1k", PYRAMID, 6_403_004, "apache-2.0"),
    Family("PVT v2", "pvt_v2_b2.in1k", PYRAMID, 24_849_856, "apache-2.0"),
    Family("MaxViT", "maxvit_tiny_tf_224.in1k", PYRAMID, 30_139_848, "apache-2.0"),
    Family("DaViT", "davit_tiny.msft_in1k", PYRAMID, 27_589_632, "apache-2.0"),
    Family("HRNet", "hrnet_w18.ms_aug_in1k", PYRAMID, 10_948_180, "mit"),
    Family("DenseNet", "densenet121.ra_in1k", PYRAMID, 6_953_856, "apache-2.0"),
    Family("SAM 2 Hiera", "sam2_hiera_tiny.fb_r896", PYRAMID, 26_849_472, "apache-2.0"),
    Family("ViT", "vit_base_patch16_224.augreg2_in21k_ft_in1k", PATCH_16, 85_798_656, "apache-2.0"),
    Family("DeiT III", "deit3_small_patch16_224.fb_in22k_ft_in1k", PATCH_16, 21_674_496, "apache-2.0"),
    Family("DINOv2", "vit_small_patch14_dinov2.lvd142m", PATCH_14, 22_056_192, "apache-2.0"),
    Family("DINOv2 with registers", "vit_small_patch14_reg4_dinov2.lvd142m", PATCH_14, 22_057_344, "apache-2.0"),
    Family("DINOv3", "vit_small_patch16_dinov3.lvd1689m", PATCH_16, 21_586_944, "dinov3-license"),
    Family("EVA-02", "eva02_small_patch14_336.mim_in22k_ft_in1k", PATCH_14, 21_743_232, "mit"),
    Family("SigLIP 2", "vit_base_patch16_siglip_224.v2_webli", PATCH_16, 85_797_120, "apache-2.0"),
    Family("SAM", "samvit_base_patch16.sa1b", PATCH_16, 88_883_456, "apache-2.0"),
    Family("XCiT", "xcit_small_12_p8_224.fb_dist_in1k", PATCH_8, 22_277_568, "apache-2.0"),
    Family("BEiT v2", "beitv2_base_patch16_224.in1k_ft_in22k_in1k", ONE_SIZE, 0, "apache-2.0"),
    Family("Hiera", "hiera_tiny_224.mae_in1k_ft_in1k", ONE_SIZE, 0, "cc-by-nc-4.0"),
    Family("CoAtNet", "coatnet_0_rw_224.sw_in1k", ONE_SIZE, 0, "apache-2.0"),
    Family("GC ViT", "gcvit_tiny.in1k", ONE_SIZE, 0, "apache-2.0"),
    Family("LeViT", "levit_256.fb_dist_in1k", ONE_SIZE, 0, "apache-2.0"),
)


def access(license_name: str | None) -> Access:
    """Return whether weights with a license may be used freely."""
    if license_name in FREE_LICENSES:
        return "free"
    if license_name in NON_COMMERCIAL_LICENSES:
        return "non-commercial"
    return "unknown" if license_name in (None, "unknown") else "own terms"


def weights_of(name: str, license_name: str | None) -> dict[str, str | None]:
    """Return the description of weights as JSON values.

    Args:
        name: model and tag of the weights.
        license_name: their license; None if unknown.
    """
    return {"tag": name.partition(".")[2], "license": license_name, "access": access(license_name)}
