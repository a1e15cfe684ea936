"""Where attentions fight: pixels that a part of a model had right and the whole lost, and those it alone won.

Shapes: N batch, V views of which the last is the whole and the others its B parts, H x W pixels, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from caaseg.analysis.ranking import Ranking
from caaseg.analysis.views import Gates, Views, gates_of
from caaseg.data.loader import EvaluationLoader
from caaseg.data.sample import IGNORE, SegmentationDataset
from caaseg.evaluation.evaluate import check_classes
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models.predictor import Predictor
from caaseg.models.segmenter import Segmenter


class Marks(NamedTuple):
    """Kinds of labelled pixels, (..., H, W), bool."""

    lost: Tensor  # some part has it right, the whole has not
    won: Tensor  # the whole has it right, no part has
    disagree: Tensor  # the parts do not all say the same; nowhere, if there is but one


def marks(views: Tensor, labels: Tensor) -> Marks:
    """Tell the kinds apart.

    Args:
        views: predicted class ids, (..., V, H, W), the whole last.
        labels: (..., H, W); pixels labelled IGNORE are of no kind.
    """
    labelled = labels != IGNORE
    right = views == labels.unsqueeze(-3)  # (..., V, H, W)
    some, whole = right[..., :-1, :, :].any(-3), right[..., -1, :, :]
    disagree = (views[..., :-1, :, :] != views[..., :1, :, :]).any(-3)
    return Marks(labelled & some & ~whole, labelled & whole & ~some, labelled & disagree)


class ConflictCounts:
    """Labelled pixels of each kind by their true class, added up image by image."""

    def __init__(self, num_views: int, num_classes: int, device: torch.device | str = "cpu") -> None:
        self.views = [ConfusionMatrix(num_classes, device) for _ in range(num_views)]
        """Of each view, the whole last."""
        self.lost, self.won, self.disagree = torch.zeros(3, num_classes, dtype=torch.int64, device=device)  # (K,) each
        self.lost_from = torch.zeros(num_views - 1, num_classes, dtype=torch.int64, device=device)
        """Pixels that each part has right and the whole has not, (B, K)."""

    def update(self, views: Tensor, labels: Tensor) -> Marks:
        """Add images: predicted class ids (N, V, H, W) and labels (N, H, W). Returns what was counted."""
        for matrix, view in zip(self.views, views.unbind(1), strict=True):
            matrix.update(view, labels)
        found = marks(views, labels)
        for counts, pixels in zip((self.lost, self.won, self.disagree), found, strict=True):
            counts += self._by_class(pixels, labels)
        for counts, view in zip(self.lost_from, views[:, :-1].unbind(1), strict=True):
            counts += self._by_class(found.lost & (view == labels), labels)
        return found

    @property
    def labelled(self) -> Tensor:
        """(K,) pixels of each class."""
        return self.views[-1].counts.sum(1)

    @property
    def won_over(self) -> Tensor:
        """(B, K) pixels that the whole has right and each part has not."""
        right = torch.stack([matrix.counts.diagonal() for matrix in self.views])  # (V, K)
        both = right[:-1] - self.lost_from
        return right[-1] - both

    def _by_class(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return torch.bincount(labels[pixels].to(torch.int64), minlength=len(self.lost))


class ImageCounts(NamedTuple):
    """An image's numbers of pixels."""

    name: str
    labelled: int
    lost: int
    won: int
    disagree: int

    @property
    def lost_share(self) -> float:
        return self.lost / self.labelled

    @property
    def order(self) -> tuple[float, str]:
        """Images that lost most come first."""
        return -self.lost_share, self.name


class Conflict(NamedTuple):
    """An image with what each view made of it."""

    counts: ImageCounts
    image: Tensor  # (3, H, W) uint8
    label: Tensor  # (H, W) uint8
    views: Tensor  # (V, H, W) uint8
    gates: Gates | None  # of a CAA model


@dataclass(frozen=True, kw_only=True, eq=False)
class Conflicts:
    """What a study of a split found."""

    names: tuple[str, ...]
    """Of the views, the whole last."""
    classes: tuple[str, ...]
    counts: ConflictCounts
    images: tuple[ImageCounts, ...]
    """All that have a labelled pixel, by the share of their labelled pixels that was lost, the largest first."""
    worst: tuple[Conflict, ...]
    """The first of each stretch of the split, in the same order."""


def study_conflicts(
    model: Segmenter,
    dataset: SegmentationDataset,
    *,
    number: int = 5,
    workers: int = 0,
    seen: Callable[[int], None] | None = None,
) -> Conflicts:
    """Compare a model's parts with the whole on every image of a dataset, whole and at its own scale.

    Images come and go one by one. The split is cut into equal stretches, of which the worst image each is kept:
    neighbours, as of one film, are much alike. Of the others some numbers are kept.

    Args:
        model: a danet, axial_se or caa model in evaluation mode.
        dataset: what to look at.
        number: how many images to keep.
        workers: processes that read beside this one; 0 reads in this one.
        seen: told how many images are done.
    """
    views = Views(model)
    predictor = Predictor(views)
    num_classes = len(dataset.classes)
    check_classes(model.config.num_classes, dataset)
    counts = ConflictCounts(len(views.names), num_classes, predictor.device)
    ranking: Ranking[ImageCounts, Conflict] = Ranking(len(dataset), number)
    pin = predictor.device.type == "cuda"
    for index, batch in enumerate(EvaluationLoader(dataset, workers=workers, pin_memory=pin)):
        of_views = predictor.scores(batch.images).chunk(len(views.names), dim=1)  # V times (1, K, H, W)
        predictions = torch.stack([scores.argmax(1) for scores in of_views], dim=1).to(torch.uint8)  # (1, V, H, W)
        found = counts.update(predictions, batch.labels.to(predictor.device))
        labelled = int((batch.labels != IGNORE).sum())
        if labelled > 0:
            one = ImageCounts(batch.names[0], labelled, *(int(pixels.sum()) for pixels in found))
            kept = partial(Conflict, one, batch.images[0], batch.labels[0], predictions[0].cpu(), None)
            ranking.add(index, one, kept)
        if seen is not None:
            seen(index + 1)
    images, worst = ranking.images, ranking.shown
    if model.head.flattens_gates:
        worst = tuple(conflict._replace(gates=gates_of(model, conflict.image)) for conflict in worst)
    return Conflicts(
        names=views.names,
        classes=tuple(dataset.classes),
        counts=counts,
        images=images,
        worst=worst,
    )
