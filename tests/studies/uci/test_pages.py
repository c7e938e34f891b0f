"""Tables and ranks: like with like, honest errors, ties."""

from typing import Any

import pytest

from studies.uci.pages import (
    QUALITIES,
    columns,
    group,
    mean_ranks,
    method_table,
)
from uci_records import made_record

BY_NAME = {quality.name: quality for quality in QUALITIES}


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    return {"yacht": made_record(), "energy": made_record()}


def test_ranks_are_over_sets() -> None:
    assert mean_ranks({"a": {"x": [1.0, 2.0]}, "b": {"x": [0.0, 1.0]}}, float) == {"a": 2.0, "b": 1.0}
    assert mean_ranks({"a": {"x": [1.0]}, "b": {"x": [1.0]}}, float) == {"a": 1.5, "b": 1.5}
    assert mean_ranks({}, float) == {}


def test_coverage_is_ranked_by_its_distance_from_the_level() -> None:
    loss = BY_NAME["coverage"].loss
    assert loss is not None
    assert mean_ranks({"a": {"x": [0.95]}, "b": {"x": [0.87]}}, loss) == {"a": 2.0, "b": 1.0}
    higher = BY_NAME["ranking"].loss
    assert higher is not None
    assert mean_ranks({"a": {"x": [0.3]}, "b": {"x": [0.1]}}, higher) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("kind", ["raw", "scaled", "floor"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_table_holds_one_kind_alone(results: dict[str, dict[str, Any]], kind: str, deep: bool) -> None:
    methods = columns(results, "nll", deep=deep, kind=kind)
    assert {group(name) for name in methods} == {kind}
    assert ("constant" in methods) == (kind == "floor")
    assert ("injected per site, floor" in methods) == (deep and kind == "floor")


def test_cells_have_honest_errors_and_the_best_is_bold(results: dict[str, dict[str, Any]]) -> None:
    results["yacht"]["methods"]["laplace, floor"]["nll"] = [0.0, 0.5, 0.5, 1.0]  # variance 1 / 6
    lines = method_table(results, BY_NAME["nll"], deep=False, kind="floor")
    error = (1 / 6 * (1 / 4 + 10 / 72)) ** 0.5
    assert lines[0] == "| method | yacht | energy | rank | post hoc |"
    assert lines[2].startswith(f"| laplace, floor | **0.500 ± {error:.3f}** | ")
    embedded = next(line for line in lines if line.startswith("| embedded, floor |"))
    assert embedded.endswith("|  |")  # not post hoc: it needs its own training
    assert "rank" not in method_table(results, BY_NAME["width"], deep=False, kind="raw")[0]
