"""Predictions of the app's models and their attention. Use from one thread: a model stores one image's attention."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from caaseg.analysis.pixel_attention import (
    ImageAttention,
    PixelAttention,
    most_attended,
    predict_with_attention,
    weight_per_class,
)
from caaseg.app.photos import Photo
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import Color
from caaseg.models.image_size import ImageSize
from caaseg.models.result import Predictable

MAX_ATTENTION_BYTES = 256 << 20
"""Limit of the memory for predictions and their attention. The least recently used ones are dropped first."""
GATES = 6  # channels with the largest gates, and as many with the smallest
CLASSES = 4  # classes with the largest weights
MIN_WEIGHT = 0.01  # smallest weight of a marked place


@dataclass(frozen=True)
class AppModel:
    """A model with its names and colors for the page."""

    name: str
    network: Predictable

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; numbers if the model was saved without names."""
        config = self.network.config
        return config.classes or tuple(f"class {k}" for k in range(config.num_classes))

    @property
    def palette(self) -> tuple[Color, ...]:
        """Colors of the classes; default colors if the model was saved without colors."""
        return self.network.config.palette or distinct_colors(self.network.config.num_classes)

    def description(self) -> dict[str, Any]:
        """Return everything that the page needs to know."""
        config = self.network.config
        return {
            "name": self.name,
            "head": config.head,
            "backbone": config.backbone,
            "classes": self.classes,
            "palette": self.palette,
            "license": config.license,
            "short_sides": config.short_sides,
        }


class Predictions:
    """Predictions by photo, model and size. The most recent ones stay in memory."""

    def __init__(self, models: Sequence[AppModel], max_bytes: int = MAX_ATTENTION_BYTES) -> None:
        self.models = models
        self._max_bytes = max_bytes
        self._recent: dict[tuple[str, int, ImageSize], ImageAttention] = {}  # the least recently used one first

    def get(self, photo: Photo, model: int, size: ImageSize) -> ImageAttention:
        """Return the prediction of a photo."""
        key = (photo.id, model, size)
        found = self._recent.pop(key, None)
        if found is None:
            found = predict_with_attention(self.models[model].network, photo.pixels(), size=size)
        self._recent[key] = found
        while len(self._recent) > 1 and sum(map(_bytes, self._recent.values())) > self._max_bytes:
            del self._recent[next(iter(self._recent))]
        return found

    def forget(self, photo_id: str) -> None:
        """Drop the predictions of a photo."""
        for key in [key for key in self._recent if key[0] == photo_id]:
            del self._recent[key]

    def summary(self, photo: Photo, model: int, size: ImageSize) -> dict[str, Any]:
        """Return the share of each class, and the size at which the photo was predicted."""
        found = self.get(photo, model, size)
        counts = np.bincount(found.labels.numpy().reshape(-1), minlength=len(self.models[model].classes))
        return {"shares": (counts / counts.sum()).tolist(), "predicted_size": found.predicted_size}

    def view_labels(self, photo: Photo, model: int, size: ImageSize) -> bytes:
        """Return the class ids at the size of the photo's view, one byte each, compressed with gzip."""
        labels = self.get(photo, model, size).labels.numpy()
        return gzip.compress(nearest(labels, photo.view_size).tobytes(), compresslevel=3)

    def explain(self, photo: Photo, model: int, size: ImageSize, pixel: tuple[int, int]) -> dict[str, Any]:
        """Return class and attention of a pixel."""
        found = self.get(photo, model, size)
        attention = found.at(pixel)
        about: dict[str, Any] = {"row": pixel[0], "column": pixel[1], "reason": found.without_maps}
        label = int(found.labels[pixel])
        return {**about, "label": label, "attention": None if attention is None else _describe(found, attention)}


def _describe(found: ImageAttention, attention: PixelAttention) -> dict[str, Any]:
    rows, columns = found.cell_centers()
    height, width = found.size
    labels = found.cell_labels()
    own_weight, places = most_attended(attention, labels)
    by_class = weight_per_class(attention.reach, labels)
    order = by_class.argsort(descending=True).tolist()[:CLASSES]
    return {
        "cells": attention.reach.shape,
        "predicted_size": found.predicted_size,
        "column": None if attention.column is None else attention.column.tolist(),
        "row": None if attention.row is None else attention.row.tolist(),
        "reach": attention.reach.flatten().tolist(),
        "cell": attention.cell,
        "own_weight": own_weight,
        "places": [
            {
                "y": rows[place.cell[0]].item() / height,
                "x": columns[place.cell[1]].item() / width,
                "weight": place.weight,
                "label": place.label,
            }
            for place in places
            if place.weight >= MIN_WEIGHT
        ],
        "by_class": [{"label": k, "weight": by_class[k].item()} for k in order if by_class[k] > 0],
        "gates": None if attention.gates is None else _describe_gates(attention.gates),
    }


def _describe_gates(gates: torch.Tensor) -> dict[str, Any]:
    """Return the channels with the largest and the smallest gates."""
    order = gates.argsort(descending=True, stable=True).tolist()
    number = min(GATES, max(1, len(order) // 2))
    values = gates.tolist()
    return {
        "number": len(order),
        "largest": [[k, values[k]] for k in order[:number]],
        "smallest": [[k, values[k]] for k in order[::-1][:number]],
    }


def nearest(labels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize labels to a height and width, nearest neighbor."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.int64) for new, old in zip(size, labels.shape, strict=True)
    )
    resized: NDArray[np.uint8] = labels[rows][:, columns]
    return resized


def _bytes(found: ImageAttention) -> int:
    maps = found.maps
    tensors = [] if maps is None else [value for value in maps if isinstance(value, torch.Tensor)]
    return found.labels.nbytes + sum(tensor.nbytes for tensor in tensors)
