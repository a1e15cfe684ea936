"""`caaseg models`: timm backbones, their strides, necks, sizes and licenses."""

import warnings
from collections.abc import Iterator
from typing import Any

from caaseg.cli.arguments import check_writable
from caaseg.cli.terminal import console_for, progress_bars, write_json
from caaseg.errors import CaasegError
from caaseg.models.families import FAMILIES, access

NOTES = (
    "no neck: output strides of --model.output-stride without a neck; any output stride works with neck resize.",
    "weights: free, non-commercial, or with terms of their own, which the license states.",
    "caaseg models PATTERN lists the timm models whose names contain or match it, such as dinov2 or 'convnext*'.",
)


def models(pattern: str | None = None, *, json: str | None = None) -> int:
    """List timm backbones: strides, necks, parameters without classifier, and the license of their weights.

    Without a pattern, it lists families, with one example of each.

    Args:
        pattern: part of the names of timm models, or a pattern such as 'convnext*'; only these models are listed.
        json: file for the list; - is standard output.
    """
    check_writable(json=json)
    console = console_for(json)
    found: list[dict[str, Any]] = []
    if pattern is None:
        found += [family.described() for family in FAMILIES]
    else:
        from caaseg.models.timm_networks import describe, model_names

        names = model_names(pattern)
        if not names:
            raise CaasegError(f"PATTERN is {pattern!r}; no timm model has this name; caaseg models lists families")
        with progress_bars(console) as report, warnings.catch_warnings(action="ignore"):  # of timm, about old names
            for number, name in enumerate(names, start=1):
                found.append(describe(name))
                report("models", number, len(names))
    for line in _lines(found):
        console.print(line, soft_wrap=True)
    if pattern is None:
        console.print("\n" + "\n".join(NOTES), soft_wrap=True)
    elif len(found) == 1:
        for weights in found[0]["weights"]:
            console.print(f"{found[0]['name']}.{weights['tag']}: {_terms(weights)}", soft_wrap=True)
    if json is not None:
        write_json({"models": found}, json, console)
    return 0


def _lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table."""
    rows = [("family" if "family" in found[0] else "", "model", "parameters", "strides", "no neck", "necks", "weights")]
    for row in found:
        size = "" if row["parameters"] is None else f"{row['parameters'] / 1e6:.1f} M"
        strides, output_strides, necks = (
            " ".join(map(str, row[key])) or "-" for key in ("strides", "output_strides", "necks")
        )
        weights = row["weights"]
        kinds = [access(one["license"]) for one in weights]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"
        terms = _terms(weights[0]) if len(weights) == 1 else counts
        terms = terms if row["reason"] is None else f"cannot be used: {row['reason']}"
        rows.append((row.get("family", ""), row["name"], size, strides, output_strides, necks, terms))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        padded = [
            cell.rjust(width) if index == 2 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        yield "  ".join(padded).strip()


def _terms(weights: dict[str, str | None]) -> str:
    return f"{access(weights['license'])} ({weights['license'] or 'no license stated'})"
