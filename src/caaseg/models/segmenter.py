"""Backbone, head, decoder and classifiers joined: images in, a Prediction out."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import ModelConfig, OutputStride
from caaseg.models.backbones import Backbone, Features
from caaseg.models.decoder import SimpleDecoder
from caaseg.models.heads import DROPOUT, HEADS
from caaseg.models.resize import resize, upsample_input
from caaseg.models.saving import HubModel
from caaseg.models.weights import load_backbone_weights

AUX_CHANNELS = 256


class Prediction(NamedTuple):
    """What a model says of a batch, in training and in evaluation. K classes, logits at the images' size."""

    logits: Tensor  # (N, K, H, W)
    aux: Tensor | None  # (N, K, H, W), of the auxiliary branch on the backbone's feature; None without one
    branches: dict[str, Tensor]  # name -> (N, K, H, W); "spatial", "channel" for danet, "channel" for axial_se


class Segmenter(nn.Module, HubModel):
    """A segmentation model.

    Args:
        config: what to build.
        hub_weights: start the backbone from timm's ImageNet weights, fetched from its hub.
    """

    def __init__(self, config: ModelConfig, *, hub_weights: bool = False) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(
            config.backbone,
            output_stride=config.output_stride,
            stages=config.stages,
            multi_grid=config.multi_grid,
            variant=config.resnet_variant,
            with_fine=config.decoder,
            hub_weights=hub_weights,
        )
        coarse, fine = self.backbone.coarse_channels, self.backbone.fine_channels
        self.head = HEADS[config.head](coarse, config)
        self.decoder = None if fine is None else SimpleDecoder(self.head.out_channels, fine, config.decoder_channels)
        decoded = self.head.out_channels if self.decoder is None else self.decoder.out_channels
        self.classifier = classifier(decoded, config.num_classes)
        self.branch_classifiers = nn.ModuleDict(
            {name: classifier(channels, config.num_classes) for name, channels in self.head.branch_channels.items()}
        )
        self.aux = (
            nn.Sequential(
                projection(coarse, AUX_CHANNELS), nn.Dropout(DROPOUT), classifier(AUX_CHANNELS, config.num_classes)
            )
            if config.aux
            else None
        )

    def forward(self, images: Tensor) -> Prediction:
        """Normalized images of any size, (N, 3, H, W)."""
        return resized(self.coarse(images), images.shape[2:])

    def coarse(self, images: Tensor) -> Prediction:
        """The same before it is resized: logits at the size of the features. A loss needs no more."""
        return self.classified(*self.features(images))

    def features(self, images: Tensor) -> Features:
        """What the backbone sees in them, enlarged where the config says so."""
        return self.backbone(upsample_input(images, self.config.input_upsampling))  # type: ignore[no-any-return]

    def classified(self, coarse: Tensor, fine: Tensor | None) -> Prediction:
        """The same from the backbone's features: Features.coarse and Features.fine."""
        features, branches = self.head(coarse)
        decoded = features if self.decoder is None else self.decoder(features, fine)
        return Prediction(
            logits=self.classifier(decoded),
            aux=None if self.aux is None else self.aux(coarse),
            branches={name: self.branch_classifiers[name](branch) for name, branch in branches.items()},
        )


def resized(prediction: Prediction, size: Sequence[int]) -> Prediction:
    """The same for images of that height and width, in tensors of its own."""
    return Prediction(
        logits=resize(prediction.logits, size),
        aux=None if prediction.aux is None else resize(prediction.aux, size),
        branches={name: resize(logits, size) for name, logits in prediction.branches.items()},
    )


def classifier(in_channels: int, num_classes: int) -> nn.Conv2d:
    """Logits from features, pixel by pixel; Glorot-uniform as the rest of the head, no class preferred at first."""
    convolution = nn.Conv2d(in_channels, num_classes, 1)
    nn.init.xavier_uniform_(convolution.weight)
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    return convolution


def create_model(
    head: str,
    *,
    backbone: str = "resnet50",
    num_classes: int,
    output_stride: OutputStride = 16,
    aux: bool = False,
    decoder: bool = False,
    pretrained: bool | str | Path | None = False,
    **options: Any,
) -> Segmenter:
    """Build a model by the names of its parts.

    Args:
        head: fcn, axial, axial_se, caa, self_attention, channelized_self_attention or danet.
        backbone: a timm model that supports features_only and output_stride.
        num_classes: number of classes.
        output_stride: 8 or 16.
        aux: add the auxiliary branch.
        decoder: add the simple decoder on stride-4 features.
        pretrained: True for timm's ImageNet weights, or a safetensors or PyTorch file of backbone weights in timm or
            torchvision naming.
        **options: further fields of `ModelConfig`, such as stages, enlarge, gate_layers, multi_grid or classes.
    """
    known = ModelConfig.names()
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"create_model has no option {name!r}; {hint}")
    config = ModelConfig(
        head=head,
        backbone=backbone,
        num_classes=num_classes,
        output_stride=output_stride,
        aux=aux,
        decoder=decoder,
        **{name: _frozen(value) for name, value in options.items()},
    )
    model = Segmenter(config, hub_weights=pretrained is True)
    if not isinstance(pretrained, bool | None):
        load_backbone_weights(model.backbone, Path(pretrained))
    return model


def with_output_stride(model: Segmenter, output_stride: OutputStride) -> Segmenter:
    """The model at another output stride than it was trained with: strides and dilations change, the weights do not."""
    if output_stride == model.config.output_stride:
        return model
    other = Segmenter(model.config.replace(output_stride=output_stride))
    other.load_state_dict(model.state_dict())
    return other.to(model.classifier.weight.device).train(model.training)


def _frozen(value: Any) -> Any:
    """Lists and arrays as tuples, so that a config compares and hashes by what it holds."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(_frozen(item) for item in value) if is_list else value
