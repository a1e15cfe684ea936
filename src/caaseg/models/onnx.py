"""ONNX models run by onnxruntime, described by the metadata that `caaseg export` writes into the file."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caaseg.config import ModelConfig
from caaseg.errors import CaasegError
from caaseg.models.result import Predictable

ONNX_SUFFIX = ".onnx"
INPUT, OUTPUT = "images", "logits"
PROBE_SIZE = (64, 48)
"""Height and width of the image that is predicted on load, to check the output."""
INSTALL = "install it with: pip install 'caaseg[export]'"


class OnnxModel(Predictable):
    """An exported model: images (N, 3, H, W) of any size, RGB values from 0 to 255 -> logits (N, K, H, W).

    The model normalizes the images itself.

    Args:
        path: a file that `caaseg export` wrote.
        device: a GPU is used if onnxruntime supports it.
    """

    mean = (0.0, 0.0, 0.0)
    std = (1 / 255, 1 / 255, 1 / 255)
    """With this mean and std, a Predictor leaves the values unchanged."""

    def __init__(self, path: Path, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if not path.is_file():
            raise CaasegError(f"{path}: no such file; expected a model that caaseg export wrote")
        self._session = open_session(path, torch.device(device))
        described = self._session.get_modelmeta().custom_metadata_map
        try:
            about: dict[str, Any] = json.loads(described["caaseg"])
            values = {key: about[key] for key in ("num_classes", "classes", "palette")}
            # The architecture is not stored: its fields have default values.
            optional = ("mask_values", "short_sides", "min_size", "license")
            others = {key: about.get(key) for key in optional}
            self.config = config = ModelConfig.read(values | others)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise CaasegError(
                f"{path}: an ONNX model without the metadata of caaseg export ({error}); export the model again"
            ) from error
        self.num_classes, self.classes, self.palette = config.num_classes, config.classes, config.palette
        try:
            finite = self(torch.zeros(1, 3, *PROBE_SIZE)).isfinite().all()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CaasegError(f"{path}: does not fit its metadata ({reason}); export the model again") from error
        if not finite:
            raise CaasegError(f"{path}: returns logits that are NaN or infinite; export a model with finite weights")

    def forward(self, images: Tensor) -> Tensor:
        try:
            (logits,) = self._session.run([OUTPUT], {INPUT: images.float().cpu().numpy()})
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise RuntimeError(f"onnxruntime: {error}") from error
        expected = (len(images), self.num_classes, *images.shape[2:])
        found = getattr(logits, "shape", None)  # None: a sequence or a map
        if found != expected:
            raise RuntimeError(f"{OUTPUT} have the shape {found}; expected {expected}")
        return torch.from_numpy(logits).to(images.device)


def disable_telemetry() -> None:
    """Turn off onnxruntime's telemetry, which writes into the home directory and sends data. Call before its import."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def onnx_files(path: Path) -> list[Path]:
    """Return the files of an ONNX model: its own, then those with external weights."""
    try:
        import onnx
    except ImportError as error:
        raise CaasegError(f"{path}: reading it needs onnx, which is not installed; {INSTALL}") from error
    return [path, *(path.parent / name for name in sorted(_locations(onnx.load(path, load_external_data=False))))]


def _locations(message: Any) -> set[str]:
    """Return the names of external files that a message of an ONNX model, or one inside it, refers to."""
    found: set[str] = set()
    for field, value in message.ListFields():
        if field.name == "external_data":
            found |= {entry.value for entry in value if entry.key == "location"}
        elif field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                found |= _locations(part)
    return found


def open_session(path: Path, device: torch.device) -> Any:
    """Return onnxruntime's session of an ONNX file, with as many threads as torch uses."""
    disable_telemetry()
    try:
        import onnxruntime
    except ImportError as error:
        raise CaasegError(f"{path}: running it needs onnxruntime, which is not installed; {INSTALL}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised
    gpu = "CUDAExecutionProvider"
    has_gpu = device.type == "cuda" and gpu in onnxruntime.get_available_providers()
    usable = [(gpu, {"device_id": device.index or 0})] if has_gpu else []
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[*usable, "CPUExecutionProvider"])
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(f"{path}: onnxruntime cannot read it ({reason}); export it again") from error
