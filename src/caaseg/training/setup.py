"""From a recipe to its parts: datasets, model, device and processes."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from caaseg.config import Architecture, ModelConfig, Recipe
from caaseg.data.catalogue import find, open_dataset
from caaseg.data.sample import SegmentationDataset
from caaseg.errors import CaasegError
from caaseg.models import Segmenter, load_model
from caaseg.models.weights import check_fits, load_backbone_weights
from caaseg.torchvision_compat import declare_missing_operators

if TYPE_CHECKING:
    from lightning.fabric import Fabric

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
    """Return device and processes, as torchrun or SLURM set them or else as requested.

    Args:
        device: auto, cpu, cuda, cuda:INDEX or mps; auto is a GPU if there is one.
        devices: number of processes on this machine, one per GPU.
    """
    if devices < 1:
        raise CaasegError(f"devices is {devices}; expected 1 or more")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise CaasegError(f"device is {device}, but torch sees no GPU; use cpu, or install a CUDA build of torch")
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise CaasegError("device is mps, which this machine does not have; use cpu")
    if torch.distributed.is_torchelastic_launched():
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return Processes(resolved, local, int(os.environ["WORLD_SIZE"]) // local)
    if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        machines = int(os.environ["SLURM_NNODES"])
        return Processes(resolved, int(os.environ["SLURM_NTASKS"]) // machines, machines)
    if resolved.type == "cuda":
        available, index = torch.cuda.device_count(), resolved.index or 0
        if max(devices, index + 1) > available:
            raise CaasegError(f"device is {device} and devices is {devices}, but torch sees {available} GPUs")
    return Processes(resolved, devices, 1)


def make_fabric(processes: Processes, precision: str) -> "Fabric":
    """Create the engine that knows devices, processes and precision."""
    declare_missing_operators()  # lightning imports torchvision
    from lightning.fabric import Fabric

    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    mode: Any = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}[precision]
    index = processes.device.index
    return Fabric(
        accelerator=processes.device.type,
        devices=processes.local if index is None else [index],
        num_nodes=processes.machines,
        strategy="ddp" if processes.total > 1 else "auto",
        precision=mode,
    )


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms only, or else let cuDNN choose the fastest."""
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
    """Return whether this process is the one that writes and prints, before and after processes have joined."""
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((rank for rank in ranks if rank is not None), "0") == "0"


def open_datasets(recipe: Recipe) -> tuple[SegmentationDataset, SegmentationDataset]:
    """Return the training and the validation split of a recipe."""
    return open_split(recipe, recipe.data.train_split), open_split(recipe, recipe.data.val_split)


def open_split(recipe: Recipe, names: str) -> SegmentationDataset:
    """Return a split of a recipe's dataset, or several joined with +."""
    data = recipe.data
    if data.root is None and find(data.dataset).has_files:
        raise CaasegError(f"data.root is missing: {data.dataset} needs the directory of its files; --data.root")
    root = None if data.root is None else Path(data.root)
    if root is not None and not root.is_dir():
        raise CaasegError(f"data.root is {root}: no such directory; expected that of {data.dataset}; --data.root")
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


def build_model(recipe: Recipe, data: SegmentationDataset, init_from: str | Path | None = None) -> Segmenter:
    """Create the model of a recipe for a dataset, with random weights or the weights of another model."""
    torch.manual_seed(recipe.seed)
    architecture = {name: getattr(recipe.model, name) for name in Architecture.names()}
    config = ModelConfig(
        **architecture, num_classes=len(data.classes), classes=tuple(data.classes), palette=tuple(data.palette)
    )
    pretrained = recipe.model.pretrained
    model = Segmenter(config, hub_weights=pretrained is True and init_from is None)
    if init_from is not None:
        with warnings.catch_warnings(record=True, action="always") as caught:
            other = load_model(init_from, num_classes=config.num_classes)
        _check_same_architecture(model, other, init_from)
        for warning in caught:
            logger.warning("%s", warning.message)
        model.load_state_dict(other.state_dict())
    elif not isinstance(pretrained, bool):
        load_backbone_weights(model.backbone, Path(pretrained))
    return model


def _check_same_architecture(model: Segmenter, other: Segmenter, source: str | Path) -> None:
    """Raise CaasegError if the weights do not fit, naming the settings that differ instead of the weights."""
    try:
        check_fits(model, other.state_dict(), str(source))
    except ValueError as error:
        settings = {name: (getattr(other.config, name), getattr(model.config, name)) for name in Architecture.names()}
        listed = [f"{name} {theirs} instead of {ours}" for name, (theirs, ours) in settings.items() if theirs != ours]
        if not listed:
            raise
        raise CaasegError(
            f"{source}: its weights do not fit, because it has {', '.join(listed)}; set the same with --model.NAME, or "
            "start from another model"
        ) from error


def synchronize_batch_norm(model: Segmenter, processes: Processes) -> Segmenter:
    """Replace batch norm by synchronized batch norm if there are several GPUs; it does not exist for CPUs."""
    if processes.device.type != "cuda" or processes.total == 1:
        return model
    from timm.layers.norm_act import convert_sync_batchnorm  # torch's own drops the activation of timm's layers

    converted = convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    assert isinstance(converted, Segmenter)
    return converted
