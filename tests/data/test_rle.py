"""Run-length decoding agrees with strings of pycocotools and with the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caaseg.data.rle import decode_rle
from tests.data.trees import encode_rle
from tests.properties import examples

# Encoded by pycocotools.mask.encode.
SCATTERED = [[1, 1, 0, 0, 1], [0, 0, 1, 0, 1], [1, 0, 0, 0, 0], [0, 1, 0, 0, 1], [1, 0, 1, 1, 0], [0, 0, 0, 1, 0]]
SCATTERED += [[1, 1, 0, 0, 1]]
BLOCK = "e<i0?000000000000000000\\OC==CC==CC==CC==CC==7000000000000000000000000000000000000000000000000[<"


def test_strings_of_pycocotools_are_decoded() -> None:
    assert decode_rle("011000011O00O01041K00O10", 7, 5).astype(int).tolist() == SCATTERED
    block = np.zeros((40, 60), dtype=bool)
    block[5:30, 10:50] = True
    block[10:12, 20:25] = False
    np.testing.assert_array_equal(decode_rle(BLOCK, 40, 60), block)
    assert decode_rle("06", 3, 2).all()
    assert not decode_rle("Pcj1", 300, 200).any()


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    density=st.sampled_from([0, 0.03, 1]),
)
def test_decoding_inverts_encoding(height: int, width: int, seed: int, density: float) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < density
    np.testing.assert_array_equal(decode_rle(encode_rle(mask), height, width), mask)


def test_uncompressed_run_lengths_are_decoded() -> None:
    assert decode_rle([1, 2, 3], 2, 3).tolist() == [[False, True, False], [True, False, False]]


@examples(30)
@given(counts=st.text(max_size=30), height=st.integers(1, 9), width=st.integers(1, 9))
def test_any_text_is_decoded_or_raises_value_error(counts: str, height: int, width: int) -> None:
    try:
        mask = decode_rle(counts, height, width)
    except ValueError:
        return
    assert mask.shape == (height, width)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ("06", "run lengths add up to 6 pixels; expected 2 x 2 = 4"),
        ("", "truncated"),
        ("P", "truncated"),
        ("~", "invalid characters"),
        ("o" * 14 + "0", "more than 60 bits"),
    ],
)
def test_invalid_run_lengths_are_refused(counts: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_rle(counts, 2, 2)
