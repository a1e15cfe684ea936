"""Conversion of the authors' released weights: TensorFlow checkpoints of models, and .h5 files of backbones."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from caaseg.config import ModelConfig, OutputStride
from caaseg.errors import CaasegError
from caaseg.files import atomic_write
from caaseg.models.authors_weights import torch_name, torch_weight
from caaseg.models.backbones import FeatureInput, TimmBackbone
from caaseg.models.segmenter import Segmenter
from caaseg.models.tf_checkpoint import TFCheckpoint
from caaseg.models.weights import check_fits

INSTALL = "install it with: pip install 'caaseg[convert]'"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
BACKBONE = "backbone.net."
SUFFIX = ".safetensors"
MAX_DEPTH = 20  # maximum nesting of groups in an .h5 file

RESNETS = {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101", (3, 8, 36, 3): "resnet152"}
"""Blocks per stage -> timm's name."""
EFFICIENTNETS = {
    (16, 1280): "b0",
    (23, 1280): "b1",
    (23, 1408): "b2",
    (26, 1536): "b3",
    (32, 1792): "b4",
    (39, 2048): "b5",
    (45, 2304): "b6",
    (55, 2560): "b7",
}
"""Number of blocks, and number of channels of the top convolution -> size of the EfficientNet."""

Shapes = Mapping[str, tuple[int, ...]]


class Conversion(NamedTuple):
    """Result of a conversion: its path, and the names of the converted and skipped variables."""

    out: Path
    config: ModelConfig | None  # None for backbone weights
    feature_channels: int | None  # input channels of a head without a backbone; None if there is a backbone
    used: list[str]
    training_state: list[str]  # variables of the optimizer and of the checkpoint, skipped
    unknown: list[str]  # variables that are not in our model, skipped


def convert(source: Path, out: Path, *, output_stride: OutputStride = 16) -> Conversion:
    """Convert the authors' weights.

    Args:
        source: a checkpoint (its .index file, its path without suffix, or a directory with a single checkpoint), or an
            .h5 file of backbone weights.
        out: directory of the model; for backbone weights, a .safetensors file for `pretrained`.
        output_stride: output stride of the model. The checkpoint does not contain it, and the weights fit any.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CaasegError(f"{out}: already exists; expected a new path, because a conversion overwrites nothing")
    if source.suffix in (".h5", ".hdf5"):
        arrays = _read_h5(source)
        return _convert(source, out, {n: a.shape for n, a in arrays.items()}, arrays.__getitem__, [], output_stride)
    checkpoint = TFCheckpoint(_find_checkpoint(source))
    names, training_state = _model_variables(list(checkpoint.variables))
    shapes = {name: checkpoint.variables[key].shape for name, key in names.items()}
    return _convert(source, out, shapes, lambda name: checkpoint.read(names[name]), training_state, output_stride)


def _find_checkpoint(source: Path) -> Path:
    """Return the index file of a checkpoint."""
    if source.is_dir():
        found = sorted(source.glob("*.index"))
        if len(found) != 1:
            listed = ", ".join(path.stem for path in found[:5]) or "none"
            raise CaasegError(f"{source}: expected the .index file of one checkpoint, found {listed}; name one of them")
        return found[0]
    named = source if source.suffix == ".index" else source.with_name(f"{source.name}.index")
    if not named.is_file():
        raise CaasegError(
            f"{source}: no such checkpoint; expected NAME.index next to NAME.data-00000-of-00001, or an .h5 file"
        )
    return named


def _model_variables(keys: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the keys of the model's variables by variable name, and the keys of the training state."""
    names, training_state = {}, []
    for key in keys:
        name = key.removesuffix(VALUE).removeprefix("model/")
        is_weight = key.endswith(VALUE) and key.startswith("model/") and not name.startswith("optimizer/")
        if is_weight and ".OPTIMIZER_SLOT" not in key:
            names[name] = key
        else:
            training_state.append(key)
    return names, training_state


def _convert(
    source: Path,
    out: Path,
    shapes: Shapes,
    read: Callable[[str], NDArray[Any]],
    training_state: list[str],
    output_stride: OutputStride,
) -> Conversion:
    backbone = _backbone_options(shapes, source)
    stages = _stage_lengths(backbone)
    ours = {name: found for name in shapes if (found := torch_name(name, stages)) is not None}
    has_head = any(name.startswith("head.") for name in ours.values())
    if not has_head and backbone is None:
        raise CaasegError(
            f"{source}: contains no weights of the authors' models, only {', '.join(list(shapes)[:3]) or 'no variable'}"
        )
    unknown = [name for name in shapes if name not in ours]

    if not has_head:
        assert backbone is not None
        tensors = {ours[name].removeprefix(BACKBONE): torch_weight(name, read(name)) for name in ours}
        _write_backbone(out, backbone, tensors, source)
        return Conversion(out, None, None, list(ours), training_state, unknown)
    if out.suffix == SUFFIX:
        raise CaasegError(f"--out is {out}; expected a directory, because {source} contains a model")
    config = _config({ours[name]: shapes[name] for name in ours}, backbone, output_stride, source)
    # An auxiliary branch of another architecture is skipped.
    unused = [name for name in ours if ours[name].startswith("aux.") and not config.aux]
    used = [name for name in ours if name not in unused]
    tensors = {ours[name]: torch_weight(name, read(name)) for name in used}
    features = FeatureInput(tensors["head.entry.0.weight"].shape[1]) if backbone is None else None
    with torch.device("meta"):
        _fill_counters(tensors, Segmenter(config, backbone=features).state_dict())
        check_fits(Segmenter(config, backbone=features), tensors, str(source))
    model = Segmenter(config, backbone=features)
    model.load_state_dict(tensors)
    model.eval().save_pretrained(out, model_card_kwargs={"training": f"Converted from {source.name} of the authors."})
    channels = None if features is None else features.coarse_channels
    return Conversion(out, config, channels, used, training_state, [*unknown, *unused])


def _fill_counters(tensors: dict[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    """Add the counters of batch norm, which TensorFlow does not have."""
    for name in ours:
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.zeros((), dtype=torch.int64, device="cpu")


def _write_backbone(out: Path, backbone: dict[str, Any], tensors: dict[str, Tensor], source: Path) -> None:
    """Write backbone weights in timm's naming."""
    if out.suffix != SUFFIX:
        raise CaasegError(f"--out is {out}; expected a {SUFFIX} file, because {source} contains a backbone only")
    net = _timm_backbone(backbone).net
    _fill_counters(tensors, net.state_dict())
    check_fits(net, tensors, str(source))
    with atomic_write(out) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def _backbone_options(shapes: Shapes, source: Path) -> dict[str, Any] | None:
    """Return the options of the backbone with these variables, or None if no variable belongs to a backbone."""
    if not any(name.startswith("backbone/") for name in shapes):
        return None
    blocks = {match.groups() for name in shapes if (match := re.match(r"backbone/stacks/(\d)/blocks/(\d+)/", name))}
    depths = tuple(sum(stage == str(number) for stage, _ in blocks) for number in range(4))
    if depths in RESNETS and "backbone/conv1_1_conv/kernel" in shapes:
        return {"backbone": RESNETS[depths], "resnet_variant": "authors", "multi_grid": (1, 2, 4)}
    number = len({match[1] for name in shapes if (match := re.match(r"backbone/blocks/(\d+)/", name))})
    top = shapes.get("backbone/top_conv/kernel", (0,))[-1]
    if (number, top) in EFFICIENTNETS:
        # Like the authors' weights, this tag was trained on images scaled to -1 to 1.
        name = f"tf_efficientnet_{EFFICIENTNETS[number, top]}.ap_in1k"
        return {"backbone": name, "dilation": "authors", "top_features": True}
    first = next(name for name in shapes if name.startswith("backbone/"))
    raise CaasegError(
        f"{source}: its backbone, with variables such as {first}, is neither the authors' ResNet-50, -101 or -152 nor "
        "an EfficientNet-B0 to B7; other backbones are not converted"
    )


def _stage_lengths(backbone: dict[str, Any] | None) -> list[int]:
    if backbone is None or not backbone.get("top_features"):
        return []
    return [len(stage) for stage in _timm_backbone(backbone).net.blocks]


def _timm_backbone(options: dict[str, Any]) -> TimmBackbone:
    renamed = {"backbone": "name", "resnet_variant": "variant"}
    with torch.device("meta"):
        return TimmBackbone(**{renamed.get(key, key): value for key, value in options.items()}, output_stride=16)


def _config(shapes: Shapes, backbone: dict[str, Any] | None, output_stride: OutputStride, source: Path) -> ModelConfig:
    """Return the settings of the model, found from the shapes of its weights."""
    kernels = {name: shape for name, shape in shapes.items() if len(shape) in (2, 4)}  # in TensorFlow's axis order
    needed = ["head.entry.0", "head.block.column_keys.0", "head.bottleneck.0", "classifier"]
    missing = [name for name in needed if f"{name}.weight" not in kernels]
    if missing:
        raise CaasegError(f"{source}: weights of {missing[0]} are missing or have wrong shapes; expected a CAA model")
    gates = [name for name in kernels if name.startswith("head.block.column_gate.hidden.")]
    out = {name.removesuffix(".weight"): shape[-1] for name, shape in kernels.items()}
    return ModelConfig(
        **(backbone or {"backbone": f"{FeatureInput.__module__}:{FeatureInput.__qualname__}"}),
        head="caa" if gates else "axial",
        output_stride=output_stride,
        channels=out["head.entry.0"],
        key_channels=out["head.block.column_keys.0"],
        gate_layers=len(gates) or 1,
        gate_width=out.get("head.block.column_gate.hidden.0", 1),
        bottleneck_channels=out["head.bottleneck.0"],
        car="head.car.weight" in kernels,
        aux=kernels.get("aux.0.0.weight", ())[:2] == (1, 1) and "aux.2.weight" in kernels,
        num_classes=out["classifier"],
    )


def _read_h5(path: Path) -> dict[str, NDArray[Any]]:
    """Return the weights of a Keras .h5 file, keyed by the names that they would have in a checkpoint."""
    try:
        import h5py
    except ImportError as error:
        raise CaasegError(f"{path}: reading .h5 files needs h5py; {INSTALL}") from error
    if not path.is_file():
        raise CaasegError(f"{path}: no such file; expected backbone weights in an .h5 file")
    try:
        with h5py.File(path, "r") as file:
            arrays = dict(_datasets(file, "", set()))
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(f"{path}: damaged or not an .h5 file of weights ({reason}); download it again") from error
    return {h5_variable(name, arrays): array for name, array in arrays.items()}


def _datasets(group: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the floating-point arrays below a group. Links are refused: they can lead to other files or form cycles."""
    import h5py

    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{prefix}{name} is a link")
        item = group[name]
        address = h5py.h5o.get_info(item.id).addr
        if address in seen or prefix.count("/") > MAX_DEPTH:
            raise ValueError("groups are nested too deeply, or contain each other")
        seen.add(address)
        if isinstance(item, h5py.Group):
            yield from _datasets(item, f"{prefix}{name}/", seen)
        elif item.dtype.kind == "f":
            if item.external or item.is_virtual or item.nbytes > item.file.id.get_filesize():
                raise ValueError(f"{prefix}{name} is not stored in the file")
            yield f"{prefix}{name}", np.asarray(item)


def h5_variable(name: str, names: Iterable[str]) -> str:
    """Return the checkpoint name of a weight in an .h5 file, such as conv2_block1_1_conv/kernel:0.

    Args:
        name: path of the weight in the file; only the last two components matter.
        names: all paths in the file, to find the number of blocks per stage of an EfficientNet.
    """
    *_, layer, kind = ["", *name.split("/")]
    kind = kind.partition(":")[0]
    if match := re.fullmatch(r"conv([2-5])_block(\d+)_([0-3])_(conv|bn)", layer):
        part = "shortcut" if match[3] == "0" else f"conv{match[3]}"
        return f"backbone/stacks/{int(match[1]) - 2}/blocks/{int(match[2]) - 1}/{part}_{match[4]}/{kind}"
    if match := re.fullmatch(r"block(\d)([a-z])_(\w+)", layer):
        earlier = {other for other in _blocks(names) if other < (match[1], match[2])}
        part = {"bn": "dwconv_bn", "expand_bn": "expand_conv_bn"}.get(match[3], match[3])
        return f"backbone/blocks/{len(earlier)}/{part}/{kind}"
    return f"backbone/{'steam_conv_bn' if layer == 'stem_bn' else layer}/{kind}"


def _blocks(names: Iterable[str]) -> set[tuple[str, str]]:
    return {(match[1], match[2]) for name in names if (match := re.search(r"\bblock(\d)([a-z])_", name))}
