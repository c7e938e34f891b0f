"""The comparison of two runs of the study follows their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.uci_devices import METHODS, compared, markdown


def run(shift: float, device: str) -> dict[str, Any]:
    scores = {"rmse": [1.0 + shift, 2.0 + shift, 3.0 + 2 * shift], "nll": [0.1, 0.2, 0.3]}
    rows = {"train": 90, "test": 10}
    deep = {"rmse": [7.0] * 3, "nll": [0.1] * 3}
    return {
        "rows": rows,
        "machine": {"device": device},
        "seconds": {"total": 60.0 + shift},
        "methods": dict.fromkeys(METHODS, scores),
        "deep": {"methods": dict.fromkeys(METHODS, deep)},
    }


def test_differences_over_splits() -> None:
    found = compared(run(0.3, "CPU"), run(0.0, "GPU"))
    own, committed, difference, error = found["methods"]["one"]["constant"]["rmse"]
    assert (own, committed) == pytest.approx((2.4, 2.0))
    assert difference == pytest.approx(0.4)
    assert error == pytest.approx((0.03 * (1 / 3 + 1 / 9)) ** 0.5)  # variance of 0.3, 0.3, 0.6
    assert found["methods"]["one"]["constant"]["nll"][2:] == [0.0, 0.0]
    assert found["methods"]["three"]["constant"]["rmse"] == [7.0, 7.0, 0.0, 0.0]
    page = markdown({"sets": {"a": found}})
    assert "| a | one | constant | 2.400 | 2.000 | +0.400 ± 0.115 |" in page
    assert "differences is 3.5 standard errors. a took 60 s (CPU) and 60 s (GPU)." in page
