"""Base class of all settings, their values in command-line options, and error messages. Does not import torch."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from caaseg.errors import CaasegError


class Settings(BaseModel):
    """Immutable settings that refuse unknown keys. `read` and `replace` raise CaasegError with a message for users."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def read(cls, values: Any, source: str = "", write: Callable[[str], str] = str) -> Self:
        """Return validated settings. Error messages start with `source` and spell dotted keys with `write`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise CaasegError(source + explain(cls, error, values, write)) from error

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some values changed."""
        return self.read(dict(self) | changes)

    def as_dict(self) -> dict[str, Any]:
        """Return all values as JSON types: nested settings as dictionaries, tuples as lists."""
        return self.model_dump(mode="json")


def flat_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return all fields by dotted keys, such as data.crop."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        below = flat_fields(kind) if isinstance(kind, type) and issubclass(kind, Settings) else {}
        fields |= {f"{name}.{key}": nested for key, nested in below.items()} or {name: field}
    return fields


def explain(model: type[Settings], error: ValidationError, values: Any, write: Callable[[str], str]) -> str:
    """Return pydantic's first error as one sentence: the key, the value found, the values expected."""
    fields, first = flat_fields(model), error.errors()[0]
    path = ".".join(map(str, first["loc"]))  # continues below the key if an element of a list is wrong
    key = next((key for key in fields if f"{path}.".startswith(f"{key}.")), path)
    required = [name for name in fields if f"{name}.".startswith(f"{key}.") and fields[name].is_required()]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{did_you_mean(key, fields)}"
    if first["type"] == "missing" and required:
        return f"{write(required[0])} is missing: {fields[required[0]].description}".removesuffix(": None")
    if first["type"] == "value_error" and key not in fields:  # about several fields; starts with a field name
        subject, _, rest = str(first["ctx"]["error"]).partition(" ")
        return f"{write(f'{key}.{subject}'.strip('.'))} {rest}"
    found = reduce(getitem, key.split("."), values) if key in fields else first["input"]
    reason = first["msg"].replace("Field required", "more values").replace("valid tuple", "list of values")
    expected = re.sub(r"^(Value error,|\w+ should (be|have)) |, unable to .*", "", reason)
    hint = did_you_mean(str(first["input"]), re.split(", | or ", expected.replace("'", "")))
    return f"{write(key) or 'the content'} is {found!r}; expected {expected}{hint}"


def did_you_mean(word: str, known: Iterable[str], write: Callable[[str], str] = str) -> str:
    """Return a hint to the new name of a key, the same name in another section, or the most similar known word."""
    from caaseg.config import OTHER_TOOLS, RENAMED

    name = OTHER_TOOLS.get(word, word).rpartition(".")[2]
    same = [RENAMED[word]] if word in RENAMED else [key for key in known if key.rpartition(".")[2] == name]
    close = same or difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {write(close[0])}?" if close else ""


def spelled(key: str) -> str:
    """Return a dotted key as an option, such as --data.val-split."""
    return f"--{key.replace('_', '-')}"


def split_options(arguments: Sequence[str], fields: Mapping[str, FieldInfo]) -> tuple[list[str], dict[str, str]]:
    """Return the positional arguments in a command line, and the texts of its options by key."""
    positional, texts, rest = [], {}, list(arguments)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("-"):
            positional.append(name + equals + text)
        elif key not in fields:
            raise CaasegError(f"unknown option {name}{did_you_mean(key, fields, spelled)}")
        else:
            texts[key] = text if equals else _take_text(name, fields[key], rest)
    return positional, texts


def _take_text(name: str, field: FieldInfo, rest: list[str]) -> str:
    """Remove the values of an option from the start of the following arguments and return them as one text."""
    if field.annotation is bool and not (rest and rest[0].lower() in ("true", "false")):
        return "true"
    if not rest or rest[0].startswith("--"):
        raise CaasegError(f"{name} has no value")
    schema = TypeAdapter(field.rebuild_annotation()).json_schema()
    lists = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") == "array"]
    further = "(?!--).*" if "'string'" in str(lists) else r"[-+.,xe\d]+"
    values = [rest.pop(0)]
    while lists and rest and re.fullmatch(further, rest[0]):
        values.append(rest.pop(0))
    return " ".join(values)


def read_text(text: str, field: FieldInfo) -> Any:
    """Parse the text of an option as JSON, a list or plain text, and return the first value that the field accepts.

    If the field accepts none of them, return a value of the right type, if there is one, for the error message.
    """
    parts = re.findall(r"[^,\s]+", text.strip("[]() "))
    candidates: list[Any] = [parts, text] if len(parts) > 1 else [text, parts]
    for code in (f"[{','.join(parts)}]", "null" if text.lower() == "none" else text):
        with suppress(ValueError, RecursionError):  # ValueError also for numbers of thousands of digits
            candidates.insert(0, json.loads(code))
    wrong_types: list[bool] = []
    for candidate in candidates:
        try:
            return TypeAdapter(field.rebuild_annotation()).validate_python(candidate)
        except ValidationError as error:
            wrong_types.append(error.errors()[0]["type"].endswith("_type"))
    return candidates[wrong_types.index(min(wrong_types))]
