"""Hand-made results of the shift study."""

from collections.abc import Mapping
from typing import Any

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
