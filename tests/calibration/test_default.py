"""The default of `calibrate`: terms, guard, verdict and what is kept; errors of networks that left rows out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
import networks
from latedrop import calibrate, metrics
from latedrop.calibration.cross_validation import CrossValidation, crossed
from latedrop.calibration.verdict import judged
from latedrop.errors import ArgumentError, DataError
from latedrop.evaluation.evaluation import compare, verdict
from networks import Net, mlp
from rounding import assert_same_up_to_rounding, rounding


def network(outputs: int = 1, width: int = 30, seed: int = 0) -> nn.Module:
    return mlp(3, width, width, outputs, act=nn.ReLU, seed=seed).eval()


def noisy(model: nn.Module, rows: int, seed: int = 0, *, size: Any = 0.3) -> tuple[Tensor, Tensor]:
    """Rows whose error grows with the first-order variance, so that there is something to find."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    linear = latedrop.linearize(model, x)
    std = linear.variance(0.5).sqrt()
    return x, linear.mean + size * std * torch.randn(std.shape, generator=generator)


def default(model: nn.Module, data: Any, **options: Any) -> latedrop.Predictor:
    return calibrate(model, data, progress=False, **options)


class TestDefault:
    @pytest.mark.parametrize("seed", range(5))
    def test_ten_rows_do_not_end_worse_than_a_constant(self, seed: int) -> None:
        model = network()
        x, y = noisy(model, 10, seed)
        uq = default(model, (x, y))
        new, target = noisy(model, 1000, seed + 100)
        assert verdict(uq.predict(new), target).gain > -0.02

    def test_data_that_cannot_be_fitted_are_refused_in_words(self) -> None:
        model = network(2)
        x, y = noisy(model, 20)
        y[:, 1] = model(x).detach()[:, 1]
        with pytest.raises(DataError, match="equal to its target, perhaps of one output alone"):
            default(model, (x, y))
        maps = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1)).eval()
        with pytest.raises(DataError, match="expected outputs of one shape in all batches"):
            default(maps, [(torch.randn(9, 1, size, size), torch.randn(9, 1, size, size)) for size in (4, 6)])

    def test_reference_rows_may_come_in_batches_with_targets(self) -> None:
        model = network()
        x, y = noisy(model, 100)
        reference = torch.randn(90, 3) + 0.1
        whole = default(model, (x, y), reference=reference).predict(x).variance
        loader = [(part, torch.zeros(len(part), 1)) for part in reference.split(40)]
        assert_same_up_to_rounding(default(model, (x, y), reference=loader).predict(x).variance, whole)
        assert_same_up_to_rounding(default(model, (x, y), reference=reference.numpy()).predict(x).variance, whole)
        pair = (reference, torch.zeros(90, 1))
        assert_same_up_to_rounding(default(model, (x, y), reference=pair).predict(x).variance, whole)
        with pytest.raises(DataError, match="expected reference rows"):
            default(model, (x, y), reference=3)

    @pytest.mark.parametrize(
        "reference",
        [torch.randn(20, 4), torch.randn(20, 3).bfloat16(), list(torch.randn(20, 3)), torch.randn(20)],
        ids=["columns", "dtype", "rows in a list", "one axis"],
    )
    def test_reference_rows_that_the_model_does_not_take(self, reference: Any) -> None:
        model = network()
        with pytest.raises(DataError, match="expected reference rows that the model takes; it raised"):
            default(model, noisy(model, 100), reference=reference)


def _bag(net: Net, x: Tensor, there: Tensor) -> Tensor:
    """Take the mean over the elements of a set, which are padded to the largest of a batch."""
    hidden = net.second(net.first(x).tanh()).tanh() * there[..., None]
    return net.head(hidden.sum(1) / there.sum(1, keepdim=True))


def _padded(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    there = [torch.ones(len(item)) for item in items]
    pad = nn.utils.rnn.pad_sequence
    return pad(items, batch_first=True), pad(there, batch_first=True)


class TestBatches:
    """A prediction does not depend on the rest of its batch, nor do the features that it is made of."""

    def test_padded_items(self) -> None:
        model = Net(_bag, first=nn.Linear(3, 16), second=nn.Linear(16, 16), head=nn.Linear(16, 1))
        items = [torch.randn(6 - i % 6, 3) for i in range(60)]
        y = model(*_padded(items)).detach() + 0.3 * torch.randn(60, 1)
        usual = [item + 0.1 for item in items]
        uq = default(
            model,
            (items, y),
            batches=latedrop.Batches(collate=_padded),
            method=latedrop.Terms(["leverage"]),
            reference=usual,
        )
        assert uq.calibration.terms.reference_rows == 60
        assert uq.calibration.terms.features.sites == ("head",)
        together = uq.predict(items)
        alone = torch.cat([uq.predict([item]).novelty for item in items])  # type: ignore[misc]
        assert_same_up_to_rounding(alone, together.novelty)
        batches = default(
            model,
            (items, y),
            batches=latedrop.Batches(collate=_padded),
            method=latedrop.Terms(["leverage"]),
            reference=iter([(usual, y)]),
        )
        assert_same_up_to_rounding(batches.predict(items).novelty, together.novelty)


class TestGuard:
    def test_strange_rows_get_wide_intervals(self) -> None:
        model = network()
        x, y = noisy(model, 200)
        far = 100 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        guarded, bare = (default(model, (x, y), method=latedrop.Terms([], guard=g)).predict(far) for g in (True, False))
        assert bool((guarded.novelty > 1).all())
        assert bool((guarded.raw_variance > bare.raw_variance).all())
        assert_same_up_to_rounding(guarded.novelty, bare.novelty)  # it is told either way


class TestVerdict:
    def test_the_gain_is_the_difference_of_two_likelihoods(self) -> None:
        error, variance = torch.randn(50, 2).double(), torch.rand(50, 2).double() + 0.1
        constant = torch.tensor([0.5, 2.0]).double()
        measured = judged(error, variance, constant, fitted="other rows")
        zero = torch.zeros_like(error)
        expected = metrics.nll(zero, constant.expand(50, 2), error) - metrics.nll(zero, variance, error)
        assert measured.gain == pytest.approx(float(expected))
        per_output = metrics.rank_correlation(zero, variance, error, per_output=True).mean()
        assert measured.correlation == pytest.approx(float(per_output))

    def test_rows_are_left_out_of_their_own_fits(self) -> None:
        error = torch.randn(25, 1)
        seen: list[tuple[set[int], set[int]]] = []

        def fit(rest: Tensor) -> Any:
            def variance(left_out: Tensor) -> Tensor:
                seen.append((set(rest.tolist()), set(left_out.tolist())))
                return torch.ones(len(left_out), 1)

            return variance

        crossed(error, fit, per_output=True, left=CrossValidation())
        assert all(not (rest & left_out) for rest, left_out in seen)
        assert set().union(*(left_out for _, left_out in seen)) == set(range(25))
        assert sorted(CrossValidation().folds(25).bincount().tolist()) == [2] * 5 + [3] * 5

    @pytest.mark.parametrize("method", ["sample", "linear", "propagate"])
    def test_every_method_is_compared_with_a_constant(self, method: str) -> None:
        model = network()
        x, y = noisy(model, 60)
        chosen = latedrop.Sampling([0.1], draws=20) if method == "sample" else method
        uq = default(model, (x, y), method=chosen)
        assert uq.calibration.verdict is not None
        other, truth = noisy(model, 60, seed=1)
        rows = {row.label: row for row in compare(uq.predict(other), truth)}
        assert rows["constant"].correlation == 0
        mean = uq.predict(x).mean
        assert uq.calibration.constant[0] == pytest.approx(float((y - mean).square().mean()), rel=rounding())


def test_a_verdict_on_another_scale_says_so() -> None:
    net = mlp(2, 16, 1, act=nn.ReLU)
    x, y = networks.noisy(net, 120, inputs=2)
    uq = latedrop.calibrate(net, (x[:80], y[:80]), progress=False)
    assert uq.calibration.verdict_of_other == ""
    relaxed = uq.scaled("relaxed").calibration
    assert "predictions use another scale" in relaxed.verdict_of_other
    assert relaxed.verdict_of_other in str(relaxed)
    assert "predictions use conformal intervals" in uq.conformal((x[80:], y[80:])).calibration.verdict_of_other


X = torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, :1].sin() + 0.1 * torch.randn(90, 1, generator=torch.Generator().manual_seed(1))
FOLDS = torch.arange(90).chunk(3)


def fold(seed: int, rows: Tensor) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    return mlp(2, 12, 1, seed=seed), (X[rows], Y[rows]), X[torch.isin(torch.arange(90), rows, invert=True)]


def test_errors_are_those_of_the_networks_that_left_the_rows_out() -> None:
    folds = [fold(seed, rows) for seed, rows in enumerate(FOLDS)]
    model = mlp(2, 12, 1, seed=9)
    uq = latedrop.calibrate_cross_fitted(model, (X, Y), folds, reference=X, progress=False)
    with torch.no_grad():
        errors = torch.cat([net(x) - y for net, (x, y), _ in folds])
        assert torch.equal(uq.predict(X).mean, model(X))
    assert uq.calibration.rows == 90
    assert uq.calibration.table[0].rmse == pytest.approx(float(errors.square().mean().sqrt()), rel=rounding())
    assert uq.calibration.fingerprint == latedrop.fingerprint(model)


def test_folds_of_the_model_itself_are_a_plain_calibration() -> None:
    model = mlp(2, 12, 1, seed=9)
    others = torch.randn(120, 2, generator=torch.Generator().manual_seed(2))
    folds = [(model, (X[rows], Y[rows]), others) for rows in FOLDS]
    fitted = latedrop.calibrate_cross_fitted(model, (X, Y), folds, reference=others, progress=False)
    method = latedrop.Terms(["dropout", "leverage", "gradients"])  # a forest would have seen the errors
    plain: latedrop.Predictor = latedrop.calibrate(model, (X, Y), reference=others, method=method, progress=False)
    torch.testing.assert_close(fitted.predict(X).variance, plain.predict(X).variance, rtol=rounding(), atol=0)


def test_wrong_folds_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"at least one fold; found none\. Call calibrate\(\)"):
        latedrop.calibrate_cross_fitted(mlp(2, 12, 1), (X, Y), [])
    with pytest.raises(ArgumentError, match=r"expected method=Terms\(\.\.\.\) for folds; found 'sample'"):
        latedrop.calibrate_cross_fitted(mlp(2, 12, 1), (X, Y), [fold(0, FOLDS[0])], method=latedrop.Sampling())  # type: ignore[arg-type]
    forest = latedrop.Terms(["dropout", "forest"])
    with pytest.raises(ArgumentError, match=r"expected terms that learn nothing from errors for folds"):
        latedrop.calibrate_cross_fitted(mlp(2, 12, 1), (X, Y), [fold(0, FOLDS[0])], method=forest)
