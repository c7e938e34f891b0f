"""Of more validation rows than memory should hold some are kept: evenly, whatever the batches, and no others run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from latedrop import Calibration, Predictor, Terms, calibrate
from latedrop.calibration import measure
from latedrop.calibration.collecting import RowSample
from latedrop.terms import BatchContext, Term
from rounding import assert_same_up_to_rounding

Batch = tuple[Tensor, Tensor]


def chosen(batches: list[int], most: int) -> list[int]:
    """The numbers of the rows that are kept after all batches."""
    sample, kept, done = RowSample(most), torch.empty(0, dtype=torch.long), 0
    for rows in batches:
        places = sample.add(rows)
        numbers = torch.arange(done, done + rows)
        kept = torch.cat([kept, numbers if places is None else numbers[places]])
        stay = sample.halved()
        kept = kept if stay is None else kept[stay]
        done += rows
    assert sample.kept == len(kept)
    return kept.tolist()


def test_the_same_rows_are_kept_whatever_the_batches() -> None:
    assert chosen([100] * 100, 1000) == chosen([7] * 1428 + [4], 1000) == chosen([10_000], 1000)


@pytest.mark.parametrize("rows", [10, 999, 1000])
def test_few_rows_are_all_kept(rows: int) -> None:
    assert chosen([rows], 1000) == list(range(rows))


def test_rows_are_kept_evenly() -> None:
    kept = torch.tensor(chosen([1000] * 200, 4000))
    assert 2000 <= len(kept) <= 4000
    by_tenth = torch.bincount(kept // 20_000, minlength=10).double()
    expected = len(kept) / 10
    assert bool(((by_tenth - expected).abs() < 4 * expected**0.5).all())  # standard deviation of a count: its root


def table(rows: int, batch: int) -> Iterator[Batch]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=dice)
    y = x[:, :1] + (0.1 + x[:, 1:2].abs()) * torch.randn(rows, 1, generator=dice)
    return zip(x.split(batch), y.split(batch), strict=True)


class Slope(Term):
    """A term of one's own that looks at features and inputs."""

    name = "slope"
    needs_features = True

    def values(self, rows: BatchContext) -> Tensor:
        assert len(rows.x) == len(rows.features)
        return rows.x[:, 1].abs()


@pytest.mark.filterwarnings("ignore::latedrop.errors.LatedropWarning")
@pytest.mark.parametrize("terms", [None, ["dropout", "leverage", "neighbours", Slope()]])
def test_a_long_table_is_calibrated_with_some_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, terms: list[str | Term] | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
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


def test_rows_with_weights_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_ROWS", 100)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    (x, y), *_ = table(400, 400)
    weights = torch.ones(400)
    same = calibrate(model, (x, y), row_weights=weights, progress=False).calibration
    assert same.rows == calibrate(model, (x, y), progress=False).calibration.rows <= 100  # as without weights
    weights[0] = 2.0
    assert calibrate(model, (x, y), row_weights=weights, progress=False).calibration.rows == 400


def test_many_reference_rows_are_thinned_for_several_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Watched(RowSample):
        def halved(self) -> Tensor | None:
            found = super().halved()
            held.append(self.kept)
            return found

    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    (x, y), *_ = table(300, 300)
    monkeypatch.setattr(measure, "RowSample", lambda most=500: Watched(most and 500))
    reference = [part + 0.01 for part, _ in table(4000, 100)]
    found = calibrate(
        model, (x, y), method=Terms(["leverage", "neighbours"]), reference=iter(reference), progress=False
    )
    assert found.calibration.terms is not None
    assert found.calibration.terms.reference_rows == 4000
    assert max(held) <= 500
