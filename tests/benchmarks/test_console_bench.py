"""The console's benchmark judges what it says it judges, on counts whose errors are known."""

from typing import Any

import numpy as np
import pytest

from benchmarks import console


def rows(bias: float, noise: float, said: float, number: int = 400) -> list[dict[str, Any]]:
    """Frames whose counts are off by `bias` and `noise`, of which the counter says `said`."""
    rng = np.random.default_rng(0)
    truth = rng.poisson(20, (number, len(console.ZONES)))
    mean = truth + bias + noise * rng.standard_normal(truth.shape)
    return [
        {"strangeness": 0.5, "mean": m.tolist(), "variance": [said**2] * len(m), "truth": t.tolist()}
        for m, t in zip(mean, truth, strict=True)
    ]


def test_a_counter_that_knows_what_it_does_not_know() -> None:
    found = console.alarms(rows(0, 2, 2), [0, 1])
    assert found["missed"] + found["false"] < 0.1 * (found["plain_missed"] + found["plain_false"] + found["amber"])
    held = console.zones_table({"rows": {"mall": rows(0, 2, 2)}}).splitlines()[2].split("|")[3]
    assert 85 < int(held.removesuffix(" % ")) < 95


def test_a_counter_that_is_wrong_and_sure() -> None:
    found = console.alarms(rows(-6, 0.5, 0.5), [0])
    assert found["missed"] > 0.2
    assert found["amber"] < 0.2


def test_labels_mend_a_bias() -> None:
    judged = console.labels(rows(-6, 1, 1))
    mae, held = judged.pop("without")
    assert held < 0.1
    for with_labels, held in judged.values():
        assert with_labels < 0.4 * mae
        assert held == pytest.approx(0.9, abs=0.12)
