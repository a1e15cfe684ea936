"""Whole models, ours beside torchvision's: images a second and peak memory, in training and in inference."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from caaseg.benchmarks.timing import Cost, measure
from caaseg.data.sample import IGNORE
from caaseg.kernels import is_supported
from caaseg.models import HEADS, Prediction, Segmenter, create_model
from caaseg.models.cuda_graphs import capture_coarse
from caaseg.models.fused_norm import fuse_batch_norm
from caaseg.models.inference import is_out_of_memory, prepare_for_inference
from caaseg.models.resize import resize

MANNERS = ("compiled", "recorded", "plain")


class Setting(NamedTuple):
    """What all models of one comparison share."""

    backbone: str
    output_stride: int
    batch: int
    size: tuple[int, int]
    num_classes: int
    dtype: str


class ModelCost(NamedTuple):
    """What one model took."""

    model: str
    size: tuple[int, int]
    training_images_per_second: float | None  # None where memory ran out or nobody asked, as all that follow
    training_peak_bytes: int | None
    inference_images_per_second: float | None
    inference_peak_bytes: int | None

    def or_faster(self, other: "ModelCost") -> "ModelCost":
        """The higher speeds of two measurements of one model."""
        training = self.training_images_per_second, other.training_images_per_second
        inference = self.inference_images_per_second, other.inference_images_per_second
        return self._replace(
            training_images_per_second=max((speed for speed in training if speed is not None), default=None),
            inference_images_per_second=max((speed for speed in inference if speed is not None), default=None),
        )


def measure_model(
    name: str, setting: Setting, device: torch.device, *, seconds: float, train: bool = True
) -> ModelCost:
    """Build a model, train it for a while on random images, then run it, ours with its normalizations folded.

    Args:
        name: a head of ours, "caa:grouped", "torchvision:fcn", "torchvision:deeplabv3", or "smp:" and the name of a
            model of segmentation_models_pytorch; ":compiled" behind it has torch.compile at it first, ":recorded"
            behind one of ours replays its training step, as recipes with cuda_graph do, and its inference, ":plain"
            trains it with torch's own normalization.
        setting: backbone, sizes and dtype.
        device: where.
        seconds: about how long to repeat each of the two.
        train: whether training is measured too.
    """
    bare, _, manner = name.rpartition(":")
    if manner not in MANNERS:
        bare, manner = name, ""
    model = build(bare, setting).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if manner == "recorded" and not (isinstance(model, Segmenter) and device.type == "cuda"):
        raise ValueError(f"model is {name!r}; :recorded is for models of ours, on a GPU; leave it out")
    torch.backends.cudnn.benchmark = True  # it tries its ways first, as it does when caaseg trains
    images = torch.randn(setting.batch, 3, *setting.size, device=device).contiguous(memory_format=torch.channels_last)
    training = _if_it_fits(lambda: _training(copy.deepcopy(model), images, setting, seconds, manner)) if train else None
    inference = _if_it_fits(lambda: _inference(model, images, setting, seconds, manner))
    return ModelCost(
        model=name,
        size=setting.size,
        training_images_per_second=None if training is None else setting.batch / training.seconds,
        training_peak_bytes=None if training is None else training.peak_bytes,
        inference_images_per_second=None if inference is None else setting.batch / inference.seconds,
        inference_peak_bytes=None if inference is None else inference.peak_bytes,
    )


def _if_it_fits(work: Callable[[], Cost]) -> Cost | None:
    """The cost of work; None where memory ran out."""
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        gc.collect()  # a model and its optimizer may refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _autocast(setting: Setting, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, getattr(torch, setting.dtype), enabled=setting.dtype != "float32")


def _inference(model: nn.Module, images: Tensor, setting: Setting, seconds: float, manner: str) -> Cost:
    compiled = manner == "compiled"
    if compiled:
        torch.compiler.reset()
    if isinstance(model, Segmenter):
        served: Any = prepare_for_inference(model, device=images.device, compile=compiled, capture=manner == "recorded")
        given = [images, *served.parameters(), *served.buffers()]
    else:
        given = [images, *model.parameters(), *model.buffers()]
        served = torch.compile(model.eval()) if compiled else model.eval()

    def infer() -> Tensor:
        with torch.inference_mode(), _autocast(setting, images.device):
            return outputs(served(images))[0]

    return measure(infer, given, images.device, seconds=seconds)


def _training(model: nn.Module, images: Tensor, setting: Setting, seconds: float, manner: str) -> Cost:
    """What a training step costs. Ours is trained with fused normalization and loss, others from resized logits."""
    device = images.device
    autocast = partial(_autocast, setting, device)
    labels = torch.randint(setting.num_classes, (setting.batch, *setting.size), dtype=torch.uint8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=device.type == "cuda")
    network: Any = model
    if isinstance(model, Segmenter):
        network = model.coarse
        if device.type == "cuda" and manner not in ("compiled", "plain"):
            fuse_batch_norm(model)
        if manner == "recorded":
            network = capture_coarse(model, images, autocast)
    if manner == "compiled":
        torch.compiler.reset()
        network = torch.compile(network, dynamic=False)

    def step() -> None:
        with autocast():
            losses = [_loss(logits, labels) for logits in outputs(network(images))]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the momentum, so that it counts as given
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    given = [images, labels, *model.parameters(), *model.buffers(), *momentum]
    cost = measure(step, given, device, seconds=seconds)
    if manner == "recorded":  # what a recording works in counts as free between its replays
        torch.cuda.empty_cache()
        cost = cost._replace(peak_bytes=torch.cuda.memory_reserved(device))
    return cost


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[2:] == labels.shape[1:]:
        return cross_entropy(logits, labels.long())
    if is_supported(logits):
        from caaseg.kernels.cross_entropy import upsampled_cross_entropy

        return upsampled_cross_entropy(logits, labels, None, ignore_index=IGNORE) / labels.numel()
    return cross_entropy(resize(logits, labels.shape[1:]), labels.long())


def build(name: str, setting: Setting) -> nn.Module:
    """A contender by its name."""
    family, _, kind = name.rpartition(":")
    if family == "torchvision" and kind in ("fcn", "deeplabv3"):
        from torchvision.models import segmentation

        builder = getattr(segmentation, f"{kind}_{setting.backbone}", None)
        if builder is None:
            raise ValueError(
                f"model is {name!r} on {setting.backbone}; torchvision has it on resnet50 and resnet101; "
                "give one of these by --backbone, or leave the model out"
            )
        model: nn.Module = builder(weights=None, weights_backbone=None, num_classes=setting.num_classes)
        return model
    if family == "smp":
        return _of_smp(kind, setting)
    head, implementation = (family, kind) if family else (kind, "auto")
    if head not in HEADS or (family and head != "caa"):
        raise ValueError(
            f"model is {name!r}; expected torchvision:fcn, torchvision:deeplabv3, smp:NAME, caa:grouped "
            f"or one of {', '.join(HEADS)}, each with or without :compiled behind it, ours with :recorded or :plain too"
        )
    options: dict[str, Any] = {"output_stride": setting.output_stride, "implementation": implementation}
    return create_model(head, backbone=setting.backbone, num_classes=setting.num_classes, **options)


def _of_smp(name: str, setting: Setting) -> nn.Module:
    """A model of segmentation_models_pytorch, where that is installed, on timm's backbone like ours."""
    try:
        import segmentation_models_pytorch as smp
    except ImportError as error:
        raise ValueError(
            f"model is 'smp:{name}', but the package segmentation-models-pytorch is not installed; "
            "pip install segmentation-models-pytorch, or leave it out"
        ) from error
    if name not in smp.MODEL_ARCHITECTURES_MAPPING:
        known = ", ".join(smp.MODEL_ARCHITECTURES_MAPPING)
        raise ValueError(f"model is 'smp:{name}'; expected smp: and one of {known}")
    encoder = f"tu-{setting.backbone}"  # timm's
    model: nn.Module = smp.create_model(name, encoder, encoder_weights=None, classes=setting.num_classes)
    return model


def outputs(prediction: Prediction | dict[str, Tensor] | Tensor) -> list[Tensor]:
    """All logits a loss is put on: ours first, then branches; torchvision's by name."""
    if isinstance(prediction, Tensor):
        return [prediction]
    if isinstance(prediction, dict):
        return list(prediction.values())
    return [prediction.logits, *prediction.branches.values()]
