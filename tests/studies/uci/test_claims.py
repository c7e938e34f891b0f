"""Each effect on a result made by hand; what is decided; what is a theorem."""

from typing import Any

import numpy as np
import pytest

from studies.claims import Effect, decide
from studies.uci.claims import CLAIMS, DEEP, QUESTIONS, THEOREMS, claims_page
from studies.uci.pages import minimum_table
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


def set_both(record: dict[str, Any], kind: str, measure: str, *by_rate: float) -> None:
    for part in ("validation", "test"):
        record[kind][part][measure] = rows(*by_rate)


def test_texts_are_unlike() -> None:
    assert len(BY_TEXT) == len(ALL)


def test_the_error_is_that_of_splits_that_share_rows(record: dict[str, Any]) -> None:
    record["methods"]["injected, scaled"]["nll"] = [0.0, 1.0, 2.0, 3.0]
    found = effect("Injection, scaled, beats a constant variance", record)
    assert (found.value, found.freedom) == (0.5, 3)
    assert found.error == pytest.approx((5 / 3 * (1 / 4 + 10 / 72)) ** 0.5)


def test_embedded_rmse_over_the_whole_range(record: dict[str, Any]) -> None:
    set_both(record, "embedded", "rmse", 2.0, 1.0, 3.0)
    assert effect("Embedded: the RMSE grows with the rate", record).value == pytest.approx(0.5)
    # Pairs of rates: falls, rises, rises.
    assert effect("Embedded: the RMSE grows with the rate over the whole range", record).value == pytest.approx(2 / 3)
    assert effect("Embedded: the RMSE does not fall before it rises", record).value == pytest.approx(1.0)
    assert effect("Embedded: at the smallest rate the RMSE is fine", record).value == pytest.approx(1.0)
    assert effect("Embedded: after its minimum the RMSE rises", record).value == pytest.approx(2.0)


def test_the_validation_rows_choose_the_best_rate(record: dict[str, Any]) -> None:
    record["embedded"]["test"]["rmse"] = rows(2.0, 1.0, 3.0)
    record["embedded"]["validation"]["rmse"] = [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], rows(2.0)[0]]
    assert effect("Embedded: the RMSE does not fall before it rises", record).value == pytest.approx(
        (0 + 0 + 1 + 1) / 4
    )


def test_rmse_at_large_rates(record: dict[str, Any]) -> None:
    set_both(record, "embedded", "rmse", 0.5, 0.5, 4.0)
    assert effect("At large rates the injected RMSE is below the embedded one", record).value == pytest.approx(-0.75)


@pytest.mark.parametrize("kind", ["Injected", "Embedded"])
def test_ruin_at_the_smallest_rate(record: dict[str, Any], kind: str) -> None:
    set_both(record, kind.lower(), "nll_unscaled", 9.0, 2.0, 3.0)
    assert effect(f"{kind}: at the smallest rate the unscaled NLL is ruined", record).value == pytest.approx(7.0)


def test_embedded_areas(record: dict[str, Any]) -> None:
    set_both(record, "embedded", "ma_unscaled", 0.4, 0.1, 0.1)
    set_both(record, "embedded", "ma_scaled", 0.05, 0.15, 0.1)
    assert effect("Embedded: the unscaled MA swings with the rate", record).value == pytest.approx(0.3)
    assert effect("Embedded: the scaled MA does not swing", record).value == pytest.approx(0.1)
    assert effect("Embedded: the unscaled MA is at or below the scaled one", record).value == pytest.approx(0.1)
    record["methods"]["embedded, raw"]["ma"] = [0.2] * 4
    record["methods"]["embedded, scaled"]["ma"] = [0.3] * 4
    text = "Embedded: the unscaled MA is at or below the scaled one, each at the rate that validation chooses"
    assert effect(text, record).value == pytest.approx(-0.1)


def test_ideal_nll(record: dict[str, Any]) -> None:
    set_both(record, "injected", "nll_ideal", -2.0, -2.0, -2.0)
    set_both(record, "embedded", "nll_ideal", -2.0, -1.0, 0.0)
    assert effect("The ideal NLL of injection is below that of embedded dropout", record).value == pytest.approx(-1.0)


def test_whom_scaling_helps_more(record: dict[str, Any]) -> None:
    set_both(record, "injected", "nll_unscaled", 4.0, 1.0, 1.0)
    set_both(record, "embedded", "nll_unscaled", 1.0, 1.0, 1.0)
    text = "Scaling helps injected dropout more than embedded dropout, "
    assert effect(f"{text}over all rates", record).value == pytest.approx(1.0)
    record["methods"]["injected, raw"]["nll"] = [1.25] * 4
    record["methods"]["embedded, raw"]["nll"] = [3.0] * 4
    chosen = f"{text}at the rates that validation chooses"
    assert effect(chosen, record).value == pytest.approx(0.25 - 2.0)
    assert decide(BY_TEXT[chosen], {"yacht": record}).verdict == "fails"


def test_the_paper_is_asked_of_three_hidden_layers_too(record: dict[str, Any]) -> None:
    text = "at large rates the injected RMSE is below the embedded one"
    other = made_record()
    set_both(other, "injected", "rmse", 1.0, 2.0, 3.0)
    set_both(other, "injected", "nll_scaled", 1.0, 0.5, 2.0)
    set_both(other, "embedded", "rmse", 1.0, 1.0, 2.0)
    other["methods"]["injected, raw"]["nll"] = [3.0] * 4
    record["deep"] = {name: other[name] for name in ("rates", "injected", "embedded", "methods")}
    assert effect(f"{DEEP}{text}", record).value == pytest.approx(0.5)
    assert effect(f"{text[0].upper()}{text[1:]}", record).value == pytest.approx(0.0)
    assert effect(f"{DEEP}the injected RMSE does not grow with the rate", record).value == pytest.approx(2.0)
    assert effect(f"{DEEP}the scaled NLL of injection does not depend on the rate", record).value == pytest.approx(1.5)
    scaling = "scaling helps injected dropout more than embedded dropout, at the rates that validation chooses"
    assert effect(f"{DEEP}{scaling}", record).value == pytest.approx(2.0)
    assert "## The paper's claims, asked of three hidden layers" in "\n".join(claims_page({"yacht": record}))


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("injection with floor is not worse than embedded dropout with floor", "injected, floor", "embedded, floor"),
        ("injection with floor is not worse than last-layer Laplace with floor", "injected, floor", "laplace, floor"),
        ("injection with floor beats a constant variance", "injected, floor", "constant"),
        ("an ensemble of five with floor beats injection with floor", "ensemble, floor", "injected, floor"),
        ("Rate-In, scaled, beats injection, scaled", "rate-in, scaled", "injected, scaled"),
        ("the default of `calibrate` beats a constant variance", "default", "constant"),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_ours_compare_two_methods_of_the_same_depth(
    record: dict[str, Any], text: str, first: str, second: str, deep: bool
) -> None:
    methods = record["deep"]["methods"] if deep else record["methods"]
    methods[first]["nll"], methods[second]["nll"] = [0.5] * 4, [2.0] * 4
    name = f"{DEEP}{text}" if deep else f"{text[0].upper()}{text[1:]}"
    assert effect(name, record).value == pytest.approx(-1.5)
    assert decide(BY_TEXT[name], {"a": record, "b": record}).verdict == "holds on all 2"


def test_like_is_compared_with_like() -> None:
    """Both sides of a claim of ours have the same treatment, unless the treatment is the question."""
    for claim in (claim for claim in ALL if claim.source == "us" and claim.effect.startswith("NLL of")):
        first, second = claim.effect.removeprefix("NLL of `").removesuffix("`").split("` minus `")
        measures, treatments = zip(*(name.rpartition(", ")[::2] for name in (first, second)), strict=True)
        assert treatments[0] == treatments[1] or measures[0] == measures[1] or not all(measures), claim.text


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


def test_theorems_are_not_verdicts(record: dict[str, Any]) -> None:
    said = "\n".join(claims_page({"yacht": record}))
    assert all(theorem.text in said and theorem.proof in said for theorem in THEOREMS)
    assert not [claim for claim in ALL if claim.text.startswith("Injected: the scaled")]


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


def test_a_table_says_where_the_rmse_is_least(record: dict[str, Any]) -> None:
    set_both(record, "embedded", "rmse", 2.0, 1.0, 3.0)
    assert "| yacht | 2 | 1 | 0.05 | 3 | 0.05 |" in minimum_table({"yacht": record})


def question(start: str, record: dict[str, Any]) -> float:
    effect = next(claim for claim in QUESTIONS if claim.text.startswith(start)).measure(record)
    assert effect is not None
    return effect.value


def test_what_training_with_dropout_does_to_the_variance(record: dict[str, Any]) -> None:
    set_both(record, "embedded", "nll_unscaled", 3.0, 1.5, 2.0)  # best at the second rate
    set_both(record, "embedded", "nll_scaled", 1.0, 1.0, 0.5)  # at the third
    set_both(record, "embedded", "ranking", 0.1, 0.4, 0.5)
    set_both(record, "embedded", "floor_share", 0.9, 0.3, 0.2)
    set_both(record, "embedded", "scale", 1.0, 2.0, 4.0)
    set_both(record, "injected", "scale", 1.0, 1.0, 0.5)
    assert question("Embedded dropout needs no scale", record) == pytest.approx(1.0)
    assert question("Errors follow the variance better", record) == pytest.approx(0.4 - 1.0)
    assert question("The larger the rate in training, the better", record) == pytest.approx(0.4)
    assert question("Less of the variance", record) == pytest.approx(0.3 - 1.0)
    assert question("The larger the rate in training, the less", record) == pytest.approx(-0.7)
    assert question("Training with dropout shrinks", record) == pytest.approx(np.log(8.0))
    assert question("The scale asked for", record) == pytest.approx(np.log(4.0) - np.log(2.0))
