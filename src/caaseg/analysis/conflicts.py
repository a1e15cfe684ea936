"""Conflicts between attention branches: pixels that a part of a model predicts correctly and the whole does not.

The parts and the whole are called views. The branches of DANet (spatial and channel attention) and the channel branch
of the sequential design (axial_se) have their own classifiers. CAA has no branches, because its channel attention is
a factor of the spatial attention. Its views are the same network with gates replaced by their
means. The mean over positions still weights channels but ignores location; the mean over positions and channels
weights nothing. The network was not trained with averaged gates.

Shapes: N batch, V views (the last is the whole model, the others are its B = V - 1 parts), K classes, H x W pixels;
h x w positions and C channels of the attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from caaseg.analysis.ranking import Ranking
from caaseg.attention import ChannelizedAxialAttention, channelized_axial_attention
from caaseg.data.loader import EvaluationLoader
from caaseg.data.sample import IGNORE, SegmentationDataset
from caaseg.data.transforms import normalize
from caaseg.errors import CaasegError
from caaseg.evaluation.evaluate import check_classes
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models.heads import HEADS, head_class
from caaseg.models.predictor import Predictor
from caaseg.models.resize import resize
from caaseg.models.segmenter import Segmenter

GateMean = Literal["none", "positions", "all"]
GATE_MEANS: tuple[tuple[GateMean, GateMean], ...] = (
    ("positions", "none"),
    ("none", "positions"),
    ("positions", "positions"),
    ("all", "all"),
)
"""Means of the column gate and of the row gate in the views of a head with gates."""


class Views(nn.Module):
    """Return the logits of all views of a model, concatenated along the class axis: (N, V * K, H, W)."""

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        check_head(model)
        self.model = model
        self.backbone = model.backbone  # a Predictor normalizes images with its mean and std
        self.config = model.config  # and resizes them to the size of the training images
        self.names = model.head.views

    def forward(self, images: Tensor) -> Tensor:
        features = self.model.features(images)
        whole = self.model.classify(features)
        views = [whole.branches[name] for name in self.names[:-1] if name in whole.branches]  # (N, K, h, w) each
        if self.model.head.averages_gates:
            for column, row in GATE_MEANS:
                with _block(self.model).register_forward_hook(partial(_average_hook, column=column, row=row)):
                    views.append(self.model.classify(features).logits)
        return torch.cat([resize(view, images.shape[2:]) for view in (*views, whole.logits)], dim=1)


def check_head(model: Segmenter) -> None:
    """Raise CaasegError for a head that has neither branches nor gates."""
    if not model.head.views:
        heads = {name: head_class(name) for name in HEADS if head_class(name).views}
        branches = ", ".join(name for name, head in heads.items() if not head.averages_gates)
        gates = ", ".join(name for name, head in heads.items() if head.averages_gates)
        raise CaasegError(
            f"the model's head is {model.config.head}, which has neither attention branches nor axial gates to study; "
            f"expected {branches} (branches) or {gates} (gates)"
        )


def average_gates(block: ChannelizedAxialAttention, features: Tensor, *, column: GateMean, row: GateMean) -> Tensor:
    """Return the output of a CAA block with averaged gates.

    Args:
        block: a block with gates.
        features: input of the block, (N, C', h, w).
        column: mean of the column gate, which has one vector per image row: over positions, over all of it, or none.
        row: the same for the row gate, which has one vector per image column.
    """
    gates = _gates(block, features)
    g_col, g_row = _average(gates.column, column), _average(gates.row, row)
    keys_and_values = block.column_keys(features), block.row_keys(features), block.values(features)
    return channelized_axial_attention(*keys_and_values, lambda _: g_col, lambda _: g_row, implementation="factorised")


def _average(gate: Tensor, mean: GateMean) -> Tensor:
    """Replace a gate by its mean over positions, or over positions and channels: (N, L, C) -> (N, L, C)."""
    if mean == "none":
        return gate
    return gate.mean(1 if mean == "positions" else (1, 2), keepdim=True).expand_as(gate)


def _average_hook(
    block: ChannelizedAxialAttention, inputs: tuple[Tensor], _: Tensor, *, column: GateMean, row: GateMean
) -> Tensor:
    return average_gates(block, inputs[0], column=column, row=row)


class Gates(NamedTuple):
    """The gates of a CAA block. `image_gates` returns them without the batch axis."""

    column: Tensor  # (N, h, C), one vector per image row
    row: Tensor  # (N, w, C), one vector per image column


@torch.inference_mode()
def image_gates(model: Segmenter, image: Tensor) -> Gates:
    """Return the gates (h, C) and (w, C) of a CAA model in evaluation mode for an image (3, H, W), uint8."""
    block, inputs = _block(model), []
    images = normalize(image[None].to(model.classifier.weight.device), model.backbone.mean, model.backbone.std)
    with block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])):
        model.coarse(images)
    return Gates(*(gate[0].float().cpu() for gate in _gates(block, inputs[0])))


def _gates(block: ChannelizedAxialAttention, features: Tensor) -> Gates:
    maps = block.explain(features)
    assert maps.column_gate is not None
    assert maps.row_gate is not None
    return Gates(maps.column_gate, maps.row_gate)


def _block(model: Segmenter) -> ChannelizedAxialAttention:
    block = model.head.block
    assert isinstance(block, ChannelizedAxialAttention)
    return block


class Marks(NamedTuple):
    """Masks of labeled pixels, (..., H, W), bool."""

    lost: Tensor  # at least one part is right, the whole model is wrong
    won: Tensor  # the whole model is right, no part is
    disagree: Tensor  # the parts predict different classes; empty for a single part


def mark_conflicts(views: Tensor, labels: Tensor) -> Marks:
    """Return the masks of lost, won and disagreeing pixels. Ignored pixels are in none of them.

    Args:
        views: predicted class ids, (..., V, H, W), the whole model last.
        labels: (..., H, W).
    """
    right = views == labels.unsqueeze(-3)  # (..., V, H, W); no view predicts IGNORE
    any_part, whole = right[..., :-1, :, :].any(-3), right[..., -1, :, :]
    disagree = (views[..., :-1, :, :] != views[..., :1, :, :]).any(-3)
    return Marks(any_part & ~whole, whole & ~any_part, disagree & (labels != IGNORE))


class ConflictCounts:
    """Counts of lost, won and disagreeing pixels by true class, accumulated over images."""

    def __init__(self, num_views: int, num_classes: int, device: torch.device | str = "cpu") -> None:
        self.views = [ConfusionMatrix(num_classes, device) for _ in range(num_views)]
        """One per view, the whole model last."""
        self.lost, self.won, self.disagree = torch.zeros(3, num_classes, dtype=torch.int64, device=device)  # (K,) each
        self.lost_from = torch.zeros(num_views - 1, num_classes, dtype=torch.int64, device=device)
        """Pixels that each part predicts correctly and the whole model does not, (B, K)."""

    def update(self, views: Tensor, labels: Tensor) -> Marks:
        """Add predicted class ids (N, V, H, W) with their labels (N, H, W). Returns the masks that were counted."""
        for matrix, view in zip(self.views, views.unbind(1), strict=True):
            matrix.update(view, labels)
        marks = mark_conflicts(views, labels)
        for counts, mask in zip((self.lost, self.won, self.disagree), marks, strict=True):
            counts += self._by_class(mask, labels)
        for counts, view in zip(self.lost_from, views[:, :-1].unbind(1), strict=True):
            counts += self._by_class(marks.lost & (view == labels), labels)
        return marks

    @property
    def labeled(self) -> Tensor:
        """(K,) labeled pixels of each class."""
        return self.views[-1].counts.sum(1)

    @property
    def won_over(self) -> Tensor:
        """(B, K) pixels that the whole model predicts correctly and each part does not."""
        right = torch.stack([matrix.counts.diagonal() for matrix in self.views])  # (V, K)
        both = right[:-1] - self.lost_from
        return right[-1] - both

    def _by_class(self, mask: Tensor, labels: Tensor) -> Tensor:
        return torch.bincount(labels[mask].to(torch.int64), minlength=len(self.lost))


class ImageCounts(NamedTuple):
    """Pixel counts of one image."""

    name: str
    labeled: int
    lost: int
    won: int
    disagree: int

    @property
    def lost_share(self) -> float:
        return self.lost / self.labeled

    @property
    def rank_key(self) -> tuple[float, str]:
        """Images with the largest share of lost pixels rank first."""
        return -self.lost_share, self.name


class ConflictImage(NamedTuple):
    """An image with the predictions of all views."""

    counts: ImageCounts
    image: Tensor  # (3, H, W) uint8
    label: Tensor  # (H, W) uint8
    views: Tensor  # (V, H, W) uint8
    gates: Gates | None = None  # of a CAA model


@dataclass(frozen=True, kw_only=True, eq=False)
class Conflicts:
    """Result of `study_conflicts`."""

    names: tuple[str, ...]
    """Names of the views, the whole model last."""
    classes: tuple[str, ...]
    counts: ConflictCounts
    images: tuple[ImageCounts, ...]
    """All images with a labeled pixel, by share of lost pixels, largest first."""
    worst: tuple[ConflictImage, ...]
    """The first-ranked image of each section of the split, in the same order."""


def study_conflicts(
    model: Segmenter,
    dataset: SegmentationDataset,
    *,
    num_shown: int = 5,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Conflicts:
    """Compare the parts of a model with the whole on every image of a dataset, at its native size.

    The split is divided into `num_shown` equal sections, and the image with the largest share of lost pixels is
    returned from each. For all other images only pixel counts are returned.

    Args:
        model: a danet, axial_se or caa model in evaluation mode.
        dataset: the dataset.
        num_shown: number of images to return.
        workers: worker processes that load images; 0 loads in this process.
        progress: called with the number of images done.
    """
    views = Views(model)
    predictor = Predictor(views)
    check_classes(model.config.num_classes, dataset)
    counts = ConflictCounts(len(views.names), len(dataset.classes), predictor.device)
    ranking: Ranking[ImageCounts, ConflictImage] = Ranking(len(dataset), num_shown)
    pin = predictor.device.type == "cuda"
    for index, batch in enumerate(EvaluationLoader(dataset, workers=workers, pin_memory=pin)):
        logits = predictor.scores(batch.images).chunk(len(views.names), dim=1)  # V times (1, K, H, W)
        predictions = torch.stack([view.argmax(1) for view in logits], dim=1).to(torch.uint8)  # (1, V, H, W)
        marks = counts.update(predictions, batch.labels.to(predictor.device))
        labeled = int((batch.labels != IGNORE).sum())
        if labeled > 0:
            found = ImageCounts(batch.names[0], labeled, *(int(mask.sum()) for mask in marks))
            shown = ConflictImage(found, batch.images[0], batch.labels[0], predictions[0].cpu())
            ranking.add(index, found, shown)
        if progress is not None:
            progress(index + 1)
    images, worst = ranking.images, ranking.shown
    if model.head.averages_gates:
        worst = tuple(image._replace(gates=image_gates(model, image.image)) for image in worst)
    return Conflicts(names=views.names, classes=tuple(dataset.classes), counts=counts, images=images, worst=worst)
