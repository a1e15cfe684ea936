"""Load any model: saved, shipped with the package, on the hub, or exported to ONNX."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from caaseg.models.onnx import ONNX_SUFFIX, OnnxModel
from caaseg.models.saving import load_model as load_saved_model
from caaseg.models.saving import log_license
from caaseg.models.segmenter import Segmenter

if TYPE_CHECKING:
    from caaseg.models.heads.base import Head


def load_model(
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    num_classes: int | None = None,
    revision: str | None = None,
    head: "str | type[Head] | None" = None,
    backbone: nn.Module | None = None,
) -> Segmenter | OnnxModel:
    """Load a model in evaluation mode. Never runs code from the files of the model.

    Args:
        source: a run directory, the directory of a saved model, the name of a shipped model such as camvid,
            hf://owner/name for a model on the hub, or an .onnx file that `caaseg export` wrote.
        device: where to run.
        num_classes: for fine-tuning on other classes: the classifiers are initialized anew, all other weights are
            loaded. This argument and the following ones do not apply to .onnx files.
        revision: branch, tag or commit of a model on the hub.
        head: class of a head that is not built in, or "file.py:Class", which executes the file.
        backbone: module for a model that was created with a backbone module; the saved weights are loaded into it.

    Returns:
        The model. `model.predict(image)` segments an image.
    """
    if str(source).lower().endswith(ONNX_SUFFIX):
        return OnnxModel(Path(source), device=device)
    model = load_saved_model(source, num_classes=num_classes, revision=revision, head=head, backbone=backbone)
    log_license(source, model.config)
    return model.to(device)
