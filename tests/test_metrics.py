"""Each metric against an independent reference, then the options and the errors all of them share."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import uncertainty_toolbox as uct
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics as sklearn_metrics
from sklearn.metrics import roc_auc_score

from latedrop import metrics
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics import classes
from rounding import assert_same_doubles, assert_same_up_to_rounding, rounding

METRICS = {
    "rmse": metrics.rmse,
    "mae": metrics.mae,
    "nll": metrics.nll,
    "ideal_nll": metrics.ideal_nll,
    "miscalibration_area": metrics.miscalibration_area,
    "coverage": metrics.coverage,
    "interval_width": metrics.interval_width,
    "crps": metrics.crps,
    "rank_correlation": metrics.rank_correlation,
}
NO_VARIANCE = {"rmse", "mae", "ideal_nll"}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
variance_metric = pytest.mark.parametrize("metric", [METRICS[name] for name in METRICS if name not in NO_VARIANCE])


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, variance and target `(200,)`; the variance is too small, the mean off by 0.3."""
    return make_data((200,))


def make_data(shape, seed=0):
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=shape)
    std = rng.uniform(0.2, 2.0, size=shape)
    return mean, std**2, mean + 0.3 + 1.5 * std * rng.normal(size=shape)


def with_ties(data, ties):
    """The data, with variances of which many are equal."""
    mean, variance, target = data
    return mean, np.round(variance) + 1 if ties else variance, target


def close(value, expected):
    assert_same_doubles(np.asarray(value), expected)


def test_every_public_metric_is_in_the_table():
    public = set(metrics.__all__) - {"align_target", "auroc", "classes"}
    assert public == set(METRICS) | {"calibration_curve"}


def test_rmse_and_mae(data):
    mean, variance, target = data
    close(metrics.rmse(mean, None, target), np.sqrt(np.mean((mean - target) ** 2)))
    close(metrics.mae(mean, None, target), np.mean(np.abs(mean - target)))
    close(metrics.rmse(mean, variance, target), metrics.rmse(mean, "ignored", target))


def test_nll_is_scipys(data):
    mean, variance, target = data
    expected = -stats.norm.logpdf(target, mean, np.sqrt(variance)).mean()
    close(metrics.nll(mean, variance, target), expected)
    close(metrics.nll(mean, variance, target, constant=False), expected - math.log(2 * math.pi) / 2)
    close(metrics.nll(mean, variance, target), uct.metrics.nll_gaussian(mean, np.sqrt(variance), target))


def test_ideal_nll_is_the_nll_of_the_squared_errors(data):
    mean, variance, target = data
    squared = (target - mean) ** 2
    for constant in (True, False):
        ideal = metrics.ideal_nll(mean, None, target, constant=constant)
        close(ideal, metrics.nll(mean, squared, target, constant=constant))
        assert ideal < metrics.nll(mean, variance, target, constant=constant)


def test_ideal_nll_leaves_errors_of_zero_out():
    value = metrics.ideal_nll([0.0, 1.0, 0.0, 0.0], None, [0.0, 1.0, 0.1, 2.0], constant=False)
    assert value == pytest.approx(0.5 + np.log([0.1, 2.0]).mean(), rel=rounding(terms=1))
    with pytest.raises(DataError, match="every error 0"):
        metrics.ideal_nll([1.0, 2.0], None, [1.0, 2.0])


def test_calibration_curve_is_that_of_uncertainty_toolbox(data):
    mean, variance, target = data
    proportions = uct.metrics_calibration.get_proportion_lists_vectorized
    expected, observed = proportions(mean, np.sqrt(variance), target, num_bins=101)
    levels, ours = metrics.calibration_curve(mean, variance, target)
    close(levels, expected[1:-1])
    close(ours, observed[1:-1])


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor])
def test_levels_may_be_given_in_any_order(data, container):
    levels, observed = metrics.calibration_curve(*data, levels=container([0.9, 0.5]))
    assert levels.tolist() == pytest.approx([0.9, 0.5], rel=rounding(terms=1))
    close(observed, [metrics.coverage(*data, level=0.9), metrics.coverage(*data, level=0.5)])
    assert metrics.coverage([0.0, 0.0], [0.0, 0.0], [0.0, 1.0]) == 0.5  # no width holds an error of 0 alone


def test_the_area_is_a_mean_beside_the_bisector(data):
    mean, variance, target = data
    # Theirs averages over 101 levels, 0 and 1 among them, where both curves agree by definition.
    expected = uct.mean_absolute_calibration_error(mean, np.sqrt(variance), target, num_bins=101)
    close(metrics.miscalibration_area(mean, variance, target), expected * 101 / 99)


def test_interval_width_is_its_definition(data):
    mean, variance, target = data
    low, high = stats.norm.interval(0.7, mean, np.sqrt(variance))
    close(metrics.interval_width(mean, variance, target, level=0.7), np.mean(high - low))


def test_crps_is_its_integral_and_that_of_uncertainty_toolbox(data):
    for mean, variance, target in [(0.0, 1.0, 0.3), (1.0, 4.0, -2.0), (-1.0, 0.01, 0.5)]:
        cdf = stats.norm(mean, math.sqrt(variance)).cdf
        below, _ = integrate.quad(lambda t, cdf=cdf: cdf(t) ** 2, -40, target, points=[mean], limit=200)
        above, _ = integrate.quad(lambda t, cdf=cdf: (1 - cdf(t)) ** 2, target, 40, points=[mean], limit=200)
        assert metrics.crps(mean, variance, target) == pytest.approx(below + above, rel=rounding(terms=1))
    mean, variance, target = data
    close(metrics.crps(mean, variance, target), uct.crps_gaussian(mean, np.sqrt(variance), target))


def test_crps_of_a_point_forecast_is_the_absolute_error():
    mean, variance = torch.zeros(2, requires_grad=True), torch.tensor([0.0, 1e-20], requires_grad=True)
    value = metrics.crps(mean, variance, [3.0, -4.0])
    assert value.item() == 3.5
    value.backward()
    assert mean.grad.tolist() == [-0.5, 0.5]
    assert variance.grad.isfinite().all()


@every_metric
@pytest.mark.parametrize("shape", [(30, 3), (15, 3, 2, 2)])
def test_per_output_is_each_output_by_itself(metric, shape):
    mean, variance, target = make_data(shape)
    together = metric(mean, variance, target, per_output=True)
    apart = [metric(mean[:, k], variance[:, k], target[:, k]) for k in range(3)]
    assert together.shape == (3,)
    close(together, apart)
    column = mean[:, 0].ravel(), variance[:, 0].ravel(), target[:, 0].ravel()
    assert metric(*column, per_output=True).shape == (1,)
    close(metric(column[0][:, None], column[1][:, None], column[2]), metric(*column))  # a flat target


@every_metric
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(metric, data, dtype):
    mean, variance, target = (torch.tensor(array).to(dtype) for array in data)
    apart = mean != target  # rounding makes a few equal, of which ideal_nll warns
    low = mean[apart], variance[apart], target[apart]
    value = metric(*low)
    assert value.dtype == torch.float32
    assert torch.equal(value, metric(*(tensor.float() for tensor in low)))
    assert metric(*(array.astype("f4") for array in data[:2]), data[2]).dtype == torch.float64


def test_read_only_and_reversed_arrays(data):
    mean, variance, target = data
    mean = mean.copy()
    mean.flags.writeable = False
    close(metrics.rmse(mean, variance, target[::-1]), metrics.rmse(mean, variance, target[::-1].copy()))


@pytest.mark.parametrize("name", ["nll", "crps", "rmse", "interval_width", "mae"])
@pytest.mark.parametrize("per_output", [False, True])
def test_gradients(name, per_output):
    mean, variance, target = (torch.tensor(array) for array in make_data((6, 2)))
    inputs = (mean.requires_grad_(), variance.requires_grad_())
    score = partial(METRICS[name], target=target, per_output=per_output)
    # What a metric does not depend on gets no gradient; gradcheck wants it left out.
    if name in ("rmse", "mae"):
        assert torch.autograd.gradcheck(lambda mean: score(mean, None), inputs[:1])
    elif name == "interval_width":
        assert torch.autograd.gradcheck(lambda variance: score(mean.detach(), variance), inputs[1:])
    else:
        assert torch.autograd.gradcheck(score, inputs)


floats = st.floats(0.01, 100)


@given(st.lists(st.tuples(floats, floats), min_size=2, max_size=20))
@settings(max_examples=50, deadline=None)
def test_bounds_that_hold_for_any_data(pairs):
    variance, target = np.array(pairs).T
    mean = np.zeros_like(target)
    assert metrics.ideal_nll(mean, None, target) <= metrics.nll(mean, variance, target) + 1e-9
    mae, area = metrics.mae(mean, None, target), metrics.miscalibration_area(mean, variance, target)
    assert 0 < metrics.crps(mean, variance, target) <= mae + np.sqrt(variance).mean()
    assert area <= 0.5
    assert mae <= metrics.rmse(mean, None, target) + 1e-9


@given(st.lists(st.tuples(floats, floats), min_size=3, max_size=20), st.randoms())
@settings(max_examples=30, deadline=None)
def test_the_order_of_entries_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    for metric in METRICS.values():
        values = []
        for rows in (pairs, shuffled):
            variance, target = np.array(rows).T
            values.append(metric(np.zeros_like(target), variance, target).item())
        assert values[0] == pytest.approx(values[1], rel=rounding(torch.float64), abs=rounding(torch.float64))


def test_align_target():
    target = torch.arange(3.0)
    assert metrics.align_target(torch.zeros(3, 1), target).shape == (3, 1)
    assert metrics.align_target(torch.zeros(3), target) is target
    assert metrics.align_target(np.zeros((3, 2)), np.zeros((3, 2), dtype=int)).dtype == torch.int64


@pytest.mark.parametrize(
    ("mean", "target"),
    [((3, 2), (3,)), ((3,), (3, 1)), ((3, 2), (3, 1)), ((3, 1), (3, 1, 1)), ((3,), ()), ((3, 1), (1,))],
)
def test_shapes_that_would_broadcast_are_refused(mean, target):
    pattern = f"target of the mean's shape {mean}, found {target}; nothing is broadcast: reshape"
    pattern = pattern.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(DataError, match=pattern):
        metrics.align_target(torch.zeros(mean), torch.zeros(target))
    with pytest.raises(DataError, match=pattern):
        metrics.nll(torch.zeros(mean), torch.ones(mean), torch.zeros(target))


@every_metric
@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(metric, hole):
    arrays = [torch.zeros(5, 2), torch.ones(5, 2), torch.ones(5, 2)]
    for place, name in [(0, "mean"), (2, "target")]:
        holed = [array.clone() for array in arrays]
        holed[place][3:, 1] = hole
        with pytest.raises(DataError, match=rf"{name} is NaN or infinite in 2 of 10 entries, .* \(3, 1\); remove"):
            metric(*holed)


@variance_metric
def test_bad_variances_are_refused(metric):
    mean, target = torch.zeros(3), torch.ones(3)
    with pytest.raises(DataError, match=r"variance is NaN or infinite in 1 of 3 entries, .* index \(1,\)"):
        metric(mean, torch.tensor([1.0, math.nan, 1.0]), target)
    with pytest.raises(DataError, match=r"variance is below 0 in 2 of 3 entries, .* index \(0,\); pass"):
        metric(mean, torch.tensor([-1.0, -2.0, 1.0]), target)
    with pytest.raises(DataError, match=r"variance of the mean's shape \(3,\), found \(\)"):
        metric(mean, 1.0, target)
    if metric is METRICS["nll"]:
        with pytest.raises(DataError, match=r"variance is 0.* in 2 of 3 entries, .* add a floor"):
            metric(mean, torch.tensor([1.0, 0.0, 0.0]), target)


@every_metric
def test_nothing_to_score_is_refused(metric):
    with pytest.raises(DataError, match=r"at least one entry, found shape \(0, 2\)"):
        metric(torch.zeros(0, 2), torch.ones(0, 2), torch.zeros(0, 2))


def test_other_arguments_are_refused():
    with pytest.raises(DataError, match="mean as a tensor, array or number, found str"):
        metrics.rmse("two", None, 1.0)
    with pytest.raises(DataError, match="target to be real"):
        metrics.rmse(torch.zeros(2), None, torch.zeros(2, dtype=torch.complex64))
    for metric in (metrics.coverage, metrics.interval_width):
        with pytest.raises(ArgumentError, match=r"probability inside \(0, 1\); found 90"):
            metric([0.0], [1.0], [1.0], level=90)


@pytest.mark.parametrize("metric", [metrics.calibration_curve, metrics.miscalibration_area])
@pytest.mark.parametrize("levels", [0, -3, 0.9, [], [0.5, 1.0], [0.0], [math.nan], [[0.5]], "many"])
def test_bad_grids_of_levels_are_refused(metric, levels):
    with pytest.raises(ArgumentError, match=r"positive int, or as numbers inside \(0, 1\), found"):
        metric([0.0], [1.0], [1.0], levels=levels)


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_scipys(data, ties):
    mean, variance, target = with_ties(data, ties)
    expected = stats.spearmanr(variance, np.abs(target - mean)).statistic
    assert_same_doubles(float(metrics.rank_correlation(mean, variance, target)), expected)


def test_a_constant_ranks_nothing(data):
    mean, variance, target = data
    assert float(metrics.rank_correlation(mean, np.ones_like(variance), target)) == 0


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_is_scikit_learns(data, ties):
    mean, variance, target = with_ties(data, ties)
    strange = np.abs(target - mean) > 1
    # The result is a float32.
    assert_same_up_to_rounding(float(metrics.auroc(variance, strange)), roc_auc_score(strange, variance), terms=1)


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(DataError, match="entries of both kinds; found 2 positive and 0 others"):
        metrics.auroc([0.1, 0.2], [True, True])
    with pytest.raises(DataError, match="one bool for each of 2 scores"):
        metrics.auroc([0.1, 0.2], [0, 1])
    with pytest.raises(DataError, match="finite scores"):
        metrics.auroc([0.1, float("nan")], [False, True])


def class_case(n: int = 400, k: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(n, k, generator=generator, dtype=torch.float64), 1)
    return p, torch.multinomial(p, 1, generator=generator)[:, 0]


@pytest.mark.parametrize("k", [2, 5])
def test_likelihood_accuracy_and_brier(k: int) -> None:
    p, y = class_case(k=k)
    assert_same_doubles(float(classes.cross_entropy(p, y)), sklearn_metrics.log_loss(y, p))
    assert float(classes.accuracy(p, y)) == pytest.approx(sklearn_metrics.accuracy_score(y, p.argmax(1)))
    if k == 2:
        expected = 2 * sklearn_metrics.brier_score_loss(y, p[:, 1])  # of one class: half of the sum over both
        assert float(classes.brier(p, y)) == pytest.approx(expected)


def test_calibration_error() -> None:
    torchmetrics = pytest.importorskip("torchmetrics.functional.classification")
    p, y = class_case()
    expected = torchmetrics.multiclass_calibration_error(p, y, num_classes=5, n_bins=15, norm="l1")
    assert float(classes.ece(p, y)) == pytest.approx(float(expected), rel=rounding(terms=1))


def test_bins_of_equal_mass_by_hand() -> None:
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 0])
    # two bins of two rows: confidences .65 and .85, accuracies 1 and .5
    assert float(classes.ece(p, y, bins=2, mass=True)) == pytest.approx((0.35 + 0.35) / 2)
    confidence, share, count = classes.reliability(p, y, bins=2, mass=True)
    assert confidence.tolist() == pytest.approx([0.65, 0.85])
    assert share.tolist() == [1.0, 0.5]
    assert count.tolist() == [2.0, 2.0]


def test_area_under_risk_coverage_is_the_mean_risk() -> None:
    p, y = class_case()
    doubt, wrong = 1 - p.amax(1), (p.argmax(1) != y).double()
    order = np.argsort(doubt.numpy())
    expected = np.mean(np.cumsum(wrong.numpy()[order]) / np.arange(1, len(order) + 1))
    assert float(classes.selective_risk(doubt, wrong)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        ([[0.5, 0.6]], [0], "sum to 1"),
        ([[0.5, 0.5]], [2], "whole numbers from 0 to 1"),
        ([[0.5, 0.5]], [0.0], "whole numbers"),
        ([0.5, 0.5], [0, 1], r"probabilities \(N, K\)"),
        ([[2.0, -1.0]], [0], "sum to 1"),
    ],
)
def test_bad_probabilities_are_refused(p: list, y: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        classes.accuracy(p, y)
