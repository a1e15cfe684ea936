"""Reader of TensorFlow checkpoints (`tf.train.Checkpoint`), without TensorFlow.

A checkpoint NAME is a file NAME.index and data files NAME.data-00000-of-00001. The index is a sorted table in LevelDB's
format: blocks of keys and values, then a footer with the position of the block that lists the blocks. The value of a
variable's name is a protocol buffer with its type, shape and position in a data file. Everything has a checksum
(CRC-32C).

Files may be damaged or hostile: every length and position is checked before it is used.
"""

import math
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caaseg.errors import CaasegError

MAGIC = 0xDB4775248B80FB57
FOOTER = 48  # bytes
TRAILER = 5  # bytes after a block: kind of compression and checksum
MAX_INDEX = 64 * 2**20  # bytes, also of all blocks together after decompression
MAX_NAME = 4096  # bytes
MAX_DIMS = 16
MAX_SHARDS = 10_000
DTYPES: dict[int, Any] = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 19: np.float16}
"""TensorFlow's number of a dtype -> NumPy's dtype, for the dtypes of weights."""


class Variable(NamedTuple):
    """A variable in a checkpoint."""

    dtype: int  # TensorFlow's number
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int  # in bytes
    checksum: int


class DamagedError(ValueError):
    """The content of a file violates the format."""


class TFCheckpoint:
    """The variables of a checkpoint by name. `read` reads only the bytes of one variable.

    Args:
        path: the .index file, or its path without .index.
    """

    def __init__(self, path: Path) -> None:
        self.prefix = path.with_suffix("") if path.suffix == ".index" else path
        self.index = self.prefix.with_name(f"{self.prefix.name}.index")
        try:
            if self.index.stat().st_size > MAX_INDEX:
                raise DamagedError(f"larger than {MAX_INDEX} bytes")
            self.num_shards, self.variables = _parse_index(self.index.read_bytes())
        except DamagedError as error:
            raise self._damaged(self.index, error) from error

    def read(self, name: str) -> NDArray[Any]:
        """Return the values of a variable."""
        variable = self.variables[name]
        path = self.prefix.with_name(f"{self.prefix.name}.data-{variable.shard:05d}-of-{self.num_shards:05d}")
        if variable.dtype not in DTYPES:
            raise CaasegError(f"{self.index}: variable {name} has type number {variable.dtype}; expected numbers")
        if not path.is_file():
            raise CaasegError(
                f"{path}: no such file; the checkpoint has {self.num_shards} data files, copy all of them"
            )
        try:
            return _read_values(path, name, variable)
        except DamagedError as error:
            raise self._damaged(path, error) from error

    @staticmethod
    def _damaged(path: Path, error: DamagedError) -> CaasegError:
        return CaasegError(f"{path}: damaged or not a TensorFlow checkpoint ({error}); download it again")


def _read_values(path: Path, name: str, variable: Variable) -> NDArray[Any]:
    dtype = np.dtype(DTYPES[variable.dtype]).newbyteorder("<")
    if variable.size != math.prod(variable.shape) * dtype.itemsize or variable.size == 0:
        raise DamagedError(f"{name} of shape {variable.shape} has {variable.size} bytes")
    if variable.offset + variable.size > path.stat().st_size:
        raise DamagedError(f"it ends before the values of {name}")
    with path.open("rb") as file:
        file.seek(variable.offset)
        content = file.read(variable.size)
    if _masked(crc32c(content)) != variable.checksum:
        raise DamagedError(f"checksum of {name} is wrong")
    return np.frombuffer(content, dtype).reshape(variable.shape)


def _parse_index(content: bytes) -> tuple[int, dict[str, Variable]]:
    """Return the number of data files and the variables of an index file."""
    if len(content) < FOOTER or struct.unpack("<Q", content[-8:])[0] != MAGIC:
        raise DamagedError("it has no footer of an index")
    footer = _Reader(content[-FOOTER:-8])
    footer.varint(), footer.varint()  # position of a block that TensorFlow leaves empty
    blocks = _block(content, footer.varint(), footer.varint())
    entries: dict[bytes, bytes] = {}
    total = 0
    for _, handle in _entries(blocks):
        position = _Reader(handle)
        block = _block(content, position.varint(), position.varint())
        total += len(block)
        if total > MAX_INDEX:
            raise DamagedError("its blocks are too large")
        entries.update(_entries(block))
    header = _fields(entries.pop(b"", b""))
    num_shards = header.get(1, [0])[0]
    if not isinstance(num_shards, int) or not 1 <= num_shards <= MAX_SHARDS or header.get(2, [0]) != [0]:
        raise DamagedError("its header has no valid number of data files, or big-endian numbers")
    try:
        named = {key.decode(): _variable(value) for key, value in entries.items()}
    except UnicodeDecodeError as error:
        raise DamagedError("a name is not text") from error
    if any(variable.shard >= num_shards for variable in named.values()):
        raise DamagedError("a variable is in a data file that does not exist")
    return num_shards, named


def _variable(content: bytes) -> Variable:
    """Parse a BundleEntryProto."""
    fields = _fields(content)
    if 7 in fields:
        raise DamagedError("a variable is stored in slices, which is not supported")
    shape: list[int] = []
    for part in _fields(_bytes(fields, 2)).get(2, []):  # of a TensorShapeProto
        if not isinstance(part, bytes) or len(shape) == MAX_DIMS:
            raise DamagedError("a shape is not valid")
        shape.append(_integer(_fields(part), 1))
    return Variable(
        dtype=_integer(fields, 1),
        shape=tuple(shape),
        shard=_integer(fields, 3),
        offset=_integer(fields, 4),
        size=_integer(fields, 5),
        checksum=_integer(fields, 6),
    )


Fields = dict[int, list[int | bytes]]


def _integer(fields: Fields, number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int) or value >= 2**63:  # negative numbers are not used
        raise DamagedError(f"field {number} is not a non-negative integer")
    return value


def _bytes(fields: Fields, number: int) -> bytes:
    value = fields.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise DamagedError(f"field {number} is not a message")
    return value


def _fields(content: bytes) -> Fields:
    """Return the fields of a protocol buffer by number: integers, or bytes for nested messages and text."""
    reader, fields = _Reader(content), Fields()
    while not reader.at_end():
        tag = reader.varint()
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value = reader.varint()
        elif kind == 2:
            value = reader.take(reader.varint())
        elif kind in (1, 5):
            value = int.from_bytes(reader.take(8 if kind == 1 else 4), "little")
        else:
            raise DamagedError(f"unknown wire type {kind}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


class _Reader:
    """Reads bytes from front to back, with checks of the length."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0

    def at_end(self) -> bool:
        return self.position >= len(self.content)

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.content):
            raise DamagedError("it ends too early")
        taken, self.position = self.content[self.position : end], end
        return taken

    def varint(self) -> int:
        """Return an unsigned integer of 7 bits per byte, the lowest first."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise DamagedError("a number is too long")


def _block(content: bytes, offset: int, size: int) -> bytes:
    """Return a block of the table, after a check of its checksum."""
    end = offset + size
    if end + TRAILER > len(content):
        raise DamagedError("a block is outside the file")
    block, kind = content[offset:end], content[end]
    if _masked(crc32c(content[offset : end + 1])) != struct.unpack("<I", content[end + 1 : end + TRAILER])[0]:
        raise DamagedError("a checksum is wrong")
    if kind == 0:
        return block
    if kind == 1:
        return decompress_snappy(block)
    raise DamagedError(f"unknown compression {kind}")


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block. A key stores only what differs from the key before it."""
    if len(block) < 4:
        raise DamagedError("a block is too short")
    restarts = 4 * (1 + struct.unpack("<I", block[-4:])[0])  # bytes of a list at the end, for searches
    if restarts > len(block):
        raise DamagedError("a block is too short")
    reader, key = _Reader(block[:-restarts]), b""
    while not reader.at_end():
        shared, own, length = reader.varint(), reader.varint(), reader.varint()
        if shared > len(key) or shared + own > MAX_NAME:
            raise DamagedError("a key is not valid")
        key = key[:shared] + reader.take(own)
        yield key, reader.take(length)


def decompress_snappy(content: bytes) -> bytes:
    """Return the bytes of a block in Snappy's format: literal bytes, and copies of bytes before them."""
    reader, result = _Reader(content), bytearray()
    expected = reader.varint()
    if expected > MAX_INDEX:
        raise DamagedError("a block is too large")
    while not reader.at_end():
        tag = reader.take(1)[0]
        kind, high = tag & 3, tag >> 2
        if kind == 0:
            length = high + 1 if high < 60 else 1 + int.from_bytes(reader.take(high - 59), "little")
            result += reader.take(length)
        else:
            length = 4 + (high & 7) if kind == 1 else high + 1
            offset = int.from_bytes(reader.take({1: 1, 2: 2, 3: 4}[kind]), "little")
            offset += (high >> 3) << 8 if kind == 1 else 0
            if not 1 <= offset <= len(result):
                raise DamagedError("a compressed block is not valid")
            start = len(result) - offset
            pattern = bytes(result[start : start + length])
            result += (pattern * (length // len(pattern) + 1))[:length]
        if len(result) > expected:
            break
    if len(result) != expected:
        raise DamagedError("a compressed block differs from its stated size")
    return bytes(result)


LANE = 256  # bytes; lanes of this length are computed side by side


def crc32c(content: bytes) -> int:
    """Return the CRC-32C checksum. A checksum is linear in the bytes, so long contents are computed in lanes."""
    table = _byte_table()
    lanes = len(content) // LANE
    state = 0xFFFFFFFF
    if lanes:
        columns = np.frombuffer(content, np.uint8, lanes * LANE).reshape(lanes, LANE).T.copy()  # (LANE, lanes)
        of_lanes = np.zeros(lanes, np.uint32)
        for column in columns:
            of_lanes = table[(of_lanes ^ column) & 255] ^ (of_lanes >> 8)
        skip = _lane_table()
        for lane in of_lanes.tolist():
            state = skip[0][state & 255] ^ skip[1][state >> 8 & 255] ^ skip[2][state >> 16 & 255] ^ skip[3][state >> 24]
            state ^= lane
    small = table.tolist()
    for byte in content[lanes * LANE :]:
        state = small[(state ^ byte) & 255] ^ (state >> 8)
    return int(state ^ 0xFFFFFFFF)


@cache
def _byte_table() -> NDArray[np.uint32]:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = (values >> np.uint32(1)) ^ (values & np.uint32(1)) * np.uint32(0x82F63B78)
    return values


@cache
def _lane_table() -> list[list[int]]:
    """Return how each byte of a state contributes to the state after LANE bytes of zeros, (4, 256)."""
    table = _byte_table()
    states = np.arange(256, dtype=np.uint32)[None] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    for _ in range(LANE):
        states = table[states & 255] ^ (states >> 8)
    found: list[list[int]] = states.tolist()
    return found


def _masked(checksum: int) -> int:
    """Return a checksum as it is stored: rotated and shifted, so that checksums of checksums are not special."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
