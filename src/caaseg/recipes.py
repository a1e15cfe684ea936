"""Recipes by name or path: complete YAML files, and rows of the paper's tables. Does not import torch."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.options import parse_options, spelled
from caaseg.settings import flat_fields

SHIPPED = Path(__file__).parent / "recipes"
LIST_TAG = "tag:yaml.org,2002:seq"
ROWS = "caaseg.reproduce.tables:ROWS"
"""Table rows as name -> (base recipe, options). Resolved when needed, because that module is in a higher layer."""


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line."""


_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence(LIST_TAG, value, flow_style=True))


def recipe_names() -> list[str]:
    """Return the names of the shipped recipe files, such as camvid/caa_resnet50."""
    return sorted(path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.glob("*/*.yaml"))


def row_names() -> list[str]:
    """Return the names of the table rows, such as table1/caa_gate3x128."""
    return list(resolve_name(ROWS))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return a validated recipe.

    Args:
        name_or_path: name of a shipped recipe or of a table row, or a YAML file.
        overrides: options as in a command line, such as ["--model.output-stride", "8", "--steps=100"].
    """
    name = str(name_or_path)
    if Path(name).is_file():
        recipe = _read_file(Path(name))
    elif name in recipe_names():
        recipe = _read_file(SHIPPED / f"{name}.yaml")
    elif name in row_names():
        recipe = load_recipe(*resolve_name(ROWS)[name])
    else:
        close = difflib.get_close_matches(name, [*recipe_names(), *row_names()], n=1)
        hint = f"did you mean {close[0]}?" if close else "caaseg recipes lists all"
        raise CaasegError(f"recipe {name!r} is neither a file nor the name of a shipped recipe; {hint}")
    changes = parse_options(Recipe, overrides) if overrides else {}
    return Recipe.read(_merged(recipe.as_dict(), changes), write=spelled) if changes else recipe


def read_recipe(content: Any, source: str | Path) -> Recipe:
    """Return the recipe in the content of a YAML or JSON file; `source` is the file, for error messages."""
    return Recipe.read(content, f"{source}: ")


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe as YAML with every value."""
    return yaml.dump(recipe.as_dict(), Dumper=_Dumper, sort_keys=False)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe with every value to a YAML file."""
    path.write_text(recipe_text(recipe))


def default_folder(recipe: Recipe | str | Path) -> Path:
    """Return the default run directory of a recipe: runs/ and the recipe's name."""
    if isinstance(recipe, Recipe):
        name = f"{recipe.data.dataset}-{recipe.model.head}_{recipe.model.backbone}"
    else:
        name = Path(recipe).with_suffix("").as_posix()
    return Path("runs") / name.replace("/", "-").strip(".-")


def differences(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ, each with both values."""
    pairs = {key: (_value(first, key), _value(second, key)) for key in flat_fields(Recipe)}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def _value(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


def _read_file(path: Path) -> Recipe:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CaasegError(f"{path}: cannot be read as YAML ({reason}); correct it, or copy a shipped recipe") from error
    return read_recipe(content, path)


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with some of them changed."""
    changed = {key: _merged(values[key], new) if isinstance(new, dict) else new for key, new in changes.items()}
    return {**values, **changed}
