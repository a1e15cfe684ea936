"""CamVid in the SegNet split: train/, trainannot/ and train.txt, and so for val and test, in one folder."""

from pathlib import Path

from caaseg.data.datasets.pairs import IMAGE_SUFFIXES, Pair, PairDataset, by_stem, check_split, read_names
from caaseg.data.labels import LabelTable, shipped_classes
from caaseg.data.sample import IGNORE

CLASSES = shipped_classes("camvid")
UNLABELLED = 11  # what the files store; samples carry IGNORE


class CamVid(PairDataset):
    """CamVid, 11 classes, 480 x 360. Images may be PNG, as published, or re-encoded."""

    def __init__(self, root: Path, split: str) -> None:
        check_split("camvid", split, self.splits)
        folder = root / "CamVid" if (root / "CamVid").is_dir() else root
        images = by_stem(folder / split, IMAGE_SUFFIXES)
        # A line is a name, or, as published, the paths of image and mask on the machine of the list's maker.
        lines = read_names(folder / f"{split}.txt", "run caaseg data prepare camvid, or point --root at the dataset")
        names = [Path(line.split()[0]).stem for line in lines]
        super().__init__(
            (
                Pair(name, images.get(name, folder / split / f"{name}.png"), folder / f"{split}annot" / f"{name}.png")
                for name in names
            ),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=LabelTable({**{raw: k for k, raw in enumerate(CLASSES.raw)}, UNLABELLED: IGNORE}).read,
            owned=((folder / split, "*"), (folder / f"{split}annot", "*.png")),
        )
