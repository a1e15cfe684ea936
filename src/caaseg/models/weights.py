"""Reading weight files without running code from them, and checking that they fit a model."""

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from caaseg.errors import CaasegError
from caaseg.models.backbones import Backbone, TimmBackbone, unused_names
from caaseg.models.timm_networks import convert_weights, name_in_network

PYTORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Floating-point weights that are converted to the dtype of the model. 8-bit weights would need scales."""
MAX_LISTED = 12  # names in a message before "and N more"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors by name of a safetensors file, or of a PyTorch file that contains only tensors."""
    if not path.is_file():
        found = "is a directory" if path.is_dir() else "no such file"
        raise CaasegError(f"{path}: {found}; expected weights in a .safetensors or PyTorch file")
    if path.suffix == ".safetensors":
        try:
            path.open("rb").close()  # safetensors reports a file without read permission as missing
            return load_file(path)
        except PermissionError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise CaasegError(f"{path}: damaged or not a safetensors file ({error}); download it again") from error
    if path.suffix not in PYTORCH_SUFFIXES:
        raise CaasegError(
            f"{path}: unknown suffix {path.suffix or '(none)'}; expected .safetensors or one of "
            f"{', '.join(PYTORCH_SUFFIXES)}"
        )
    _check_unpacked_size(path)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about pickles that it then refuses
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CaasegError(
            f"{path}: refused, because it contains more than tensors, and loading it could run code; "
            "ask its author for safetensors, or convert it yourself if you trust it"
        ) from error
    except Exception as error:  # torch raises everything from struct.error to AssertionError on damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(f"{path}: damaged or not a PyTorch file ({reason}); download it again") from error
    for wrapper in ("state_dict", "model_state_dict", "model"):  # how training scripts commonly wrap weights
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CaasegError(f"{path}: expected a dictionary from names to tensors, found other types in it")
    needed, stored = sum(tensor.numel() * tensor.itemsize for tensor in content.values()), path.stat().st_size
    if needed > stored:  # tensors of stride 0, or tensors that share their values: copies could fill the memory
        raise CaasegError(
            f"{path}: refused, because its tensors take {needed:,} bytes, but the file has {stored:,}; save it again "
            "with a contiguous copy of each tensor"
        )
    wrapped = all(name.startswith("module.") for name in content)  # by data-parallel training
    return {name.removeprefix("module.") if wrapped else name: value for name, value in content.items()}


def _check_unpacked_size(path: Path) -> None:
    """Raise an error if a PyTorch file is a compressed zip archive. torch.save never compresses."""
    if not zipfile.is_zipfile(path):  # the format before torch 1.6
        return
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CaasegError(f"{path}: damaged or not a PyTorch file ({error}); download it again") from error
    if unpacked > path.stat().st_size:
        raise CaasegError(
            f"{path}: refused, because it is compressed: {path.stat().st_size:,} bytes would become {unpacked:,}; "
            "save it again with torch.save"
        )


def check_fits(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise an error if tensors are missing, unexpected, or of another shape or dtype."""
    ours = module.state_dict()
    shared = [name for name in ours if name in tensors]
    problems = [
        _listed("missing", [name for name in ours if name not in tensors]),
        _listed("not in the model", [name for name in tensors if name not in ours]),
        _listed(
            "of another shape",
            [
                f"{name} {tuple(tensors[name].shape)} instead of {tuple(ours[name].shape)}"
                for name in shared
                if tensors[name].shape != ours[name].shape
            ],
        ),
        _listed(
            "of another dtype",
            [
                f"{name} {_described(tensors[name])} instead of {_described(ours[name])}"
                for name in shared
                if not _is_convertible(tensors[name], ours[name])
            ],
        ),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise CaasegError(f"{source}: the weights do not fit the model; {'; '.join(found)}")


def check_finite(tensors: Mapping[str, Tensor], source: str, advice: str) -> None:
    """Raise an error if a tensor has values that are NaN or infinite."""
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        raise CaasegError(f"{source}: {_listed('tensors with NaN or infinite values', bad)}; {advice}")


def _is_convertible(tensor: Tensor, ours: Tensor) -> bool:
    same_kind = tensor.dtype == ours.dtype or {tensor.dtype, ours.dtype} <= set(FLOAT_DTYPES)
    return same_kind and tensor.layout == ours.layout


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout}".replace("torch.", "")


def _listed(problem: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{len(names)} {problem}: {', '.join(names[:MAX_LISTED])}{more}" if names else ""


def load_backbone_weights(backbone: Backbone, path: Path) -> None:
    """Load backbone weights in timm or torchvision naming, or in the authors' naming if timm can convert it.

    A classifier and unused stages in the file are ignored.
    """
    if not isinstance(backbone, TimmBackbone):
        raise CaasegError(f"{path}: only timm backbones are loaded from a file, not {type(backbone).__name__}")
    tensors = read_tensors(path)
    fitting = _named_as_ours(backbone, tensors)
    if fitting.keys() != backbone.net.state_dict().keys():
        converted = _named_as_ours(backbone, convert_weights(backbone.name, tensors))
        fitting = converted if converted.keys() == backbone.net.state_dict().keys() else fitting
    check_fits(backbone.net, fitting, str(path))
    check_finite(fitting, str(path), "download it again")
    backbone.net.load_state_dict(fitting)


def _named_as_ours(backbone: TimmBackbone, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in the backbone's network, without those that it does not use."""
    ours, unused = backbone.net.state_dict(), unused_names(backbone)
    counters = {name: tensor for name, tensor in ours.items() if name.endswith("num_batches_tracked")}
    renamed = {name_in_network(name, ours): tensor for name, tensor in tensors.items() if name not in unused}
    return counters | renamed  # files of old torch versions have no counters
