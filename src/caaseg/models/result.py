"""Prediction results: labels with class names and colors, and methods to draw, save and convert them."""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from caaseg.config import MaskValues, ModelConfig
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import Color
from caaseg.drawing.label_files import save_labels, save_overlay, save_source_values
from caaseg.drawing.legend import add_legend
from caaseg.drawing.overlays import background_class, overlay
from caaseg.errors import CaasegError
from caaseg.models.predictor import Predictor, read_pixels

ImageInput = str | Path | Image.Image | NDArray[np.uint8] | Tensor
"""A file, a Pillow image, an array (H, W), (H, W, 3) or (H, W, 4) of uint8, or a tensor (3, H, W) of uint8."""


@dataclass(frozen=True, eq=False)
class Result:
    """Prediction of one image. Shows itself as an overlay in notebooks."""

    labels: NDArray[np.uint8]
    """Class ids, (H, W), at the size of the image."""
    classes: tuple[str, ...]
    """Name of class k at position k."""
    palette: tuple[Color, ...]
    """Color of class k at position k."""
    image: NDArray[np.uint8]
    """The image, (H, W, 3) RGB, with its EXIF rotation applied."""
    name: str = "image"
    """Stem of the file, or "image"."""
    probabilities: NDArray[np.float32] | None = None
    """Class probabilities, (K, H, W); None if not requested."""
    mask_values: MaskValues | None = None
    """Value or color of each class in the training masks; None if unknown."""

    def __repr__(self) -> str:
        height, width = self.labels.shape
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items())
        return f"Result({self.name}, {width} x {height}: {shares})"

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the pixels of each class that occurs, the largest first."""
        counts = np.bincount(self.labels.reshape(-1), minlength=len(self.classes))
        order = sorted(np.flatnonzero(counts).tolist(), key=lambda k: -counts[k])
        return {self.classes[k]: float(counts[k] / self.labels.size) for k in order}

    def mask(self, name: str) -> NDArray[np.bool_]:
        """Return the pixels of a class, (H, W)."""
        if name not in self.classes:
            raise CaasegError(f"no class is called {name!r}; expected any of {', '.join(self.classes)}")
        mask: NDArray[np.bool_] = self.labels == self.classes.index(name)
        return mask

    def overlay(self, *, opacity: float = 0.65, legend: bool = False) -> Image.Image:
        """Return the image under the colors of its classes. A class called background is transparent.

        Args:
            opacity: opacity of the colors, 0 to 1.
            legend: add the names and colors of the classes that occur, right of the image.
        """
        background = background_class(self.classes)
        drawn = Image.fromarray(overlay(self.image, self.labels, self.palette, opacity, background))
        return add_legend(drawn, self.labels, self.classes, self.palette) if legend else drawn

    def to_coco(self) -> dict[str, Any]:
        """Return the labels as COCO JSON: one image, and one annotation with a run-length encoded mask per class."""
        height, width = self.labels.shape
        annotations: list[dict[str, Any]] = []
        for name in self.shares:
            mask = self.mask(name)
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box = [columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 1,
                    "category_id": self.classes.index(name),
                    "segmentation": {"size": [height, width], "counts": _run_lengths(mask)},
                    "area": int(mask.sum()),
                    "bbox": [int(value) for value in box],
                    "iscrowd": 1,
                }
            )
        return {
            "images": [{"id": 1, "file_name": f"{self.name}.jpg", "height": height, "width": width}],
            "annotations": annotations,
            "categories": [{"id": k, "name": name} for k, name in enumerate(self.classes)],
        }

    def save(self, directory: str | Path, *, source_values: bool = False) -> tuple[Path, Path]:
        """Write NAME_labels.png (class ids with a palette) and NAME_overlay.jpg. Existing files are an error.

        Args:
            directory: where to write them.
            source_values: write the values or colors of the training masks, such as 0 and 255, instead of class ids.
                Only models that were trained on the dataset folder know them.

        Returns:
            The paths of labels and overlay.
        """
        paths = Path(directory) / f"{self.name}_labels.png", Path(directory) / f"{self.name}_overlay.jpg"
        for path in paths:
            if path.exists():
                raise CaasegError(f"{path}: already exists; choose another directory, or rename the file")
        note = json.dumps({"classes": self.classes})
        if not source_values:
            save_labels(self.labels, self.palette, paths[0], note)
        elif self.mask_values is not None:
            save_source_values(self.labels, self.mask_values, paths[0], note)
        else:
            raise CaasegError(
                "source_values is True, but the values of the model's training masks are unknown, because it was not "
                "trained on the dataset folder; leave it out"
            )
        image = torch.from_numpy(self.image).permute(2, 0, 1)
        save_overlay(image, self.labels, self.palette, paths[1], self.classes)
        return paths

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.overlay(legend=True).save(buffer, "PNG")
        return buffer.getvalue()


class Predictable(nn.Module):
    """Base class of models with `predict`."""

    config: ModelConfig

    def for_inference(self) -> nn.Module:
        """Return the network that `predict` runs."""
        return self

    @overload
    def predict(self, images: ImageInput, *, probabilities: bool = False, **options: Any) -> Result: ...
    @overload
    def predict(self, images: Sequence[ImageInput], *, probabilities: bool = False, **options: Any) -> list[Result]: ...
    @overload
    def predict(
        self, images: Iterator[ImageInput], *, probabilities: bool = False, **options: Any
    ) -> Iterator[Result]: ...
    def predict(self, images: Any, *, probabilities: bool = False, **options: Any) -> Any:
        """Predict one image, or several.

        Args:
            images: a path, a Pillow image, a uint8 array of shape (H, W), (H, W, 3) or (H, W, 4), a uint8 tensor of
                shape (3, H, W), or a list or generator of these.
            probabilities: also return the class probabilities.
            options: arguments of `Predictor`: size, scales, flip, window, average, precision.

        Returns:
            A Result at the size of the image; a list of results for a list, a generator for a generator.
        """
        predictor = Predictor(self.for_inference(), **options)
        if isinstance(images, Iterator):
            return (_predict(predictor, image, self.config, probabilities) for image in images)
        if isinstance(images, list | tuple):
            return [_predict(predictor, image, self.config, probabilities) for image in images]
        return _predict(predictor, images, self.config, probabilities)


def _predict(predictor: Predictor, image: Any, config: ModelConfig, probabilities: bool) -> Result:
    pixels = read_pixels(image)  # (3, H, W)
    size = (pixels.shape[1], pixels.shape[2])
    labels = np.empty(size, dtype=np.uint8)
    found: NDArray[np.float32] | None = None
    for rows, columns, scores in predictor.parts(pixels):
        labels[rows, columns] = scores.max(0).indices.to(torch.uint8).cpu().numpy()
        if probabilities:
            if found is None:
                found = np.empty((len(scores), *size), dtype=np.float32)
            part = scores if predictor.average == "probabilities" else scores.softmax(0)
            found[:, rows, columns] = part.cpu().numpy()
    number = config.num_classes
    return Result(
        labels,
        config.classes or tuple(str(k) for k in range(number)),
        config.palette or distinct_colors(number),
        pixels.permute(1, 2, 0).numpy(),
        Path(image).stem if isinstance(image, str | Path) else "image",
        found,
        config.mask_values,
    )


def _run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Return the run lengths of a mask (H, W) as COCO has them: column by column, zeros first."""
    flat = np.concatenate(([False], mask.T.reshape(-1)))
    edges = np.flatnonzero(flat[1:] != flat[:-1])
    lengths: list[int] = np.diff(np.concatenate(([0], edges, [mask.size]))).tolist()
    return lengths
