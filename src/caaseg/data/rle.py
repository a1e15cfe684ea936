"""Decoder for COCO's run-length encoding of masks, using array operations only.

The mask is read column by column as alternating runs of zeros and ones, starting with zeros. The compressed form
stores run lengths in characters of 6 bits, starting at "0": five bits of the number, lowest first, and a bit that
says whether more characters follow. From the fourth run on, it stores the difference to the run two before. The fifth
bit of a number's last character is its sign.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def decode_rle(counts: str | Sequence[int], height: int, width: int) -> NDArray[np.bool_]:
    """Decode compressed (string) or plain (sequence) run lengths to a mask, (H, W); ValueError if they are invalid."""
    runs = _uncompress(counts) if isinstance(counts, str) else np.asarray(counts, dtype=np.int64)
    if runs.ndim != 1 or (runs < 0).any() or int(runs.sum()) != height * width:
        raise ValueError(f"run lengths add up to {runs.sum()} pixels; expected {height} x {width} = {height * width}")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _uncompress(counts: str) -> NDArray[np.int64]:
    codes = np.frombuffer(counts.encode("latin-1"), dtype=np.uint8).astype(np.int64) - 48
    if len(codes) == 0 or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        raise ValueError("run lengths are truncated or contain invalid characters")
    last = (codes & 32) == 0  # the last character of each number
    starts = np.concatenate(([0], np.flatnonzero(last)[:-1] + 1))
    lengths = np.diff(np.append(starts, len(codes)))
    if lengths.max() > 12:  # 60 bits
        raise ValueError("a run length has more than 60 bits")
    position = np.arange(len(codes)) - np.repeat(starts, lengths)
    numbers: NDArray[np.int64] = np.add.reduceat((codes & 31) << (5 * position), starts)
    negative = (codes[last] & 16) != 0
    numbers[negative] -= np.int64(1) << (5 * lengths[negative])
    numbers[1::2] = numbers[1::2].cumsum()
    numbers[2::2] = numbers[2::2].cumsum()  # the first number is never a difference
    return numbers
