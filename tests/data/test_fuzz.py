"""Reading a damaged file returns a sample or raises BadFileError; it raises no other exception and ends in time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from caaseg.data.datasets.pairs import Pair, PairDataset
from caaseg.data.decode import read_color_mask
from caaseg.data.labels import LabelTable, distinct_colors
from caaseg.data.prepare.mat import read_mat
from caaseg.data.sample import IGNORE, BadFileError
from tests.data.damage import encoded_images, encoded_masks, mutated
from tests.data.trees import values_of
from tests.time_limit import time_limit

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow may warn about damaged metadata


def outcomes(read: Callable[[Path], object], seeds: list[bytes], path: Path, number: int, seed: int) -> tuple[int, int]:
    """Return how many of `number` damaged files were read, and how many were refused by name."""
    rng = np.random.default_rng(seed)
    good = bad = 0
    for k in range(number):
        path.write_bytes(mutated(seeds[k % len(seeds)], rng))
        try:
            with time_limit(20):
                read(path)
            good += 1
        except BadFileError as error:
            bad += str(error).startswith(f"{path.parent}/")
    assert good + bad == number  # every error names its file
    return good, bad


def check_damaged_pairs(directory: Path, number: int, seed: int) -> None:
    """Damage the image of a pair, then its mask."""
    pair = Pair("x", directory / "image", directory / "mask")
    pair.image.write_bytes(encoded_images()[0])
    (directory / "mask").write_bytes(encoded_masks()[0])
    table = LabelTable({0: 0, 1: 1, 2: 2, 255: IGNORE})
    dataset = PairDataset([pair], classes=("a", "b", "c"), palette=distinct_colors(3), read_label=table.read)
    assert dataset[0].label.shape == (40, 56)
    good, bad = outcomes(lambda _: dataset[0], encoded_images(), pair.image, number, seed)
    assert good > number // 50
    assert bad > number // 4
    pair.image.write_bytes(encoded_images()[0])
    good, bad = outcomes(lambda _: dataset[0], encoded_masks(), directory / "mask", number, seed + 1)
    assert good > number // 100
    assert bad > number // 4
    good, bad = outcomes(read_color_mask, encoded_masks(), directory / "mask", number // 4, seed + 2)
    assert good > 0
    assert bad > number // 16


def test_damaged_images_and_masks_are_read_or_refused(tmp_path: Path) -> None:
    check_damaged_pairs(tmp_path, 400, seed=0)


@pytest.mark.slow
def test_10000_more_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    check_damaged_pairs(tmp_path, 10_000, seed=100)


def test_damaged_matlab_files_are_read_or_refused(tmp_path: Path) -> None:
    seeds = []
    for compressed in (False, True):
        path = tmp_path / "seed.mat"
        savemat(path, {"S": values_of(0, 1, 2).astype(np.uint8), "x": "text"}, do_compression=compressed)
        seeds.append(path.read_bytes())
    good, bad = outcomes(lambda path: read_mat(path, "S"), seeds, tmp_path / "a.mat", 1000, seed=0)
    assert good > 50
    assert bad > 100
    for compressed in (False, True):
        struct = {"a": "text", "Segmentation": values_of(0, 1, 2).astype(np.uint8)}
        savemat(tmp_path / "seed.mat", {"GTcls": struct}, do_compression=compressed)
        seeds[compressed] = (tmp_path / "seed.mat").read_bytes()
    good, bad = outcomes(lambda path: read_mat(path, "GTcls.Segmentation"), seeds, tmp_path / "a.mat", 300, seed=1)
    assert good > 20
    assert bad > 50
