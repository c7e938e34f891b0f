"""Hand-made results of the shift study."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from studies.shift.study import MEASURES


def record(methods: Mapping[str, Mapping[str, list[float]]], cuts: int = 4, epochs: float = 1.0) -> dict[str, Any]:
    """A set with the measures that are given; the others are 0 on every cut."""
    return {
        "settings": {"epochs": epochs},
        "machine": {"device": "a CPU"},
        "versions": {"torch": "2"},
        "rows": {"train": 100, "validation": 30, "inside": 40},
        "cuts": [{"input": cut, "direction": "above", "edge": 0.5, "shifted": 60 + cut} for cut in range(cuts)],
        "left_out": [{"input": cuts, "direction": "below", "reason": "one value in all rows inside; it has 3 values"}],
        "methods": {
            name: {measure: [0.0] * cuts for measure in MEASURES} | dict(given) for name, given in methods.items()
        },
        "seconds": {"total": 1.0},
    }


def random_results(methods: tuple[str, ...], sets: tuple[str, ...], cuts: int = 6) -> dict[str, dict[str, Any]]:
    """Results of many methods, by chance."""
    random = np.random.default_rng(0)
    found = {}
    for name in sets:
        error = random.normal(1.5, 1, cuts)
        found[name] = record(
            {
                method: {
                    **{measure: random.uniform(0.4, 1, cuts).tolist() for measure in MEASURES},
                    "error_growth": error.tolist(),
                    "variance_growth": (random.uniform(0, 1) * error + random.normal(0, 0.3, cuts)).tolist(),
                }
                for method in methods
            },
            cuts,
        )
    return found
