"""Directives that generate reference pages from the code: commands with options, recipe values, recipes, datasets.

    :::{commands}            every command of the command line
    :::{recipe-values}       every key of a recipe with its default and help
    :::{recipe-list}         the shipped recipes
    :::{dataset-list}        the datasets of the catalogue

The text comes from signatures, docstrings and YAML files, so it is the same as in `caaseg COMMAND --help`.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, get_origin

import docstring_parser
from docutils import nodes
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from caaseg import cli
from caaseg.config import Recipe
from caaseg.data.catalogue import DATASETS
from caaseg.recipes import SHIPPED, recipe_names
from caaseg.reproduce.tables import TABLES
from caaseg.settings import flat_fields, spelled


class Generated(SphinxDirective):
    """A directive whose content is Markdown returned by a function."""

    text: ClassVar[Callable[[], str]]

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(type(self).text(), allow_section_headings=True)


def command_names() -> list[str]:
    """Return the full names of all commands, such as `caaseg data list`."""
    names = [f"caaseg {name}" for name in cli.COMMANDS["caaseg"].split()]
    return [one for name in names for one in _with_subcommands(name)]


def _with_subcommands(name: str) -> list[str]:
    return [f"{name} {below}" for below in cli.COMMANDS[name].split()] if name in cli.COMMANDS else [name]


def commands() -> str:
    """Return one section per command: usage, description, arguments and options."""
    return "\n\n".join(_command(name) for name in command_names())


def _command(name: str) -> str:
    function = cli._function(name)
    doc = docstring_parser.parse(function.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    helps = {one.arg_name: one.description or "" for one in doc.params}
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "overrides"]
    positional = [one for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    options = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    takes_recipe = "overrides" in inspect.signature(function).parameters
    required = [one for one in options if one.default is inspect.Parameter.empty]
    usage = " ".join([name, *map(_usage, [*positional, *required]), *["[OPTIONS]"] * (len(options) > len(required))])
    lines = [f"## {name}", f"    {usage}", _one_line(doc.short_description), _one_line(doc.long_description)]
    if parameters:
        rows = [
            (f"`{one.name.upper()}`" if one in positional else f"`{spelled(one.name)}`", _default(one), helps[one.name])
            for one in parameters
        ]
        lines.append(_table(("argument", "default", "meaning"), rows))
    if takes_recipe:
        lines.append("Every [value of a recipe](recipes.md#values-of-a-recipe) is an option too.")
    return "\n\n".join(line for line in lines if line)


def _usage(parameter: inspect.Parameter) -> str:
    name = parameter.name.upper()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        return f"{spelled(parameter.name)} {name}"
    text = f"{name}..." if get_origin(parameter.annotation) is list else name
    return text if parameter.default is inspect.Parameter.empty else f"[{text}]"


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "required"
    return _value(parameter.default)


def _value(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ((), []):
        return ""
    if isinstance(value, tuple | list):
        return f"`{' '.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def recipe_values() -> str:
    """Return all keys of a recipe, one table per section."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for key, field in flat_fields(Recipe).items():
        default = field.get_default(call_default_factory=True) if field.default_factory is None else ...
        row = (f"`{key}`", "" if default is ... else _value(default), field.description or "")
        sections.setdefault(key.rpartition(".")[0] or "run", []).append(row)
    return "\n\n".join(
        f"### {section}\n\n{_table(('key', 'default', 'meaning'), rows)}" for section, rows in sections.items()
    )


def recipe_list() -> str:
    """Return two tables: shipped recipes with the first line of each file, and table rows with their own recipe."""
    shipped = [
        (f"`{name}`", (SHIPPED / f"{name}.yaml").read_text().partition("\n")[0].lstrip("# ")) for name in recipe_names()
    ]
    rows = [
        (f"`{table}/{row.name}`", row.title(own_recipe=True))
        for table, content in TABLES.items()
        for row in content.rows
        if row.dataset is not None
    ]
    return (
        f"### Shipped files\n\n{_table(('recipe', 'description'), shipped)}\n\n"
        f"### Rows of tables\n\n{_table(('recipe', 'row'), rows)}"
    )


def dataset_list() -> str:
    """Return a table of the datasets."""
    rows = [
        (
            f"`{name}`",
            info.title,
            str(len(info.classes) or "your own"),
            ", ".join(f"{split} {count}" for split, count in info.counts.items()) or "your own",
            info.image_size,
        )
        for name, info in DATASETS.items()
    ]
    return _table(("name", "dataset", "classes", "images", "size"), rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str | None, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _one_line(text: str | None) -> str:
    return re.sub(r"\s+", " ", _escaped(text or "")).strip()


def _escaped(text: str) -> str:
    """Escape the Markdown characters `*`, `_` and `<` outside code, such as in the pattern **/*.jpg."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"(?<!\\)([*_<])", r"\\\1", part) for part in parts)


def _directives() -> Iterator[tuple[str, type[Generated]]]:
    for name, function in {
        "commands": commands,
        "recipe-values": recipe_values,
        "recipe-list": recipe_list,
        "dataset-list": dataset_list,
    }.items():
        yield name, type(name, (Generated,), {"text": staticmethod(function)})


def setup(app: Sphinx) -> ExtensionMetadata:
    """Add the directives."""
    for name, directive in _directives():
        app.add_directive(name, directive)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
