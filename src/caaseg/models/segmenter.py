"""The segmentation model: backbone, head, decoder and classifiers."""

import copy
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from caaseg.attention.projection import projection
from caaseg.config import ModelConfig, OutputStride
from caaseg.errors import CaasegError
from caaseg.models.backbones import Backbone, Features, TimmBackbone, check_backbone
from caaseg.models.decoder import SimpleDecoder
from caaseg.models.heads import head_class, resolve_head
from caaseg.models.heads.base import DROPOUT, Head
from caaseg.models.necks import make_neck
from caaseg.models.resize import resize, upsample_input
from caaseg.models.result import Predictable
from caaseg.models.saving import HubModel
from caaseg.models.timm_networks import FINEST_STRIDE
from caaseg.models.weights import load_backbone_weights


class Prediction(NamedTuple):
    """Output of a model, in training and in evaluation. K classes, logits at the size of the images."""

    logits: Tensor  # (N, K, H, W)
    aux: Tensor | None  # (N, K, H, W), of the auxiliary branch on the backbone's features; None without it
    branches: dict[str, Tensor]  # name -> (N, K, H, W), further outputs of the head, each with its own loss
    regularized: Tensor | None = None  # (N, C, h, w), features for the losses of CAR; only in a coarse prediction
    presence: Tensor | None = None  # (N, K), logits of the classes that an image contains; only in a coarse prediction


class Segmenter(Predictable, HubModel):
    """A segmentation model.

    Args:
        config: architecture and classes.
        head: class of the head, needed if `config.head` is not a name in `HEADS`.
        backbone: a backbone module to use instead of the timm model `config.backbone`; see `Backbone`.
        hub_weights: download timm's ImageNet weights for the backbone.
        drop_path: drop path rate (stochastic depth) of the backbone in training.
        block_dropout: dropout rate in the blocks of the backbone in training.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        head: type[Head] | None = None,
        backbone: nn.Module | None = None,
        hub_weights: bool = False,
        drop_path: float = 0.0,
        block_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = config
        head = head or head_class(config.head)  # a built-in head: a config never decides which code is run
        with_finest = config.decoder_stride == FINEST_STRIDE
        if backbone is None:
            self.backbone: Backbone = TimmBackbone(
                config.backbone,
                output_stride=config.output_stride if config.neck is None else None,
                stages=config.stages,
                multi_grid=config.multi_grid,
                variant=config.resnet_variant,
                dilation=config.dilation,
                top_features=config.top_features,
                with_fine=config.decoder and config.neck != "sfp",  # neck sfp makes fine features itself
                with_finest=with_finest,
                drop_path=drop_path,
                block_dropout=block_dropout,
                hub_weights=hub_weights,
            )
        else:
            self.backbone = check_backbone(backbone, with_fine=config.decoder, with_finest=with_finest)
        self.neck = make_neck(config, self.backbone, head)
        source = self.backbone if self.neck is None else self.neck
        coarse, levels = source.coarse_channels, getattr(source, "level_channels", ())
        self.head = head(coarse if head.levels is None else _selected(levels, head), config)
        if config.car and getattr(self.head, "car", None) is None:
            raise CaasegError(f"car is true, but head {config.head} has no linear layer `car`; leave the option out")
        self.decoder = (
            SimpleDecoder(
                self.head.out_channels,
                cast("int", source.fine_channels),
                config.decoder_channels,
                self.backbone.finest_channels if with_finest else None,
            )
            if config.decoder
            else None
        )
        decoded = self.head.out_channels if self.decoder is None else self.decoder.out_channels
        self.classifier = classifier(decoded, config.num_classes)
        self.branch_classifiers = nn.ModuleDict(
            {name: classifier(self.head.branch_channels, config.num_classes) for name in self.head.branches}
        )
        stage = config.aux_stage
        if stage is not None and stage > len(levels):
            raise CaasegError(f"aux_stage is {stage}, but the model has {len(levels)} stages; use fewer or none")
        self.aux = (
            nn.Sequential(
                projection(coarse, config.bottleneck_channels)
                if stage is None
                else projection(levels[stage - 1], config.bottleneck_channels, kernel_size=3),
                nn.Dropout(DROPOUT),
                classifier(config.bottleneck_channels, config.num_classes),
            )
            if config.aux
            else None
        )

    def forward(self, images: Tensor) -> Prediction:
        """Predict normalized images of any size: (N, 3, H, W) -> logits (N, K, H, W)."""
        return resize_prediction(self.coarse(images), images.shape[2:])

    def coarse(self, images: Tensor) -> Prediction:
        """Predict without the final resizing: (N, 3, H, W) -> logits (N, K, h, w) at the size of the features."""
        return self.classify(self.features(images))

    def features(self, images: Tensor) -> Features:
        """Return the features of backbone and neck for normalized images (N, 3, H, W).

        With `config.input_upsampling`, the images are upsampled first.

        Returns:
            `coarse` (N, C, h, w) for the head, `fine` (N, C', H/4, W/4) for the decoder, None without a decoder,
            `levels`, one map per backbone stage, for a head with `levels`, and `finest` (N, C", H/2, W/2) for a decoder
            of stride 2.
        """
        images = upsample_input(images, self.config.input_upsampling)
        features: Features = self.backbone(images)
        if self.neck is not None:
            features = self.neck(features, images.shape[2:])
        return features

    def classify(self, features: Features) -> Prediction:
        """Return the coarse prediction, logits (N, K, h, w), from the result of `features`."""
        coarse, fine, levels, finest = features
        read = self.head.levels
        found = self.head(coarse if read is None else [levels[index] for index in read])
        decoded = found.fused if self.decoder is None else self.decoder(found.fused, fine, finest)
        stage = self.config.aux_stage
        branches = {name: self.branch_classifiers[name](branch) for name, branch in found.branches.items()}
        return Prediction(
            logits=self.classifier(decoded),
            aux=None if self.aux is None else self.aux(coarse if stage is None else levels[stage - 1]),
            branches={**branches, **found.logits},
            regularized=found.regularized,
            presence=found.presence,
        )

    def for_inference(self) -> "Segmenter":
        """Return the model with folded batch norm, which `caaseg predict` runs too: the labels are identical."""
        from caaseg.models.folding import folded  # that module imports this one

        return folded(self)

    def rebuild(self, **changes: Any) -> "Segmenter":
        """Return a new model with the same weights and other settings, on the same device and in the same mode.

        Args:
            **changes: fields of `ModelConfig` that do not change the shape of any weight.
        """
        timm = isinstance(self.backbone, TimmBackbone)
        if "output_stride" in changes and not timm:
            raise CaasegError(
                f"the backbone is a module of your own ({self.config.backbone}), whose output stride cannot be "
                "changed; leave output_stride out"
            )
        if "output_stride" in changes and self.config.neck == "sfp":
            raise CaasegError("the weights of neck sfp are for one output stride, which cannot be changed")
        backbone = None if timm else copy.deepcopy(self.backbone)
        model = Segmenter(self.config.replace(**changes), head=type(self.head), backbone=backbone)
        model.to(self.classifier.weight)  # its device and dtype
        model.load_state_dict(self.state_dict())
        return model.train(self.training)


def _selected(channels: Sequence[int], head: type[Head]) -> tuple[int, ...]:
    """Return the channels of the feature maps that a head reads."""
    assert head.levels is not None
    needed = max(index + 1 if index >= 0 else -index for index in head.levels)
    if needed > len(channels):
        raise CaasegError(
            f"{head.title} reads feature maps of {needed} backbone stages, but there are {len(channels)}; use another "
            "backbone, or another neck"
        )
    return tuple(channels[index] for index in head.levels)


def resize_prediction(prediction: Prediction, size: Sequence[int]) -> Prediction:
    """Resize all logits to a height and width, as new tensors."""
    return Prediction(
        logits=resize(prediction.logits, size),
        aux=None if prediction.aux is None else resize(prediction.aux, size),
        branches={name: resize(logits, size) for name, logits in prediction.branches.items()},
    )


def classifier(in_channels: int, num_classes: int) -> nn.Conv2d:
    """Return a 1x1 convolution from features to logits, Glorot-uniform like the head, with zero bias."""
    convolution = nn.Conv2d(in_channels, num_classes, 1)
    nn.init.xavier_uniform_(convolution.weight)
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    return convolution


def create_model(
    head: str | type[Head],
    *,
    backbone: str | nn.Module = "resnet50",
    num_classes: int,
    output_stride: OutputStride = 16,
    aux: bool = False,
    decoder: bool = False,
    pretrained: bool | str | Path | None = False,
    drop_path: float = 0.0,
    block_dropout: float = 0.0,
    **options: Any,
) -> Segmenter:
    """Build a model from the names of its parts, or from parts of your own.

    Args:
        head: fcn, axial, axial_se, caa, self_attention, channelized_self_attention, danet, psp, deeplabv3,
            deeplabv3plus, upernet, segformer, nonlocal, ccnet, emanet, ann, encnet or ocr; a subclass of
            `caaseg.models.heads.base.Head`; or "file.py:Class", which executes the file.
        backbone: a timm model, see `caaseg models`, or a module that follows `caaseg.models.backbones.Backbone`.
        num_classes: number of classes.
        output_stride: 8, 16 or 32.
        aux: add the auxiliary branch.
        decoder: add the simple decoder on stride-4 features.
        pretrained: True for timm's ImageNet weights, or a safetensors or PyTorch file of backbone weights in timm or
            torchvision naming.
        drop_path: drop path rate (stochastic depth) of the backbone in training.
        block_dropout: dropout rate before the last convolution of each block of a ResNet in training.
        **options: further fields of `ModelConfig`, such as neck, stages, gate_layers, multi_grid or classes.

    Returns:
        The model, in training mode. It maps normalized images (N, 3, H, W) to a `Prediction`.
    """
    known = list(ModelConfig.model_fields)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(known)}"
            raise CaasegError(f"create_model has no option {name!r}; {hint}")
    config = ModelConfig.read(
        {
            "head": head if isinstance(head, str) else _class_name(head),
            "backbone": backbone if isinstance(backbone, str) else _class_name(type(backbone)),
            "num_classes": num_classes,
            "output_stride": output_stride,
            "aux": aux,
            "decoder": decoder,
            **{name: _as_tuples(value) for name, value in options.items()},
        }
    )
    module = None if isinstance(backbone, str) else backbone
    if module is not None and pretrained:
        raise CaasegError("pretrained is for timm backbones; load the weights of a backbone module before passing it")
    for name, rate in (("drop_path", drop_path), ("block_dropout", block_dropout)):
        if module is not None and rate:
            raise CaasegError(f"{name} is for timm backbones; set it in the backbone module before passing it")
    model = Segmenter(
        config,
        head=resolve_head(head),
        backbone=module,
        hub_weights=pretrained is True,
        drop_path=drop_path,
        block_dropout=block_dropout,
    )
    if not isinstance(pretrained, bool | None):
        load_backbone_weights(model.backbone, Path(pretrained))
    return model


def with_output_stride(model: Segmenter, output_stride: OutputStride) -> Segmenter:
    """Return the model at another output stride: strides and dilations change, the weights do not."""
    return model if output_stride == model.config.output_stride else model.rebuild(output_stride=output_stride)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _as_tuples(value: Any) -> Any:
    """Convert lists and arrays to tuples, so that configs are hashable."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(_as_tuples(item) for item in value) if is_list else value
