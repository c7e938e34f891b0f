"""Several outputs together: regions and bands hold what they say, and marginal variances stay as they were."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError, DataError
from latedrop.prediction.joint import Joint, Region
from networks import mlp, trained
from rounding import assert_same_up_to_rounding

OUTPUTS = 3


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Outputs whose noise is mostly common to all."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=dice)
    noise = torch.randn(count, 1, generator=dice) + 0.3 * torch.randn(count, OUTPUTS, generator=dice)
    return x, torch.sin(x[:, :OUTPUTS]) + (0.2 + 0.3 * x[:, 3:].abs()) * noise


@pytest.fixture(scope="module")
def uq() -> latedrop.Predictor:
    net = mlp(4, 30, 30, OUTPUTS, act=nn.ReLU)
    x, y = rows(400, 0)
    return latedrop.calibrate(trained(net, x, y, 150, 5e-3), rows(200, 1), reference=x, progress=False)


@pytest.fixture(scope="module")
def joint(uq: latedrop.Predictor) -> latedrop.JointPredictor:
    return uq.joint(rows(400, 2))


def test_coverage_is_what_the_level_says(joint: latedrop.JointPredictor) -> None:
    x, y = rows(4000, 3)
    p = joint.predict(x)
    for level in (0.5, 0.9):
        low, high = p.bands(level)
        memberships = [p.region(level).contains(y), ((low <= y) & (y <= high)).all(1)]
        # Of 200 rows that set the radius the coverage follows a beta distribution; of 4000 rows its share is binomial.
        error = math.sqrt(level * (1 - level) * (1 / 200 + 1 / 4000))
        for inside in memberships:
            assert abs(float(inside.double().mean()) - level) < 4 * error


def test_an_ellipsoid_is_smaller_than_bands_where_errors_go_together(joint: latedrop.JointPredictor) -> None:
    p = joint.predict(rows(500, 4)[0])
    low, high = p.bands()
    assert bool((p.region().log_volume < (high - low).log().sum(1)).all())
    assert bool((p.correlation[:, 0, 1] > 0.5).all())


def test_marginal_variances_stay(uq: latedrop.Predictor, joint: latedrop.JointPredictor) -> None:
    x, _ = rows(20, 5)
    p, plain = joint.predict(x), uq.predict(x)
    assert_same_up_to_rounding(p.std, plain.std)
    assert_same_up_to_rounding(p.covariance.diagonal(dim1=1, dim2=2), plain.variance.double())


def test_radius_is_the_finite_sample_rank(joint: latedrop.JointPredictor) -> None:
    errors = joint.joint_errors
    p = replace(joint.predict(rows(2, 6)[0]), joint=replace(errors, distances=(1.0, 4.0, 9.0), largest=(1.0, 2.0, 3.0)))
    # ceil((3 + 1) 0.75) = 3, ceil((3 + 1) 0.5) = 2
    ratio = p.region(0.75).log_volume - p.region(0.5).log_volume
    assert_same_up_to_rounding(ratio, torch.full((2,), OUTPUTS * math.log(1.5), dtype=torch.float64))
    assert_same_up_to_rounding(p.bands(0.5)[1] - p.mean, 2 * p.std)
    with pytest.raises(ArgumentError, match=r"at least 4 conformal rows.*found 3\. Pass twice as many rows to joint"):
        p.region(0.8)


def test_volume_and_outline_of_a_known_ellipse() -> None:
    region = Region(0.9, torch.zeros(1, 2), torch.diag(torch.tensor([2.0, 3.0]))[None])
    assert_same_up_to_rounding(region.log_volume, torch.tensor([6 * math.pi]).log())
    assert_same_up_to_rounding(region.outline(points=5)[0, :2], torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    assert region.contains(torch.tensor([[1.9, 0.0]])).tolist() == [True]
    assert region.contains(torch.tensor([[1.9, 2.9]])).tolist() == [False]
    with pytest.raises(DataError, match=r"targets of shape \(1, 2\).*found \(2,\)"):
        region.contains(torch.zeros(2))


def test_correlation_to_first_order_is_that_of_mask_gradients() -> None:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    x = torch.tensor([[1.0, 2.0]])
    hidden = net[0](x)[0].detach()
    phi = hidden * net[1].weight.detach()  # mask gradients of both outputs
    cosine = float(torch.cosine_similarity(phi[0], phi[1], 0))
    data = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    uq = latedrop.calibrate(net, (data, net(data).detach() + data), progress=False)
    joint = uq.joint((data + 1, net(data).detach() - data))
    by_row = joint.predict(x).by_row
    assert_same_up_to_rounding(by_row[0, 0, 1], cosine)
    mixed = Joint(0.5, torch.eye(2), 0.5).correlation(by_row)
    assert_same_up_to_rounding(mixed[0, 0, 1], cosine / 4)


def test_batches_and_a_loaded_file(uq: latedrop.Predictor, joint: latedrop.JointPredictor, tmp_path: Path) -> None:
    x, _ = rows(12, 7)
    whole = joint.predict(x)
    parts = joint.predict(iter([x[:5], x[5:]]))
    assert_same_up_to_rounding(parts.region().root, whole.region().root)
    assert_same_up_to_rounding(whole.cpu().covariance, whole.covariance)
    path = f"{tmp_path}/a.json"
    uq.save(path)
    with pytest.raises(ArgumentError, match="which no file holds"):
        joint.save(path)
    again = latedrop.load(path, uq.model).joint(rows(400, 2))
    assert_same_up_to_rounding(again.predict(x).covariance, whole.covariance)


def test_what_is_refused(uq: latedrop.Predictor, joint: latedrop.JointPredictor) -> None:
    x, y = rows(40, 8)
    single = latedrop.calibrate(mlp(4, 8, 1), (x, y[:, :1]), progress=False)
    logs = latedrop.calibrate(mlp(4, 8, OUTPUTS), (x, y.exp()), target=latedrop.Log(), progress=False)
    region = Region(0.9, torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3))
    for attempt, match in (
        (lambda: single.joint((x, y[:, :1])), r"2 to 64 outputs.*found outputs of shape \(1,\)"),
        (lambda: logs.joint((x, y.exp())), "Log"),
        (lambda: uq.joint((x[:19], y[:19])), "at least 20 rows.*found 19"),
        (lambda: joint.scaled("relaxed"), "found Joint"),
        (lambda: joint.predict(x).scaled("relaxed"), "found Joint"),
        (lambda: joint.to_onnx("joint.onnx", x), "which no file holds"),
        (lambda: joint.joint((x, y)), "found JointPredictor"),
        (lambda: region.outline(0, 0), "two different outputs of 3"),
        (lambda: region.outline(0, 3), "two different outputs of 3"),
    ):
        with pytest.raises((ArgumentError, DataError), match=match):
            attempt()
    with pytest.warns(latedrop.LatedropWarning, match="used for nothing else"):
        uq.joint(rows(200, 1))
