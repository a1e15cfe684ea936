"""Small copies of the official directory trees of the datasets, and helpers of the data tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat
from scipy.sparse import csc_array
from torch import Tensor

from caaseg.data.datasets.scenes import Scenes
from caaseg.data.sample import IGNORE

Label = NDArray[Any]

CAMVID = Path(__file__).parents[3] / "shared" / "data" / "camvid"
"""The real CamVid next to the repository, if it exists."""


def no_progress(step: str, done: int, total: int | None) -> None:
    """Progress callback that does nothing."""


def make_image(seed: int, height: int = 12, width: int = 16) -> Image.Image:
    """Return a smooth image, which lossy encoders change little."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def save_image(path: Path, seed: int = 0, height: int = 12, width: int = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_image(seed, height, width).save(path)


def save_mask(path: Path, values: Label) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def values_of(*values: int, height: int = 12, width: int = 16) -> Label:
    """Return a label map of exactly these values."""
    return np.resize(np.asarray(values), (height, width))


def values_in(label: Tensor) -> list[int]:
    """Return the sorted values of a label."""
    return sorted(set(label.flatten().tolist()))


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def folder_of_scenes(root: Path, number: int, size: tuple[int, int]) -> list[Path]:
    """Write the first scenes of split val as a dataset `folder`; return the paths of the images."""
    scenes = Scenes("val", length=number, size=size)
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    samples = [scenes[k] for k in range(number)]
    for image, label, name in samples:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(root / "images" / f"{name}.png")
        save_mask(root / "masks" / f"{name}.png", label.numpy())
    write_lines(root / "train.txt", [])
    write_lines(root / "val.txt", [sample.name for sample in samples])
    (root / "classes.yaml").write_text(f"classes: [{', '.join(scenes.classes)}]\nignore: [{IGNORE}]\n")
    return [root / "images" / f"{sample.name}.png" for sample in samples]


def camvid(root: Path, *, suffix: str = ".png", full_paths: bool = False) -> None:
    for split, number in (("train", 3), ("val", 2), ("test", 2)):
        names = [f"0001TP_{split}{k}" for k in range(number)]
        for k, name in enumerate(names):
            save_image(root / split / f"{name}{suffix}", seed=k)
            save_mask(root / f"{split}annot" / f"{name}.png", values_of(0, 5, 10, 11))
        prefix = f"/SegNet/CamVid/{split}"
        paths = [f"{prefix}/{name}.png {prefix}annot/{name}.png" for name in names]
        write_lines(root / f"{split}.txt", paths if full_paths else names)


def cityscapes(root: Path) -> None:
    for split, city in (("train", "aachen"), ("train", "ulm"), ("val", "lindau"), ("test", "bonn")):
        for frame in range(2):
            stem = f"{city}/{city}_000000_{frame:06d}"
            save_image(root / "leftImg8bit" / split / f"{stem}_leftImg8bit.png", seed=frame)
            save_mask(root / "gtFine" / split / f"{stem}_gtFine_labelIds.png", values_of(0, 7, 33, 4))
            save_mask(root / "gtFine" / split / f"{stem}_gtFine_instanceIds.png", values_of(7))  # part of the archive


def coco_stuff_10k(root: Path, values: Label | None = None, *, train: int = 3, test: int = 2) -> None:
    for split, number in (("train", train), ("test", test)):
        names = [f"COCO_train2014_{k:012d}" for k in range(number * 10, number * 11)]
        for name in names:
            save_image(root / "images" / f"{name}.jpg")
            (root / "annotations").mkdir(parents=True, exist_ok=True)
            labels = values_of(0, 1, 90, 92, 182) if values is None else values
            content = {"S": labels.astype(np.uint8), "captions": np.array(["a", "b"], dtype=object)}
            savemat(root / "annotations" / f"{name}.mat", content, do_compression=True)
        write_lines(root / "imageLists" / f"{split}.txt", names)


def coco_stuff_164k(root: Path) -> None:
    for split, number in (("train", 3), ("val", 2)):
        for k in range(number):
            save_image(root / "images" / f"{split}2017" / f"{k:012d}.jpg")
            save_mask(root / "annotations" / f"{split}2017" / f"{k:012d}.png", values_of(0, 89, 91, 181, 255))


def ade20k(root: Path, *, train: int = 3) -> None:
    """One image of each split is grayscale, and one very small."""
    for split, directory, number in (("train", "training", train), ("val", "validation", 2)):
        for k in range(1, number + 1):
            name, (height, width) = f"ADE_{split}_{k:08d}", (2, 3) if k == 2 else (12, 16)
            image = root / "images" / directory / f"{name}.jpg"
            image.parent.mkdir(parents=True, exist_ok=True)
            make_image(k, height, width).convert("L" if k == 1 else "RGB").save(image)
            save_mask(
                root / "annotations" / directory / f"{name}.png", values_of(0, 1, 8, 150, height=height, width=width)
            )
    write_lines(root / "objectInfo150.txt", ["part of the archive"])


VOC_NAMES = {"train": ["2007_000032", "2007_000039"], "val": ["2007_000033"]}
SBD_NAMES = {"train": ["2007_000032", "2008_000002"], "val": ["2007_000033", "2008_000003"]}
"""Other splits than those of VOC: one of train and one of val are in VOC, the others only here."""


def voc2012(root: Path) -> None:
    voc = root / "VOCdevkit" / "VOC2012"
    for name in sorted({name for names in (*VOC_NAMES.values(), *SBD_NAMES.values()) for name in names}):
        save_image(voc / "JPEGImages" / f"{name}.jpg")
    trainval = [name for names in VOC_NAMES.values() for name in names]
    for split, names in {**VOC_NAMES, "trainval": trainval}.items():
        for name in names:
            save_palette_mask(voc / "SegmentationClass" / f"{name}.png", values_of(0, 1, 20, 255))
            save_palette_mask(voc / "SegmentationObject" / f"{name}.png", values_of(0, 1, 2, 3, 255))
        write_lines(voc / "ImageSets" / "Segmentation" / f"{split}.txt", names)


def save_palette_mask(path: Path, values: Label) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.fromarray(values.astype(np.uint8))
    mask.putpalette([(37 * k + channel) % 256 for k in range(256) for channel in (0, 85, 170)])
    mask.save(path)


def sbd(root: Path, values: Label | None = None) -> None:
    dataset = root / "benchmark_RELEASE" / "dataset"
    for split, names in SBD_NAMES.items():
        for name in names:
            save_image(dataset / "img" / f"{name}.jpg")
            save_sbd_mat(dataset / "cls" / f"{name}.mat", values_of(0, 5, 20) if values is None else values)
        write_lines(dataset / f"{split}.txt", names)


def save_sbd_mat(path: Path, values: Label) -> None:
    """Save a struct as in SBD: boundaries of each class in a cell array of sparse matrices, labels, classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    boundaries = np.empty((20, 1), dtype=object)
    for k in range(20):
        boundaries[k, 0] = csc_array((values == k + 1).astype(float))
    present = np.unique(values[values > 0]).astype(np.uint8)[:, None]
    struct = {"Boundaries": boundaries, "Segmentation": values.astype(np.uint8), "CategoriesPresent": present}
    savemat(path, {"GTcls": struct}, do_compression=True)


CONTEXT_NAMES = {"train": ["2008_000002", "2008_000003"], "val": ["2010_000001"]}


def voc2010(root: Path) -> None:
    voc = root / "VOCdevkit" / "VOC2010"
    for split, names in CONTEXT_NAMES.items():
        for name in names:
            save_image(voc / "JPEGImages" / f"{name}.jpg")
        write_lines(voc / "ImageSets" / "Main" / f"{split}.txt", names)
    save_image(voc / "JPEGImages" / "2007_000999.jpg")  # VOC has images that Context does not use


def context_mat(root: Path, values: Label) -> None:
    (root / "trainval").mkdir(parents=True)
    for name in (name for names in CONTEXT_NAMES.values() for name in names):
        savemat(root / "trainval" / f"{name}.mat", {"LabelMap": values.astype(np.uint16)}, do_compression=True)


def context_json(root: Path, values: Label) -> None:
    images, regions = [], []
    for split, names in CONTEXT_NAMES.items():
        for name in names:
            number = int(name.replace("_", ""))
            height, width = values.shape
            images.append(
                {"file_name": f"{name}.jpg", "image_id": number, "phase": split, "height": height, "width": width}
            )
            for raw in np.unique(values[values > 0]).tolist():
                counts = encode_rle(values == raw)
                segmentation = {"size": [height, width], "counts": counts}
                regions.append({"image_id": number, "category_id": raw, "segmentation": segmentation})
    path = root / "VOCdevkit" / "VOC2010" / "trainval_merged.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annos_segmentation": regions, "categories": []}))


def encode_rle(mask: NDArray[np.bool_]) -> str:
    """Encode a mask as COCO's compressed run lengths, one number and one character at a time."""
    runs: list[int] = []
    current, length = False, 0
    for pixel in mask.T.ravel().tolist():
        if pixel != current:
            runs.append(length)
            current, length = pixel, 0
        length += 1
    runs.append(length)
    text = ""
    for k, run in enumerate(runs):
        number = run - runs[k - 2] if k > 2 else run
        more = True
        while more:
            bits = number & 31
            number >>= 5
            more = number != (-1 if bits & 16 else 0)
            text += chr(48 + bits + (32 if more else 0))
    return text
