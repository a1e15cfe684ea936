"""Recipes as files: shipped ones by name, others by path, every value typed and overridable on the command line.

A recipe is one complete YAML file without inheritance; what it leaves out has the default of its dataclass. Nothing
here imports torch, so that `caaseg train --help` is instant.
"""

import difflib
import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from caaseg.config import DataRecipe, LossRecipe, ModelRecipe, OptimizerRecipe, Recipe

SHIPPED = Path(__file__).parent / "recipes"
SUFFIX = ".yaml"
SECTIONS: dict[str, Any] = {
    "model": ModelRecipe,
    "data": DataRecipe,
    "loss": LossRecipe,
    "optimizer": OptimizerRecipe,
}
PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def recipe_names() -> list[str]:
    """The shipped recipes, such as camvid/caa_resnet50."""
    return sorted(path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.glob(f"*/*{SUFFIX}"))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe, checked.

    Args:
        name_or_path: a shipped recipe's name, or a YAML file.
        overrides: words as on the command line, such as `--model.output_stride 8 --steps=100`.
    """
    path = find_recipe(name_or_path)
    parser = _parser()
    recipe = read_recipe(_read(path), path, parser)
    if not overrides:
        return recipe
    _check_options(overrides)
    parser.set_defaults(_flat(recipe.as_dict()))
    try:
        values = parser.parse_args(_with_underscores(overrides))
    except ArgumentError as error:
        raise ValueError(f"command line: {_explained(error)}") from error
    return _built(values.as_dict(), "command line")


def read_recipe(content: dict[str, Any], path: Path, parser: ArgumentParser | None = None) -> Recipe:
    """The recipe that a file's keys and values say, checked.

    Args:
        content: keys and values.
        path: where they were found, for messages.
        parser: of recipes, where the caller has one.
    """
    _check_keys(content, path)
    try:
        written = (parser or _parser()).parse_object(content, defaults=True)
    except ArgumentError as error:
        raise ValueError(f"{path}: {_explained(error)}") from error
    return _built(written.as_dict(), str(path))


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe with every value in it as keys and plain values, as read_recipe takes it."""
    content: dict[str, Any] = _plain(recipe.as_dict())
    return content


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe with every value in it, as load_recipe reads it."""
    path.write_text(recipe_text(recipe))


def recipe_text(recipe: Recipe) -> str:
    """A recipe as YAML, with every value in it."""
    return yaml.safe_dump(plain_recipe(recipe), sort_keys=False)


def default_folder(recipe: Recipe | str | Path) -> Path:
    """Where a run goes if nobody says: runs/ and the recipe's name, or what the name of a shipped one is made of."""
    if isinstance(recipe, Recipe):
        name = f"{recipe.data.dataset}-{recipe.model.head}_{recipe.model.backbone}"
    else:
        name = Path(recipe).with_suffix("").as_posix()
    return Path("runs") / name.replace("/", "-").strip(".-")


def differences(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, each with both values."""
    ours, theirs = _flat(first.as_dict()), _flat(second.as_dict())
    return {key: (ours[key], theirs[key]) for key in ours if _plain(ours[key]) != _plain(theirs[key])}


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a shipped recipe, or the file that a path says."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{name_or_path}{SUFFIX}"
    if str(name_or_path) in recipe_names():
        return shipped
    close = difflib.get_close_matches(str(name_or_path), recipe_names(), n=1)
    hint = f"did you mean {close[0]}?" if close else "caaseg recipes lists the shipped ones"
    raise ValueError(f"recipe {str(name_or_path)!r} is neither a file nor the name of a shipped recipe; {hint}")


def add_recipe_arguments(parser: ArgumentParser) -> None:
    """Every value of a recipe as an option, with its docstring and default."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser.add_class_arguments(Recipe)
    for action in parser._actions:
        if action.dest in SECTIONS:
            action.help = SUPPRESS  # a file for a section: a recipe is one file


def split_overrides(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Words of a command line without those that override a value of a recipe, and those.

    Args:
        words: the command line.
        own: names of the command's own options.
    """
    others, overrides = [], []
    rest = iter(words)
    for word in rest:
        if word.startswith("--") and _key(word) in _hints():
            overrides.append(word)
            if "=" not in word:
                overrides.extend(value for value in [next(rest, None)] if value is not None)
        elif word.startswith("--") and _key(word) not in own:
            raise ValueError(_unknown(f"option {word.partition('=')[0]}", _key(word), prefix="--", own=own))
        else:
            others.append(word)
    return others, overrides


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    add_recipe_arguments(parser)
    return parser


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path}: cannot be read as YAML ({reason}); correct it, or start from a shipped one"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds {type(content).__name__}; expected a recipe's keys: model, data, steps, ...")
    return content


def _check_keys(content: Mapping[Any, Any], path: Path) -> None:
    for name, value in content.items():
        if name in SECTIONS:
            if not isinstance(value, dict):
                raise ValueError(f"{path}: {name} is {value!r}; expected keys and values below it")
            for key in value:
                if f"{name}.{key}" not in _hints():
                    raise ValueError(f"{path}: {_unknown(f'key {name}.{key}', f'{name}.{key}')}")
        elif name not in _hints():
            raise ValueError(f"{path}: {_unknown(f'key {name}', str(name))}")
    if "dataset" not in content.get("data", {}):
        raise ValueError(f"{path}: data.dataset is missing; expected a name of caaseg data list")
    content.setdefault("model", {})  # type: ignore[attr-defined]


def _check_options(words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("--") and _key(word) not in _hints():
            raise ValueError(_unknown(f"option {word.partition('=')[0]}", _key(word), prefix="--"))


def _unknown(what: str, key: str, prefix: str = "", own: Collection[str] = ()) -> str:
    known = [*_hints(), *own]
    # The right name in the wrong section is nearer than any other spelling.
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    near = close[0].replace("_", "-") if close and close[0] in own else close[0] if close else None
    hint = f"did you mean {prefix}{near}?" if near else "caaseg train --help lists all"
    return f"unknown {what}; {hint}"


def _hints() -> dict[str, Any]:
    """The type of every value, by its dotted key."""
    hints: dict[str, Any] = {}
    for key in Recipe.names():
        if key in SECTIONS:
            of_section = get_type_hints(SECTIONS[key])
            hints |= {f"{key}.{name}": hint for name, hint in of_section.items()}
        else:
            hints[key] = get_type_hints(Recipe)[key]
    return hints


def _key(option: str) -> str:
    return option.removeprefix("--").partition("=")[0].replace("-", "_")


def _with_underscores(words: Sequence[str]) -> list[str]:
    return [re.sub(r"^--[^=]*", lambda option: f"--{_key(option[0])}", word) for word in words]


def _explained(error: ArgumentError) -> str:
    """Jsonargparse's message in our words: the key, what was found, what was expected."""
    text = str(error)
    key = re.search(r'key "([\w.]+)"', text)
    found = re.search(r"(?:Got value|Given value): (.*)", text)
    if key is None or found is None or key[1] not in _hints():
        return " ".join(text.split())
    return f"{key[1]} is {found[1]}; expected {_described(_hints()[key[1]])}"


def _described(hint: Any) -> str:
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return " or ".join(str(value) for value in arguments)
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(_described(kind) for kind in arguments)
    if get_origin(hint) is tuple:
        of = "numbers" if arguments[0] is float else "whole numbers"
        return f"a list of {of}" if arguments[1:] == (...,) else f"a list of {len(arguments)} {of}"
    return PLAIN.get(hint, "keys and values")


def _built(values: Mapping[str, Any], where: str) -> Recipe:
    try:
        parts = {name: part(**_without_lists(values[name])) for name, part in SECTIONS.items()}
        return Recipe(**{**values, **parts})
    except ValueError as error:  # what the dataclasses refuse
        raise ValueError(f"{where}: {error}") from error


def _without_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as tuples, so that recipes compare by what they hold; options belong to the dataset and stay."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_leaves(content))


def _leaves(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if name in SECTIONS:
            yield from ((f"{name}.{key}", leaf) for key, leaf in value.items())
        else:
            yield name, value


def _plain(value: Any) -> Any:
    """What YAML writes without tags: tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
