"""What intervals hold after rows leave the training range: UCI sets, which served no choice about streams.

Up to 200 held-out rows of the side that the network knows, then up to 300 of the other; each fifth row has its label.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.default_data import PARTS
from benchmarks.stream_alarms import units
from benchmarks.stream_data import Given, Series
from latedrop.metrics.levels import normal_quantile
from latedrop.streams import Stream
from latedrop.streams.bag import Usual

LEVEL, EVERY, ORDERS = 0.9, 5, 3
BEFORE, AFTER = 200, 300


def shifted(seed: int = 0) -> dict[str, Any]:
    """By set: shares held and interval scores before and after the change, of the predictor and of a stream."""
    return {name: _of_set(name, seed) for name in tqdm(PARTS["uci"], unit="set")}


def _of_set(name: str, seed: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {part: [] for part in ("before", "after")}
    for _, parts in units(name, seed):
        for order in range(ORDERS):
            rng = np.random.default_rng([seed, order])
            chosen = [rng.permutation(len(y))[:most] for (_, y), most in zip(parts, (BEFORE, AFTER), strict=True)]
            columns = [
                np.concatenate([np.ravel(column(p, y)[rows]) for (p, y), rows in zip(parts, chosen, strict=True)])
                for column in (lambda p, _: p.mean.double(), lambda p, _: p.std.double(), lambda _, y: y.double())
            ]
            for part, measures in compared(Series(*columns, Usual()), len(chosen[0])).items():
                found[part].append(measures)
    return {
        part: {key: float(np.mean([each[key] for each in runs])) for key in runs[0]} for part, runs in found.items()
    }


def compared(series: Series, change: int) -> dict[str, dict[str, float]]:
    """The predictor's own intervals and those of a stream, on both sides of a change."""
    stream = Stream(level=LEVEL)
    rows = []
    for i in range(len(series.mean)):
        found = stream.follow(Given.of(series, [i]))
        rows.append((float(found.mean), float(found.high - found.low) / 2))
        if i % EVERY == EVERY - 1:
            stream.update(series.truth[i])
    centre, half = np.array(rows).T
    ways = {"own": (series.mean, normal_quantile((1 + LEVEL) / 2) * series.std), "stream": (centre, half)}
    sides = {"before": slice(0, change), "after": slice(change, None)}
    return {
        side: _judged(series.truth[at], {way: (c[at], h[at]) for way, (c, h) in ways.items()})
        for side, at in sides.items()
    }


def _judged(truth: np.ndarray, ways: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    found = {}
    for way, (centre, half) in ways.items():
        beyond = np.abs(truth - centre) - half
        found[f"{way} held"] = float((beyond <= 0).mean())
        found[f"{way} score"] = float((2 * half + 2 / (1 - LEVEL) * np.maximum(beyond, 0)).mean())
    return found
