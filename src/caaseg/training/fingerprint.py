"""Fingerprint of the data of a run: classes, names, file sizes and order. No file is decoded."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from caaseg.data.datasets.pairs import Pair, PairDataset
from caaseg.data.sample import SegmentationDataset
from caaseg.errors import CaasegError

logger = logging.getLogger(__name__)

MAX_LISTED = 5  # names in a message


def fingerprint(dataset: SegmentationDataset) -> dict[str, Any]:
    """Return plain values that identify a dataset, for a checkpoint.

    Datasets without files (scenes, or your own) have no names, because their samples are known only when read.
    """
    pairs = _pairs(dataset)
    return {
        "classes": list(dataset.classes),
        "length": len(dataset),
        "names": None if pairs is None else [pair.name for pair in pairs],
        "bytes": None if pairs is None else torch.tensor([_bytes(pair) for pair in pairs]),  # (N,) int64
    }


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any], split: str, source: Path) -> None:
    """Raise CaasegError if a split has other classes or images than when its fingerprint was saved.

    A changed file size is only a warning, because a damaged file may be repaired before resuming.
    """
    found = _difference(saved, now)
    if found is not None:
        raise CaasegError(
            f"{source}: the data of split {split} have changed: {found}; restore them, or start a new run with another "
            "--out"
        )
    if now["names"] is not None:
        changed = [name for name, other in zip(now["names"], saved["bytes"] != now["bytes"], strict=True) if other]
        if changed:
            logger.warning("%s: files of split %s have changed their size: %s", source, split, _listed(changed))


def _difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    if saved["classes"] != now["classes"]:
        return f"the classes were {', '.join(saved['classes'])} and are {', '.join(now['classes'])}"
    if saved["names"] == now["names"]:
        return None if saved["length"] == now["length"] else f"{saved['length']} images then, {now['length']} now"
    if saved["names"] is None or now["names"] is None:
        return "the dataset has another type"
    before, after = set(saved["names"]), set(now["names"])
    removed = [name for name in saved["names"] if name not in after]
    added = [name for name in now["names"] if name not in before]
    parts = [f"missing {_listed(removed)}"] * bool(removed) + [f"new {_listed(added)}"] * bool(added)
    return "; ".join(parts) or "the images are in another order"


def _pairs(dataset: Any) -> list[Pair] | None:
    if isinstance(dataset, PairDataset):
        return dataset.pairs
    if isinstance(dataset, ConcatDataset):
        parts = [_pairs(part) for part in dataset.datasets]
        return None if None in parts else [pair for part in parts for pair in part or ()]
    return None


def _bytes(pair: Pair) -> int:
    """Return the size of the files of a sample; a file that is missing counts as 0."""
    paths = [path for path in (pair.image, pair.label) if path is not None]
    return sum(path.stat().st_size for path in paths if path.exists())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"
