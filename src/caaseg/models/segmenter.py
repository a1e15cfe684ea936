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
from caaseg.models.necks import JPU, STRIDES
from caaseg.models.resize import resize, upsample_input
from caaseg.models.result import Predictable
from caaseg.models.saving import HubModel
from caaseg.models.weights import load_backbone_weights


class Prediction(NamedTuple):
    """Output of a model, in training and in evaluation. K classes, logits at the size of the images."""

    logits: Tensor  # (N, K, H, W)
    aux: Tensor | None  # (N, K, H, W), of the auxiliary branch on the backbone's features; None without it
    branches: dict[str, Tensor]  # name -> (N, K, H, W), as the head's `branches` lists them
    regularized: Tensor | None = None  # (N, C, h, w), features for the losses of CAR; only in a coarse prediction


class Segmenter(Predictable, HubModel):
    """A segmentation model.

    Args:
        config: architecture and classes.
        head: class of the head, needed if `config.head` is not a name in `HEADS`.
        backbone: a backbone module to use instead of the timm model `config.backbone`; see `Backbone`.
        hub_weights: download timm's ImageNet weights for the backbone.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        head: type[Head] | None = None,
        backbone: nn.Module | None = None,
        hub_weights: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        head = head or head_class(config.head)  # built in: a config never decides which code is run
        if backbone is None:
            self.backbone: Backbone = TimmBackbone(
                config.backbone,
                output_stride=config.output_stride,
                pyramid=None if config.neck is None else STRIDES,
                stages=config.stages,
                multi_grid=config.multi_grid,
                variant=config.resnet_variant,
                dilation=config.dilation,
                top_features=config.top_features,
                with_fine=config.decoder,
                hub_weights=hub_weights,
            )
        else:
            self.backbone = check_backbone(backbone, with_fine=config.decoder)
        coarse = self.backbone.coarse_channels
        self.neck: JPU | None = None
        if config.neck is not None:
            if not isinstance(self.backbone, TimmBackbone):
                raise CaasegError(f"neck is {config.neck}, for timm backbones only; leave it out")
            self.neck = JPU(self.backbone.pyramid_channels, config.channels)
            coarse = self.neck.out_channels
        self.head = head(coarse, config)
        if config.car and getattr(self.head, "car", None) is None:
            raise CaasegError(f"car is true, but head {config.head} has no linear layer `car`; leave it out")
        self.decoder = (
            SimpleDecoder(self.head.out_channels, cast("int", self.backbone.fine_channels), config.decoder_channels)
            if config.decoder
            else None
        )
        decoded = self.head.out_channels if self.decoder is None else self.decoder.out_channels
        self.classifier = classifier(decoded, config.num_classes)
        self.branch_classifiers = nn.ModuleDict(
            {name: classifier(self.head.branch_channels, config.num_classes) for name in self.head.branches}
        )
        self.aux = (
            nn.Sequential(
                projection(coarse, config.bottleneck_channels),
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
        return self.classify(*self.features(images))

    def features(self, images: Tensor) -> Features:
        """Return the features of backbone and neck for normalized images, (N, 3, H, W), upsampled if configured.

        Returns:
            `coarse` (N, C, h, w) for the head, and `fine` (N, C', H/4, W/4) for the decoder, None without a decoder.
        """
        found = self.backbone(upsample_input(images, self.config.input_upsampling))
        return found if self.neck is None else Features(self.neck(found.levels), found.fine)

    def classify(self, coarse: Tensor, fine: Tensor | None) -> Prediction:
        """Return the coarse prediction, logits (N, K, h, w), from the result of `features`.

        Args:
            coarse: (N, C, h, w).
            fine: (N, C', H/4, W/4); None for a model without a decoder.
        """
        features, branches, regularized = self.head(coarse)
        decoded = features if self.decoder is None else self.decoder(features, fine)
        return Prediction(
            logits=self.classifier(decoded),
            aux=None if self.aux is None else self.aux(coarse),
            branches={name: self.branch_classifiers[name](branch) for name, branch in branches.items()},
            regularized=regularized,
        )

    def for_inference(self) -> nn.Module:
        """Return a copy with folded batch norm, which `caaseg predict` runs too: the labels are identical."""
        from caaseg.models.folding import fold_batch_norm  # that module imports this one

        return fold_batch_norm(self)

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
        backbone = None if timm else copy.deepcopy(self.backbone)
        model = Segmenter(self.config.replace(**changes), head=type(self.head), backbone=backbone)
        model.to(self.classifier.weight)  # its device and dtype
        model.load_state_dict(self.state_dict())
        return model.train(self.training)


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
    **options: Any,
) -> Segmenter:
    """Build a model from the names of its parts, or from parts of your own.

    Args:
        head: fcn, axial, axial_se, caa, self_attention, channelized_self_attention or danet; a subclass of
            `caaseg.models.heads.base.Head`; or "file.py:Class", which executes the file.
        backbone: a timm model that supports features_only and output_stride, or a module that follows
            `caaseg.models.backbones.Backbone`.
        num_classes: number of classes.
        output_stride: 8 or 16.
        aux: add the auxiliary branch.
        decoder: add the simple decoder on stride-4 features.
        pretrained: True for timm's ImageNet weights, or a safetensors or PyTorch file of backbone weights in timm or
            torchvision naming.
        **options: further fields of `ModelConfig`, such as stages, gate_layers, multi_grid or classes.

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
    model = Segmenter(config, head=resolve_head(head), backbone=module, hub_weights=pretrained is True)
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
