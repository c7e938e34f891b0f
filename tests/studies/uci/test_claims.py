"""Each effect on a result made by hand; what is decided; what is a theorem."""

from typing import Any

import pytest

from studies.claims import Effect, decide
from studies.uci.claims import CLAIMS, THEOREMS, claims_page
from uci_records import made_record, rows

ALL = [claim for claims in CLAIMS.values() for claim in claims]
BY_TEXT = {claim.text: claim for claim in ALL}


@pytest.fixture
def record() -> dict[str, Any]:
    return made_record()


def effect(text: str, record: dict[str, Any]) -> Effect:
    found = BY_TEXT[text].measure(record)
    assert found is not None
    return found


def test_the_error_is_that_of_splits_that_share_rows(record: dict[str, Any]) -> None:
    record["methods"]["injected, scaled"]["nll"] = [0.0, 1.0, 2.0, 3.0]
    found = effect("Injection, scaled, beats a constant variance", record)
    assert (found.value, found.freedom) == (0.5, 3)
    assert found.error == pytest.approx((5 / 3 * (1 / 4 + 10 / 72)) ** 0.5)


def test_the_validation_rows_choose_the_best_rate(record: dict[str, Any]) -> None:
    record["embedded"]["test"]["rmse"] = rows(2.0, 1.0, 3.0)
    record["embedded"]["validation"]["rmse"] = [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], rows(2.0)[0]]
    assert effect("Embedded: the RMSE does not fall before it rises", record).value == pytest.approx(
        (0 + 0 + 1 + 1) / 4
    )


def test_a_method_that_is_not_there_is_not_measured(record: dict[str, Any]) -> None:
    del record["methods"]["swag, floor"]
    claim = BY_TEXT["Injection with floor is not worse than SWAG with floor"]
    assert claim.measure(record) is None
    assert decide(claim, {"yacht": record}).verdict == "not measured"
    assert "| yacht |  |  |  | not measured |" in "\n".join(claims_page({"yacht": record}))


def test_verdicts_count_the_sets(record: dict[str, Any]) -> None:
    claim = BY_TEXT["Injection, scaled, beats a constant variance"]
    results = {name: made_record() for name in "abc"}
    for name, nll in {"a": [0.0, 0.1, 0.2, 0.1], "b": [2.0, 2.1, 2.2, 2.1], "c": [0.0, 1.0, 2.0, 1.1]}.items():
        results[name]["methods"]["injected, scaled"]["nll"] = nll
    found = decide(claim, results)
    assert [found.sets(word) for word in ("holds", "fails", "not decided")] == [("a",), ("b",), ("c",)]
    assert found.verdict == "holds on 1, fails on 1 of 3"
    assert decide(claim, {"c": results["c"]}).verdict == "not decided"
    assert decide(claim, dict.fromkeys("cd", results["c"])).verdict == "not decided on any of 2"


def test_theorems_show_deviations(record: dict[str, Any]) -> None:
    by_text = {theorem.text: theorem.deviation for theorem in THEOREMS}
    assert [deviation(record) for deviation in by_text.values()] == [0.0] * len(THEOREMS)
    flat = next(deviation for text, deviation in by_text.items() if "scaled NLL, MA" in text)
    record["injected"]["test"]["ma_scaled"] = rows(0.5, 0.4, 0.5)
    assert flat(record) == pytest.approx(0.2)
    ordered = next(deviation for text, deviation in by_text.items() if "scaled NLL is at most the unscaled" in text)
    record["embedded"]["validation"]["nll_scaled"] = rows(1.0, 1.25, 1.0)
    assert ordered(record) == pytest.approx(0.25)
    record["settings"]["draws"] = 1000  # sampled: the first three hold only on average
    assert flat(record) is None
