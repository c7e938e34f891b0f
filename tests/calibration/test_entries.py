"""Entries of large outputs: bounded, the same positions in every column and row, and a fit like that of all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import latedrop
from latedrop.calibration import collecting as module
from latedrop.calibration.collecting import Entries
from latedrop.errors import DataError


def _filled(
    shape: tuple[int, ...], axis: int, most: int | None, batches: int = 5
) -> tuple[Entries, list[torch.Tensor]]:
    kept = Entries(shape, axis, most)
    given = [torch.randn(3, *shape, generator=torch.Generator().manual_seed(i)) for i in range(batches)]
    for part in given:
        kept.add({"a": part, "b": 2 * part})
    return kept, given


@pytest.mark.parametrize(("shape", "axis"), [((40, 50), 1), ((2, 40, 50), 2), ((1, 2000), 1), ((3, 7, 11, 13), 2)])
def test_columns_keep_the_same_entries_of_every_row(shape: tuple[int, ...], axis: int) -> None:
    kept, given = _filled(shape, axis, most=6000)
    a = kept["a"]
    assert torch.equal(kept["b"], 2 * a)
    assert a.numel() <= 6000 < torch.cat(given).numel()
    assert a.shape[:axis] == torch.cat(given).shape[:axis]
    assert torch.equal(a, kept.of(torch.cat(given)))
    flat = torch.cat(given).flatten(axis)
    places = [
        int((flat[0].reshape(-1, flat.shape[-1])[0] == value).nonzero()) for value in a[0].reshape(-1, a.shape[-1])[0]
    ]
    assert torch.equal(flat[..., places], a)
    assert len(set(places)) == len(places)


def test_what_fits_is_kept_as_it_is() -> None:
    kept, given = _filled((4, 5), 1, most=300)
    assert torch.equal(kept["a"], torch.cat(given))


def test_numbers_are_never_dropped_and_rows_stay() -> None:
    kept, given = _filled((), 1, most=2)
    assert torch.equal(kept["a"], torch.cat(given))
    kept, given = _filled((30,), 1, most=2)
    assert kept["a"].shape == (15, 1)


def test_columns_collected_later_keep_the_same_entries() -> None:
    kept, given = _filled((40, 50), 1, most=6000)
    later = kept.like()
    for part in given:
        later.add({"c": part})
    assert torch.equal(later["c"], kept["a"])


def test_another_shape_is_refused() -> None:
    kept, _ = _filled((40, 50), 1, most=6000)
    with pytest.raises(DataError, match=r"outputs of one shape in all batches; found \[\(40, 50\), \(50, 40\)\]"):
        kept.add({"a": torch.zeros(2, 50, 40), "b": torch.zeros(2, 50, 40)})


def _map_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))


def test_a_map_is_fitted_from_some_of_its_pixels_as_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _map_model()
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(48, 1, 24, 24, generator=generator)
    y = model(x).detach()
    y = y + (0.1 + x) * 0.3 * torch.randn(y.shape, generator=generator)
    whole = latedrop.calibrate(model, (x, y), progress=False, batches=latedrop.Batches(8))
    monkeypatch.setattr(module.Entries.__init__, "__defaults__", (5000,))
    some = latedrop.calibrate(model, (x, y), progress=False, batches=latedrop.Batches(8))
    assert some.calibration.output_shape == whole.calibration.output_shape == (2, 24, 24)
    assert some.calibration.per_output
    assert len(some.calibration.scales) == 2
    a, b = (uq.predict(x).variance for uq in (some, whole))
    assert a.shape == b.shape == y.shape
    # The mean variance is that of the squared errors, whose standard error the 5000 that were kept determine.
    e2 = (y - model(x).detach()).square()[:, 0]
    expected = float(e2.std() / e2.mean()) / 2500**0.5
    assert float((a.mean((0, 2, 3)) / b.mean((0, 2, 3))).log().abs().max()) < 4 * expected
