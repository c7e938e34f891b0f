"""Density maps of people on a loose grid, with false bumps between them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from latedrop_crowd.regions import Maps

Array = npt.NDArray[np.float64]
SHAPE = (30, 40)


def bump(x: float, y: float, mass: float = 1.0, sigma: float = 1.2) -> Array:
    rows, columns = np.indices(SHAPE)
    actual: Array = np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / (2 * sigma**2))
    return mass * actual / actual.sum()


def made(frames: int, seed: int, false: Callable[[np.random.Generator], tuple[float, float]], rate: float = 2) -> Maps:
    """People on a loose grid, and false bumps between them; `false` draws their mass and ratio."""
    rng = np.random.default_rng(seed)
    mean, std, heads = np.zeros((frames, *SHAPE)), np.zeros((frames, *SHAPE)), []
    places = [(x, y) for x in range(5, 40, 10) for y in range(5, 30, 10)]
    for i in range(frames):
        order = rng.permutation(len(places))
        people, clutter = order[:6], order[6 : 6 + rng.poisson(rate)]
        for k in people:
            mass = rng.uniform(0.7, 1.3)
            mean[i] += bump(*places[k], mass)
            std[i] += bump(*places[k], rng.uniform(0.1, 0.3) * mass)
        for k in clutter:
            mass, ratio = false(rng)
            mean[i] += bump(*places[k], mass)
            std[i] += bump(*places[k], ratio * mass)
        heads.append(np.array([places[k] for k in people], dtype=float))
    return Maps(mean, std, heads)


def as_heavy_as_people(rng: np.random.Generator) -> tuple[float, float]:
    return rng.uniform(0.6, 0.95), rng.uniform(0.6, 0.9)


def light(rng: np.random.Generator) -> tuple[float, float]:
    return rng.uniform(0.15, 0.4), rng.uniform(0.1, 0.3)
