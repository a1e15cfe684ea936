"""Recipes by name or path: complete YAML files, and rows of the paper's tables. Does not import torch."""

import re
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from pkgutil import resolve_name

import yaml

from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.files import read_yaml
from caaseg.settings import did_you_mean, flat_fields, read_text, spelled, split_options

SHIPPED = Path(__file__).parent / "recipes"
ROWS = "caaseg.reproduce.tables:ROWS"
"""Table rows as name -> (base recipe, options). Resolved when needed, because that module is in a higher layer."""


def recipe_names() -> list[str]:
    """Return the names of the shipped recipe files, such as camvid/caa_resnet50."""
    return sorted(path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.glob("*/*.yaml"))


def row_names() -> list[str]:
    """Return the names of the table rows, such as table1/caa_gate3x128."""
    return list(resolve_name(ROWS))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by its path or name.

    Args:
        name_or_path: a YAML file, or the name of a shipped recipe or of a table row.
        overrides: command-line options that change values of the recipe, such as --steps=100.

    Returns:
        The recipe, validated and complete: values that the file does not set have their defaults.
    """
    name, known = str(name_or_path), [*recipe_names(), *row_names()]
    path = Path(name) if Path(name).is_file() else SHIPPED / f"{name}.yaml"
    if path.is_file():
        recipe = Recipe.read(read_yaml(path, "correct it, or copy a shipped recipe"), f"{path}: ")
    elif name in known:
        recipe = load_recipe(*resolve_name(ROWS)[name])
    else:
        hint = did_you_mean(name, known) or "; caaseg recipes lists all"
        raise CaasegError(f"recipe {name!r} is neither a file nor the name of a shipped recipe{hint}")
    unexpected, texts = split_options(overrides, fields := flat_fields(Recipe))
    if unexpected:
        raise CaasegError(f"unexpected argument {unexpected[0]!r}; options start with --")
    values = recipe.values_to_change(texts)
    for key, text in texts.items():
        *sections, last = key.split(".")
        reduce(getitem, sections, values)[last] = read_text(text, fields[key])
    return Recipe.read(values, write=spelled)


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe as YAML with every value."""
    text = yaml.safe_dump(recipe.as_dict(), sort_keys=False)
    return re.sub(r"(\n *- \S+)+", lambda found: f" [{', '.join(found[0].split()[1::2])}]", text)  # lists in one line
