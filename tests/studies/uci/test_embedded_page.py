"""Why embedded dropout trades off by itself: the words follow the numbers."""

from typing import Any

import pytest

from latedrop.studies.uci.embedded_page import QUESTIONS, embedded_page
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
    return {"yacht": record, "energy": record}


def test_effects() -> None:
    record = made(0.4, 0.5)["yacht"]
    values = [found.value for claim in QUESTIONS if (found := claim.measure(record)) is not None]
    # Unscaled minus scaled NLL, embedded and injected; ranking and share against injection, and from end to end.
    assert values == pytest.approx([0.5, 0.0, 0.1, 0.4, -0.1, -0.5])


def test_the_answer_follows_the_numbers() -> None:
    yes, no = (embedded_page(made(*numbers)) for numbers in ((0.4, 0.5), (0.2, 0.7)))
    assert "better: **yes** (yes on 2, no on 0, not decided on 0); the floor's share is smaller: **yes**" in yes
    assert "better: **no** (yes on 0, no on 2, not decided on 0); the floor's share is smaller: **no**" in no
    mixed = {"yacht": made(0.4, 0.5)["yacht"], "energy": made(0.2, 0.7)["yacht"]}
    assert "better: **it depends on the set**" in embedded_page(mixed)


def test_the_table_has_both_networks() -> None:
    assert "| yacht | 0.300 ± 0.000 | 0.400 ± 0.000 | 0.600 ± 0.000 | 0.500 ± 0.000 | 1 | 0.05 |" in embedded_page(
        made(0.4, 0.5)
    )
