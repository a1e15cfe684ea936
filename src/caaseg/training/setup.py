"""From a recipe to its parts: datasets, model, device and processes."""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from caaseg.config import Architecture, ModelConfig, ModelRecipe, Recipe
from caaseg.data.catalogue import find, open_dataset
from caaseg.data.resized import short_sides
from caaseg.data.sample import SegmentationDataset
from caaseg.errors import CaasegError
from caaseg.models import Segmenter
from caaseg.models.backbones import TimmBackbone
from caaseg.models.heads import resolve_head
from caaseg.models.saving import CLASSIFIERS
from caaseg.models.weights import check_fits, load_backbone_weights
from caaseg.process_group import environment_integer
from caaseg.torchvision_compat import declare_missing_operators
from caaseg.training import ranks

if TYPE_CHECKING:
    from lightning_fabric import Fabric

logger = logging.getLogger(__name__)


class Processes(NamedTuple):
    """The device type and the number of processes of a run."""

    device: torch.device
    local: int  # processes on this machine
    machines: int

    @property
    def total(self) -> int:
        return self.local * self.machines


def resolve_processes(device: str, devices: int) -> Processes:
    """Return device and number of processes: set by torchrun or SLURM if they started this process, or as requested.

    Args:
        device: auto, cpu, cuda, cuda:INDEX or mps; auto uses a GPU if there is any.
        devices: number of processes on this machine, one per GPU.
    """
    if devices < 1:
        raise CaasegError(f"devices is {devices}; expected 1 or more")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.index is not None and devices > 1:
        raise CaasegError(f"device is {device}, a single GPU, but devices is {devices}; use device cuda, or devices 1")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise CaasegError(f"device is {device}, but torch sees no GPU; use cpu, or install a CUDA build of torch")
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise CaasegError("device is mps, which this machine does not have; use cpu")
    if torch.distributed.is_torchelastic_launched():
        local, total = environment_integer("LOCAL_WORLD_SIZE"), environment_integer("WORLD_SIZE")
        return Processes(resolved, local, total // max(local, 1))
    if are_ranks_running():
        machines, total = environment_integer("SLURM_NNODES"), environment_integer("SLURM_NTASKS")
        return Processes(resolved, total // max(machines, 1), machines)
    if not is_first_rank() and (devices == 1 or "LOCAL_RANK" not in os.environ):
        # This process would train, but write no files, because only the first rank writes them.
        raise CaasegError(
            "RANK, LOCAL_RANK or SLURM_PROCID is set and not 0, but neither torchrun nor SLURM started this process; "
            "unset these environment variables, or use torchrun"
        )
    if resolved.type == "cuda":
        available, index = torch.cuda.device_count(), resolved.index or 0
        if max(devices, index + 1) > available:
            raise CaasegError(f"device is {device} and devices is {devices}, but torch sees {available} GPUs")
    return Processes(resolved, devices, 1)


def are_ranks_running() -> bool:
    """Return whether torchrun or SLURM has started all ranks. If not, the first rank starts the others."""
    slurm = "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    return torch.distributed.is_torchelastic_launched() or slurm


def make_fabric(processes: Processes, precision: str) -> "Fabric":
    """Create the Lightning Fabric with devices, processes and precision."""
    declare_missing_operators()  # lightning_fabric imports torchvision if torchmetrics is installed
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    mode: Any = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}[precision]
    index = processes.device.index
    return Fabric(
        accelerator=processes.device.type,
        devices=processes.local if index is None else [index],
        num_nodes=processes.machines,
        strategy=DDPStrategy(timeout=ranks.RANK_TIMEOUT) if processes.total > 1 else "auto",
        precision=mode,
    )


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms only if enabled; if not, let cuDNN choose the fastest algorithms."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with this setting only
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.benchmark = not enabled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def is_first_rank() -> bool:
    """Return whether this process is the first rank, which writes and prints; also before the ranks have joined."""
    found = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((rank for rank in found if rank is not None), "0") == "0"


def open_datasets(recipe: Recipe) -> tuple[SegmentationDataset, SegmentationDataset]:
    """Return the training and the validation split of a recipe."""
    return open_split(recipe, recipe.data.train_split), open_split(recipe, recipe.data.val_split)


def open_split(recipe: Recipe, names: str) -> SegmentationDataset:
    """Return a split of a recipe's dataset, or several joined with +."""
    data = recipe.data
    if data.root is None and find(data.dataset).has_files:
        raise CaasegError(f"data.root is missing: {data.dataset} needs the directory of its files; set --data.root")
    root = None if data.root is None else Path(data.root)
    if root is not None and not root.is_dir():
        raise CaasegError(
            f"data.root is {root}: no such directory; expected the directory of {data.dataset}; set --data.root"
        )
    return open_dataset(data.dataset, root, names, **data.options)


def check_classes_of(recipe: Recipe, train: SegmentationDataset, val: SegmentationDataset) -> None:
    """Raise CaasegError if recipe, training and validation split disagree about the number of classes."""
    expected = recipe.model.num_classes or len(train.classes)
    for name, dataset in ((recipe.data.train_split, train), (recipe.data.val_split, val)):
        if len(dataset.classes) != expected:
            raise CaasegError(
                f"model.num_classes is {expected}, but split {name} of {recipe.data.dataset} has "
                f"{len(dataset.classes)} classes; omit it to use the dataset's"
            )
    weights = recipe.loss.class_weights
    if not isinstance(weights, str) and len(weights) != expected:
        raise CaasegError(f"loss.class_weights has {len(weights)} numbers, but the dataset has {expected} classes")


def resolve_epochs(recipe: Recipe, num_images: int) -> Recipe:
    """Return the recipe with the number of steps that its epochs over `num_images` training images take."""
    if recipe.epochs is None:
        return recipe
    return recipe.replace(steps=math.ceil(recipe.epochs * num_images / recipe.batch_size))


def check_labels(recipe: Recipe, *, in_training: bool, in_validation: bool) -> None:
    """Raise CaasegError if the training or the validation split has no labeled pixel."""
    for split, has_labels in ((recipe.data.train_split, in_training), (recipe.data.val_split, in_validation)):
        if not has_labels:
            raise CaasegError(
                f"split {split} of {recipe.data.dataset} has no labeled pixel: all are ignored, so nothing can be "
                f"learned or scored; check the masks and classes with caaseg data check {recipe.data.dataset}"
            )


def training_size(recipe: Recipe, data: SegmentationDataset) -> tuple[int | None, tuple[int, int, int]]:
    """Return the limit of the short side, or None, and smallest, median and largest short side under that limit."""
    sides = short_sides(data, skip_bad_files=recipe.data.bad_files == "skip")
    limit = recipe.data.resize
    if limit == "auto":
        crop = max(recipe.data.crop)
        limit = 2 * crop if sides[len(sides) // 2] > 3 * crop else None
    resized = [side if limit is None else min(side, limit) for side in sides]
    return limit, (resized[0], resized[len(resized) // 2], resized[-1])


def adopt_architecture(recipe: Recipe, other: Architecture) -> Recipe:
    """Return the recipe with the architecture of another model, except the settings that the recipe sets itself."""
    names = Architecture.model_fields.keys() - recipe.model.model_fields_set
    return recipe.replace(model=recipe.model.replace(**{name: getattr(other, name) for name in names}))


def build_model(
    recipe: Recipe,
    data: SegmentationDataset,
    other: Segmenter | None = None,
    sides: tuple[int, int, int] | None = None,
    weights_license: str | None = None,
) -> Segmenter:
    """Create the model of a recipe for a dataset, with random weights or the weights of another model.

    Args:
        recipe: the recipe.
        data: dataset that defines the classes and their colors.
        other: a model to copy the weights from; its classifiers are copied only if it has the same classes.
        sides: smallest, median and largest short side of the training images.
        weights_license: license of the initial weights, if any.
    """
    torch.manual_seed(recipe.seed)
    architecture = {name: getattr(recipe.model, name) for name in Architecture.model_fields}
    classes = {"num_classes": len(data.classes), "classes": tuple(data.classes), "palette": tuple(data.palette)}
    values = getattr(data, "mask_values", None)
    more = {"mask_values": values, "short_sides": sides, "license": weights_license}
    config = ModelConfig.read(architecture | classes | more)
    pretrained = recipe.model.pretrained
    # A head named by a saved model is never executed from a file: `other` was loaded with its class.
    has_head = other is not None and other.config.head == config.head
    head = type(other.head) if other is not None and has_head else resolve_head(config.head)
    hub_weights = pretrained is True and other is None
    drop_path, block_dropout = recipe.model.drop_path, recipe.model.block_dropout
    model = Segmenter(config, head=head, hub_weights=hub_weights, drop_path=drop_path, block_dropout=block_dropout)
    if other is not None:
        copy_weights(other, model, str(recipe.init_from))
    elif not isinstance(pretrained, bool):
        load_backbone_weights(model.backbone, Path(pretrained))
    return model


def freeze(model: Segmenter, recipe: ModelRecipe) -> None:
    """Freeze the backbone, or its first stages, as a recipe sets."""
    if recipe.frozen_stages:
        timm_backbone(model, "model.frozen_stages").freeze_stages(recipe.frozen_stages)
    if recipe.freeze_backbone:
        model.backbone.requires_grad_(False)


def timm_backbone(model: Segmenter, option: str) -> TimmBackbone:
    """Return the backbone of a model, or raise CaasegError if it is not a timm network, which an option needs."""
    if not isinstance(model.backbone, TimmBackbone):
        raise CaasegError(f"{option} is set, but needs a timm backbone; leave it out")
    return model.backbone


def copy_weights(source: Segmenter, target: Segmenter, name: str) -> None:
    """Copy the weights of a model, without its classifiers if the classes differ. Log which parts are new.

    Args:
        source: the model to copy from.
        target: the model to copy to.
        name: path or name of the source.
    """
    weights, ours = source.state_dict(), target.state_dict()
    theirs, classes = source.config, target.config
    same = theirs.classes == classes.classes if theirs.classes else theirs.num_classes == classes.num_classes
    new = "all weights are loaded"
    if not same:
        weights |= {key: tensor for key, tensor in ours.items() if key.startswith(CLASSIFIERS) and key in weights}
        new = f"the classifiers are new, because its {theirs.num_classes} classes are not the classes of the dataset"
    check_same_architecture(target, weights, theirs.as_dict(), name)
    target.load_state_dict(weights)
    loaded = f"backbone {theirs.backbone} and head {theirs.head} at output stride {theirs.output_stride}"
    if theirs.license is not None:
        new += f"; the license of these weights, {theirs.license}, applies to the new model too"
    if is_first_rank():
        logger.warning("%s: loaded %s%s; %s", name, loaded, " with decoder" if theirs.decoder else "", new)


def check_same_architecture(
    model: Segmenter, weights: Mapping[str, Tensor], config: Mapping[str, Any], source: str
) -> None:
    """Raise CaasegError if weights do not fit a model. The message names different settings, if known, or the weights.

    Args:
        model: the model to load the weights into.
        weights: weights of another model.
        config: architecture settings of that model as JSON values, as far as they are known.
        source: path of that model.
    """
    try:
        check_fits(model, weights, source)
    except CaasegError as error:
        ours = model.config.as_dict()
        settings = {name: (config[name], ours[name]) for name in Architecture.model_fields if name in config}
        listed = [f"{name} {found} instead of {own}" for name, (found, own) in settings.items() if found != own]
        if not listed:
            raise
        raise CaasegError(
            f"{source}: its weights do not fit, because it has {', '.join(listed)}; set the same values with "
            "--model.NAME, or leave these options out"
        ) from error


def is_batch_norm_synchronized(recipe: Recipe, processes: Processes) -> bool:
    """Return whether batch norm is synchronized: with several GPUs; torch does not support it on CPUs."""
    return recipe.sync_batch_norm and processes.device.type == "cuda" and processes.total > 1


def synchronize_batch_norm(model: Segmenter) -> Segmenter:
    """Replace batch norm by synchronized batch norm."""
    from timm.layers.norm_act import convert_sync_batchnorm  # torch's own drops the activation of timm's layers

    converted = convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    assert isinstance(converted, Segmenter)
    return converted


def set_batch_norm_momentum(model: nn.Module, momentum: float | None) -> None:
    """Set the momentum of all batch norm statistics; None leaves them unchanged."""
    for module in model.modules():
        if momentum is not None and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = momentum
