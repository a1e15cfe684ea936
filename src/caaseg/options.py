"""Command-line options from settings: tyro parses and documents them, pydantic validates them. Torch-free."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from pydantic import Field, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from tyro.constructors import (  # fmt: skip
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from caaseg.errors import CaasegError
from caaseg.settings import Settings, choices_of, describe, flat_fields, section, shown_value, unknown

POSITIONAL = {"positional": True}
"""The `json_schema_extra` of fields that are arguments without a name."""
OTHER_TOOLS = {"epochs": "steps", "learning_rate": "optimizer.lr", "num_workers": "data.workers", "imgsz": "data.crop"}
"""Options of other tools, and the corresponding keys of a recipe."""


class Default(NamedTuple):
    """Value of an option that is not in the command line."""

    value: Any


def settings_of(function: Callable[..., Any], *others: type[Settings]) -> type[Settings]:
    """Return settings with the parameters of a function, and the fields of other settings.

    Keyword-only parameters become options. The parameter `overrides` is left out: it takes options of a recipe.
    """
    hints, explained = get_type_hints(function, include_extras=True), docstring_parser.parse(function.__doc__ or "")
    helps = {one.arg_name: " ".join((one.description or "").split()) for one in explained.params}
    fields: dict[str, Any] = {}
    for name, parameter in signature(function).parameters.items():
        default = PydanticUndefined if parameter.default is Parameter.empty else parameter.default
        extra: Any = None if parameter.kind is Parameter.KEYWORD_ONLY else POSITIONAL
        if name != "overrides":
            field = Field(default=default, description=helps.get(name), json_schema_extra=extra)
            fields[name] = (hints[name], field)
    fields |= {name: (field.annotation, field) for other in others for name, field in other.model_fields.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*shadows an attribute")  # --json, beside a deprecated method of pydantic
        return create_model(function.__name__, __base__=Settings, **fields)


def spelled(key: str) -> str:
    """Return a dotted key as an option, such as --data.val-split."""
    return f"--{key.replace('_', '-')}"


def parse_options(model: type[Settings], words: Sequence[str], **tyro_options: Any) -> dict[str, Any]:
    """Return the values in a command line as nested dictionaries, not yet validated. With --help, print help and exit.

    Args:
        model: the settings that the command line may change.
        words: the command line.
        tyro_options: arguments of `tyro.cli` for the help: prog, description, default.
    """
    values: Any
    tokens = ["--help"] if "--help" in words else attach_values(words, flat_fields(model))
    values, unexpected = tyro.cli(model, args=tokens, return_unknown_args=True, registry=REGISTRY, **tyro_options)
    if unexpected:
        raise CaasegError(f"unexpected argument {unexpected[0]!r}")
    return dict(values)


def attach_values(words: Sequence[str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return a command line in which each option and its values are one word, such as "--data.crop=64 64"."""
    tokens, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            tokens.append(word)
            continue
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if key not in fields or fields[key].json_schema_extra == POSITIONAL:
            near = OTHER_TOOLS.get(key)
            hint = f"unknown option {name}; did you mean {spelled(near)}?" if near in fields else ""  # type: ignore[arg-type]
            raise CaasegError(hint or unknown("option", key, fields, spelled))
        values = [value] if equals else _take_values(_members(fields[key].annotation), rest)
        if not values:
            raise CaasegError(f"{name} has no value; expected {describe(fields[key])}")
        tokens.append(f"{spelled(key)}={' '.join(values)}")
    return tokens


def _take_values(kinds: list[Any], rest: list[str]) -> list[str]:
    """Remove the values of one option from the start of the remaining words and return them."""
    if kinds == [bool]:
        return [rest.pop(0)] if rest and rest[0].lower() in ("true", "false") else ["true"]
    if not rest or rest[0].startswith("--"):
        return []
    values = [rest.pop(0)]
    elements = next((get_args(kind) for kind in kinds if get_origin(kind) is tuple), ())
    if not elements or (elements[-1] is not ... and re.search("[x,]", values[0])):  # 64x64 is a whole size
        return values
    is_text = str in _members(elements[0]) or get_origin(_members(elements[0])[0]) is Literal
    pattern = "[^-].*" if is_text else r"[-+\d.,xe]+"
    while rest and (elements[-1] is ... or len(values) < len(elements)) and re.fullmatch(pattern, rest[0]):
        values.append(rest.pop(0))
    return values


def _from_text(text: str, kind: Any) -> Any:
    """Return none, booleans, integers, choices and lists as their type has them, other texts as they are."""
    kinds = _members(kind)
    if text.lower() in ("none", "null") and NoneType in kinds:
        return None
    if text.lower() in ("true", "false") and bool in kinds:
        return text.lower() == "true"
    if re.fullmatch(r"-?\d+", text) and not {int, float}.isdisjoint(kinds):
        return int(text)
    for choice in (one for member in kinds if get_origin(member) is Literal for one in get_args(member)):
        if str(choice) == text:
            return choice
    sequence = next((one for one in kinds if get_origin(one) is tuple), None)
    if sequence is None:
        return text
    return [_from_text(part, get_args(sequence)[0]) for part in re.split(r"[,\s]+", text.strip("[]() ")) if part]


def _members(kind: Any) -> list[Any]:
    """Return the members of a union type, without their bounds."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [one for member in get_args(kind) for one in _members(member)]
    return [kind]


def _struct(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Describe settings to tyro, which then returns the given values as a dictionary."""
    if not (isinstance(info.type, type) and issubclass(info.type, Settings)):
        return None
    fields = []
    for name, field in info.type.model_fields.items():
        value = getattr(info.default, name, field.default)
        if nested := section(field):
            kind, default = nested, value if isinstance(value, nested) else tyro.MISSING_NONPROP
        else:
            kind, default = _option(name, field, value), Default(value)
        fields.append(StructFieldSpec(name=name, type=kind, default=default, helptext=field.description))
    return StructConstructorSpec(instantiate=_given, fields=tuple(fields))


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, Default) and value != {}}


def _option(name: str, field: FieldInfo, default: Any) -> Any:
    """Return the type that makes tyro hand on the text of an option, and show what it accepts in the help."""
    kinds = _members(field.annotation)
    several = list[str] in kinds
    choices = ["true", "false"] if kinds == [bool] else [str(one) for one in choices_of(field.annotation)]
    accepted = "" if choices or not {str, Path, list[str]}.isdisjoint(kinds) else f"{describe(field)}; "
    hint = "required" if default is PydanticUndefined else f"{accepted}default: {shown_value(default)}"
    spec = PrimitiveConstructorSpec[Any](
        nargs="*" if several else 1,
        metavar="{" + ",".join(choices) + "}" if choices else name.upper(),
        instance_from_str=lambda texts: texts if several else _from_text(texts[0], field.annotation),
        is_instance=lambda value: True,
        str_from_instance=lambda default: [shown_value(default.value)],
    )
    marks = [tyro.conf.Positional] if field.json_schema_extra == POSITIONAL else []
    return Annotated[(Default, spec, tyro.conf.arg(help_behavior_hint=f"({hint})"), *marks)]


REGISTRY = ConstructorRegistry()
REGISTRY.struct_rule(_struct)
