"""Synthetic scenes, drawn from (seed, index) without files, whose small objects need long-range context.

A landscape of three textured regions contains a few small houses, and lamps along its edges. All houses look alike:
the class of a house is the color of the one lamp in its row or column, at the more distant edge. No two houses share
rows or columns, so other lamps, some of them without a house, mislead a model that does not look along the right line.
Regions and lamps can be classified from a few pixels around them, houses cannot: a model whose receptive field is
less than half the image can only guess.

All drawing uses integer arithmetic, so a scene is identical in every process and on every machine.
"""

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from caaseg.data.datasets.info import DatasetInfo
from caaseg.data.sample import IGNORE, Color, Sample
from caaseg.errors import CaasegError

Split = Literal["train", "val", "test"]
Difficulty = Literal["easy", "medium", "hard"]

MEADOW, WATER, SAND, LAMP, FIRST_HOUSE = range(5)
ROUND, SQUARE, DIAMOND = range(3)

MIN_SIDE = 64
"""In smaller images, houses and lamps have too few pixels for a shape."""

LENGTHS: dict[str, int] = {"train": 2000, "val": 200, "test": 200}


class Clutter(NamedTuple):
    """Number of objects and noise of a difficulty."""

    houses: int
    strays: int  # lamps without a house
    noise: int  # largest change of a pixel value


CLUTTER: dict[Difficulty, Clutter] = {
    "easy": Clutter(houses=2, strays=0, noise=8),
    "medium": Clutter(houses=4, strays=3, noise=16),
    "hard": Clutter(houses=5, strays=6, noise=32),
}

Integers = NDArray[np.int32]


class Layout(NamedTuple):
    """Positions and colors of houses and lamps."""

    houses: Integers  # (houses, 3): row and column of the center, half the extent
    kinds: Integers  # (houses,): ROUND, SQUARE or DIAMOND
    colors: Integers  # (houses,): index of the color that the house shares with its lamp, from 0
    lamps: Integers  # (houses, 2): row and column of the center of each house's lamp
    strays: Integers  # (strays, 3): row, column and color of lamps without a house


class Scenes:
    """Synthetic dataset with eight classes; no scene occurs in two splits or with two seeds.

    Args:
        split: train, val or test: different scenes for the same seed.
        length: number of scenes; by default 2000 for train and 200 for val and test.
        size: height and width.
        difficulty: number of houses and misleading lamps, and amount of noise.
        seed: selects the scenes.
    """

    classes: tuple[str, ...] = (
        "meadow",
        "water",
        "sand",
        "lamp",
        "amber house",
        "teal house",
        "violet house",
        "rose house",
    )
    palette: tuple[Color, ...] = (
        (124, 168, 92),
        (74, 120, 186),
        (222, 204, 150),
        (250, 250, 250),
        (244, 160, 26),
        (22, 160, 148),
        (124, 76, 196),
        (226, 62, 114),
    )

    def __init__(
        self,
        split: Split = "train",
        *,
        length: int | None = None,
        size: tuple[int, int] = (128, 128),
        difficulty: Difficulty = "medium",
        seed: int = 0,
    ) -> None:
        for option, value, known in (("split", split, Split), ("difficulty", difficulty, Difficulty)):
            if value not in get_args(known):
                raise CaasegError(f"scenes: {option} is {value!r}; expected any of {', '.join(get_args(known))}")
        if min(size) < MIN_SIDE:
            raise CaasegError(f"scenes: size is {size[0]} x {size[1]}; expected at least {MIN_SIDE} on each side")
        if length is not None and length < 1:
            raise CaasegError(f"scenes: length is {length}; expected 1 or more")
        if seed < 0:
            raise CaasegError(f"scenes: seed is {seed}; expected 0 or more")
        self.split: Split = split
        self.length = LENGTHS[split] if length is None else length
        self.size = size
        self.difficulty: Difficulty = difficulty
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.length:
            raise IndexError(f"scenes: index {index}; expected 0 to {self.length - 1}")
        stream = (self.seed, get_args(Split).index(self.split), index)
        layout = draw_layout(np.random.default_rng((*stream, 0)), self.size, CLUTTER[self.difficulty])
        # A separate stream, so that the painting cannot depend on the layout's random numbers.
        image, label = paint(layout, np.random.default_rng((*stream, 1)), self.size, CLUTTER[self.difficulty].noise)
        return Sample(
            torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(label), f"{self.split}-{self.seed}-{index:06d}"
        )


def unit_of(size: tuple[int, int]) -> int:
    """Return the unit of all lengths, 1/16 of the shorter side: houses are up to 2 units wide, edges are 2 units."""
    return min(size) // 16


def draw_layout(rng: np.random.Generator, size: tuple[int, int], clutter: Clutter) -> Layout:
    """Place each house in its own band of rows and of columns, and its lamp at the far edge of its row or column."""
    unit, n = unit_of(size), clutter.houses
    centers = [np.arange(3 * unit, side - 3 * unit + 1, 2 * unit) for side in size]  # of the bands, inside the edges
    bands = [rng.permutation(line) for line in centers]  # rows, columns
    half = rng.integers(5 * unit // 8, unit, n)
    shift = rng.integers(0, 2 * (unit - half)[:, None] - 1, (n, 2)) - (unit - half)[:, None] + 1  # stay inside the band
    spots = np.stack([bands[0][:n], bands[1][:n]], 1) + shift  # (houses, 2)

    edges = [np.where(spots[:, axis] < side // 2, side - 1 - unit, unit) for axis, side in enumerate(size)]
    in_row = rng.integers(0, 2, n, dtype=bool)
    lamps = np.where(in_row[:, None], np.stack([spots[:, 0], edges[1]], 1), np.stack([edges[0], spots[:, 1]], 1))

    ends = [(unit, side - 1 - unit) for side in size]
    free = [(row, column) for row in (*ends[0], *bands[0][n:]) for column in ends[1]]
    free += [(row, column) for row in ends[0] for column in bands[1][n:]]
    chosen = rng.permutation(np.array(free))[: clutter.strays]
    colors = len(Scenes.classes) - FIRST_HOUSE
    strays = np.concatenate([chosen, rng.integers(0, colors, (len(chosen), 1))], 1)
    return Layout(
        houses=np.concatenate([spots, half[:, None]], 1).astype(np.int32),
        kinds=rng.integers(0, 3, n, dtype=np.int32),
        colors=rng.integers(0, colors, n, dtype=np.int32),  # drawn last, so that nothing above depends on it
        lamps=lamps.astype(np.int32),
        strays=strays.astype(np.int32),
    )


def paint(
    layout: Layout, rng: np.random.Generator, size: tuple[int, int], noise: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Paint the image (H, W, 3) and the label (H, W) of a layout. Only the lamp of a house shows its color."""
    height, width = size
    unit = unit_of(size)
    rows, columns = np.ogrid[:height, :width]
    fields = np.stack([_smooth(rng, size, 4 * unit) for _ in range(3)])  # (3, H, W)
    label = fields.argmax(0).astype(np.uint8)

    image = np.array(Scenes.palette, np.int16)[label]  # (H, W, 3)
    phase = rng.integers(0, unit, 3)
    tufts = _smooth(rng, size, max(unit // 4, 2)) // 640
    waves = _triangle_wave(rows + fields[1] // 2048 + phase[1], unit)
    ripples = _triangle_wave(rows + columns + phase[2], max(unit // 2, 2))
    image += np.choose(label, [tufts, waves, ripples]).astype(np.int16)[:, :, None]

    houses = np.column_stack([layout.houses, layout.kinds, layout.colors])
    for row, column, half, kind, color in houses:
        area, down, right = _square_around(row, column, half + 1)
        inside = _shape(kind, down, right, half)
        label[area][_shape(kind, down, right, half + 1)] = IGNORE  # a one-pixel outline, as in annotated datasets
        label[area][inside] = FIRST_HOUSE + color
        wall = rng.integers(150, 210)
        image[area][inside] = wall
        image[area][inside & (down < 0)] = (wall - 60, wall - 80, wall - 90)  # the roof

    image += rng.integers(-noise, noise + 1, image.shape, dtype=np.int16)
    colors = np.array(Scenes.palette[FIRST_HOUSE:], np.int16)
    half = 3 * unit // 8
    for row, column, color in np.concatenate([np.column_stack([layout.lamps, layout.colors]), layout.strays]):
        area, down, right = _square_around(row, column, half + 1)
        label[area] = LAMP
        image[area] = 20  # a dark rim, visible on every background
        image[area][_shape(SQUARE, down, right, half)] = colors[color]
    return image.clip(0, 255).astype(np.uint8), label


def _smooth(rng: np.random.Generator, size: tuple[int, int], cell: int) -> Integers:
    """Return a random field (H, W) from 0 to about 2**15, bilinear between grid points `cell` pixels apart."""
    levels = max(2**15 // cell**2, 8)  # at least 8 different values, also in large scenes
    grid = rng.integers(0, levels, (size[0] // cell + 2, size[1] // cell + 2), dtype=np.int32)
    for axis, side in enumerate(size):
        at, between = np.divmod(np.arange(side, dtype=np.int32), cell)
        between = between.reshape((-1, 1) if axis == 0 else (1, -1))
        grid = grid.take(at, axis) * (cell - between) + grid.take(at + 1, axis) * between
    largest = levels * cell**2
    return grid if largest <= 2**15 else (grid.astype(np.int64) * 2**15 // largest).astype(np.int32)


def _triangle_wave(at: NDArray[np.integer], period: int) -> Integers:
    """Return a triangle wave between -16 and 16 with a period of 2 * `period`."""
    return (abs(at % (2 * period) - period) * 32 // period - 16).astype(np.int32)


def _square_around(row: int, column: int, half: int) -> tuple[tuple[slice, slice], Integers, Integers]:
    """Return the square around a point, and the vertical and horizontal offset of each of its pixels."""
    down, right = np.mgrid[-half : half + 1, -half : half + 1].astype(np.int32)
    return (slice(row - half, row + half + 1), slice(column - half, column + half + 1)), down, right


def _shape(kind: int, down: Integers, right: Integers, half: int) -> NDArray[np.bool_]:
    if kind == ROUND:
        return down**2 + right**2 <= half**2
    return (np.maximum(abs(down), abs(right)) if kind == SQUARE else abs(down) + abs(right)) <= half


INFO = DatasetInfo(
    title="synthetic scenes whose small houses need context from far along their row or column",
    open=lambda root, split, **options: Scenes(split, **options),
    has_files=False,
    classes=Scenes.classes,
    palette=Scenes.palette,
    counts=LENGTHS,
    image_size="128 x 128",
    how="drawn on demand, without files or root",
)
