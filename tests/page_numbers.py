"""Check that every number in the text of a page is that of a committed result or is listed with a reason."""

import re
from typing import Any

from docs._extensions.result_numbers import evaluate, is_rounded

NUMBER = re.compile(r"(?<![\w.])(?<!\w-)[-+]?\d+(?:,\d{3})*(?:\.\d+)?")


def prose(page: str) -> str:
    """Return the text and the tables of a page, without code, roles and targets of links, with single spaces."""
    for pattern in (r"^```.*?^```$", r"`[^`]*`", r"\]\([^)]*\)"):
        page = re.sub(pattern, " ", page, flags=re.DOTALL | re.MULTILINE)
    return " ".join(page.split())


def check_numbers(text: str, expressions: list[str | None]) -> None:
    """Compare the numbers of a text with an expression each; None is a number that is a name or a size."""
    for number, expression in zip(NUMBER.findall(text), expressions, strict=True):
        if expression is not None:
            value = evaluate(expression)
            assert is_rounded(number, value), f"{text!r}: {expression} is {value}"


def check_every_number(text: str, sources: dict[str, Any]) -> None:
    """Check the measured texts, and that no number is outside of these and of the texts that are not measured."""
    for entry in sources.get("measured", []):
        measured, expressions = entry["text"], entry["sources"]
        assert text.count(measured) == 1, f"{measured!r} occurs {text.count(measured)} times; expected once"
        text = text.replace(measured, " ")
        check_numbers(measured, expressions)
    for other in sources.get("not_measured", {}):
        assert other in text, f"{other!r} is not in the page any more; delete it"
        text = text.replace(other, " ")
    left = [text[max(match.start() - 30, 0) : match.end() + 30] for match in NUMBER.finditer(text)]
    assert not left, f"numbers without a source: {left}"
