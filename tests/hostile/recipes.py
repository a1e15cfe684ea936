"""Recipe files and command-line options with damaged, impossible and hostile values."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from numpy.random import Generator

from caaseg.config import Recipe
from caaseg.recipes import load_recipe
from caaseg.settings import flat_fields
from tests.data.damage import mutated
from tests.hostile.material import (
    HOSTILE_TEXTS,
    HOSTILE_VALUES,
    RECIPE,
    TINY_TRAINING,
    choice,
    shared_data,
    shared_model,
    write_image,
)

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 60))
TEXTS = (
    *(BOMB, "a: &a [*a]", "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "", "\x00", "- 1", "3", "null"),
    *(
        "model: !!python/object/apply:os.system [x]",
        "a: !!timestamp x",
        "? [1]\n: 2",
        "model: 2024-13-99",
        "\ufeff",
        "---\n---\n",
    ),
    *(
        "model:\n" * 2,
        "<<: {a: 1}",
        "steps: " + "9" * 5000,
        "model: {head: [}",
        "%TAG ! x\n---\na: !x 1",
        "data: |\n  x",
    ),
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "predict model photo.png": (
        *("--out", "--scales", "--flip", "--window", "--average", "--output-stride", "--precision", "--device"),
        *("--probabilities", "--max-pixels", "--json", "--compare-grids"),
    ),
    "evaluate model --dataset folder --root data --workers 0": (
        *("--dataset", "--root", "--split", "--scales", "--window", "--batch-size", "--workers", "--json", "--average"),
    ),
    "data show folder --root data --out x.txt": ("--root", "--split", "--samples", "--out"),
    "data check folder --root data": ("--root", "--json"),
    "data prepare camvid --root root": ("--addresses",),
    "flops": ("--head", "--backbone", "--num-classes", "--output-stride", "--json", "--gate-layers"),
    "recipes": ("show", "copy", "--help"),
    "compare model model --dataset folder --root data --workers 0 --out x.txt": ("--images", "--split", "--out"),
}


def case(rng: Generator, directory: Path) -> list[str]:
    return choice(rng, [damaged_file, hostile_file, hostile_values, hostile_values, hostile_options])(rng, directory)


def damaged_file(rng: Generator, directory: Path) -> list[str]:
    (directory / "recipe.yaml").write_bytes(mutated(valid_recipe().encode(), rng))
    return use(rng)


def hostile_file(rng: Generator, directory: Path) -> list[str]:
    (directory / "recipe.yaml").write_text(choice(rng, TEXTS))
    return use(rng)


def hostile_values(rng: Generator, directory: Path) -> list[str]:
    """Change a value, in the file or with an option."""
    key = choice(rng, list(flat_fields(Recipe)))
    if rng.random() < 0.5:
        (directory / "recipe.yaml").write_text(
            yaml.safe_dump(changed(valid_values(), key, choice(rng, HOSTILE_VALUES)))
        )
        return use(rng)
    (directory / "recipe.yaml").write_text(valid_recipe())
    option = f"--{key}" if rng.random() < 0.5 else f"--{key.replace('_', '-')}"
    return [*use(rng, "train"), option, *(choice(rng, HOSTILE_TEXTS) for _ in range(int(rng.integers(0, 3))))]


def hostile_options(rng: Generator, directory: Path) -> list[str]:
    shutil.copytree(shared_data(), directory / "data")
    shutil.copytree(shared_model(), directory / "model")
    write_image(directory / "photo.png")
    command = choice(rng, list(COMMANDS))
    arguments = command.split()
    for _ in range(int(rng.integers(1, 3))):
        arguments += [choice(rng, COMMANDS[command]), *([] if rng.random() < 0.2 else [choice(rng, HOSTILE_TEXTS)])]
    if command.startswith("predict") and "--out" not in arguments:
        arguments += ["--out", "out"]
    return arguments


def use(rng: Generator, command: str | None = None) -> list[str]:
    """Return a command that reads the recipe. Training always fails, because its data do not exist."""
    if (command or choice(rng, ["train", "train", "show", "copy"])) == "train":
        return ["train", "recipe.yaml", "--out", "out/run", "--data.root", "missing", "--device", "cpu"]
    return (
        ["recipes", "show", "recipe.yaml"] if rng.random() < 0.5 else ["recipes", "copy", "recipe.yaml", "out/new.yaml"]
    )


@cache
def valid_values() -> Any:
    return yaml.safe_load(valid_recipe())


@cache
def valid_recipe() -> str:
    return yaml.safe_dump(load_recipe(RECIPE, TINY_TRAINING).as_dict())


def changed(content: Any, key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    if not isinstance(content, dict):
        return value
    return {**content, first: changed(content.get(first), rest, value) if rest else value}
