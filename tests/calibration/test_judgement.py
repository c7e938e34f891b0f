"""Judgements of test rows: grades, groups in which intervals hold less, the worst rows, and what can be required."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import latedrop
from latedrop.calibration.cross_validation import CrossValidation, crossed, share_error
from latedrop.calibration.verdict import Verdict, judged
from latedrop.errors import ArgumentError
from latedrop.evaluation.evaluation import compare, in_use
from latedrop.evaluation.judgement import judge, parsed_requirements
from latedrop.metrics.groups import Inputs, Outcomes, by_deviation, by_input


def predicted(outputs: int = 1, rows: int = 200, **settings: Any) -> tuple[latedrop.Prediction, torch.Tensor]:
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, outputs))

    def made(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 3)
        return x, net(x).detach() + 0.3 * torch.randn(count, outputs)

    x, y = made(rows)
    return latedrop.calibrate(net, made(150), progress=False, **settings).predict(x), y


class TestGrades:
    @pytest.mark.parametrize(
        ("about", "measured", "grade"),
        [
            ("coverage", {"coverage": 0.91}, "good"),
            ("coverage", {"coverage": 0.86}, "weak"),
            ("coverage", {"coverage": 0.70}, "bad"),
            ("coverage", {"coverage": 0.99, "coverage_error": 0.001}, "bad"),
            ("coverage", {"coverage": 0.90, "coverage_error": 0.06}, "good"),
            ("worth", {"gain": 0.2, "gain_error": 0.02}, "good"),
            ("worth", {"gain": 0.02, "gain_error": 0.002}, "weak"),
            ("worth", {"gain": -0.2, "gain_error": 0.02}, "bad"),
            ("worth", {"gain": 0.5, "gain_error": 0.4}, "weak"),
            ("worth", {"gain": -12345.6, "gain_error": 20000.0}, "weak"),
            ("ranking", {"rows": 1000, "correlation": 0.4}, "good"),
            ("ranking", {"rows": 1000, "correlation": 0.2}, "weak"),
            ("ranking", {"rows": 1000, "correlation": 0.01}, "bad"),
            ("ranking", {"rows": 20, "correlation": 0.2}, "weak"),
        ],
    )
    def test_grade(self, about: str, measured: dict[str, float], grade: str) -> None:
        verdict = replace(Verdict(500, "other rows", 0.1, 0.01, 0.4, 0.9, 0.01), **measured)
        assert {finding.about: finding.grade for finding in verdict.findings}[about] == grade

    def test_the_error_of_a_correlation_is_its_spread_over_samples(self) -> None:
        rows, correlations = 100, []
        for _ in range(400):
            pair = torch.randn(2, rows)
            other = 0.5 * pair[0] + 0.75**0.5 * pair[1]
            ranks = torch.stack([pair[0].argsort().argsort().double(), other.argsort().argsort().double()])
            correlations.append(float(torch.corrcoef(ranks)[0, 1]))
        expected = Verdict(rows, "other rows", 0, 0, float(np.mean(correlations)), 0.9, 0.01).correlation_error
        assert np.std(correlations) == pytest.approx(expected, rel=0.12)  # three standard errors of a deviation of 400

    def test_all_inside_has_an_error_of_its_own(self) -> None:
        assert share_error(torch.ones(10)) == pytest.approx(np.sqrt(11 / 10) / 12)
        assert share_error(torch.tensor([1.0, 0.0, 1.0, 1.0])) == pytest.approx(0.25)


def outcomes(rows: int, inside: Any, std: Any = None, level: float = 0.9) -> Outcomes:
    deviation = np.linspace(1, 2, rows) if std is None else std
    return Outcomes(
        level, np.arange(rows), np.ones(rows), deviation, np.asarray(inside, dtype=bool), np.ones(rows, bool)
    )


class TestGroups:
    def test_by_deviation_are_tenths(self) -> None:
        groups = by_deviation(outcomes(200, np.arange(200) >= 20))
        assert [group.rows for group in groups] == [20] * 10
        assert [group.coverage for group in groups] == [0.0] + [1.0] * 9
        assert (groups[0].off, groups[0].constant) == ("less", 1.0)
        assert groups[0].high <= groups[1].low

    def test_the_input_that_tells_comes_first(self) -> None:
        dice = np.random.default_rng(0)
        age, noise = dice.random(500), dice.random(500)
        by_name = by_input(outcomes(500, age < 0.8), Inputs({"noise": noise, "age": age}), {})
        assert [groups[0].name for groups in by_name] == ["age", "noise"]
        assert [group.off for group in by_name[0]][-1] == "less"

    def test_values_of_one_row_count_together(self) -> None:
        """100 copies of a value tell no more than one."""
        inside = np.repeat(np.arange(40) % 10 != 0, 100)
        rows = np.repeat(np.arange(40), 100)
        many = Outcomes(0.9, rows, np.ones(4000), np.tile(np.linspace(1, 2, 100), 40), inside, None)
        for group in by_deviation(many):
            assert group.coverage_error == pytest.approx(np.sqrt(0.09 / 40), rel=0.05)


class TestJudgement:
    def test_measures_are_those_of_what_is_in_use(self) -> None:
        prediction, target = predicted()
        judgement = judge(prediction, target)
        used = next(row for row in compare(prediction, target) if row.label == in_use(prediction.calibration))
        measures = judgement.measures()
        assert measures["coverage90"] == pytest.approx(used.coverage)
        assert measures["width90"] == pytest.approx(used.width)
        assert measures["rmse"] == used.rmse
        assert measures["gain"] == pytest.approx(used.gain)

    def test_each_output_is_held_against_its_own_constant(self) -> None:
        prediction, target = predicted(outputs=2, method=latedrop.Terms(guard=False))
        factor = torch.tensor([1.0, 1e6])
        record = prediction.calibration
        record = replace(record, constant=(record.constant[0], record.constant[1] * 1e12))
        moved = {"output": prediction.output * factor, "raw_variance": prediction.raw_variance * factor**2}
        judgement = judge(replace(prediction, calibration=record, **moved), target * factor)
        (usual, *_) = judgement.together.strange
        shares = [output.strange[0].constant for output in judgement.outputs]
        assert usual.constant == pytest.approx(np.mean(shares))
        assert np.isnan(usual.rmse)
        assert (judgement.together.deciles, judgement.together.worst, judgement.together.kept) == ((), (), ())

    def test_one_variance_for_all_rows_chooses_nothing(self) -> None:
        prediction, target = predicted(method=latedrop.Terms(guard=False))
        same = replace(prediction, raw_variance=torch.ones_like(prediction.raw_variance))
        together = judge(same, target).together
        assert together.deciles == ()
        assert len(set(together.kept_rmse)) == 1


class TestRequirements:
    def test_held_and_broken(self) -> None:
        judgement = judge(*predicted()).require("coverage90 >= 0.1, gain<-5 ,rows>1e2,width50<=1000")
        assert [item.met for item in judgement] == [True, False, True, True]
        assert str(judgement[1]).startswith("required gain < -5; found ")

    @pytest.mark.parametrize("text", ["coverage90", "gain=>0", "gain>=a", "", "gain>=0;ma<1", ">=0"])
    def test_what_cannot_be_read(self, text: str) -> None:
        with pytest.raises(ArgumentError, match="expected requirements as NAME>=NUMBER"):
            parsed_requirements(text)

    @pytest.mark.parametrize("text", ["coverag90>=0", "coverage>=0", "coverage100>=0", "gain,5>1"])
    def test_unknown_names_list_the_known(self, text: str) -> None:
        with pytest.raises(ArgumentError, match=r"expected (a measure to require among coverage90|requirements)"):
            parsed_requirements(text)

    def test_a_floor_alone_does_not_rank_the_rows_that_it_leaves_out(self) -> None:
        # Each fold's floor is smaller where its own errors are large; that is no ranking, neither right nor wrong.
        error = torch.randn(12, 1)
        values = crossed(
            error, lambda rest: lambda held: error[rest].square().mean().expand(len(held), 1), True, CrossValidation()
        )
        assert judged(error, *values, fitted="cross-validation").correlation == 0
