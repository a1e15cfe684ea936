"""Label exports of annotation tools with damaged files, values of other types, and hostile names."""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from numpy.random import Generator

from tests.data import exports
from tests.data.damage import mutated
from tests.hostile.material import HOSTILE_TEXTS, HOSTILE_VALUES, choice, shared_directory

FORMATS = (
    *(exports.coco, exports.coco_masks, exports.labelme, exports.cvat, exports.cvat_masks),
    *(exports.voc, exports.roboflow, exports.yolo, exports.label_studio),
)
TEXT_SUFFIXES = (".json", ".xml", ".txt", ".csv", ".yaml")
ENTITIES = '<!DOCTYPE a [<!ENTITY a0 "x">' + "".join(f'<!ENTITY a{k} "&a{k - 1};&a{k - 1};">' for k in range(1, 40))
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40)) + "names: [*a39]\n"
CONTENTS = {
    ".json": ("[" * 3000 + "]" * 3000, "3", '{"shapes": 3}', '{"images": [], "annotations": [], "categories": []}'),
    ".xml": (ENTITIES + "]><annotations>&a39;</annotations>", "<annotations><image/></annotations>"),
    ".yaml": (BOMB, "names: 3", "names: [[a], {b: c}]", "names: [a, a]"),
    ".csv": ("\0", "Pixel Value, Class\n1\n", "a,b\n" + "9" * 5000 + ",c\n", '"' + "x" * 200_000),
    ".txt": ("\0", "nan nan nan", "0 inf 0 1 1 0 1", "9" * 5000, "road:300,0,0::\n", "a:1,2,3\na:4,5,6\n", "\udcff"),
}


@cache
def made(number: int) -> Path:
    """Return the directory of a valid export."""
    return FORMATS[number](shared_directory() / f"export-{number}")


def case(rng: Generator, directory: Path) -> list[str]:
    export = directory / "export"
    shutil.copytree(made(int(rng.integers(len(FORMATS)))), export)
    files = sorted(path for path in export.rglob("*") if path.is_file())
    texts = [path for path in files if path.suffix in TEXT_SUFFIXES]
    file = choice(rng, texts if texts and rng.random() < 0.8 else files)
    choice(rng, [damage, change, change, change, replace])(rng, file)
    options = ["--unlabeled", choice(rng, HOSTILE_TEXTS)] if rng.random() < 0.1 else []
    options += ["--skip-faulty"] if rng.random() < 0.3 else []
    return ["data", "import", "export", "--out", "out/new", *options]


def damage(rng: Generator, file: Path) -> None:
    file.write_bytes(mutated(file.read_bytes(), rng))


def change(rng: Generator, file: Path) -> None:
    """Put another value into a JSON file, other content into another text file."""
    if file.suffix == ".json" and rng.random() < 0.8:
        file.write_text(json.dumps(changed(rng, json.loads(file.read_text()))))
    elif file.suffix in CONTENTS:
        file.write_text(choice(rng, CONTENTS[file.suffix]), errors="surrogateescape")
    else:
        damage(rng, file)


def changed(rng: Generator, content: Any) -> Any:
    """Return a JSON value with another value somewhere inside."""
    if rng.random() < 0.2 or not isinstance(content, dict | list) or not content:
        return choice(rng, HOSTILE_VALUES)
    key = choice(rng, list(content) if isinstance(content, dict) else range(len(content)))
    content[key] = changed(rng, content[key])
    return content


def replace(rng: Generator, file: Path) -> None:
    """Replace a file by something that is not a file of the export."""
    file.unlink()
    match int(rng.integers(4)):
        case 0:
            os.mkfifo(file)
        case 1:
            file.symlink_to(choice(rng, ["/dev/zero", "/etc/passwd", file.name, "../..", "missing"]))
        case 2:
            file.mkdir()
        case _:
            pass  # missing
