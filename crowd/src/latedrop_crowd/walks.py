"""Scenes that move: the square of `scenes`, with people who walk across it, for the console's demo and for tests.

A frame is a function of the seed and the time alone. How many people there are follows the hour of a small world: calm,
then a train arrives. Now and then the lamps fail for some seconds, and the frame is unlike what the counter has seen.
Pictures are four times as large as the frames of `scenes`, and in colour; made smaller again they are such frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import cos, pi, sin

import numpy as np
import numpy.typing as npt

from latedrop_crowd.scenes import HORIZON, SHAPE, Figure, Part, clutter, cover_of, ground_of, height_at, person

__all__ = ["Walks"]

Picture = npt.NDArray[np.float32]

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
    """A camera above a square.

    Attributes:
        seed: of everything.
        period: seconds from one train to the next.
        least: people on the square when it is calm.
        most: when a train has arrived.
    """

    seed: int = 0
    period: float = 60.0
    least: int = 10
    most: int = 46

    def people(self, time: float) -> int:
        """How many walk, those outside the picture included."""
        wave = max(0.0, sin(2 * pi * (time / self.period + 0.1 * self.seed))) ** 2
        ripple = 0.5 + 0.5 * sin(2 * pi * time / (0.31 * self.period))
        return round(self.least + (self.most - self.least) * (0.88 * wave + 0.12 * ripple))

    def picture(self, time: float) -> npt.NDArray[np.uint8]:
        """What the camera sees, `(H, W, 3)` in colour."""
        canvas = self._empty.copy()
        walkers = [self._walker(number, time) for number in range(self.people(time))]
        figures = sorted([*walkers, *self._things], key=lambda figure: figure[0].y)
        sun = 0.6
        for figure, _ in figures:
            if figure.person:
                _fill(canvas, figure, Part(0.25 * sun, 0.01, 0.32, 0.06, 0.0), np.zeros(3), 0.35)
        for figure, colours in figures:
            for part, colour in zip(figure.parts, colours, strict=True):
                _fill(canvas, figure, part, colour)
        light = 0.95 + 0.05 * sin(2 * pi * time / 97)
        dark = (time % _DUSK) / _DARK
        light *= 1 - 0.72 * sin(pi * dark) ** 0.5 if 0 < dark < 1 and time > _DUSK else 1
        noise = np.random.default_rng([self.seed, int(time * 1000)]).normal(0, 0.018, (_ROWS // 2, _COLUMNS // 2))
        seen = canvas * light + noise.repeat(2, 0).repeat(2, 1)[:, :, None]
        pixels: npt.NDArray[np.uint8] = np.clip(255 * seen, 0, 255).astype(np.uint8)
        return pixels

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


def _fill(canvas: Picture, figure: Figure, part: Part, colour: npt.NDArray[np.float64], strength: float = 1.0) -> None:
    """Blend one shape with soft edges into the canvas."""
    box, across, share = cover_of(canvas.shape, figure, part, LARGER / 2)
    cover = (strength * share)[:, :, None]
    lit = 0.05 * np.clip(across, -1, 1)[None, :, None] * (strength == 1)
    view = canvas[box]
    view += cover * (colour.astype(np.float32) + lit - view)
