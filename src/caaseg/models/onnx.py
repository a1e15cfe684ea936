"""ONNX models run by onnxruntime, described by the metadata that `caaseg export` writes into the file."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from caaseg.config import Color
from caaseg.errors import CaasegError

ONNX_SUFFIX = ".onnx"
INPUT, OUTPUT = "images", "logits"
INSTALL = "install it with: pip install 'caaseg[export]'"


class OnnxModel(nn.Module):
    """Logits (N, K, H, W) of images (N, 3, H, W) of any size, RGB values from 0 to 255; it normalizes them itself.

    Args:
        path: a file that `caaseg export` wrote.
        device: a GPU is used if onnxruntime supports it.
    """

    mean = (0.0, 0.0, 0.0)
    std = (1 / 255, 1 / 255, 1 / 255)
    """With these a Predictor leaves the values unchanged."""

    def __init__(self, path: Path, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if not path.is_file():
            raise CaasegError(f"{path}: no such file; expected a model that caaseg export wrote")
        self._session = _session(path, torch.device(device))
        described = self._session.get_modelmeta().custom_metadata_map
        try:
            about: dict[str, Any] = json.loads(described["caaseg"])
            self.num_classes = int(about["num_classes"])
            self.classes: tuple[str, ...] | None = about["classes"] and tuple(map(str, about["classes"]))
            self.palette: tuple[Color, ...] | None = about["palette"] and tuple(
                (int(red), int(green), int(blue)) for red, green, blue in about["palette"]
            )
            if not 1 <= self.num_classes <= 255 or any(
                given is not None and len(given) != self.num_classes for given in (self.classes, self.palette)
            ):
                raise ValueError(f"{self.num_classes} classes")
        except (KeyError, ValueError, TypeError) as error:
            raise CaasegError(
                f"{path}: an ONNX model without the metadata of caaseg export ({error}); export the model again"
            ) from error
        self._path = path

    def forward(self, images: Tensor) -> Tensor:
        try:
            (logits,) = self._session.run([OUTPUT], {INPUT: images.float().cpu().numpy()})
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise RuntimeError(f"onnxruntime: {error}") from error
        return torch.from_numpy(logits).to(images.device)


def _session(path: Path, device: torch.device) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise CaasegError(f"{path}: running it needs onnxruntime, which is not installed; {INSTALL}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only, and those are raised
    gpu = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    usable = [name for name in gpu if name in onnxruntime.get_available_providers()]
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[*usable, "CPUExecutionProvider"])
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaasegError(f"{path}: onnxruntime cannot read it ({reason}); export it again") from error
