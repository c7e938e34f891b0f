"""Rows of a target without labels: weights follow the ratio of densities, and intervals hold where others do not."""

import math

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError, DataError
from latedrop.prediction.adapted import Density, Shift
from networks import mlp, trained
from rounding import assert_same_up_to_rounding


def rows(count: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Noise grows with the first input."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=dice)
    x[:, 0] += shift
    noise = torch.randn(count, 1, generator=dice)
    return x, torch.sin(x[:, 1:2]) + x[:, 0:1].exp().clamp_max(8) * 0.2 * noise


@pytest.fixture(scope="module")
def uq() -> latedrop.Predictor:
    """Dropout alone, to which the noise is much the same everywhere."""
    net = trained(mlp(3, 30, 1, act=nn.ReLU), *rows(300, 0), 100, 5e-3)
    return latedrop.calibrate(net, rows(200, 1), method=latedrop.FirstOrder(floor=True), progress=False)


def density() -> Density:
    return Density(torch.zeros(1), torch.ones(1, 1), torch.zeros(1, 2), 1.0)


def test_weighted_scores_are_those_of_split_conformal_where_all_weigh_the_same() -> None:
    scores = torch.arange(1.0, 20.0).double()[torch.randperm(19, generator=torch.Generator().manual_seed(0))]
    shift = Shift(density(), torch.ones(19).double(), 10.0, (scores,), 19.0, 0.0)
    for level in (0.1, 0.5, 0.9, 0.95):
        assert shift.reach(torch.ones(1), level).item() == math.ceil(20 * level - 1e-9)
    assert shift.reach(torch.ones(1), 0.96).item() == math.inf


def test_weighted_scores_by_hand() -> None:
    shift = Shift(
        density(), torch.tensor([1.0, 2.0, 5.0]).double(), 2.0, (torch.tensor([3.0, 1.0, 2.0]).double(),), 3.0, 0.0
    )
    # Sorted scores 1, 2, 3 have the weights 2, 5, 1, of 8 and the row's own; its 9 is cut at 2.
    assert shift.reach(torch.tensor([9.0, 0.0]), 0.2).flatten().tolist() == [1.0, 1.0]
    assert shift.reach(torch.tensor([9.0, 0.0]), 0.7).flatten().tolist() == [2.0, 2.0]
    assert shift.reach(torch.tensor([9.0, 0.0]), 0.85).flatten().tolist() == [math.inf, 2.0]


def test_density_ratio_of_two_gaussians() -> None:
    labelled, target = torch.randn(4000, 2), torch.randn(4000, 2)
    target[:, 0] += 1
    made, ratios, _ = Density.fit(labelled, target)
    true = (labelled[:, 0] - 0.5).exp().double()  # exp(x) is the ratio of N(1, 1) and N(0, 1), up to exp(-1/2)
    # The slope of logistic regression has a standard error of about 2 / sqrt(8000) in the logarithm.
    near = true.log().abs() < 1.5
    for values in (ratios, made.of(labelled)):  # by classifiers that did not see the row, and by all of them
        assert float((values / true).log()[near].abs().max()) < 4 * 2 * 1.5 / math.sqrt(8000) * math.sqrt(2)


def test_intervals_hold_on_the_target(uq: latedrop.Predictor) -> None:
    other, (x, y) = rows(1500, 2), rows(4000, 3, shift=1)
    plain, adapted = uq.conformal(other).predict(x), uq.adapted(rows(800, 4, shift=1)[0], other)
    p = adapted.predict(x)
    shares = []
    for each in (plain, p):
        low, high = each.interval(0.9)
        shares.append(float(((low <= y) & (y <= high)).float().mean()))
    # As many rows as weights of exp(x) leave: of 1500 about 1500 / e.
    error = math.sqrt(0.9 * 0.1 / adapted.effective_rows)
    assert shares[0] < 0.9 - 6 * error
    assert abs(shares[1] - 0.9) < 4 * error
    assert bool((p.std > plain.std).all())
    assert 300 < adapted.effective_rows < 1000
    assert "conformal" not in repr(adapted.calibration.intervals)
    assert_same_up_to_rounding(adapted.predict(iter([x[:3], x[3:8]])).interval()[0], p.interval()[0][:8])
    assert_same_up_to_rounding(p.cpu().weight, p.weight)


def test_a_target_without_overlap_is_refused(uq: latedrop.Predictor) -> None:
    with pytest.raises(DataError, match=r"expected labelled rows like those of the target.*beyond.*Label rows of the"):
        uq.adapted(rows(300, 5, shift=6)[0], rows(300, 6))
    with pytest.raises(DataError, match=r"at least 30 labelled rows.*found 20 and 300"):
        uq.adapted(rows(300, 5)[0], rows(20, 6))


def test_what_is_refused(uq: latedrop.Predictor) -> None:
    target = rows(100, 7)[0]
    adapted = uq.adapted(target, rows(100, 8))
    maps = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 1, 3))
    images = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    pairs = images, images[:, :, 2:6, 2:6]
    of_maps = latedrop.calibrate(maps, pairs, method="propagate", progress=False)
    for attempt, match in (
        (lambda: adapted.scaled("relaxed"), "found Adapted"),
        (lambda: adapted.predict(target).scaled("relaxed"), "found Adapted"),
        (lambda: adapted.save("adapted.json"), "which no file holds"),
        (lambda: adapted.to_onnx("adapted.onnx", target), "which no file holds"),
        (lambda: adapted.adapted(target, rows(100, 8)), "found AdaptedPredictor"),
        (lambda: of_maps.adapted(images, pairs), "one value or a vector.*found outputs of shape"),
    ):
        with pytest.raises(ArgumentError, match=match):
            attempt()
    with pytest.warns(latedrop.LatedropWarning, match="used for nothing else"):
        uq.adapted(target, rows(200, 1))
