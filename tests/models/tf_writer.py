"""Writes TensorFlow checkpoints in the format that `caaseg.models.tf_checkpoint` reads."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from caaseg.models.tf_checkpoint import MAGIC, crc32c

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def masked(content: bytes) -> int:
    checksum = crc32c(content)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded, value = encoded + bytes([value & 127 | 128]), value >> 7
    return encoded + bytes([value])


def snappy(content: bytes) -> bytes:
    """Compress nothing: one literal."""
    return varint(len(content)) + bytes([62 << 2]) + (len(content) - 1).to_bytes(3, "little") + content


def block_of(entries: list[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(b"\0" + varint(len(key)) + varint(len(value)) + key + value for key, value in entries)
    return body + struct.pack("<II", 0, 1)


def sealed(block: bytes, kind: int = 0) -> bytes:
    """Return a block with its trailer: kind of compression and checksum."""
    content = block + bytes([kind])
    return content + struct.pack("<I", masked(content))


def index_of(block: bytes, kind: int = 0) -> bytes:
    """Return an index file with one block of entries."""
    first, empty = sealed(block, kind), sealed(block_of([]))
    handle = varint(0) + varint(len(block))
    listing = block_of([(b"z", handle)])
    footer = varint(len(first)) + varint(len(empty) - 5) + varint(len(first) + len(empty)) + varint(len(listing))
    return first + empty + sealed(listing) + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def entries_of(arrays: Mapping[str, Any]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the entries of an index, and the content of the data file."""
    data, entries = bytearray(), [(b"", b"\x08\x01")]
    for name, array in sorted(arrays.items()):
        content = np.asarray(array, np.float32).tobytes()
        sizes = [b"\x08" + varint(side) for side in array.shape]
        dims = b"".join(b"\x12" + varint(len(size)) + size for size in sizes)
        entry = (
            b"\x08\x01\x12" + varint(len(dims)) + dims + b"\x20" + varint(len(data)) + b"\x28" + varint(len(content))
        )
        entries.append((name.encode(), entry + b"\x35" + struct.pack("<I", masked(content))))
        data += content
    return entries, bytes(data)


def write_checkpoint(prefix: Path, arrays: Mapping[str, Any], *, compressed: bool = False) -> None:
    """Write the variables of a model, as NAME.index and NAME.data-00000-of-00001."""
    entries, data = entries_of({f"model/{name}{VALUE}": array for name, array in arrays.items()})
    block = block_of(entries)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.index").write_bytes(index_of(snappy(block) if compressed else block, compressed))
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(data)
