"""Draws street.png: an image of CamVid's test split, its classes, and the attention of one of its pixels.

Usage: python docs/figures/street.py CAMVID [FILE], where CAMVID is the directory of the dataset.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Patch
from PIL import Image

from caaseg.analysis.pixel_attention import predict_with_attention
from caaseg.models import load_model

NAME = "Seq05VD_f01620"
PIXEL = (190, 284)
"""Row and column."""


def draw(camvid: Path, file: Path) -> None:
    """Draw the figure."""
    [path] = (camvid / "test").glob(f"{NAME}.*")
    model = load_model("camvid")
    result = model.predict(path)
    attention = predict_with_attention(model, torch.from_numpy(result.image).permute(2, 0, 1)).at(PIXEL)
    assert attention is not None  # CAA has attention
    reach = (attention.reach + 1e-6).log10().numpy()  # brightness is logarithmic
    height, width = result.labels.shape
    enlarged = np.asarray(Image.fromarray(reach).resize((width, height), Image.Resampling.BICUBIC))

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for axis, image, title in zip(
        axes,
        (result.image, result.overlay(), enlarged),
        ("image", "classes", "attention of the marked pixel"),
        strict=True,
    ):
        axis.imshow(image, cmap="magma")
        axis.set_title(title, fontsize=11)
        axis.set_axis_off()
        axis.plot(PIXEL[1], PIXEL[0], "o", color="white", markeredgecolor="black")
    colors = dict(zip(result.classes, result.palette, strict=True))
    handles = [Patch(color="#{:02x}{:02x}{:02x}".format(*colors[name]), label=name) for name in result.shares]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).with_suffix(".png")))
