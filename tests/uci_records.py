"""A tiny result of the UCI study, by hand: three rates, four splits, numbers that a test sets."""

from typing import Any

import numpy as np

RATES = (0.001, 0.05, 0.5)
SPLITS = 4
QUALITIES = ("rmse", "nll", "crps", "ma", "coverage", "width", "ranking")
_BY_RATE = ("rmse", "nll_ideal", "scale", "relaxed_scale", "floor_scale", "floor", "floor_share", "ranking")
_TREATED = ("nll", "ma", "crps", "coverage", "width")
_MEASURES = (
    *("injected", "embedded", "concrete", "laplace", "ensemble", "ensemble variance"),
    *("gaussian", "gaussian ensemble", "rate-in", "swag"),
)


def rows(*by_rate: float, jitter: float = 0.0) -> list[list[float]]:
    """A measure of each rate, the same in all splits up to a jitter that sums to 0."""
    off = jitter * np.linspace(-1, 1, SPLITS)
    return [(value + off).tolist() for value in by_rate]


def made_record() -> dict[str, Any]:
    """Every measure is 1 everywhere, the ideal NLL 0."""
    names = [*_BY_RATE, *(f"{name}_{how}" for name in _TREATED for how in ("unscaled", "scaled", "relaxed", "floor"))]
    parts = {
        part: {name: rows(*(float(name != "nll_ideal"),) * 3) for name in names} for part in ("validation", "test")
    }

    def methods(*more: str) -> dict[str, dict[str, list[float]]]:
        treated = [f"{name}, {how}" for name in _MEASURES for how in ("raw", "scaled", "floor")]
        others = ("injected, relaxed", "embedded, relaxed", "constant", "default", "default + reference", *more)
        by_method = {name: {quality: [1.0] * SPLITS for quality in QUALITIES} for name in (*treated, *others)}
        by_method |= {"conformal": {quality: [1.0] * SPLITS for quality in ("ma", "coverage", "width", "rmse")}}
        return by_method

    def copied() -> dict[str, Any]:
        return {
            part: {name: [list(row) for row in values] for name, values in measures.items()}
            for part, measures in parts.items()
        }

    return {
        "settings": {"draws": None, "deep_draws": 20, "epochs": 1.0},
        "rows": {"train": 72, "validation": 18, "test": 10},
        "rates": list(RATES),
        "injected": copied(),
        "embedded": copied(),
        "methods": methods(),
        "deep": {
            "rates": list(RATES),
            "injected": copied(),
            "embedded": copied(),
            "methods": methods("injected per site, floor"),
        },
        "seconds": {"total": 60.0},
        "machine": {"device": "a machine"},
        "versions": {"torch": "2"},
    }
