"""Why embedded dropout trades off by itself: the words follow the numbers."""

from typing import Any

import numpy as np
import pytest

from studies.uci.embedded_page import QUESTIONS, embedded_page
from uci_records import made_record, rows


def made(ranking: float, share: float) -> dict[str, dict[str, Any]]:
    """Two sets where embedded dropout has these at the rate of its least unscaled NLL, and injection 0.3 and 0.6."""
    record = made_record()
    for part in ("validation", "test"):
        record["embedded"][part]["nll_unscaled"] = rows(5.0, 1.5, 2.0)
        record["injected"][part]["ranking"] = rows(0.3, 0.3, 0.3)
        record["injected"][part]["floor_share"] = rows(0.6, 0.6, 0.6)
        record["embedded"][part]["ranking"] = rows(0.1, ranking, 0.5)
        record["embedded"][part]["floor_share"] = rows(0.7, share, 0.2)
        record["injected"][part]["scale"] = rows(1000.0, 10.0, 1.0)
        record["embedded"][part]["scale"] = rows(1000.0, 50.0, 20.0)
    return {"yacht": record, "energy": record}


def test_effects() -> None:
    record = made(0.4, 0.5)["yacht"]
    values = [found.value for claim in QUESTIONS if (found := claim.measure(record)) is not None]
    # Unscaled minus scaled NLL, embedded and injected; ranking and share against injection, and from end to end; the
    # scales of the largest rate, 20 over 1, and how far scales move, 50 over 1000.
    assert values == pytest.approx([0.5, 0.0, 0.1, 0.4, -0.1, -0.5, np.log(20), np.log(50 / 1000)])


def test_injection_is_taken_at_its_own_best_rate() -> None:
    record = made(0.4, 0.5)["yacht"]
    record["injected"]["validation"]["nll_unscaled"] = rows(3.0, 2.0, 1.0)
    record["injected"]["test"]["ranking"] = rows(0.0, 0.0, 0.3)
    found = QUESTIONS[2].measure(record)
    assert found is not None
    assert found.value == pytest.approx(0.1)


def test_three_hidden_layers_are_asked_too() -> None:
    results = made(0.4, 0.5)
    assert "## Three hidden layers" not in embedded_page(results)
    other = made(0.2, 0.7)["yacht"]
    results["yacht"]["deep"] |= {name: other[name] for name in ("rates", "injected", "embedded")}
    one, three = embedded_page(results).split("## Three hidden layers")
    assert "better: **yes** (yes on 2" in one
    assert "better: **no** (yes on 0, no on 2" in three


def test_the_answer_follows_the_numbers() -> None:
    yes, no = (embedded_page(made(*numbers)) for numbers in ((0.4, 0.5), (0.2, 0.7)))
    assert "better: **yes** (yes on 2, no on 0, not decided on 0); the floor's share is smaller: **yes**" in yes
    assert "better: **no** (yes on 0, no on 2, not decided on 0); the floor's share is smaller: **no**" in no
    mixed = {"yacht": made(0.4, 0.5)["yacht"], "energy": made(0.2, 0.7)["yacht"]}
    assert "better: **it depends on the set**" in embedded_page(mixed)


def test_the_table_has_both_networks() -> None:
    page = embedded_page(made(0.4, 0.5))
    assert "| yacht | 0.300 ± 0.000 | 0.400 ± 0.000 | 0.600 ± 0.000 | 0.500 ± 0.000 |" in page
    assert "| yacht | injected | 1e+03 | 10 | 1 | 1e+03 at 0.001 |" in page
    assert "| yacht | embedded | 1e+03 | 50 | 20 | 50 at 0.05 |" in page
