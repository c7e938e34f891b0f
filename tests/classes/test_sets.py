"""Prediction sets hold what they say over repeated draws; a rejection rule keeps its risk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import latedrop
from latedrop.calibration.class_record import ClassSets, Score, at_most, rejection, scores_of
from latedrop.errors import ArgumentError, DataError
from networks import mlp
from rounding import rounding

scipy_stats = pytest.importorskip("scipy.stats")


def _rows(n: int, seed: int, k: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Overconfident probabilities, and labels of the true ones."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(z, 1), 1, generator=generator)[:, 0]
    return torch.softmax(2 * z, 1), labels


@pytest.mark.parametrize("score", ["aps", "raps"])
def test_rounding_of_probabilities_moves_no_score(score: Score) -> None:
    p, _ = _rows(2000, 0)
    moved = (scores_of(p, score) - scores_of(p * (1 + 1e-8), score)).abs().amax(1) > 1e-6
    assert float(moved.double().mean()) < 1e-3  # only where a digit is rounded up or down


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_hold_the_label_as_often_as_they_say(score: Score) -> None:
    level, n, shares = 0.8, 60, []
    for seed in range(300):
        p, y = _rows(n + 20, seed)
        members = ClassSets.fit(p[:n], y[:n], score, per_class=False).members(p[n:], level)
        shares.append(float(members.gather(1, y[n:, None]).double().mean()))
    share, error = torch.tensor(shares).mean(), torch.tensor(shares).std() / 300**0.5
    # At least the level, and at most 1 / (n + 1) above it, as scores hardly tie.
    assert level - 3 * error <= share <= level + 1 / (n + 1) + 3 * error


def test_sets_per_class_hold_every_class() -> None:
    by_class: dict[int, list[float]] = {k: [] for k in range(3)}
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        y = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 400, replacement=True, generator=generator)
        lift = torch.nn.functional.one_hot(y, 3) * torch.tensor([3.0, 1.5, 0.5])
        p = torch.softmax(torch.randn(400, 3, generator=generator) + lift, 1)
        members = ClassSets.fit(p[:300], y[:300], "lac", per_class=True).members(p[300:], 0.8)
        for k in range(3):
            inside = members[y[300:] == k, k].double()
            by_class[k] += [float(inside.mean())] if len(inside) else []
    for shares in by_class.values():
        values = torch.tensor(shares)
        assert float(values.mean()) > 0.8 - 3 * float(values.std() / len(values) ** 0.5)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_of_novel_rows_hold_what_their_probabilities_ask_for(score: Score) -> None:
    """Probabilities near 1/3 lie on both sides of the threshold of usual rows: LAC alone gives such a row one class."""
    net, x = mlp(3, 16, 3, act=nn.ReLU), torch.randn(400, 3)
    y = net(x).argmax(1).where(torch.rand(400) < 0.8, torch.randint(3, (400,)))
    uq = latedrop.calibrate(net, (x[:200], y[:200]), progress=False).conformal((x[200:], y[200:]), score)
    p = uq.predict(torch.cat([x, 100 * x[:50]]))
    novel, members = p.novelty > 1, p.prediction_set(0.7)
    assert bool(novel[400:].all())
    assert bool(((p.probabilities * members).sum(1) > 0.7 - rounding())[novel].all())
    assert torch.equal(members[~novel], p.calibration.sets.members(p.probabilities, 0.7)[~novel])
    assert bool(members[p.calibration.sets.members(p.probabilities, 0.7)].all())


def test_sets_per_class_need_every_class_when_they_are_made() -> None:
    x, y = torch.randn(120, 3, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 3
    model = mlp(3, 8, 3)
    uq = latedrop.calibrate(model, (x[:60], y[:60]), method=latedrop.Terms(["leverage"]), progress=False)
    new, labels = x[60:], y[60:]
    with pytest.raises(DataError, match="expected rows of every class for sets per class; found none of class 1"):
        uq.conformal((new[labels != 1], labels[labels != 1]), per_class=True)
    uq.conformal((new[labels != 1], labels[labels != 1]))  # of all classes together


def test_aps_by_hand() -> None:
    p = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    (scores,) = scores_of(p, "aps").tolist()
    u = scores[1] / 0.5
    assert 0 <= u <= 1
    assert scores[2] == pytest.approx(0.5 + u * 0.3)
    assert scores[0] == pytest.approx(0.8 + u * 0.2)


def test_the_test_is_clopper_and_pearsons() -> None:
    for errors, rows, rate in ((0, 50, 0.05), (3, 100, 0.06), (40, 41, 0.9), (7, 7, 0.3), (120, 5000, 0.02)):
        # Summed from logarithms of factorials: an error of one is the relative error of its exponential.
        error = rounding(torch.float64, terms=1) * math.lgamma(rows + 1)
        assert at_most(errors, rows, rate) == pytest.approx(scipy_stats.binom.cdf(errors, rows, rate), rel=error)
        bound = 1.0 if errors == rows else scipy_stats.beta.ppf(0.95, errors + 1, rows - errors)
        assert (at_most(errors, rows, rate) > 0.05) == (bound > rate)


def test_rejection_keeps_its_risk_in_repeated_trials() -> None:
    risk, broken, trials = 0.2, 0, 0
    fresh, labels = _rows(200_000, 10_000)
    sure, wrong = fresh.amax(1), fresh.argmax(1) != labels
    for seed in range(200):
        p, y = _rows(800, seed)
        rule = rejection(p.amax(1), p.argmax(1) == y, risk, 0.9)
        keep = sure >= rule.threshold
        trials += int(keep.any())
        broken += bool(keep.any()) and float(wrong[keep].double().mean()) > risk
    assert trials > 100
    assert broken <= 0.1 * 200 + 3 * (0.1 * 0.9 * 200) ** 0.5


def test_a_rule_is_kept_with_the_calibration(tmp_path: Path) -> None:
    x = torch.randn(400, 3)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
    y = (5 * model(x).detach() + 0.3 * torch.randn(400, 3)).argmax(1)
    uq = latedrop.calibrate(model, (x[:200], y[:200]), method=latedrop.Terms(["leverage"]), progress=False)
    with pytest.raises(ArgumentError, match="expected a predictor with a rule"):
        uq.predict(x).kept()
    assert "kept" not in uq.predict(x).to_dict()
    ruled = uq.reject((x[200:], y[200:]), risk=0.3)
    ruled.save(tmp_path / "c.json")
    prediction = latedrop.load(tmp_path / "c.json", model).predict(x)
    assert torch.equal(prediction.kept(), ruled.predict(x).kept())
    assert torch.equal(prediction.to_dict()["kept"], prediction.kept())
