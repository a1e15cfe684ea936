"""What a model is: all that is needed to build it again."""

import difflib
from dataclasses import dataclass

from caaseg.models.backbones import OutputStride, ResNetVariant
from caaseg.models.heads import HEADS, HeadOptions

Colour = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Architecture(HeadOptions):
    """A network but for what the data decide."""

    head: str = "caa"
    """fcn, axial, axial_se, caa, self_attention, channelized_self_attention or danet."""
    backbone: str = "resnet50"
    """A timm model that supports features_only and output_stride."""
    output_stride: OutputStride = 16
    """How many pixels a feature of the head stands for: 8 or 16."""
    aux: bool = False
    """Whether an auxiliary branch on the backbone's feature is trained along."""
    decoder: bool = False
    """Whether the simple decoder refines the result at stride 4."""
    multi_grid: tuple[int, ...] | None = None
    """Dilation factors of the blocks of the last ResNet stage, such as (1, 2, 4)."""
    resnet_variant: ResNetVariant = "standard"
    """The standard ResNet, or the authors' (deep stem, strides in the last blocks)."""

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            close = difflib.get_close_matches(str(self.head), HEADS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"head is {self.head!r}{hint}; expected one of {', '.join(HEADS)}")
        if self.output_stride not in (8, 16):
            raise ValueError(f"output_stride is {self.output_stride}; expected 8 or 16")
        if self.resnet_variant not in ("standard", "authors"):
            raise ValueError(f"resnet_variant is {self.resnet_variant!r}; expected standard or authors")
        for name in ("channels", "key_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """All that is needed to build a model again."""

    num_classes: int
    """Number of classes."""
    classes: tuple[str, ...] | None = None
    """Names of the classes."""
    palette: tuple[Colour, ...] | None = None
    """Colours of the classes, RGB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_classes < 1:
            raise ValueError(f"num_classes is {self.num_classes}; expected 1 or more")
        for name in ("classes", "palette"):
            given = getattr(self, name)
            if given is not None and len(given) != self.num_classes:
                raise ValueError(f"{name} has {len(given)} entries, but num_classes is {self.num_classes}")
