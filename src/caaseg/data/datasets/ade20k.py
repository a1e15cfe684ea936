"""ADE20K as in the scene parsing benchmark (SceneParse150), with images/ and annotations/.

The PNG files store 0 for pixels of no class, and class ids plus one for all others.
"""

from pathlib import Path

from caaseg.data.datasets.info import Archive, DatasetInfo
from caaseg.data.datasets.pairs import Pair, PairDataset, check_split, files_by_stem
from caaseg.data.labels import LabelTable, load_class_table
from caaseg.data.sample import IGNORE, BadFileError

CLASSES = load_class_table("ade20k")
OTHER = 0  # value in the label files; samples have IGNORE
FROM_PNG = LabelTable(
    {OTHER: IGNORE} | {value: k for k, value in enumerate(CLASSES.values)},
    advice=(
        "the label was probably shifted by one before (to 0 to 149, and 255 for pixels of no class), or belongs to the "
        "full ADE20K; use the files of ADEChallengeData2016.zip as published"
    ),
)

DIRECTORY = "ADEChallengeData2016"
DIRECTORIES = {"train": "training", "val": "validation"}


class ADE20K(PairDataset):
    """ADE20K, 150 classes. Images may be grayscale, and have any size."""

    splits = ("train", "val")

    def __init__(self, root: Path, split: str) -> None:
        check_split("ade20k", split, self.splits)
        directory = root / DIRECTORY if (root / DIRECTORY).is_dir() else root
        images, labels = (directory / kind / DIRECTORIES[split] for kind in ("images", "annotations"))
        if not images.is_dir():
            raise BadFileError(
                f"{images}: no such directory; expected the images of ADE20K; "
                "run caaseg data prepare ade20k, or point --root at the dataset"
            )
        super().__init__(
            (Pair(name, image, labels / f"{name}.png") for name, image in files_by_stem(images, (".jpg",)).items()),
            classes=CLASSES.names,
            palette=CLASSES.palette,
            read_label=FROM_PNG.read,
            file_globs=((labels, "*.png"),),
        )


INFO = DatasetInfo(
    title="ADE20K, SceneParse150",
    open=ADE20K,
    classes=CLASSES.names,
    palette=CLASSES.palette,
    counts={"train": 20210, "val": 2000},
    image_size="about 683 x 512",
    how="prepare downloads it (1 GB)",
    archives=(
        Archive(
            file="ADEChallengeData2016.zip",
            max_gigabytes=2,
            contents={DIRECTORY: DIRECTORY},
            address="http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip",
            sha1="219e1696abb36c8ba3a3afe7fb2f4b4606a897c7",
        ),
    ),
)
