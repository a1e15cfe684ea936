"""One label map out of a MATLAB file (version 5 to 7) that may be anything.

A file is a header and a row of elements, each a kind, a size and its content; a compressed element is zlib around
another one, and a matrix is itself a row of elements: flags, dimensions, name, numbers column by column. That is all a
label map needs, and reading it here is safe: scipy's reader can be made to crash the process by a damaged file.
"""

import struct
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caaseg.data.decode import MAX_PIXELS
from caaseg.data.sample import BadFileError

HEADER = 128
MATRIX, COMPRESSED = 14, 15
STORED_AS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)  # from double to uint64; the others are text, cells, structures and sparse matrices
COMPLEX = 0x0800


def read_mat(path: Path, key: str) -> NDArray[Any]:
    """The matrix called `key`, (H, W), of whole numbers; BadFileError if there is no such thing."""
    if not path.is_file():
        raise BadFileError(f"{path}: no such file; expected a MATLAB file with the label map {key!r}")
    try:
        values = _find(path.read_bytes(), key)
    except (OSError, ValueError, struct.error, zlib.error, OverflowError, MemoryError) as error:
        raise BadFileError(f"{path}: cannot be read as a MATLAB file ({error}); replace the file") from error
    if values is None:
        raise BadFileError(f"{path}: no matrix {key!r} in it; expected the label map under that name")
    if values.dtype.kind == "f":  # MATLAB's numbers are floating unless told otherwise
        if not np.isfinite(values).all() or (values != np.rint(values)).any() or abs(values).max() > 1 << 31:
            raise BadFileError(f"{path}: {key!r} has values that are not whole; expected a label map of class ids")
        values = values.astype(np.int64)
    return values


def _find(content: bytes, key: str) -> NDArray[Any] | None:
    order = {b"IM": "<", b"MI": ">"}.get(content[126:HEADER])
    if order is None or content.startswith(b"MATLAB 7.3"):
        raise ValueError("not of version 5 to 7; save it with -v7")
    for kind, element in _elements(memoryview(content)[HEADER:], order):
        if kind == COMPRESSED:
            kind, element = next(_elements(memoryview(_inflated(element)), order), (0, element))
        if kind == MATRIX:
            parts = _elements(element, order)
            (_, flags), (_, dimensions), (_, name) = (next(parts, (0, memoryview(b""))) for _ in range(3))
            if bytes(name) == key.encode():
                return _matrix(flags, dimensions, next(parts, (0, memoryview(b""))), order)
    return None


def _matrix(flags: memoryview, dimensions: memoryview, numbers: tuple[int, memoryview], order: str) -> NDArray[Any]:
    (flag,) = struct.unpack_from(f"{order}I", flags)
    shape = struct.unpack(f"{order}{len(dimensions) // 4}i", dimensions)
    stored = STORED_AS.get(numbers[0])  # MATLAB stores in the narrowest type that holds the values
    if flag & 0xFF not in NUMERIC_CLASSES or flag & COMPLEX or stored is None:
        raise ValueError("the label map is no matrix of numbers")
    values = np.frombuffer(numbers[1], dtype=np.dtype(order + stored))
    if len(shape) != 2 or min(shape) < 1 or prod(shape) != values.size:
        raise ValueError(f"{values.size} numbers for a label map of {' x '.join(map(str, shape))}")
    return values.reshape(shape, order="F").astype(stored)  # in this machine's byte order, and in memory of its own


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Kind and content of each element."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        if kind >> 16:  # up to 4 bytes lie in the tag itself, after a kind and a size of two bytes each
            yield kind & 0xFFFF, data[at + 4 : at + 4 + min(kind >> 16, 4)]
            at += 8
            continue
        if at + 8 + size > len(data):
            raise ValueError("it is cut short")
        yield kind, data[at + 8 : at + 8 + size]
        at += 8 + size + (0 if kind == COMPRESSED else -size % 8)


def _inflated(content: memoryview) -> bytes:
    """Not more than a label map can need, whatever it was made to become."""
    inflater = zlib.decompressobj()
    found = inflater.decompress(content, 8 * MAX_PIXELS)
    if not inflater.eof:
        raise ValueError("a compressed element is cut short or too large")
    return found
