"""Detectors of strange rows, for classes and numbers: p-values with a rate of false alarms, combination, files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import latedrop
from latedrop import metrics
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.prediction.detector import COMBINED, Combination, Detector, p_values
from networks import mlp, noisy
from rounding import assert_same_up_to_rounding

QUICK: dict[str, Any] = {"method": latedrop.Terms(["leverage"]), "progress": False}


def rows(count: int, seed: int, times: float = 1.0) -> Tensor:
    return times * torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


network = partial(mlp, 4, 12, 12, act=nn.ReLU)


@pytest.fixture(scope="module")
def classifier() -> Any:
    model, x = network(3), rows(150, 0)
    y = (3 * model(x) + torch.rand(150, 3, generator=torch.Generator().manual_seed(1))).argmax(1)
    return latedrop.calibrate(model, (x, y), **QUICK)


@pytest.fixture(scope="module")
def regression() -> Any:
    model = network(2)
    return latedrop.calibrate(model, noisy(model, 150, noise=0.1, inputs=4), **QUICK)


def test_p_values_count_usual_rows_that_score_as_high() -> None:
    usual, new = (torch.randint(0, 20, (size,)).double() for size in (50, 40))
    expected = (1 + (usual[None] >= new[:, None]).sum(1)).double() / 51
    assert torch.equal(p_values(usual.sort().values, new), expected)  # counts


@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_rows_that_are_there_many_times_are_not_strange_by_rounding(kind: str, request: pytest.FixtureRequest) -> None:
    """Four different rows, a quarter of the usual ones each: whichever comes, none is strange."""
    four = rows(4, 3)
    detector = request.getfixturevalue(kind).detector(four.repeat(60, 1))
    assert len(repr(detector)) < 3000
    for size in (1, 2, 3, 4):
        for p in detector(four[:size]).p_values.values():
            assert float(p.min()) > 0.1


def by_name(scores: dict[str, Tensor]) -> Combination:
    return Combination({name: values.double().sort().values for name, values in scores.items()})


def test_false_alarms_are_as_rare_as_asked_for() -> None:
    """Over repeated draws, of single scores with ties and of their combination."""
    dice, repeats, new = torch.Generator().manual_seed(0), 300, 40
    counts: dict[tuple[str, float], list[float]] = {}
    for _ in range(repeats):
        base = torch.randn(60 + new, 1, generator=dice) + 0.5 * torch.randn(60 + new, 3, generator=dice)
        scores = {"a": base[:, 0], "b": base[:, 1].exp(), "c": base[:, 2].round()}
        parts = [{name: s[i:j] for name, s in scores.items()} for i, j in ((0, 30), (30, 60), (60, 60 + new))]
        combined = by_name(parts[0])
        usual, fresh = ({**part, COMBINED: combined(part)} for part in parts[1:])
        for name in usual:
            p = p_values(usual[name].sort().values, fresh[name])
            for alarm in (0.1, 0.3):
                counts.setdefault((name, alarm), []).append(float((p <= alarm).double().mean()))
    for (name, alarm), rates in counts.items():
        shares = torch.tensor(rates)
        error = float(shares.std()) / repeats**0.5
        assert float(shares.mean()) <= alarm + 3 * error, (name, alarm)
        if name in "ab":  # ties, as the others have, make fewer alarms
            assert float(shares.mean()) >= alarm - 1 / 31 - 3 * error, (name, alarm)


def test_any_score_may_say_that_a_row_is_strange() -> None:
    usual = {name: torch.randn(200) for name in "ab"}
    fit = by_name(usual)
    new = {"a": torch.tensor([5.0, -5.0, 0.0, 9.0]), "b": torch.tensor([-5.0, 5.0, 0.0, -5.0])}
    first, second, middle, further = fit(new).tolist()
    assert middle < min(first, second) < further
    assert min(first, second) >= float(fit(usual).max())


ALL = {
    "classes": ("novelty", "entropy", "confidence", "energy", "mutual_information", "neighbours"),
    "numbers": ("novelty", "std", "neighbours"),
}


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_every_score_of_a_network(task: str, classifier: Any, regression: Any, tmp_path: Path) -> None:
    uq = classifier if task == "classes" else regression
    detector = uq.detector(rows(300, 5), scores=ALL[task])
    names = {*ALL[task], COMBINED}
    new, far = detector(rows(200, 6)), detector(rows(200, 7, 6.0))
    assert set(new.scores) == set(new.p_values) == names
    assert all(len(values) == 200 for values in (new, far, *new.scores.values()))
    is_far = torch.arange(400) >= 200
    areas = {name: float(metrics.auroc(torch.cat([s, far.scores[name]]), is_far)) for name, s in new.scores.items()}
    assert min(areas["novelty"], areas["neighbours"], areas[COMBINED]) > 0.9
    error = (0.05 * 0.95 * (1 / 200 + 1 / 150)) ** 0.5
    assert all(float((p <= 0.05).double().mean()) < 0.05 + 4 * error for p in new.p_values.values())
    assert torch.equal(new.strange(0.05), new.p_values[COMBINED] <= 0.05)
    assert torch.equal(new.strange(0.2, "novelty"), new.p_values["novelty"] <= 0.2)
    detector.save(tmp_path / "detector.json")
    again = Detector.load(tmp_path / "detector.json", uq)(rows(200, 6))
    # A file keeps every digit, and the batch is the same.
    assert all(torch.equal(again.p_values[name], values) for name, values in new.p_values.items())


def test_what_is_scored_by_default(classifier: Any, regression: Any) -> None:
    x = rows(60, 5)
    assert set(classifier.detector(x)(x).scores) == {"novelty", "entropy", "confidence", "energy", COMBINED}
    assert set(regression.detector(x)(x).scores) == {"novelty", "std", COMBINED}
    p = classifier.predict(x)
    scores = classifier.detector(x)(x).scores
    assert torch.equal(scores["energy"], p.energy)  # the same call on the same batch
    assert torch.equal(scores["confidence"], 1 - p.confidence)
    assert torch.equal(scores["entropy"], p.entropy)
    assert torch.equal(scores["novelty"], p.novelty)


def test_one_score_needs_no_half(classifier: Any) -> None:
    x = rows(60, 5)
    detector = classifier.detector(x, ["entropy"])
    assert (detector.known.combination, detector.rows) == (None, 60)
    assert torch.equal(detector(x).p_value, detector(x).p_values["entropy"])  # the same call on the same batch
    assert classifier.detector(x).rows == 30


def test_loaders_and_batches_give_the_same(classifier: Any) -> None:
    x = rows(60, 5)
    expected = classifier.detector(x)(rows(30, 6)).p_value
    loader = DataLoader(TensorDataset(x), batch_size=7)
    assert_same_up_to_rounding(classifier.detector(loader)(DataLoader(TensorDataset(rows(30, 6)))).p_value, expected)


def test_wrong_input(classifier: Any, regression: Any, tmp_path: Path) -> None:
    x = rows(60, 5)
    for uq, scores in ((classifier, ["std"]), (regression, ["entropy"]), (classifier, "entropy"), (classifier, [])):
        with pytest.raises(ArgumentError, match="expected different scores among"):
            uq.detector(x, scores)
    with pytest.raises(DataError, match="at least 20 usual rows for a detector, and better a thousand; found 5"):
        classifier.detector(x[:5])
    detector = classifier.detector(x)
    with pytest.raises(ArgumentError, match=r"a rate of false alarms from 0\.032"):
        detector(x).strange(0.01)
    with pytest.raises(ArgumentError, match="expected a score among"):
        detector(x).strange(0.1, "std")
    with pytest.raises(DataError, match="at least one row"):
        detector(x[:0])
    path = tmp_path / "detector.json"
    detector.save(path)
    with pytest.raises(FileError, match="the model that the detector was made with"):
        Detector.load(path, regression)
    known = replace(detector.known, usual={name: values.flip(0) for name, values in detector.known.usual.items()})
    replace(detector, known=known).save(path)
    with pytest.raises(FileError, match=r"detector.json: expected detector.usual.* in rising order"):
        Detector.load(path, classifier)
    path.write_text("{}")
    with pytest.raises(FileError, match="a detector"):
        Detector.load(path, classifier)


@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_another_calibration_is_refused(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    uq = request.getfixturevalue(kind)
    detector = uq.detector(rows(60, 3), scores=["novelty"])
    detector.save(tmp_path / "d.json")
    uq.save(tmp_path / "c.json")
    again = latedrop.load(tmp_path / "c.json", uq.model)
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(Detector.load(tmp_path / "d.json", again)(rows(5, 4)).p_value, detector(rows(5, 4)).p_value)
    x = rows(150, 9, times=3.0)
    output = uq.model(x).detach()
    y = output.argmax(1) if kind == "classifier" else output + 1
    other = latedrop.calibrate(uq.model, (x, y), **QUICK)
    with pytest.raises((DataError, FileError), match="expected the calibration that the detector was made with"):
        Detector.load(tmp_path / "d.json", other)
