"""Reading weight files without running code from them, and checking that they fit a model."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from caaseg.errors import CaasegError
from caaseg.models.backbones import Backbone, TimmBackbone, flat_name, unused_names

PYTORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_LISTED = 12  # names in a message before "and N more"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors by name of a safetensors file, or of a PyTorch file that contains only tensors."""
    if not path.is_file():
        found = "is a directory" if path.is_dir() else "no such file"
        raise CaasegError(f"{path}: {found}; expected weights in a .safetensors or PyTorch file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CaasegError(f"{path}: damaged or not a safetensors file ({error}); download it again") from error
    if path.suffix not in PYTORCH_SUFFIXES:
        raise CaasegError(
            f"{path}: unknown suffix {path.suffix or '(none)'}; expected .safetensors or one of "
            f"{', '.join(PYTORCH_SUFFIXES)}"
        )
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about pickles that it then refuses
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CaasegError(
            f"{path}: refused, because it contains more than tensors, and loading it could run code; "
            "ask its author for safetensors, or convert it where you trust it"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, AttributeError, IndexError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(f"{path}: damaged or not a PyTorch file ({reason}); download it again") from error
    for wrapper in ("state_dict", "model_state_dict", "model"):  # how training scripts commonly wrap weights
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CaasegError(f"{path}: expected a dictionary from names to tensors, found other types in it")
    wrapped = all(name.startswith("module.") for name in content)  # by data-parallel training
    return {name.removeprefix("module.") if wrapped else name: value for name, value in content.items()}


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
        _listed("of another dtype", [name for name in shared if _kind(tensors[name]) != _kind(ours[name])]),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise CaasegError(f"{source}: the weights do not fit the model; {'; '.join(found)}")


def _kind(tensor: Tensor) -> tuple[bool, bool, torch.layout]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.layout


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:MAX_LISTED])}{more}" if names else ""


def load_backbone_weights(backbone: Backbone, path: Path) -> None:
    """Load backbone weights in timm or torchvision naming; a classifier and unused stages in the file are ignored."""
    if not isinstance(backbone, TimmBackbone):
        raise CaasegError(f"{path}: only timm backbones are loaded from a file, not {type(backbone).__name__}")
    ours = backbone.net.state_dict()
    unused = unused_names(backbone.name, backbone.output_stride, backbone.stages)
    fitting = {flat_name(name, ours): t for name, t in read_tensors(path).items() if name not in unused}
    for name, counter in ours.items():  # missing in files of old torch versions
        if name.endswith("num_batches_tracked"):
            fitting.setdefault(name, counter)
    check_fits(backbone.net, fitting, str(path))
    backbone.net.load_state_dict(fitting)
