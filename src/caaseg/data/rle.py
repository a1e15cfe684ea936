"""COCO's run-length encoding of masks, decoded with array operations alone.

A mask is read column by column as runs, first of zeros, then of ones, and so on. The compressed form writes the run
lengths, from the fourth on as the difference to the one two before, in characters of 6 bits from "0" on: five bits of
the number, lowest first, and one that says that more follow. The last character's fifth bit is the sign.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def decode_rle(counts: str | Sequence[int], height: int, width: int) -> NDArray[np.bool_]:
    """The mask, (H, W), of run lengths, compressed or plain. Anything that is not one is a ValueError."""
    runs = _uncompressed(counts) if isinstance(counts, str) else np.asarray(counts, dtype=np.int64)
    if runs.ndim != 1 or (runs < 0).any() or int(runs.sum()) != height * width:
        raise ValueError(f"runs of {runs.sum()} pixels in all; expected {height} x {width} = {height * width}")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _uncompressed(counts: str) -> NDArray[np.int64]:
    codes = np.frombuffer(counts.encode("latin-1"), dtype=np.uint8).astype(np.int64) - 48
    if len(codes) == 0 or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        raise ValueError("run lengths that are cut short or have characters of no meaning")
    last = (codes & 32) == 0  # the last character of each number
    starts = np.concatenate(([0], np.flatnonzero(last)[:-1] + 1))
    lengths = np.diff(np.append(starts, len(codes)))
    if lengths.max() > 12:  # 60 bits
        raise ValueError("a run length of more than 60 bits")
    place = np.arange(len(codes)) - np.repeat(starts, lengths)
    numbers: NDArray[np.int64] = np.add.reduceat((codes & 31) << (5 * place), starts)
    negative = (codes[last] & 16) != 0
    numbers[negative] -= np.int64(1) << (5 * lengths[negative])
    numbers[1::2] = numbers[1::2].cumsum()
    numbers[2::2] = numbers[2::2].cumsum()  # the first number stands alone
    return numbers
