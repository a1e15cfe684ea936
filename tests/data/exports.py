"""The same ten labeled images in the format of each annotation tool."""

import base64
import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from tests.data import trees

CLASSES = ("background", "car", "road")
COLORS = {"background": (0, 0, 0), "car": (128, 64, 32), "road": (0, 200, 10)}
HEIGHT, WIDTH = 24, 32
NAMES = [f"photo{k}" for k in range(10)]
Rectangle = tuple[int, int, int, int]  # left, top, right, bottom: pixels left to right - 1


def rectangles(k: int) -> list[tuple[str, Rectangle]]:
    """Return the regions of image k; the car is smaller than the road, later, and partly above it."""
    return [("road", (2, 10, 30, 24)), ("car", (4 + k, 6, 12 + k, 15))]


def expected_label(k: int) -> NDArray[np.uint8]:
    label = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    for name, (left, top, right, bottom) in rectangles(k):
        label[top:bottom, left:right] = CLASSES.index(name)
    return label


def corners(rectangle: Rectangle) -> list[tuple[int, int]]:
    left, top, right, bottom = rectangle
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def save_images(directory: Path, suffix: str = ".jpg") -> None:
    for k, name in enumerate(NAMES):
        trees.save_image(directory / f"{name}{suffix}", seed=k, height=HEIGHT, width=WIDTH)


def region_mask(rectangle: Rectangle) -> NDArray[np.bool_]:
    left, top, right, bottom = rectangle
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.bool_)
    mask[top:bottom, left:right] = True
    return mask


def run_lengths(values: NDArray[np.bool_]) -> list[int]:
    """Return the run lengths of flat values, starting with zeros."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], values.astype(np.int8), [0]))))
    runs: list[int] = np.diff(np.concatenate(([0], edges, [len(values)]))).tolist()
    return runs if values[-1] == 0 else runs[:-1]


def coco(root: Path, *, as_masks: bool = False) -> Path:
    save_images(root / "images")
    annotations: list[dict[str, object]] = []
    for k in range(len(NAMES)):
        for name, rectangle in rectangles(k):
            mask = region_mask(rectangle)
            rle = {"size": [HEIGHT, WIDTH], "counts": run_lengths(mask.T.reshape(-1))}
            polygon = [[float(x) for point in corners(rectangle) for x in point]]
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": k,
                    "category_id": 10 * CLASSES.index(name),
                    "segmentation": rle if as_masks else polygon,
                }
            )
    content = {
        "images": [{"id": k, "file_name": f"{n}.jpg", "height": HEIGHT, "width": WIDTH} for k, n in enumerate(NAMES)],
        "annotations": annotations[::-1],  # the smaller region first: the area decides, not the order
        "categories": [{"id": 10 * CLASSES.index(name), "name": name} for name in ("road", "car")],
    }
    (root / "labels.json").write_text(json.dumps(content))
    return root


def coco_masks(root: Path) -> Path:
    return coco(root, as_masks=True)


def labelme(root: Path) -> Path:
    save_images(root)
    for k, name in enumerate(NAMES):
        shapes = []
        for label, rectangle in rectangles(k):
            left, top, right, bottom = rectangle
            shape = {"label": label, "shape_type": "polygon", "points": corners(rectangle)}
            if label == "car" and k % 3 == 1:
                shape |= {"shape_type": "rectangle", "points": [[left, top], [right, bottom]]}
            if label == "car" and k % 3 == 2:
                buffer = io.BytesIO()
                Image.fromarray(np.full((bottom - top, right - left), True)).save(buffer, "PNG")
                encoded = base64.b64encode(buffer.getvalue()).decode()
                shape |= {"shape_type": "mask", "points": [[left, top], [right - 1, bottom - 1]], "mask": encoded}
            shapes.append(shape)
        content = {"imagePath": f"{name}.jpg", "imageHeight": HEIGHT, "imageWidth": WIDTH, "shapes": shapes}
        (root / f"{name}.json").write_text(json.dumps(content))
    return root


def cvat(root: Path) -> Path:
    save_images(root / "images")
    annotations = ElementTree.Element("annotations")
    labels = ElementTree.SubElement(
        ElementTree.SubElement(ElementTree.SubElement(annotations, "meta"), "task"), "labels"
    )
    for name in ("car", "road"):
        ElementTree.SubElement(ElementTree.SubElement(labels, "label"), "name").text = name
    for k, name in enumerate(NAMES):
        size = {"width": str(WIDTH), "height": str(HEIGHT)}
        image = ElementTree.SubElement(annotations, "image", {"id": str(k), "name": f"{name}.jpg", **size})
        for depth, (label, rectangle) in reversed(list(enumerate(rectangles(k)))):
            left, top, right, bottom = rectangle
            order = {"label": label, "z_order": str(depth)}
            if k % 2:
                points = ";".join(f"{x:.2f},{y:.2f}" for x, y in corners(rectangle))
                ElementTree.SubElement(image, "polygon", {"points": points, **order})
            else:
                box = {"left": left, "top": top, "width": right - left, "height": bottom - top}
                runs = f"0, {(right - left) * (bottom - top)}"
                ElementTree.SubElement(image, "mask", {"rle": runs, **order, **{n: str(v) for n, v in box.items()}})
    ElementTree.ElementTree(annotations).write(root / "annotations.xml")
    return root


def cvat_masks(root: Path) -> Path:
    """Segmentation mask 1.1: labelmap.txt and color masks."""
    save_images(root / "JPEGImages")
    lines = ["# label:color_rgb:parts:actions"]
    lines += [f"{name}:{','.join(map(str, COLORS[name]))}::" for name in ("road", "car", "background")]
    trees.write_lines(root / "labelmap.txt", lines)
    for k, name in enumerate(NAMES):
        colors = np.array([COLORS[name] for name in CLASSES], dtype=np.uint8)
        (root / "SegmentationClass").mkdir(exist_ok=True)
        Image.fromarray(colors[expected_label(k)]).save(root / "SegmentationClass" / f"{name}.png")
    return root


def voc(root: Path) -> Path:
    """PASCAL VOC itself: palette masks of its own classes; car is 7 and road is called train, 19."""
    save_images(root / "JPEGImages")
    palette = [channel for k in range(256) for channel in voc_color(k)]
    (root / "SegmentationClass").mkdir(parents=True)
    for k, name in enumerate(NAMES):
        mask = Image.fromarray(np.array([0, 7, 19], dtype=np.uint8)[expected_label(k)])
        mask.putpalette(palette)
        mask.save(root / "SegmentationClass" / f"{name}.png")
    for split, names in (("train", NAMES[:7]), ("val", NAMES[7:])):
        trees.write_lines(root / "ImageSets" / "Segmentation" / f"{split}.txt", names)
    return root


def voc_color(k: int) -> list[int]:
    return [sum((k >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(8)) for channel in range(3)]


def roboflow(root: Path) -> Path:
    for k, name in enumerate(NAMES):
        directory = root / ("train" if k < 7 else "valid")
        trees.save_image(directory / f"{name}.jpg", seed=k, height=HEIGHT, width=WIDTH)
        trees.save_mask(directory / f"{name}_mask.png", expected_label(k))
        with (directory / "_classes.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["Pixel Value", " Class"], *([v, f" {n}"] for v, n in enumerate(CLASSES))])
    return root


def yolo(root: Path) -> Path:
    names = ("car", "road")
    (root / "data.yaml").parent.mkdir(parents=True, exist_ok=True)
    (root / "data.yaml").write_text(yaml.safe_dump({"names": dict(enumerate(names)), "train": "images/train"}))
    for k, name in enumerate(NAMES):
        split = "train" if k < 7 else "val"
        trees.save_image(root / "images" / split / f"{name}.jpg", seed=k, height=HEIGHT, width=WIDTH)
        lines = []
        for label, rectangle in rectangles(k):
            points = " ".join(f"{x / WIDTH:.6f} {y / HEIGHT:.6f}" for x, y in corners(rectangle))
            lines.append(f"{names.index(label)} {points}")
        trees.write_lines(root / "labels" / split / f"{name}.txt", lines)
    return root


def label_studio(root: Path) -> Path:
    save_images(root)
    tasks = []
    for k, name in enumerate(NAMES):
        results = []
        for label, rectangle in rectangles(k):
            size = {"original_width": WIDTH, "original_height": HEIGHT}
            if label == "road":
                points = [[100 * x / WIDTH, 100 * y / HEIGHT] for x, y in corners(rectangle)]
                results.append({"type": "polygonlabels", "value": {"points": points, "polygonlabels": [label]}, **size})
            else:
                brush = {"format": "rle", "rle": encode_brush(region_mask(rectangle)), "brushlabels": [label]}
                results.append({"type": "brushlabels", "value": brush, **size})
        image = f"/data/upload/3/0a1b2c3d-{name}.jpg"
        tasks.append({"id": k, "data": {"image": image}, "annotations": [{"result": results}]})
    (root / "project.json").write_text(json.dumps(tasks))
    return root


def encode_brush(mask: NDArray[np.bool_]) -> list[int]:
    """Encode a mask as Label Studio does: RGBA bytes, here in runs of one value and single values in turn."""
    values = np.repeat(np.where(mask.reshape(-1), 255, 0), 4).tolist()
    bits = f"{len(values):032b}{7:05b}" + "".join(f"{size - 1:04b}" for size in (3, 4, 8, 16))
    start = 0
    while start < len(values):
        end = start
        while end < len(values) and values[end] == values[start]:
            end += 1
        if end - start <= 8:
            bits += f"0{0:02b}{end - start - 1:03b}" + f"{values[start]:08b}" * (end - start)
        else:
            bits += f"1{3:02b}{end - start - 1:016b}{values[start]:08b}"
        start = end
    bits += "0" * (-len(bits) % 8)
    return [int(bits[k : k + 8], 2) for k in range(0, len(bits), 8)]


EXPORTS: Sequence[Callable[[Path], Path]] = (
    coco, coco_masks, labelme, cvat, cvat_masks, voc, roboflow, yolo, label_studio,
)  # fmt: skip
