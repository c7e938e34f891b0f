"""Several labels for one row: probabilities are calibrated, and sets miss no more labels than they say."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.multilabel import RiskControl
from rounding import assert_same_up_to_rounding

LABELS = 4


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=dice)
    chance = torch.sigmoid(2 * x[:, :LABELS] - torch.arange(LABELS) / 2)
    return x, (torch.rand(count, LABELS, generator=dice) < chance).float()


def overconfident(factor: float = 5.0) -> nn.Module:
    """The true logits, five times as large."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, LABELS))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
        model[0].bias.zero_()
        model[1].weight.copy_(2 * factor * torch.eye(LABELS, 6))
        model[1].bias.copy_(-factor * torch.arange(LABELS) / 2)
    return model


@pytest.fixture(scope="module")
def uq() -> latedrop.MultiLabelPredictor:
    return latedrop.calibrate_multilabel(overconfident(), rows(400, 0), names="abcd").control(rows(500, 1))


def test_probabilities_follow_the_truth(uq: latedrop.MultiLabelPredictor) -> None:
    c = uq.calibration
    # The slope of one label, from 400 rows of Fisher information 0.1 per unit of the logit or more.
    assert all(abs(5 * slope - 1) < 4 / math.sqrt(400 * 0.1) for slope in c.slopes)
    assert c.choice != "model"
    assert c.nll < c.base_nll
    x, y = rows(4000, 2)
    p = uq.predict(x).probabilities
    assert float((p.sum(1).mean() - y.sum(1).mean()).abs()) < 4 * math.sqrt(LABELS / 4 * (1 / 4000 + 1 / 400))


def test_a_calibrated_model_stays_as_it_is() -> None:
    model = overconfident(1.0)
    uq = latedrop.calibrate_multilabel(model, rows(400, 0))
    assert uq.calibration.choice == "model"
    x, _ = rows(10, 3)
    assert_same_up_to_rounding(uq.predict(x).probabilities, torch.sigmoid(model(x).detach()).double())


def test_sets_miss_no_more_than_they_say(uq: latedrop.MultiLabelPredictor) -> None:
    x, y = rows(6000, 4)
    p = uq.predict(x)
    for missed in (0.05, 0.2):
        lost = (y.bool() & ~p.label_set(missed)).sum(1) / y.sum(1).clamp_min(1)
        # Means over 500 rows, which chose the threshold, and 6000; a loss of at most 1 has a variance below its mean.
        error = math.sqrt(missed * (1 / 500 + 1 / 6000))
        assert abs(float(lost.mean()) - missed) < 4 * error
    assert bool((p.label_set(0.05) | ~p.label_set(0.2)).all())  # sets are nested
    assert p.named(0) == [name for name, inside in zip("abcd", p.label_set()[0], strict=True) if inside]


def test_the_threshold_is_that_of_risk_control() -> None:
    probabilities = torch.tensor([[0.9, 0.2], [0.6, 0.7], [0.3, 0.1], [0.5, 0.5]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    control = RiskControl.fit(probabilities, labels)
    assert_same_up_to_rounding(list(control.probabilities), [0.3, 0.6, 0.7, 0.9])
    assert control.losses == (1.0, 0.5, 0.5, 1.0)
    # (lost + 1) / 5 <= share: none may be lost at 0.2, one at 0.4, one and a half at 0.5, all three at 0.8.
    assert_same_up_to_rounding([control.threshold(share) for share in (0.2, 0.4, 0.5, 0.79)], [0.3, 0.6, 0.7, 0.9])
    assert control.threshold(0.8) == math.inf
    with pytest.raises(ArgumentError, match=r"at least 9 rows.*below 0\.1; found 4\. Pass more rows to control"):
        control.threshold(0.1)


def test_a_file_brings_it_back(uq: latedrop.MultiLabelPredictor, tmp_path: Path) -> None:
    path = tmp_path / "labels.json"
    uq.save(path)
    again = latedrop.load_multilabel(path, uq.model)
    assert again.calibration == uq.calibration
    x, _ = rows(7, 5)
    assert again.predict(iter([x[:3], x[3:]])).label_set().tolist() == uq.predict(x).label_set().tolist()
    with pytest.raises(FileError, match=r"latedrop\.load_multilabel\(path, model\)"):
        latedrop.load(path, uq.model)
    path.write_text(path.read_text().replace('"slopes"', '"shapes"'))
    with pytest.raises(FileError):
        latedrop.load_multilabel(path, uq.model)


def test_a_row_that_overflows_is_refused(uq: latedrop.MultiLabelPredictor) -> None:
    x, _ = rows(20, 3)
    x[3] = 3e38
    with pytest.raises(DataError, match="found 1 of 20 rows of a batch that overflow"):
        uq.predict(x)


def test_what_is_refused(uq: latedrop.MultiLabelPredictor) -> None:
    model, (x, y) = overconfident(), rows(40, 6)
    with pytest.raises(DataError, match=r"labels of 0 and 1 of shape \(40, 4\).*found shape \(40, 3\)"):
        latedrop.calibrate_multilabel(model, (x, y[:, :3]))
    with pytest.raises(DataError, match=r"labels of 0 and 1.*values from 0 to 2"):
        latedrop.calibrate_multilabel(model, (x, 2 * y))
    with pytest.raises(DataError, match=r"expected logits; found numbers between 0 and 1.*readout=torch\.logit"):
        latedrop.calibrate_multilabel(nn.Sequential(model, nn.Sigmoid()), (x, y))
    with pytest.raises(DataError, match="at least 20 validation rows; found 19"):
        latedrop.calibrate_multilabel(model, (x[:19], y[:19]))
    with pytest.raises(DataError, match=r"at least 2 labels; found \(40, 1\)"):
        latedrop.calibrate_multilabel(nn.Linear(6, 1), (x, y[:, :1]))
    with pytest.raises(ArgumentError, match="names of 4 labels; found 2"):
        latedrop.calibrate_multilabel(model, (x, y), names=["a", "b"])
    with pytest.raises(ArgumentError, match=r"controls missed labels.*uq = uq\.control"):
        latedrop.calibrate_multilabel(model, (x, y)).predict(x).label_set()
    with pytest.warns(latedrop.LatedropWarning, match="exactly one label"):
        latedrop.calibrate_multilabel(model, (x, nn.functional.one_hot(y.argmax(1), 4)))
    with pytest.warns(latedrop.LatedropWarning, match="used for nothing else"):
        uq.control(rows(400, 0))
    for inputs in (torch.randn(5, 7), {"x": x}):
        with pytest.raises(DataError, match="expected inputs that the model takes"):
            uq.predict(inputs)
    with torch.no_grad():
        uq.model[1].bias += 1
    with pytest.warns(latedrop.LatedropWarning, match="weights"):
        uq.predict(x)
    with torch.no_grad():
        uq.model[1].bias -= 1
