"""Base class of all settings, and error messages for values that they do not accept. Does not import torch."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from caaseg.errors import CaasegError

TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", NoneType: "none"}
PLURALS = {int: "integers", float: "numbers", str: "names"}


class Settings(BaseModel):
    """Immutable settings without unknown keys, validated on construction and in `replace`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise CaasegError(explain(type(self), error, values)) from error

    # Makes pydantic validate nested settings by itself, so that errors keep the path of their field.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: Any, source: str = "", write: Callable[[str], str] = str) -> Self:
        """Return settings from plain values.

        Args:
            values: nested mappings, as in a YAML or JSON file.
            source: start of error messages, such as "recipe.yaml: ".
            write: returns how error messages spell a dotted key such as data.crop.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise CaasegError(source + explain(cls, error, values, write)) from error

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some values changed."""
        return type(self)(**(dict(self) | changes))

    def as_dict(self) -> dict[str, Any]:
        """Return all values as JSON and YAML have them: nested settings as dictionaries, tuples as lists."""
        return self.model_dump(mode="json")

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all fields."""
        return list(cls.model_fields)


def section(field: FieldInfo) -> type[Settings] | None:
    """Return the class of a field that holds nested settings, otherwise None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def flat_fields(model: type[Settings]) -> dict[str, FieldInfo]:
    """Return all fields by dotted keys, such as data.crop."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if nested := section(field):
            fields |= {f"{name}.{key}": below for key, below in flat_fields(nested).items()}
        else:
            fields[name] = field
    return fields


def explain(model: type[Settings], error: ValidationError, values: Any, write: Callable[[str], str] = str) -> str:
    """Return pydantic's first error as one sentence: the key, what was found, what was expected."""
    if not isinstance(values, Mapping):
        return f"found {type(values).__name__}; expected the keys {', '.join(model.names()[:3])}, ..."
    located = [(_locate(model, one["loc"]), one) for one in error.errors(include_url=False)]
    (path, field), first = located[0]
    key, reason, kind = ".".join(path), first.get("ctx", {}).get("error"), first["type"]
    others = len({found for (found, _), _ in located}) - 1
    more = f" ({others} more error{'s' * (others > 1)})" if others else ""
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown("key", key, flat_fields(model)) + more
    if kind == "value_error" and (field is None or section(field)):  # about several fields; starts with one of them
        subject, _, rest = str(reason).partition(" ")
        return f"{write('.'.join((*path, subject)))} {rest}{more}"
    assert field is not None
    if kind == "missing" and len(first["loc"]) == len(path):
        return f"{write(key)} is missing: {field.description}{more}"
    value: Any = values
    for name in path:
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    expected = str(reason) if kind == "value_error" else describe(field)
    is_text = value == "" or (isinstance(value, str) and value.isdecimal() and expected.startswith("an integer"))
    found = repr(value) if is_text else shown_value(value)
    choices = expected.split(", ") if kind == "value_error" else [str(one) for one in choices_of(field.annotation)]
    return f"{write(key)} is {found}; expected {expected}{did_you_mean(found, choices)}{more}"


def _locate(model: type[Settings], location: Iterable[int | str]) -> tuple[tuple[str, ...], FieldInfo | None]:
    """Return the names on the way to a field and the field, without pydantic's positions inside its value."""
    path: list[str] = []
    field: FieldInfo | None = None
    owner: type[Settings] | None = model
    for name in location:
        if owner is None:
            break
        path.append(str(name))
        field = owner.model_fields.get(str(name))
        owner = section(field) if field else None
    return tuple(path), field


def unknown(what: str, key: str, known: Iterable[str], write: Callable[[str], str] = str) -> str:
    """Return the message for an unknown key or option: its new name, or the most similar known one."""
    from caaseg.config import RENAMED

    if key in RENAMED:
        return f"unknown {what} {write(key)}; it is now {write(RENAMED[key])}"
    known = list(known)
    # The right name in the wrong section is closer than any other spelling.
    close = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown {what} {write(key)}" + (f"; did you mean {write(close[0])}?" if close else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint to the most similar known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def shown_value(value: Any) -> str:
    """Return a value as people write it on a command line."""
    if isinstance(value, list | tuple):
        return " ".join(map(shown_value, value)) or "empty"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def choices_of(kind: Any) -> list[Any]:
    """Return the values of all literals in a type."""
    nested = get_args(kind)
    return list(nested) if get_origin(kind) is Literal else [one for member in nested for one in choices_of(member)]


def either(names: Iterable[Any]) -> str:
    """Return alternatives joined as text: a, b or c."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def describe(field: FieldInfo) -> str:
    """Return a description of the values that a field accepts, such as "an integer from 1 to 8, or none"."""
    return _describe(field.annotation, field.metadata)


def _describe(kind: Any, metadata: Iterable[Any] = (), plural: bool = False) -> str:
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        nested = [bound for one in arguments[1:] for bound in getattr(one, "metadata", [one])]
        return _describe(arguments[0], [*nested, *metadata], plural)
    if get_origin(kind) is Literal:
        return either(arguments)
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join(_describe(one, metadata) for one in arguments)
    if get_origin(kind) is tuple:
        count = "a list of" if arguments[1:] == (...,) else f"{'groups of ' * plural}{len(arguments)}"
        return f"{count} {_describe(arguments[0], plural=True)}"
    if isinstance(kind, type) and issubclass(kind, Settings):
        return "keys and values below it"
    return (PLURALS if plural else TYPE_NAMES).get(kind, "text") + _bounds(metadata)


def _bounds(metadata: Iterable[Any]) -> str:
    low = next((one for one in metadata if isinstance(one, Ge | Gt)), None)
    high = next((one for one in metadata if isinstance(one, Le | Lt)), None)
    words = ""
    if low is not None:
        only = " of {} or more" if high is None else " from {}"
        words = only.format(low.ge) if isinstance(low, Ge) else f" above {low.gt}"
    if high is not None:
        inclusive = " to {}" if isinstance(low, Ge) else ", at most {}" if low else " of at most {}"
        words += inclusive.format(high.le) if isinstance(high, Le) else f"{',' if low else ''} below {high.lt}"
    return words
