"""Read a label map from an untrusted MATLAB file (version 5 to 7).

A file is a header and a sequence of elements, each with type, size and content. A compressed element is another element
in zlib format. A matrix is itself a sequence of elements: flags, dimensions, name, values in column-major order. A
struct is a matrix that has, instead of values, the names of its fields and one matrix per field.
scipy's reader is not used, because a damaged file can crash the process.
"""

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.data.decode import MAX_PIXELS
from caaseg.data.sample import BadFileError

HEADER = 128
MATRIX, COMPRESSED = 14, 15
DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
STRUCT_CLASS = 2
NUMERIC_CLASSES = range(6, 16)  # double to uint64; the others are text, cells, structs and sparse matrices
COMPLEX = 0x0800

Element = tuple[int, memoryview]  # type and content
NOTHING: Element = (0, memoryview(b""))  # in place of a missing element


class Matrix(NamedTuple):
    """The elements of a matrix."""

    flags: memoryview
    dimensions: memoryview
    name: bytes  # empty for the field of a struct
    others: Iterator[Element]


def read_mat(path: Path, key: str) -> NDArray[Any]:
    """Read an integer matrix, (H, W); BadFileError if there is none.

    Args:
        path: MATLAB file.
        key: name of the matrix, or of a struct and its field, such as GTcls.Segmentation.
    """
    if not path.is_file():
        raise BadFileError(f"{path}: no such file; expected a MATLAB file with the label map {key!r}")
    try:
        values = _find(path.read_bytes(), key)
    except KeyError:
        raise BadFileError(f"{path}: no matrix {key!r}; expected the label map under that name") from None
    except (OSError, ValueError, struct.error, zlib.error, OverflowError, MemoryError) as error:
        raise BadFileError(f"{path}: cannot be read as a MATLAB file ({error}); replace the file") from error
    if values.dtype.kind == "f":  # MATLAB's default type is double
        if not np.isfinite(values).all() or (values != np.rint(values)).any() or abs(values).max() > 1 << 31:
            raise BadFileError(f"{path}: {key!r} has values that are not integers; expected a label map of class ids")
        values = values.astype(np.int64)
    return values


def _find(content: bytes, key: str) -> NDArray[Any]:
    order = {b"IM": "<", b"MI": ">"}.get(content[126:HEADER])
    if order is None or content.startswith(b"MATLAB 7.3"):
        raise ValueError("not version 5 to 7; save it with -v7")
    variable, *fields = key.encode().split(b".")
    for kind, element in _elements(memoryview(content)[HEADER:], order):
        if kind == COMPRESSED:
            kind, element = next(_elements(memoryview(_decompress(element)), order), NOTHING)
        if kind == MATRIX and (matrix := _matrix(element, order)).name == variable:
            for field in fields:
                matrix = _field(matrix, field, order)
            return _values(matrix, order)
    raise KeyError(key)


def _matrix(content: memoryview, order: str) -> Matrix:
    elements = _elements(content, order)
    (_, flags), (_, dimensions), (_, name) = (next(elements, NOTHING) for _ in range(3))
    return Matrix(flags, dimensions, bytes(name), elements)


def _field(matrix: Matrix, field: bytes, order: str) -> Matrix:
    """Return a field of a struct; KeyError if it has none of that name."""
    (flag,) = struct.unpack_from(f"{order}I", matrix.flags)
    if flag & 0xFF != STRUCT_CLASS or prod(_shape(matrix, order)) != 1:
        raise ValueError(f"no struct with the field {field.decode()}")
    (_, length), (_, names) = (next(matrix.others, NOTHING) for _ in range(2))
    (width,) = struct.unpack(f"{order}i", length)  # of each name, padded with zeros
    if width < 1:
        raise ValueError(f"field names of {width} bytes")
    known = [bytes(names[k : k + width]).partition(b"\0")[0] for k in range(0, len(names), width)]
    if field not in known:
        raise KeyError(field)
    kind, content = next(islice(matrix.others, known.index(field), None), NOTHING)
    if kind != MATRIX:
        raise ValueError("truncated")
    return _matrix(content, order)


def _shape(matrix: Matrix, order: str) -> tuple[int, ...]:
    return struct.unpack(f"{order}{len(matrix.dimensions) // 4}i", matrix.dimensions)


def _values(matrix: Matrix, order: str) -> NDArray[Any]:
    (flag,) = struct.unpack_from(f"{order}I", matrix.flags)
    shape = _shape(matrix, order)
    kind, data = next(matrix.others, NOTHING)
    dtype = DTYPES.get(kind)  # MATLAB stores the narrowest type that holds the values
    if flag & 0xFF not in NUMERIC_CLASSES or flag & COMPLEX or dtype is None:
        raise ValueError("the label map is not a numeric matrix")
    values = np.frombuffer(data, dtype=np.dtype(order + dtype))
    if len(shape) != 2 or min(shape) < 1 or prod(shape) != values.size:
        raise ValueError(f"{values.size} values for a label map of {' x '.join(map(str, shape))}")
    return values.reshape(shape, order="F").astype(dtype)  # a copy in native byte order


def _elements(data: memoryview, order: str) -> Iterator[Element]:
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
