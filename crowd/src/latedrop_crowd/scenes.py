"""Simple surveillance scenes with known heads, made in memory: for the demo and the tests, which then need no data.

A camera looks down on a square: `height(y) = far + (near - far) · y / (H - 1)` is how tall a person is, in pixels,
whose feet are on row `y`. People are a head, a body and legs, alone and in groups, one in front of the other. Clutter
looks like parts of people. The training part has little of it; validation and test have more of it, and kinds that
training never showed, so that a network trained here makes false positives there.

`Walks` are scenes that move, for the console's demo: a frame is a function of the seed and the time alone. It is calm,
then a train arrives; now and then the lamps fail for some seconds, and the frame is unlike what the counter has seen.
Pictures are four times as large as the frames of a set, and in colour; made smaller again they are such frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from latedrop.errors import ArgumentError
from latedrop_crowd.layouts import CrowdSet, Frame

__all__ = ["Walks", "make_scenes"]

SHAPE = (144, 192)
"""Rows and columns of a frame."""
_SIGMA = 3.0
_FAR, _NEAR = 10.0, 32.0
"""Height of a person on the first and on the last row, of a frame of 144 rows."""
HORIZON = 0.14
"""Share of the frame above the square."""
_KNOWN = ("post", "bin", "shadow")
_OTHER = ("bush", "torso", "lamp")
_SEEN = 0.5
"""A head counts if at least so much of it is not hidden behind others."""

Picture = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int32]


def make_scenes(
    train: int = 320, validation: int = 80, test: int = 120, *, seed: int = 0, shape: tuple[int, int] = SHAPE
) -> CrowdSet:
    """Frames with 0 to about 60 people; the same arguments give the same pixels.

    A frame depends on the seed, its part and its place in it alone, so a smaller set is the beginning of a larger one.

    Args:
        train: frames with few posts, bins and shadows.
        validation: frames with more of these, and with bushes, bodies without a head, and lamps.
        test: frames like those of validation.
        seed: of everything.
        shape: rows and columns of a frame, at least 64 each.
    """
    sizes = (train, validation, test)
    if min(sizes) < 0 or not sum(sizes):
        raise ArgumentError(f"expected numbers of frames, not all 0; found {sizes}. Ask for at least one frame.")
    if min(shape) < 64:
        raise ArgumentError(f"expected frames of at least 64 x 64 pixels; found {shape}. Ask for larger ones.")
    ground = ground_of(np.random.default_rng([seed, 99]), shape)
    made = [_scene((seed, part, i), ground, other=part > 0) for part, size in enumerate(sizes) for i in range(size)]
    frames = tuple(Frame(f"scene_{i:04d}", None, heads, pixels) for i, (heads, pixels) in enumerate(made))
    ends = np.cumsum((0, *sizes)).tolist()
    first, second, third = (tuple(range(start, stop)) for start, stop in pairwise(ends))
    return CrowdSet("scenes", frames, first, second, third, sigma=_SIGMA, size=shape)


class Part(NamedTuple):
    """A filled shape, in heights of its figure: middle (right of, above the feet), radii, grey value.

    `power` 2 is an ellipse, 8 a box with round corners.
    """

    right: float
    up: float
    wide: float
    tall: float
    grey: float
    power: float = 2.0
    head: bool = False


class Figure(NamedTuple):
    """A person or a thing: x and y of its feet and its height, in pixels; its parts, the hindmost first."""

    x: float
    y: float
    height: float
    parts: Sequence[Part]
    person: bool


def _scene(
    key: tuple[int, int, int], ground: Picture, *, other: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]:
    """Return the heads `(P, 2)` and the pixels of a frame."""
    rng = np.random.default_rng(key)
    shape = (ground.shape[0], ground.shape[1])
    canvas, owner = ground.copy(), np.zeros(shape, np.int32)
    sun = float(rng.uniform(-1, 1))
    figures = [*_people(rng, shape), *clutter(rng, shape, other)]
    # Whoever is farther away is painted first, so that the nearer ones hide them.
    figures.sort(key=lambda figure: figure.y)
    for figure in figures:
        if figure.person:
            _fill(canvas, figure, Part(0.25 * sun, 0.01, 0.32, 0.06, 0.0), strength=0.35)
    areas = [_paint(canvas, owner, figure, number, sun) for number, figure in enumerate(figures)]
    seen = np.bincount(owner.ravel(), minlength=len(figures) + 1)[1:]
    heads = [
        _middle(figure)
        for figure, area, left in zip(figures, areas, seen, strict=True)
        if figure.person and left >= max(1, _SEEN * area)
    ]
    heads = [(x, y) for x, y in heads if 0 <= x <= shape[1] - 1 and 0 <= y <= shape[0] - 1]
    return np.array(heads, float).reshape(-1, 2), _camera(rng, canvas)


def height_at(row: npt.ArrayLike, rows: int) -> npt.NDArray[np.float64]:
    """How tall a person is whose feet are on that row."""
    return (_FAR + (_NEAR - _FAR) * np.asarray(row, float) / (rows - 1)) * rows / SHAPE[0]


def _people(rng: np.random.Generator, shape: tuple[int, int]) -> list[Figure]:
    """Groups of one to seven around places on the square; feet may be outside the frame."""
    rows, columns = shape
    people = []
    for _ in range(rng.poisson(rng.uniform(1, 24))):
        # Evenly over the square, and not over the frame: there is more of it far away.
        y = rows * (HORIZON + (1.15 - HORIZON) * rng.random() ** 1.3)
        x = rng.uniform(-0.03, 1.03) * columns
        size = 1 + min(6, rng.geometric(0.45) - 1) if rng.random() < 0.7 else 1
        height = float(height_at(y, rows))
        for _ in range(size):
            dx, dy = rng.normal(0, (0.45, 0.3)) * height if size > 1 else (0.0, 0.0)
            feet = max(y + dy, HORIZON * rows)
            people.append(person(rng, x + dx, feet, float(height_at(feet, rows)) * rng.normal(1, 0.06)))
    return people


def person(rng: np.random.Generator, x: float, y: float, height: float) -> Figure:
    """Somebody whose feet are at x, y."""
    coat, trousers, skin, hair = rng.uniform((0.05, 0.05, 0.55, 0.02), (0.95, 0.6, 0.8, 0.4))
    stride, width = rng.uniform(0.02, 0.09), rng.uniform(0.13, 0.18)
    parts = [
        Part(-stride, 0.24, 0.06, 0.25, trousers),
        Part(stride, 0.24, 0.06, 0.25, trousers),
        Part(0, 0.6, width, 0.22, coat, 2.6),
        Part(0, 0.89, 0.095, 0.115, skin, head=True),
        Part(rng.uniform(-0.03, 0.03), 0.93, 0.09, 0.08, hair, head=True),
    ]
    return Figure(x, y, height, parts, True)


def clutter(rng: np.random.Generator, shape: tuple[int, int], other: bool) -> list[Figure]:
    """Posts, bins and shadows; in the other parts more of them, and bushes, bodies without a head, and lamps too."""
    rows, columns = shape
    kinds = (*_KNOWN, *_OTHER, *_OTHER) if other else _KNOWN
    things = []
    for _ in range(rng.integers(3, 10) if other else rng.integers(1, 6)):
        y = rows * (HORIZON + (1.05 - HORIZON) * rng.random())
        kind = kinds[rng.integers(len(kinds))]
        things.append(_thing(rng, kind, rng.uniform(0, columns), y, float(height_at(y, rows))))
    return things


def _thing(rng: np.random.Generator, kind: str, x: float, y: float, height: float) -> Figure:
    dark, mid, light = rng.uniform((0.05, 0.25, 0.6), (0.3, 0.6, 0.95))
    grey = (dark, mid, light)[rng.integers(3)]
    if kind == "bush":
        blobs = rng.uniform((-0.25, 0.12, 0.12, 0.1, -0.1), (0.25, 0.5, 0.22, 0.18, 0.1), (9, 5))
        parts = [Part(right, up, wide, tall, mid + tone) for right, up, wide, tall, tone in blobs.tolist()]
    elif kind == "torso":
        parts = [Part(0, 0.12, 0.17, 0.12, light, 8), Part(0, 0.5, rng.uniform(0.12, 0.18), 0.28, grey, 2.6)]
    else:
        lid = Part(0, 1.03, 0.1, 0.03, dark)
        parts = {
            "post": [Part(0, 0.6, 0.035, 0.6, grey, 8), Part(0, 0.03, 0.09, 0.04, dark)],
            "bin": [Part(0, 0.25, 0.17, 0.25, grey, 8), Part(0, 0.5, 0.19, 0.04, dark, 4)],
            "shadow": [Part(0.3, 0.06, 0.4, 0.05, 0.15), Part(0.75, 0.08, 0.11, 0.05, 0.15)],
            "lamp": [Part(0, 0.45, 0.025, 0.45, dark, 8), Part(0, 0.93, 0.1, 0.11, light), lid],
        }[kind]
    return Figure(x, y, height, parts, False)


def _middle(figure: Figure) -> tuple[float, float]:
    head = next(part for part in figure.parts if part.head)
    return figure.x + head.right * figure.height, figure.y - head.up * figure.height


def _paint(canvas: Picture, owner: Numbers, figure: Figure, number: int, sun: float) -> int:
    """Paint a figure, and write in `owner` whose head is seen where: `number + 1`, or 0. The pixels of its head."""
    area = 0
    for part in figure.parts:
        box, inside = _fill(canvas, figure, part, sun=sun)
        hidden = owner[box]
        area += int(inside.sum()) if part.head and not area else 0
        hidden[inside] = number + 1 if part.head else 0
    return area


def _fill(
    canvas: Picture, figure: Figure, part: Part, *, strength: float = 1.0, sun: float = 0.0
) -> tuple[tuple[slice, slice], npt.NDArray[np.bool_]]:
    """Blend one shape, with soft edges and lit from one side, into the canvas; where it is."""
    box, across, cover = cover_of(canvas.shape, figure, part)
    view = canvas[box]
    view += strength * cover * (part.grey + 0.08 * sun * np.clip(across, -1, 1) - view)
    return box, cover > 0.5


def cover_of(
    shape: Sequence[int], figure: Figure, part: Part, blur: float = 1.0
) -> tuple[tuple[slice, slice], Picture, Picture]:
    """The rows and columns that a shape touches, places across it from -1 to 1, and how much of each pixel it covers.

    Its edge is `blur` pixels wide.
    """
    x, y = figure.x + part.right * figure.height, figure.y - part.up * figure.height
    wide, tall = max(0.4, part.wide * figure.height), max(0.4, part.tall * figure.height)
    rows = slice(*np.clip([y - tall - 1, y + tall + 2], 0, shape[0]).astype(int).tolist())
    columns = slice(*np.clip([x - wide - 1, x + wide + 2], 0, shape[1]).astype(int).tolist())
    across = ((np.arange(columns.start, columns.stop) - x) / wide).astype(np.float32)
    down = ((np.arange(rows.start, rows.stop) - y) / tall).astype(np.float32)
    distance = (np.abs(across) ** part.power + np.abs(down[:, None]) ** part.power) ** (1 / part.power)
    return (rows, columns), across, np.clip((1 - distance) * min(wide, tall) / blur + 0.5, 0, 1)


def ground_of(rng: np.random.Generator, shape: tuple[int, int]) -> Picture:
    """The empty square: a wall with windows, and paving in perspective with stains."""
    rows, columns = shape
    y, x = np.mgrid[:rows, :columns].astype(np.float32)
    horizon = HORIZON * rows
    depth = height_at(y, rows) / height_at(rows - 1, rows)
    paving = 0.62 - 0.14 * y / rows + 0.04 * _stains(rng, shape, 6) + 0.03 * _stains(rng, shape, 24)
    along, across = (x - columns / 2) / depth / (0.11 * columns), np.log(depth) * 9
    paving -= 0.06 * ((along % 1 < 0.06) | (across % 1 < 0.08))
    wall = 0.42 + 0.03 * _stains(rng, shape, 12) - 0.18 * ((x % 24 < 10) & (y % 14 > 5))
    return np.asarray(np.where(y < horizon, wall, paving), np.float32)


def _stains(rng: np.random.Generator, shape: tuple[int, int], cells: int) -> Picture:
    """Smooth noise of unit spread: random numbers on a coarse grid, interpolated."""
    coarse = torch.from_numpy(rng.standard_normal((1, 1, cells, cells)))
    smooth = torch.nn.functional.interpolate(coarse, shape, mode="bicubic", align_corners=True)[0, 0]
    return smooth.numpy().astype(np.float32)


def _camera(rng: np.random.Generator, canvas: Picture) -> npt.NDArray[np.uint8]:
    """The light of the moment, a cloud's shade, dark corners, and the noise of the sensor."""
    rows, columns = canvas.shape
    gain, slope = rng.uniform((0.7, -0.12), (1.15, 0.12))
    across, down = np.linspace(-1, 1, columns), np.linspace(-1, 1, rows)[:, None]
    light = gain * (1 + slope * across) * (1 - 0.08 * (across**2 + down**2))
    seen = canvas * light + rng.normal(0, 0.025, canvas.shape)
    return np.asarray(np.clip(255 * seen, 0, 255).round(), np.uint8)


LARGER = 4
_ROWS, _COLUMNS = SHAPE[0] * LARGER, SHAPE[1] * LARGER
_PEOPLE = 90
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_COATS = np.array(
    [[0.9, -0.2, -0.5], [-0.5, 0.0, 0.9], [-0.3, 0.3, -0.2], [0.6, 0.2, -0.9], [0.3, -0.2, 0.5], [0, 0, 0]]
)
_DUSK, _DARK = 150.0, 7.0  # seconds from one failure of the lamps to the next, and how long it lasts


@dataclass(frozen=True)
class Walks:
    """A camera above a square."""

    seed: int = 0  # of everything
    period: float = 60.0  # seconds from one train to the next
    least: int = 10  # people on the square when it is calm
    most: int = 46  # when a train has arrived

    def people(self, time: float) -> int:
        """How many walk, those outside the picture included."""
        wave = max(0.0, sin(2 * pi * (time / self.period + 0.1 * self.seed))) ** 2
        ripple = 0.5 + 0.5 * sin(2 * pi * time / (0.31 * self.period))
        return round(self.least + (self.most - self.least) * (0.88 * wave + 0.12 * ripple))

    def picture(self, time: float) -> npt.NDArray[np.uint8]:
        """Paint the view of the camera, `(H, W, 3)` in colour."""
        canvas = self._empty.copy()
        walkers = [self._walker(number, time) for number in range(self.people(time))]
        figures = sorted([*walkers, *self._things], key=lambda figure: figure[0].y)
        sun = 0.6
        for figure, _ in figures:
            if figure.person:
                _blend(canvas, figure, Part(0.25 * sun, 0.01, 0.32, 0.06, 0.0), np.zeros(3), 0.35)
        for figure, colours in figures:
            for part, colour in zip(figure.parts, colours, strict=True):
                _blend(canvas, figure, part, colour)
        light = 0.95 + 0.05 * sin(2 * pi * time / 97)
        dark = (time % _DUSK) / _DARK
        light *= 1 - 0.72 * sin(pi * dark) ** 0.5 if 0 < dark < 1 and time > _DUSK else 1
        noise = np.random.default_rng([self.seed, int(time * 1000)]).normal(0, 0.018, (_ROWS // 2, _COLUMNS // 2))
        seen = canvas * light + noise.repeat(2, 0).repeat(2, 1)[:, :, None]
        return np.asarray(np.clip(255 * seen, 0, 255), np.uint8)

    @cached_property
    def _empty(self) -> Picture:
        """The square without people, in a warm light; as the counter was trained to see it."""
        grey = ground_of(np.random.default_rng([0, 99]), SHAPE).repeat(LARGER, 0).repeat(LARGER, 1)
        kernel = np.ones(LARGER) / LARGER
        for axis in (0, 1):  # soft, where the small picture has steps
            grey = np.apply_along_axis(np.convolve, axis, np.pad(grey, 2, "edge"), kernel, "same")[2:-2, 2:-2]
        rows = np.linspace(0, 1, _ROWS)[:, None, None]
        tint = _chroma(np.array([0.10, 0.01, -0.16])) * (0.4 + 0.6 * rows)
        return (grey[:, :, None] + 0.4 * tint).astype(np.float32)

    @cached_property
    def _things(self) -> list[tuple[Figure, list[npt.NDArray[np.float64]]]]:
        rng = np.random.default_rng([self.seed, 5])
        things = clutter(rng, (_ROWS, _COLUMNS), other=True)[:6]
        return [(thing, [np.full(3, part.grey) for part in thing.parts]) for thing in things]

    @cached_property
    def _cast(self) -> list[tuple[float, float, float, float, int]]:
        """For each person: place across and in depth, speed, phase, and a seed."""
        rng = np.random.default_rng([self.seed, 7])
        return [
            (rng.random(), rng.random() ** 1.3, rng.uniform(0.015, 0.035) * rng.choice((-1, 1)), rng.random(), number)
            for number in range(_PEOPLE)
        ]

    def _walker(self, number: int, time: float) -> tuple[Figure, list[npt.NDArray[np.float64]]]:
        across, depth, speed, phase, own = self._cast[number % _PEOPLE]
        way = across + speed * time + 0.03 * sin(0.7 * time + 9 * phase)
        x = (way % 1.16 - 0.08) * _COLUMNS
        y = _ROWS * (HORIZON + (1.08 - HORIZON) * (depth + 0.03 * sin(0.21 * time + 7 * phase)) % 1.0)
        rng = np.random.default_rng([self.seed, 11, own])
        height = float(height_at(y, _ROWS)) * rng.normal(1, 0.05)
        figure = person(rng, x, y + 0.01 * height * abs(cos(5 * time + 9 * phase)), height)
        swing = 0.085 * sin(5 * time + 9 * phase)
        parts = [part._replace(right=side * swing) for part, side in zip(figure.parts, (-1, 1), strict=False)]
        coat = _COATS[rng.integers(len(_COATS))] * 0.22
        tints = (0.3 * coat, 0.3 * coat, coat, np.array([0.16, -0.02, -0.12]), np.zeros(3))
        parts += figure.parts[2:]
        colours = [part.grey + _chroma(tint) for part, tint in zip(parts, tints, strict=True)]
        return figure._replace(parts=parts), colours


def _chroma(colour: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The colour without its grey: grey pictures stay as they are."""
    return colour - float(colour @ _LUMA)


def _blend(canvas: Picture, figure: Figure, part: Part, colour: npt.NDArray[np.float64], strength: float = 1.0) -> None:
    """Blend one shape with soft edges into the canvas."""
    box, across, share = cover_of(canvas.shape, figure, part, LARGER / 2)
    cover = (strength * share)[:, :, None]
    lit = 0.05 * np.clip(across, -1, 1)[None, :, None] * (strength == 1)
    view = canvas[box]
    view += cover * (colour.astype(np.float32) + lit - view)
