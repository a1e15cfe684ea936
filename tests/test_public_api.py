"""The public names are listed, and their docstrings explain every parameter and result."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import caaseg
import caaseg.attention

FUNCTIONS = [
    pytest.param(getattr(module, name), id=name)
    for module in (caaseg, caaseg.attention)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]
CLASSES = [
    pytest.param(getattr(module, name), id=name)
    for module in (caaseg, caaseg.attention)
    for name in module.__all__
    if inspect.isclass(getattr(module, name))
]


def documented_parameters(doc: str) -> set[str]:
    """Return the names in the Args section of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    return set(re.findall(r"^    \**(\w+): \S", section[1], re.MULTILINE)) if section else set()


def test_dir_lists_the_public_names() -> None:
    assert set(dir(caaseg)) == set(caaseg.__all__)
    assert all(hasattr(caaseg, name) for name in dir(caaseg))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_document_their_parameters_and_result(function: Callable[..., Any]) -> None:
    doc = inspect.getdoc(function) or ""
    assert documented_parameters(doc) == set(inspect.signature(function).parameters)
    assert "\nReturns:\n" in doc or doc.startswith("Return ")


@pytest.mark.parametrize("cls", CLASSES)
def test_classes_document_their_parameters(cls: type) -> None:
    """Settings and results document their fields one by one instead."""
    assert cls.__doc__
    own = cls.__dict__.get("__init__")
    if own is not None and not hasattr(cls, "__dataclass_fields__") and len(inspect.signature(cls).parameters):
        assert documented_parameters(inspect.getdoc(cls) or "") == set(inspect.signature(cls).parameters)
