"""Numbers of the benchmark results, for pages and for the tests that compare pages with the results.

An expression names a file below benchmarks/results and a path in it, then optional factors:

    model.json models[model=torchvision:fcn].training_images_per_second
    model.json models[model=caa:captured].training_peak_bytes / 1e9
    fused.json measurements[implementation=fused,height=65].forward_ms
    mean headline/train-seed?.single.json mean_iou * 100

A step `name[key=value,...]` selects the only element of a list with these values; `name.3` selects element 3. ~ stands
for a space. After `/`, `*` or `-` follows a number or another path in the same file; they apply from left to right.
`mean` and `std` in front take the value of every file that matches the pattern.

In a page, {number}`EXPRESSION; FORMAT` writes the value with a Python format, such as `.0f`.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "/": lambda left, right: left / right,
    "*": lambda left, right: left * right,
    "-": lambda left, right: left - right,
}


def evaluate(expression: str) -> float:
    """Return the value of an expression. Raises ValueError if a file, key or element does not exist."""
    words = expression.split()
    if words[0] in ("mean", "std"):
        files = sorted(RESULTS.glob(words[1]))
        if len(files) < 2:
            raise ValueError(f"{expression}: {len(files)} files; expected at least 2")
        values = [_in_one_file(file, words[2:], expression) for file in files]
        return fmean(values) if words[0] == "mean" else stdev(values)
    return _in_one_file(RESULTS / words[0], words[1:], expression)


def is_rounded(text: str, value: float) -> bool:
    """Return whether a number in a text, such as 1,003 or 61.2, is a value rounded to the digits of the text."""
    decimals = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= float(f"0.5e-{decimals}") + 1e-9


def _in_one_file(file: Path, words: list[str], expression: str) -> float:
    if not file.is_file():
        raise ValueError(f"{expression}: no such file below benchmarks/results")
    result = _operand(file, words[0], expression)
    for sign, word in zip(words[1::2], words[2::2], strict=True):
        result = OPERATIONS[sign](result, _operand(file, word, expression))
    return result


def _operand(file: Path, word: str, expression: str) -> float:
    try:
        return float(word)
    except ValueError:
        pass
    found: Any = _content(file)
    for step in re.findall(r"[^.\[]+(?:\[[^\]]*\])?", word):
        name, _, conditions = step.replace("~", " ").removesuffix("]").partition("[")
        try:
            found = found[int(name) if isinstance(found, list) else name]
        except (KeyError, IndexError) as error:
            raise ValueError(f"{expression}: no {name!r}; expected any of {', '.join(found)}") from error
        if conditions:
            wanted = dict(condition.split("=", 1) for condition in conditions.split(","))
            matching = [one for one in found if all(str(one.get(key)) == value for key, value in wanted.items())]
            if len(matching) != 1:
                raise ValueError(f"{expression}: {len(matching)} elements match {step!r}; expected 1")
            [found] = matching
    return float(found)


@cache
def _content(file: Path) -> Any:
    return json.loads(file.read_text())


def number_role(
    name: str, rawtext: str, text: str, lineno: int, inliner: Inliner, options: object = None, content: object = None
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Write a value of the results with a format."""
    expression, _, form = text.partition(";")
    try:
        written = format(evaluate(expression), form.strip())
    except ValueError as error:
        message = inliner.reporter.error(str(error), line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]
    return [nodes.inline(written, written, classes=["number"])], []


def setup(app: Sphinx) -> ExtensionMetadata:
    """Add the role."""
    app.add_role("number", number_role)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
