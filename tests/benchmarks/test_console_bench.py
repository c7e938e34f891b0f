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
    actual = console.alarms(rows(0, 2, 2), [0, 1])
    assert actual["missed"] + actual["false"] < 0.1 * (actual["plain_missed"] + actual["plain_false"] + actual["amber"])
    held_out = console.zones_table({"rows": {"mall": rows(0, 2, 2)}}).splitlines()[2].split("|")[3]
    assert 85 < int(held_out.removesuffix(" % ")) < 95


def test_a_counter_that_is_wrong_and_sure() -> None:
    actual = console.alarms(rows(-6, 0.5, 0.5), [0])
    assert actual["missed"] > 0.2
    assert actual["amber"] < 0.2


def test_labels_mend_a_bias() -> None:
    judged = console.labels(rows(-6, 1, 1))
    mae, held_out = judged.pop("without")
    assert held_out < 0.1
    for with_labels, held_out in judged.values():
        assert with_labels < 0.4 * mae
        assert held_out == pytest.approx(0.9, abs=0.12)
