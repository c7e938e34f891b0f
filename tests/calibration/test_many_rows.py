"""Data larger than memory should hold: some rows are kept, evenly, and some positions of large outputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import latedrop
from latedrop import Batches, Calibration, Predictor, Terms, calibrate
from latedrop.calibration import measure
from latedrop.terms import BatchContext, Term
from networks import mlp
from rounding import assert_same_up_to_rounding


def table(rows: int, batch: int) -> DataLoader[tuple[Tensor, ...]]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=dice)
    y = x[:, :1] + (0.1 + x[:, 1:2].abs()) * torch.randn(rows, 1, generator=dice)
    return DataLoader(TensorDataset(x, y), batch)


network = partial(mlp, 3, 16, 1, act=nn.ReLU)


class Slope(Term):
    """A term of one's own that looks at features and inputs."""

    name = "slope"
    needs_features = True

    def values(self, rows: BatchContext) -> Tensor:
        assert len(rows.x) == len(rows.features)
        return rows.x[:, 1].abs()


@pytest.mark.filterwarnings("ignore::latedrop.errors.LatedropWarning")
@pytest.mark.parametrize("terms", [None, ["dropout", "leverage", "neighbours", Slope()]])
def test_a_long_table_is_calibrated_with_some_rows(monkeypatch: pytest.MonkeyPatch, terms: list[Any] | None) -> None:
    model = network()
    every = calibrate(model, table(6000, 250), method=Terms(terms), progress=False).calibration
    monkeypatch.setattr(measure, "MOST_ROWS", 2000)
    few = calibrate(model, table(6000, 250), method=Terms(terms), progress=False).calibration
    again = calibrate(model, table(6000, 500), method=Terms(terms), progress=False).calibration
    assert every.rows == 6000
    assert 1000 <= few.rows <= 2000
    assert few.rows == again.rows
    x = torch.cat([x for x, _ in table(500, 100)])
    both = [std(model, record, x) for record in (every, few)]
    assert 0.8 < float((both[1] / both[0]).median()) < 1.25  # of 1000 rows a variance is known to 4 %
    assert_same_up_to_rounding(std(model, again, x), both[1])


def std(model: nn.Module, record: Calibration, x: Tensor) -> Tensor:
    return Predictor(model, record).predict(x).std


def test_rows_with_weights_and_rows_of_unknown_number_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_ROWS", 100)
    model, ((x, y), *_) = network(), table(400, 400)
    weights = torch.ones(400)
    same = calibrate(model, (x, y), row_weights=weights, progress=False).calibration
    assert same.rows == calibrate(model, (x, y), progress=False).calibration.rows <= 140  # as without weights
    weights[0] = 2.0
    assert calibrate(model, (x, y), row_weights=weights, progress=False).calibration.rows == 400
    assert calibrate(model, iter(table(400, 50)), progress=False).calibration.rows == 400


@pytest.mark.parametrize("loader", [True, False])
def test_of_many_reference_rows_some_are_run(monkeypatch: pytest.MonkeyPatch, loader: bool) -> None:
    monkeypatch.setattr(measure, "_MOST_NUMBERS", 0)  # then 1000 rows
    model, ((x, y), *_) = network(), table(300, 300)
    reference = torch.randn(6000, 3, generator=torch.Generator().manual_seed(3))
    shown: list[int] = []

    class Counting(latedrop.terms.Leverage):
        def learned_from(self, reference: Iterator[Tensor], own: bool) -> latedrop.terms.Leverage:
            parts = list(reference)
            shown.append(sum(map(len, parts)))
            return super().learned_from(parts, own)

    given = DataLoader(TensorDataset(reference), 100) if loader else reference
    uq = calibrate(model, (x, y), method=Terms([Counting()]), reference=given, progress=False)
    assert uq.calibration.terms.reference_rows == 6000
    assert 500 <= shown[0] <= 1000


def test_a_map_is_fitted_from_some_of_its_pixels_as_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    x = torch.rand(48, 1, 24, 24)
    y = model(x).detach()
    y = y + (0.1 + x) * 0.3 * torch.randn(y.shape)
    whole = calibrate(model, (x, y), progress=False, batches=Batches(8))
    monkeypatch.setattr(measure, "MOST_ENTRIES", 5000)
    some = calibrate(model, (x, y), progress=False, batches=Batches(8))
    assert some.calibration.output_shape == whole.calibration.output_shape == (2, 24, 24)
    assert some.calibration.per_output
    assert some.cross_validated.mean.numel() <= 5000 < whole.cross_validated.mean.numel()
    a, b = (uq.predict(x).variance for uq in (some, whole))
    assert a.shape == b.shape == y.shape
    # The mean variance is that of the squared errors, whose standard error the 5000 that were kept determine.
    e2 = (y - model(x).detach()).square()[:, 0]
    expected = float(e2.std() / e2.mean()) / 2500**0.5
    assert float((a.mean((0, 2, 3)) / b.mean((0, 2, 3))).log().abs().max()) < 4 * expected


def test_about_as_many_rows_are_chosen_as_expected() -> None:
    choice = measure._RowChoice(1_000_000, measure.MOST_ROWS)
    assert choice.expected == 1_000_000 // 32
    chosen = sum(len(choice.next(100_000)) for _ in range(10))
    assert chosen == pytest.approx(choice.expected, abs=5 * choice.expected**0.5)
