"""Read a label map from an untrusted MATLAB file (version 5 to 7).

A file is a header and a sequence of elements, each with type, size and content. A compressed element is another element
in zlib format. A matrix is itself a sequence of elements: flags, dimensions, name, values in column-major order.
scipy's reader is not used, because a damaged file can crash the process there.
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
DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)  # double to uint64; the others are text, cells, structs and sparse matrices
COMPLEX = 0x0800


def read_mat(path: Path, key: str) -> NDArray[Any]:
    """Read the integer matrix named `key`, (H, W); BadFileError if there is none."""
    if not path.is_file():
        raise BadFileError(f"{path}: no such file; expected a MATLAB file with the label map {key!r}")
    try:
        values = _find(path.read_bytes(), key)
    except (OSError, ValueError, struct.error, zlib.error, OverflowError, MemoryError) as error:
        raise BadFileError(f"{path}: cannot be read as a MATLAB file ({error}); replace the file") from error
    if values is None:
        raise BadFileError(f"{path}: no matrix {key!r}; expected the label map under that name")
    if values.dtype.kind == "f":  # MATLAB's default type is double
        if not np.isfinite(values).all() or (values != np.rint(values)).any() or abs(values).max() > 1 << 31:
            raise BadFileError(f"{path}: {key!r} has values that are not integers; expected a label map of class ids")
        values = values.astype(np.int64)
    return values


def _find(content: bytes, key: str) -> NDArray[Any] | None:
    order = {b"IM": "<", b"MI": ">"}.get(content[126:HEADER])
    if order is None or content.startswith(b"MATLAB 7.3"):
        raise ValueError("not version 5 to 7; save it with -v7")
    for kind, element in _elements(memoryview(content)[HEADER:], order):
        if kind == COMPRESSED:
            kind, element = next(_elements(memoryview(_decompress(element)), order), (0, element))
        if kind == MATRIX:
            parts = _elements(element, order)
            (_, flags), (_, dimensions), (_, name) = (next(parts, (0, memoryview(b""))) for _ in range(3))
            if bytes(name) == key.encode():
                return _matrix(flags, dimensions, next(parts, (0, memoryview(b""))), order)
    return None


def _matrix(flags: memoryview, dimensions: memoryview, data: tuple[int, memoryview], order: str) -> NDArray[Any]:
    (flag,) = struct.unpack_from(f"{order}I", flags)
    shape = struct.unpack(f"{order}{len(dimensions) // 4}i", dimensions)
    dtype = DTYPES.get(data[0])  # MATLAB stores the narrowest type that holds the values
    if flag & 0xFF not in NUMERIC_CLASSES or flag & COMPLEX or dtype is None:
        raise ValueError("the label map is not a numeric matrix")
    values = np.frombuffer(data[1], dtype=np.dtype(order + dtype))
    if len(shape) != 2 or min(shape) < 1 or prod(shape) != values.size:
        raise ValueError(f"{values.size} values for a label map of {' x '.join(map(str, shape))}")
    return values.reshape(shape, order="F").astype(dtype)  # a copy in native byte order


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield type and content of each element."""
    position = 0
    while position + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, position)
        if kind >> 16:  # small element: up to 4 bytes inside the tag, after 2 bytes each for type and size
            yield kind & 0xFFFF, data[position + 4 : position + 4 + min(kind >> 16, 4)]
            position += 8
            continue
        if position + 8 + size > len(data):
            raise ValueError("truncated")
        yield kind, data[position + 8 : position + 8 + size]
        position += 8 + size + (0 if kind == COMPRESSED else -size % 8)


def _decompress(content: memoryview) -> bytes:
    """Decompress an element, limited to the size of the largest label map."""
    decompressor = zlib.decompressobj()
    result = decompressor.decompress(content, 8 * MAX_PIXELS)
    if not decompressor.eof:
        raise ValueError("a compressed element is truncated or too large")
    return result
