"""Models of mmsegmentation for comparison: its ResNets, heads and auxiliary heads, built from its own configurations.

mmsegmentation 1.2.2 with mmcv-lite 2.1.0 and mmengine from PyPI is enough: no operator needs to be compiled.
"""

import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from caaseg.benchmarks.mmseg_settings import CONFIGURATIONS
from caaseg.errors import CaasegError
from caaseg.torchvision_compat import declare_missing_operators

STRIDES = {8: (1, 2, 1, 1), 16: (1, 2, 2, 1), 32: (1, 2, 2, 2)}
DILATIONS = {8: (1, 1, 2, 4), 16: (1, 1, 1, 2), 32: (1, 1, 1, 1)}
"""Strides and dilation rates of the four stages, by output stride."""


class MMSegModel(nn.Module):
    """A model of mmsegmentation that returns upsampled logits.

    In training it also returns the logits of its auxiliary head, of its branches (DANet, OCR), and of the classes that
    an image contains (EncNet). mmsegmentation's training step computes the first head of OCR twice and the accuracy of
    every batch; both are left out here, so that the comparison is with its heads alone.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(N, 3, H, W) -> logits (N, K, H, W) by name, and for EncNet in training "presence", (N, K)."""
        features = self.model.extract_feat(images)
        heads = self.model.decode_head
        found: dict[str, Tensor] = {}
        if isinstance(heads, nn.ModuleList):  # a cascade: the first head's logits are the regions of the second
            found["regions"] = heads[0](features)
            logits = heads[1](features, found["regions"])
        else:
            logits = heads(features)
        logits, *others = logits if isinstance(logits, tuple | list) else [logits]
        found |= {f"branch{k}": other for k, other in enumerate(others) if other.ndim == 4}
        found = {"logits": logits} | (found if self.training else {})
        if self.training and self.model.with_auxiliary_head:
            found["aux"] = self.model.auxiliary_head(features)
        upsampled = {name: self._upsample(one, images) for name, one in found.items()}
        presence = [other for other in others if other.ndim == 2]
        return upsampled | ({"presence": presence[0]} if self.training and presence else {})

    def _upsample(self, logits: Tensor, images: Tensor) -> Tensor:
        return nn.functional.interpolate(
            logits, images.shape[2:], mode="bilinear", align_corners=self.model.align_corners
        )


def build_mmseg(name: str, *, backbone: str, output_stride: int, num_classes: int) -> MMSegModel:
    """Build a model of mmsegmentation.

    Args:
        name: our name of the head.
        backbone: resnet50, resnet101 or resnet152. A suffix c, as in resnet101c, selects mmsegmentation's ResNetV1c,
            whose stem has three 3x3 convolutions, as in its published models.
        output_stride: 8, 16 or 32.
        num_classes: number of classes.
    """
    model = f"model is 'mmseg:{name}'"
    if name not in CONFIGURATIONS:
        raise CaasegError(f"{model}; expected mmseg: and one of {', '.join(CONFIGURATIONS)}")
    found = re.fullmatch(r"resnet(50|101|152)(c?)(\..*)?", backbone)
    if found is None:
        raise CaasegError(
            f"{model} with backbone {backbone}; it is compared with resnet50, resnet101, resnet152, resnet50c, "
            "resnet101c and resnet152c; give one of them with --backbone, or remove the model"
        )
    configuration = _load(name, model)
    configuration.pop("pretrained")
    configuration.pop("data_preprocessor")  # the inputs are tensors
    configuration.backbone.update(
        type="ResNetV1c" if found[2] else "ResNet",
        depth=int(found[1]),
        strides=STRIDES[output_stride],
        dilations=DILATIONS[output_stride],
    )
    configuration.backbone.norm_cfg.type = "BN"  # synchronized between processes in the configuration
    heads = configuration.decode_head
    auxiliary = [configuration.auxiliary_head] if "auxiliary_head" in configuration else []  # OCR has none
    for head in [*(heads if isinstance(heads, list) else [heads]), *auxiliary]:
        head.num_classes = num_classes
        head.norm_cfg.type = "BN"
    from mmseg.registry import MODELS

    return MMSegModel(MODELS.build(configuration))


def check_installed(model: str) -> None:
    """Raise an error if mmsegmentation is not installed."""
    missing = [package for package in ("mmseg", "mmcv", "mmengine") if find_spec(package) is None]
    if missing:
        raise CaasegError(
            f"{model}, but the package {missing[0]} is not installed; pip install mmsegmentation==1.2.2 "
            "mmcv-lite==2.1.0 mmengine ftfy regex, or remove the model"
        )


def _load(name: str, model: str) -> Any:
    """Return the configuration of a model."""
    check_installed(model)
    declare_missing_operators()
    for unused in ("cv2", "scipy", "scipy.ndimage", "scipy.optimize", "mmcv._ext"):  # parents first
        if unused not in sys.modules and _is_missing(unused):
            sys.modules[unused] = _AbsentModule(unused)
    import mmseg.models  # registers the heads
    from mmengine.config import Config

    directory = Path(mmseg.__file__).parent / ".mim" / "configs" / "_base_" / "models"
    found = Config.fromfile(directory / f"{CONFIGURATIONS[name]}.py").model
    if name == "segformer":  # replace its own backbone, a transformer, by the ResNet of UPerNet
        resnet = Config.fromfile(directory / f"{CONFIGURATIONS['upernet']}.py").model
        found.decode_head.in_channels = resnet.decode_head.in_channels
        resnet.decode_head = found.decode_head
        return resnet
    return found


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:  # its parent is missing
        return True


class _AbsentModule(ModuleType):
    """Stand-in for a module that mmsegmentation imports, but none of these models uses."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0
