"""Terms against direct computations of the same, and what a term of one's own needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
import networks
from latedrop import calibrate, find_sites
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.network.network import Network
from latedrop.terms import BatchContext, Leverage, Neighbours, Size, Term, VarianceHead
from latedrop.terms.features import Features
from networks import Net
from rounding import assert_same_up_to_rounding


def mlp(outputs: int = 1) -> nn.Module:
    return networks.mlp(3, 12, 8, outputs)


def rows_of(model: nn.Module, x: Any, readout: Any = None, index: Tensor | None = None) -> BatchContext:
    sites = find_sites(model, x)
    return BatchContext(Network.of(model), x, sites, readout, Features.all(sites), index)


def data(rows: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    noise = torch.randn(rows, 1, generator=generator) * (0.05 + x[:, :1].abs())
    return x, mlp()(x).detach() + noise


def _recurrent() -> nn.Module:
    layers = {"first": nn.GRU(3, 6, batch_first=True), "second": nn.GRU(6, 5, batch_first=True)}
    return Net(lambda net, x: net.head(net.second(net.first(x)[0])[1][0]), **layers, head=nn.Linear(5, 1))


def _convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())


class TestFeatures:
    @pytest.mark.parametrize(
        ("make", "shape", "features"),
        [(mlp, (3,), 20), (_convolutional, (1, 8, 8), 8), (_recurrent, (4, 3), 17)],
        ids=["mlp", "convolutions", "recurrent"],
    )
    def test_one_vector_for_every_row(self, make: Callable[[], nn.Module], shape: Any, features: int) -> None:
        torch.manual_seed(1)
        model, x = make().eval(), torch.randn(6, *shape)
        sites = find_sites(model, x)
        where = Features.all(sites)
        vectors, _ = where.of(Network(model), x, sites)
        assert vectors.shape == (6, features)
        assert_same_up_to_rounding(
            torch.cat([where.of(Network(model), x[i : i + 1], sites)[0] for i in range(6)]), vectors
        )

    def test_wide_features_are_projected_and_stay_apart(self) -> None:
        model = nn.Sequential(nn.Linear(3, 1000), nn.ReLU(), nn.Linear(1000, 1)).eval()
        x = torch.randn(40, 3)
        rows = rows_of(model, x).features
        assert rows.shape[1] < 1000
        wide = model[1](model[0](x)).detach()
        ratio = torch.cdist(rows, rows)[0, 1:] / torch.cdist(wide, wide)[0, 1:]
        assert float(ratio.std() / ratio.mean()) < 0.2


class TestOthers:
    def test_size(self) -> None:
        rows = rows_of(mlp(2), torch.randn(5, 3))
        assert_same_up_to_rounding(Size(1).values(rows), rows.mean.abs())
        assert_same_up_to_rounding(Size().values(rows), rows.mean.square())
        with pytest.raises(ArgumentError, match="power of 1 or 2"):
            Size(3)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("term", "expected"),
        [
            (VarianceHead(1), lambda o: o[1]),
            (VarianceHead(1, "std"), lambda o: o[1].square()),
            (VarianceHead(1, "log_variance"), lambda o: o[1].exp()),
            (VarianceHead(lambda o: o[1]), lambda o: o[1]),
            (VarianceHead(0, upper=1, level=0.8), lambda o: ((o[1] - o[0]) / 2.5631031).clamp_min(0).square()),
        ],
        ids=["variance", "std", "log", "function", "quantiles"],
    )
    def test_a_variance_that_the_model_gives(self, term: VarianceHead, expected: Callable[[Any], Tensor]) -> None:
        model, x = _head(), torch.randn(6, 3)
        output = tuple(part.detach() for part in model(x))
        assert_same_up_to_rounding(term.values(rows_of(model, x, readout=0)), expected(output))

    def test_a_given_variance_below_0_is_refused(self) -> None:
        with pytest.raises(OutputError, match="log_variance"):
            VarianceHead(lambda o: -o[1]).values(rows_of(_head(), torch.randn(6, 3), readout=0))

    def test_neighbours_against_all_distances(self) -> None:
        model, x = mlp(), torch.randn(40, 3)
        reference = rows_of(model, x).features
        new = rows_of(model, torch.randn(7, 3))
        spread, center = torch.std_mean(reference, 0)
        far = torch.cdist((new.features - center) / spread, (reference - center) / spread).square()
        term = Neighbours(5).learned_from([reference], own=False)
        assert_same_up_to_rounding(term.values(new), far.sort(1).values[:, :5].mean(1))

    def test_a_row_is_not_its_own_neighbour(self) -> None:
        model, x = mlp(), torch.randn(40, 3)
        own = rows_of(model, x, index=torch.arange(40))
        z = (own.features - own.features.mean(0)) / own.features.std(0)
        far = torch.cdist(z, z).square()
        term = Neighbours(3).learned_from([own.features], own=True)
        assert_same_up_to_rounding(term.values(own), far.sort(1).values[:, 1:4].mean(1))


def _head() -> nn.Module:
    def run(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(net.body(x))
        return net.mean(h), nn.functional.softplus(net.spread(h))

    torch.manual_seed(0)
    return Net(run, body=nn.Linear(3, 8), mean=nn.Linear(8, 1), spread=nn.Linear(8, 1))


class Night(Term):
    name = "night"

    def values(self, rows: BatchContext) -> Tensor:
        return (rows.x[:, 0] > 0).float()


class TestInACalibration:
    def test_a_term_of_ones_own(self, tmp_path: Path) -> None:
        x = torch.randn(400, 3)
        model = mlp()
        y = model(x).detach() + (0.1 + (x[:, :1] > 0)) * torch.randn(400, 1)
        uq = calibrate(model, (x, y), method=latedrop.Terms([Night()]), progress=False)
        assert uq.calibration.terms.shares["night"] > 0.4
        uq.save(tmp_path / "c.json")
        with pytest.raises(FileError, match="expected terms= with"):
            latedrop.load(tmp_path / "c.json", model)
        again = latedrop.load(tmp_path / "c.json", model, terms=[Night()])
        # A file keeps every digit, and the batch is the same.
        assert torch.equal(again.predict(x).std, uq.predict(x).std)

    @pytest.mark.parametrize(
        ("values", "match"),
        [
            (lambda rows: torch.full((rows,), -1.0), "'wrong' to be finite and not below 0"),
            (lambda rows: torch.full((rows,), torch.nan), "'wrong' to be finite and not below 0"),
            (lambda rows: torch.ones(rows, 7), "to give shape"),
        ],
        ids=["negative", "nan", "shape"],
    )
    def test_a_term_that_is_no_variance_is_refused(self, values: Callable[[int], Tensor], match: str) -> None:
        class Wrong(Term):
            name = "wrong"

            def values(self, rows: BatchContext) -> Tensor:
                return values(len(rows.x))

        with pytest.raises(DataError, match=match):
            calibrate(mlp(), data(), method=latedrop.Terms(["dropout", Wrong()]), progress=False)

    def test_a_variance_that_a_function_reads_is_given_again(self, tmp_path: Path) -> None:
        model, x = _head(), torch.randn(80, 3)
        read = VarianceHead(lambda output: output[1].exp())
        uq = calibrate(
            model,
            (x, model(x)[0].detach() + torch.randn(80, 1)),
            readout=0,
            method=latedrop.Terms([read]),
            progress=False,
        )
        uq.save(tmp_path / "c.json")
        with pytest.raises(FileError, match="expected terms= with \\['variance_head'\\]"):
            latedrop.load(tmp_path / "c.json", model)
        with pytest.raises(ArgumentError, match="needs arguments that say what to read"):
            latedrop.load(tmp_path / "c.json", model, terms=["variance_head"])  # type: ignore[list-item]
        again = latedrop.load(tmp_path / "c.json", model, terms=[read])
        # A file keeps every digit, and the batch is the same.
        assert torch.equal(again.predict(x).std, uq.predict(x).std)


class TestBlocks:
    def test_runs_of_rows_are_left_out_together(self) -> None:
        from latedrop.calibration.cross_validation import CrossValidation, standard_error

        fold = CrossValidation.of_runs(25).folds(25)
        assert int((fold.diff() != 0).sum()) == 9  # ten runs
        assert fold.unique().tolist() == list(range(10))
        assert CrossValidation.of_runs(3).folds(3).unique().tolist() == [0, 1, 2]
        walk = torch.randn(500, generator=torch.Generator().manual_seed(0)).cumsum(0)
        assert standard_error(walk, CrossValidation.of_runs(500)) > 3 * standard_error(walk)  # neighbours are alike

    def test_rows_that_come_in_runs_are_not_taken_for_many(self) -> None:
        """Every row thirty times in a row says no more than each once."""
        x, y = data(12)
        often = (x.repeat_interleave(30, 0), y.repeat_interleave(30, 0))
        shuffled, blocks = (
            calibrate(mlp(), often, method=latedrop.Terms(["dropout", "leverage"], folds=kind)).calibration  # type: ignore[arg-type]
            for kind in ("shuffled", "blocks")
        )
        # Shuffled, the same rows are on both sides, and seem to tell much.
        assert shuffled.verdict.gain > 3 * shuffled.verdict.gain_error
        assert shuffled.verdict.gain > 2 * blocks.verdict.gain
        assert not any("each site apart" in candidate.name for candidate in blocks.terms.candidates)


class TestNamedFeatures:
    def test_leverage_looks_at_these_alone(self) -> None:
        x, y = data()
        calibration = calibrate(mlp(), (x, y), method=latedrop.Terms(features=["4"])).calibration
        assert calibration.terms.features == Features(("4",))
        assert calibration.terms.guard.terms == ("leverage", "gradients")
        (leverage,) = (term for term in calibration.terms.terms if isinstance(term, Leverage))
        assert leverage.root.shape == (1, 9, 9)
