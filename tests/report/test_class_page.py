"""The page about a classifier: verdict, one temperature beside it, and nothing from outside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import latedrop
from latedrop.calibration.class_record import ClassVerdict
from latedrop.calibration.fit_classes import ALONE
from latedrop.errors import ArgumentError, DataError
from latedrop.evaluation.judgement import ERROR_BAD, RuleScores, SetScores, findings_of, judge_classes
from latedrop.metrics import classes as metrics
from latedrop.prediction.predictor import ClassPredictor
from latedrop.report import write_class_report
from rounding import rounding


def _case(terms: list[str]) -> tuple[ClassPredictor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    x = 2 * torch.randn(900, 4)
    y = torch.multinomial(torch.softmax(8 * net(x).detach(), 1), 1)[:, 0]
    names = ["cat", "dog <b>", "bird"]
    uq = latedrop.calibrate(
        net, (x[:500], y[:500]), method=latedrop.Terms(terms), task=latedrop.Classification(names=names), progress=False
    )
    return uq, x[500:], y[500:]


@pytest.mark.parametrize("guard", [True, False], ids=["leverage", "temperature"])
def test_scores_are_those_of_the_metrics_and_the_page_has_them(tmp_path: Path, guard: bool) -> None:
    uq, x, y = _case(["leverage"])
    if not guard:
        uq = latedrop.calibrate(
            uq.model, (x[:200], y[:200]), method=latedrop.Terms(["leverage"], guard=False), progress=False
        )
        assert uq.calibration.choice == ALONE
        x, y = x[200:], y[200:]
    p = uq.predict(x)
    judgement = judge_classes(p, y)
    assert judgement.scores[0].nll == pytest.approx(float(metrics.cross_entropy(p.probabilities, y)))
    alone = torch.softmax(p.logits / uq.calibration.alone, 1)
    by_label = {row.label: row for row in judgement.scores}
    assert by_label[ALONE].nll == pytest.approx(float(metrics.cross_entropy(alone, y)), rel=rounding())
    assert judgement.verdict.gain == pytest.approx(
        by_label[ALONE].nll - judgement.scores[0].nll, abs=rounding(torch.float64)
    )
    assert "the model's softmax" in by_label
    path = tmp_path / "page.html"
    write_class_report(path, title="Pets <i>", prediction=p, labels=y, reproduce={"command": "make pets"})
    text = path.read_text(encoding="utf-8")
    assert 'class="verdict"' in text
    assert "Pets &lt;i&gt;" in text
    assert f"{judgement.scores[0].nll:.4f}" in text
    assert "http" not in text.replace("http-equiv", "")
    assert ("dog &lt;b&gt;" in text) == guard
    assert "Rows unlike the others" in text
    assert judgement.to_dict()["verdict"]["grade"] == judgement.grade


def test_broken_promises_lower_the_grade() -> None:
    uq, x, y = _case(["leverage"])
    judgement = judge_classes(uq.predict(x), y)
    assert judgement.grade != "bad"
    assert replace(judgement, sets=SetScores(0.9, 0.7, 0.01, 1.2)).grade == "bad"
    assert replace(judgement, rule=RuleScores(0.1, 0.8, 0.3, 0.01)).grade == "bad"
    assert replace(judgement, sets=SetScores(0.9, 0.9, 0.01, 1.2)).grade == judgement.grade


def test_a_sure_and_wrong_classifier_is_told() -> None:
    uq, x, y = _case(["leverage"])
    judgement = judge_classes(uq.predict(x), (y + 1) % 3)
    assert judgement.grade == "bad"
    with pytest.raises(DataError, match=r"one label for each row, \(400,\); found shape \(3,\)"):
        judge_classes(uq.predict(x), y[:3])


def test_few_rows_do_not_condemn_exact_probabilities() -> None:
    """The calibration error of few rows is large by chance; that of many is not."""
    verdict = ClassVerdict(100, "other rows", gain=0.0, gain_error=0.0, nll=1.0, accuracy=0.75, ece=0.14)
    assert ERROR_BAD < verdict.ece < verdict.ece_by_chance
    assert findings_of(verdict)[0].grade == "weak"
    assert findings_of(replace(verdict, rows=5000))[0].grade == "bad"


def test_a_page_about_a_calibration_alone(tmp_path: Path) -> None:
    uq, _, _ = _case(["leverage"])
    path = tmp_path / "page.html"
    write_class_report(path, title="Alone", calibration=uq.calibration)
    assert "What was compared on the validation rows" in path.read_text()
    with pytest.raises(ArgumentError, match="expected a prediction with labels, or a calibration"):
        write_class_report(path, title="Nothing")


def test_exact_probabilities_are_good_among_enough_rows() -> None:
    grades = []
    for _ in range(100):
        logits = 2 * torch.randn(1000, 4).double()
        p = logits.softmax(1)
        y = torch.multinomial(p, 1)[:, 0]
        accuracy, error = float(metrics.accuracy(p, y)), float(metrics.ece(p, y, mass=True))
        verdict = ClassVerdict(1000, "other rows", gain=0.0, gain_error=0.0, nll=1.0, accuracy=accuracy, ece=error)
        grades.append(findings_of(verdict)[0].grade)
    assert grades.count("good") > 80
    assert "by chance up to" in str(verdict)
