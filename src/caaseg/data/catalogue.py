"""Datasets by name."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from torch.utils.data import ConcatDataset

from caaseg.data.datasets import ade20k, camvid, cityscapes, coco_stuff, folder, pascal_context, scenes, voc2012
from caaseg.data.datasets.info import DatasetInfo
from caaseg.data.datasets.pairs import PairDataset
from caaseg.data.labels import distinct_colors
from caaseg.data.sample import BadFileError, Color, Sample, SegmentationDataset
from caaseg.errors import CaasegError

DATASETS: dict[str, DatasetInfo] = {
    "pascal_context": pascal_context.INFO,
    "pascal_context_60": pascal_context.INFO_60,
    "coco_stuff_10k": coco_stuff.INFO_10K,
    "coco_stuff_164k": coco_stuff.INFO_164K,
    "ade20k": ade20k.INFO,
    "voc2012": voc2012.INFO,
    "cityscapes": cityscapes.INFO,
    "camvid": camvid.INFO,
    "scenes": scenes.INFO,
    "folder": folder.INFO,
}


def find(name: str) -> DatasetInfo:
    """Return the catalogue entry of a dataset."""
    if name not in DATASETS:
        raise CaasegError(f"no dataset is called {name!r}; expected any of {', '.join(DATASETS)}")
    return DATASETS[name]


def splits(name: str, root: Path) -> tuple[str, ...]:
    """Return the names of the splits of a dataset; the splits of a folder depend on its content."""
    info = find(name)
    return info.splits(root) if info.splits else tuple(info.counts)


def open_dataset(name: str, root: Path | None, split: str, **options: Any) -> SegmentationDataset:
    """Open a split of a dataset and check that all its files exist.

    Args:
        name: name in the catalogue.
        root: directory of its files; None for datasets without files.
        split: name of a split of the dataset, such as train, or several joined with +, such as train+val.
        options: further arguments of the dataset's class.
    """
    if "+" in split:
        return ConcatSplits([open_dataset(name, root, part, **options) for part in split.split("+")])
    info = find(name)
    if root is None and info.has_files:
        raise CaasegError(f"{name} needs the directory of its files; give it as --root")
    dataset = info.open(root, split, **options)
    if isinstance(dataset, PairDataset) and dataset.problems:
        raise BadFileError(dataset.problems[0])
    if len(dataset) == 0:
        raise BadFileError(f"{root}: no images in split {split} of {name}; expected at least one; see caaseg data list")
    if isinstance(dataset, PairDataset) and (missing := dataset.missing()):
        advice = f"run caaseg data check {name} --root {quote(str(root))} to list all problems"
        others = f", and {len(missing) - 1} more files of split {split} are missing" if len(missing) > 1 else ""
        raise BadFileError(f"{missing[0]}: no such file{others}; {advice}")
    return dataset


class ConcatSplits(ConcatDataset[Sample]):
    """Several splits with the same classes as one dataset."""

    def __init__(self, datasets: Sequence[SegmentationDataset]) -> None:
        super().__init__(datasets)  # type: ignore[arg-type]
        self.classes = tuple(datasets[0].classes)
        for dataset in datasets:
            if tuple(dataset.classes) != self.classes:
                raise CaasegError(
                    f"splits of {len(self.classes)} and {len(dataset.classes)} classes cannot be concatenated; "
                    "expected the same classes in the same order"
                )
        self.palette: tuple[Color, ...] = getattr(datasets[0], "palette", None) or distinct_colors(len(self.classes))
        self.mask_values = getattr(datasets[0], "mask_values", None)  # of the dataset folder


def with_palette(dataset: SegmentationDataset) -> SegmentationDataset:
    """Return a dataset that has a palette: the dataset itself, or a wrapper that adds distinct colors."""
    return dataset if getattr(dataset, "palette", None) else ConcatSplits([dataset])
