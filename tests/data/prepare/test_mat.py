"""MATLAB files of every type as scipy writes them, and invalid files."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.io import savemat

from caaseg.data.prepare.mat import read_mat
from caaseg.data.sample import BadFileError


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (1, 4), (7, 2)])
def test_files_written_by_scipy_are_read(tmp_path: Path, shape: tuple[int, int], dtype: str, compressed: bool) -> None:
    values = (np.arange(np.prod(shape)) % 120).reshape(shape).astype(dtype)
    around = {"names": np.array(["a", "bc"], dtype=object), "x": 3.5, "S": values, "text": "abc", "deep": {"S": 1}}
    savemat(tmp_path / "a.mat", around, do_compression=compressed)
    found = read_mat(tmp_path / "a.mat", "S")
    np.testing.assert_array_equal(found, values)
    assert found.dtype.kind in "ui"
    assert found.flags.writeable


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("others", [{}, {"A": np.eye(3), "cells": np.array(["a", 2], dtype=object), "B": {"S": 7}}])
def test_the_field_of_a_struct_is_read(tmp_path: Path, others: dict[str, Any], compressed: bool) -> None:
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    struct = {**others, "Segmentation": values, "a_much_longer_name": "text", "inner": {"S": values + 1}}
    savemat(tmp_path / "a.mat", {"S": 3, "GTcls": struct}, do_compression=compressed)
    np.testing.assert_array_equal(read_mat(tmp_path / "a.mat", "GTcls.Segmentation"), values)
    np.testing.assert_array_equal(read_mat(tmp_path / "a.mat", "GTcls.inner.S"), values + 1)
    for key in ("GTcls.Boundaries", "GTinst.Segmentation", "GTcls.inner.Segmentation", "GTcls.Segment"):
        with pytest.raises(BadFileError, match=rf"a\.mat: no matrix '{key}'; expected the label map under that name"):
            read_mat(tmp_path / "a.mat", key)
    for key, message in (
        ("S.Segmentation", "no struct with the field Segmentation"),
        ("GTcls", "the label map is not a numeric matrix"),
    ):
        with pytest.raises(BadFileError, match=rf"a\.mat: cannot be read as a MATLAB file \({message}\)"):
            read_mat(tmp_path / "a.mat", key)


def test_an_array_of_structs_is_refused(tmp_path: Path) -> None:
    structs = np.array([(1,), (2,)], dtype=[("Segmentation", "u1")])
    savemat(tmp_path / "a.mat", {"GTcls": structs})
    with pytest.raises(BadFileError, match=r"a\.mat: .*no struct with the field Segmentation"):
        read_mat(tmp_path / "a.mat", "GTcls.Segmentation")


def test_the_other_byte_order_is_read(tmp_path: Path) -> None:
    def element(kind: int, content: bytes) -> bytes:
        return struct.pack(">II", kind, len(content)) + content + bytes(-len(content) % 8)

    numbers = struct.pack(">6H", 1, 2, 3, 400, 5, 459)
    parts = element(6, struct.pack(">II", 11, 0)) + element(5, struct.pack(">ii", 2, 3)) + element(1, b"LabelMap")
    matrix = element(14, parts + element(4, numbers))
    (tmp_path / "a.mat").write_bytes(b"MATLAB 5.0".ljust(124) + struct.pack(">H", 0x0100) + b"MI" + matrix)
    assert read_mat(tmp_path / "a.mat", "LabelMap").tolist() == [[1, 3, 5], [2, 400, 459]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([[0.5, 1]]), "has values that are not integers"),
        (np.array([[np.nan, 1]]), "has values that are not integers"),
        (np.array([[1e300, 1]]), "has values that are not integers"),
        (np.array([[1j]]), "the label map is not a numeric matrix"),
        ("text", "the label map is not a numeric matrix"),
        (np.ones((2, 2, 2), dtype=np.uint8), "8 values for a label map of 2 x 2 x 2"),
        (np.ones((0, 3), dtype=np.uint8), "0 values for a label map of 0 x 3"),
    ],
)
def test_other_variables_are_refused(tmp_path: Path, value: NDArray[Any] | str, message: str) -> None:
    savemat(tmp_path / "a.mat", {"S": value})
    with pytest.raises(BadFileError, match=rf"a\.mat: .*{message}"):
        read_mat(tmp_path / "a.mat", "S")


def test_invalid_files_and_missing_variables_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    with pytest.raises(BadFileError, match=r"a\.mat: no such file; expected a MATLAB file with the label map 'S'"):
        read_mat(path, "S")
    for content in (b"", b"nothing of the kind", b"\0" * 200, b"MATLAB 7.3 MAT-file".ljust(126) + b"IM"):
        path.write_bytes(content)
        with pytest.raises(BadFileError, match=r"a\.mat: cannot be read as a MATLAB file \(not version 5 to 7"):
            read_mat(path, "S")
    savemat(path, {"other": np.ones((2, 2), dtype=np.uint8)})
    with pytest.raises(BadFileError, match=r"a\.mat: no matrix 'S'; expected"):
        read_mat(path, "S")
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(BadFileError, match=r"a\.mat: cannot be read as a MATLAB file \(truncated\)"):
        read_mat(path, "other")
