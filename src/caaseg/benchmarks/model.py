"""Benchmark of whole models, ours and others': images per second and peak memory, training and inference."""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from caaseg.benchmarks.mmseg import build_mmseg
from caaseg.benchmarks.timing import Cost, measure
from caaseg.data.sample import IGNORE
from caaseg.errors import CaasegError
from caaseg.kernels import is_supported
from caaseg.models import HEADS, Prediction, Segmenter, create_model
from caaseg.models.cuda_graphs import capture_coarse
from caaseg.models.fused_norm import fuse_batch_norm
from caaseg.models.inference import is_out_of_memory, prepare_for_inference
from caaseg.models.resize import resize
from caaseg.training.losses import presence_loss

MODES = ("compiled", "regional", "captured", "plain")
BLOCKS = ("BasicBlock", "Bottleneck")
"""Class names of residual blocks, in timm, torchvision and mmsegmentation."""


class Setting(NamedTuple):
    """Settings shared by all models of a benchmark."""

    backbone: str
    output_stride: int
    batch: int
    size: tuple[int, int]
    num_classes: int
    dtype: str
    aux: bool = False  # auxiliary classifier on the third stage; mmsegmentation's models always have it


class ModelCost(NamedTuple):
    """Speed and memory of one model."""

    model: str
    size: tuple[int, int]
    training_images_per_second: float | None  # this and the next fields: None if out of memory or not measured
    training_peak_bytes: int | None
    inference_images_per_second: float | None
    inference_peak_bytes: int | None

    def or_faster(self, other: "ModelCost") -> "ModelCost":
        """Return the higher speeds of two measurements of one model."""
        training = self.training_images_per_second, other.training_images_per_second
        inference = self.inference_images_per_second, other.inference_images_per_second
        return self._replace(
            training_images_per_second=max((speed for speed in training if speed is not None), default=None),
            inference_images_per_second=max((speed for speed in inference if speed is not None), default=None),
        )


def measure_model(
    name: str,
    setting: Setting,
    device: torch.device,
    *,
    seconds: float,
    train: bool = True,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> ModelCost:
    """Build a model and measure training and inference on random images. Our models infer with folded batch norm.

    Args:
        name: one of our heads, "file.py:Class", "caa:grouped", "torchvision:fcn", "torchvision:deeplabv3", "smp:NAME"
            for a model of segmentation_models_pytorch, or "mmseg:NAME" for a model of mmsegmentation. A suffix selects
            a mode: ":compiled" uses torch.compile; ":regional" compiles each residual block and each other part of the
            model by itself, which takes less time; ":captured" (our models) replays training step and inference as CUDA
            graphs; ":plain" (our models) trains with torch's own batch norm.
        setting: backbone, sizes and dtype.
        device: device to run on.
        seconds: approximate duration of each of the two measurements.
        train: whether to measure training.
        options: further settings of our model, as for `create_model`.
    """
    base, _, mode = name.rpartition(":")
    if mode not in MODES:
        base, mode = name, ""
    with device:
        model = build(base, setting, options)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if mode == "captured" and not (isinstance(model, Segmenter) and device.type == "cuda"):
        raise CaasegError(f"model is {name!r}; :captured works for models of caaseg on a GPU; remove the suffix")
    torch.backends.cudnn.benchmark = True  # as in training
    images = torch.randn(setting.batch, 3, *setting.size, device=device).contiguous(memory_format=torch.channels_last)
    training = _or_none(lambda: _training(copy.deepcopy(model), images, setting, seconds, mode)) if train else None
    inference = _or_none(lambda: _inference(model, images, setting, seconds, mode))
    return ModelCost(
        model=name,
        size=setting.size,
        training_images_per_second=None if training is None else setting.batch / training.seconds,
        training_peak_bytes=None if training is None else training.peak_bytes,
        inference_images_per_second=None if inference is None else setting.batch / inference.seconds,
        inference_peak_bytes=None if inference is None else inference.peak_bytes,
    )


def _or_none(work: Callable[[], Cost]) -> Cost | None:
    """Return the cost, or None if memory ran out."""
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        gc.collect()  # model and optimizer may reference each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _autocast(setting: Setting, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, getattr(torch, setting.dtype), enabled=setting.dtype != "float32")


def _inference(model: nn.Module, images: Tensor, setting: Setting, seconds: float, mode: str) -> Cost:
    if mode in ("compiled", "regional"):
        torch.compiler.reset()
    network: Any = inference_network(model, images.device, mode)
    inputs = [images, *network.parameters(), *network.buffers()]

    def infer() -> Tensor:
        with torch.inference_mode(), _autocast(setting, images.device):
            return outputs(network(images))[0]

    return measure(infer, inputs, images.device, seconds=seconds)


def inference_network(model: nn.Module, device: torch.device, mode: str) -> nn.Module:
    """Return a model prepared for inference: ours with folded batch norm, others as they are."""
    if isinstance(model, Segmenter):
        compiled = mode in ("compiled", "regional")
        return prepare_for_inference(model, device=device, compile=compiled, capture=mode == "captured")
    model.eval()
    if mode == "regional":
        compile_regions(model)
    network: nn.Module = torch.compile(model) if mode == "compiled" else model  # type: ignore[assignment]
    return network


def _training(model: nn.Module, images: Tensor, setting: Setting, seconds: float, mode: str) -> Cost:
    """Measure a training step: our models with fused batch norm and loss, others with upsampled logits."""
    device = images.device
    autocast = partial(_autocast, setting, device)
    labels = torch.randint(setting.num_classes, (setting.batch, *setting.size), dtype=torch.uint8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=device.type == "cuda")
    network: Any = model
    if isinstance(model, Segmenter):
        network = model.coarse
        if device.type == "cuda" and mode not in ("compiled", "regional", "plain"):
            fuse_batch_norm(model)
        if mode == "captured":
            network = capture_coarse(model, images, autocast)
    if mode == "compiled":
        torch.compiler.reset()
        network = torch.compile(network, dynamic=False)
    elif mode == "regional":
        torch.compiler.reset()
        compile_regions(model)

    def step() -> None:
        with autocast():
            prediction = network(images)
            losses = [_loss(logits, labels) for logits in outputs(prediction)]
            if (presence := presence_logits(prediction)) is not None:
                losses.append(presence_loss(presence, labels) / presence.numel())
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()  # allocates the momentum buffers, which count as inputs
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    inputs = [images, labels, *model.parameters(), *model.buffers(), *momentum]
    cost = measure(step, inputs, device, seconds=seconds)
    if mode == "captured":  # between replays, the memory pool of a graph is not counted as allocated
        torch.cuda.empty_cache()
        cost = cost._replace(peak_bytes=torch.cuda.memory_reserved(device))
    return cost


def compile_regions(model: nn.Module) -> None:
    """Compile each residual block, and each part of a model without such blocks, in place.

    Blocks of one shape are compiled once: a ResNet-101 has 8 kinds of blocks. Compiling the whole model takes minutes.
    """
    torch._dynamo.config.recompile_limit = 64  # all regions count as one function; further ones would run eagerly
    for region in regions(model):
        region.forward = _compiled(region.forward)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:  # torch.compile skips the forward functions of torch's own modules
        return forward(*inputs)

    compiled: Callable[..., Any] = torch.compile(call, dynamic=False)
    return compiled


def regions(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the residual blocks of a model, and its largest parts without residual blocks."""
    if type(module).__name__ in BLOCKS or not any(type(part).__name__ in BLOCKS for part in module.modules()):
        yield module
    else:
        for child in module.children():
            yield from regions(child)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[2:] == labels.shape[1:]:
        return cross_entropy(logits, labels.long())
    if is_supported(logits):
        from caaseg.kernels.cross_entropy import upsampled_cross_entropy

        return upsampled_cross_entropy(logits, labels, None, ignore_index=IGNORE) / labels.numel()
    return cross_entropy(resize(logits, labels.shape[1:]), labels.long())


def build(name: str, setting: Setting, options: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """Build a model by its benchmark name, without mode suffix. The options are those of `create_model`, for ours."""
    family, _, kind = name.rpartition(":")
    if family == "torchvision" and kind in ("fcn", "deeplabv3"):
        from torchvision.models import segmentation

        builder = getattr(segmentation, f"{kind}_{setting.backbone}", None)
        if builder is None:
            raise CaasegError(
                f"model is {name!r} with backbone {setting.backbone}; torchvision has it with resnet50 and resnet101; "
                "give one of them with --backbone, or remove the model"
            )
        model: nn.Module = builder(
            weights=None, weights_backbone=None, num_classes=setting.num_classes, aux_loss=setting.aux
        )
        return model
    if family == "smp":
        return _build_smp(kind, setting)
    if family == "mmseg":
        return build_mmseg(
            kind,
            backbone=setting.backbone,
            output_stride=setting.output_stride,
            num_classes=setting.num_classes,
        )
    is_file = family.endswith(".py")
    head, implementation = (family, kind) if family and not is_file else (name, "auto")
    if not is_file and (head not in HEADS or (family and head != "caa")):
        raise CaasegError(
            f"model is {name!r}; expected torchvision:fcn, torchvision:deeplabv3, smp:NAME, mmseg:NAME, caa:grouped, "
            f"file.py:Class or one of {', '.join(HEADS)}; all accept the suffixes :compiled and :regional, our models "
            "also :captured and :plain"
        )
    settings: dict[str, Any] = {"output_stride": setting.output_stride, "implementation": implementation}
    if setting.aux:
        settings |= {"aux": True, "aux_stage": 3}
    return create_model(head, backbone=setting.backbone, num_classes=setting.num_classes, **{**settings, **options})


def _build_smp(name: str, setting: Setting) -> nn.Module:
    """Build a model of segmentation_models_pytorch with the same timm backbone as ours."""
    try:
        import segmentation_models_pytorch as smp
    except ImportError as error:
        raise CaasegError(
            f"model is 'smp:{name}', but the package segmentation-models-pytorch is not installed; "
            "pip install segmentation-models-pytorch, or remove the model"
        ) from error
    if name not in smp.MODEL_ARCHITECTURES_MAPPING:
        known = ", ".join(smp.MODEL_ARCHITECTURES_MAPPING)
        raise CaasegError(f"model is 'smp:{name}'; expected smp: and one of {known}")
    encoder = f"tu-{setting.backbone}"  # a timm model
    model: nn.Module = smp.create_model(name, encoder, encoder_weights=None, classes=setting.num_classes)
    return model


def outputs(prediction: Prediction | dict[str, Tensor] | Tensor) -> list[Tensor]:
    """Return all maps of logits that have a loss: the main output first, then auxiliary output and branches."""
    if isinstance(prediction, Tensor):
        return [prediction]
    if isinstance(prediction, dict):
        return [logits for name, logits in prediction.items() if name != "presence"]
    aux = [] if prediction.aux is None else [prediction.aux]
    return [prediction.logits, *aux, *prediction.branches.values()]


def presence_logits(prediction: Prediction | dict[str, Tensor] | Tensor) -> Tensor | None:
    """Return the logits of the classes that an image contains, (N, K), or None."""
    if isinstance(prediction, dict):
        return prediction.get("presence")
    return prediction.presence if isinstance(prediction, Prediction) else None
