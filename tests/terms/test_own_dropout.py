"""Embedded dropout: the model's own layers, switched on; and noise of each input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import latedrop
from latedrop import calibrate, find_sites
from latedrop.errors import SiteError
from latedrop.network.find_sites import own_dropouts
from latedrop.terms import BatchContext, InputNoise, OwnDropout
from rounding import assert_same_up_to_rounding


def trained_with_dropout() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 40), nn.Linear(40, 30)
    return nn.Sequential(
        nn.Dropout(0.05), first, nn.ReLU(), nn.Dropout(0.2), second, nn.ReLU(), nn.Linear(30, 1)
    ).eval()


def rows_of(model: nn.Module, x: Tensor) -> BatchContext:
    return BatchContext(model, x, find_sites(model, x), None, None)


def test_they_are_found_with_their_rates() -> None:
    model, x = trained_with_dropout(), torch.randn(6, 3)
    sites, rates = own_dropouts(model, x)
    assert [(site.name, site.units, site.kind) for site in sites] == [("0", (3,), "element"), ("3", (40,), "element")]
    assert rates == {"0": 0.05, "3": 0.2}


def test_channels_are_dropped_whole() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 1)).eval()
    sites, rates = own_dropouts(model, torch.randn(3, 1, 6, 6))
    assert [(site.name, site.units, site.kind) for site in sites] == [("1", (4,), "channel")]
    assert rates == {"1": 0.3}


def test_draws_have_the_moments_of_the_model_in_train_mode() -> None:
    model, x = trained_with_dropout(), torch.randn(4, 3)
    found = OwnDropout(4000).prepared(rows_of(model, x)).values(rows_of(model, x))
    model.train()
    with torch.no_grad():
        draws = torch.stack([model(x) for _ in range(4000)])
    model.eval()
    # Two variances of 4000 draws, each with a relative standard error of sqrt(2 / 4000).
    torch.testing.assert_close(found, draws.var(0), rtol=4.7 * (2 * 2 / 4000) ** 0.5, atol=0)


def test_first_order_is_near_it_and_batch_independent() -> None:
    model, x = trained_with_dropout(), torch.randn(4, 3)
    term = OwnDropout().prepared(rows_of(model, x))
    found, drawn = (
        term.values(rows_of(model, x)),
        OwnDropout(2000).prepared(rows_of(model, x)).values(rows_of(model, x)),
    )
    assert bool(((found / drawn - 1).abs() < 0.5).all())
    alone = torch.cat([term.values(rows_of(model, x[i : i + 1])) for i in range(4)])
    assert_same_up_to_rounding(alone, found)


def test_in_a_calibration_and_back_from_a_file(tmp_path: Path) -> None:
    model = trained_with_dropout()
    x = torch.randn(120, 3)
    y = model(x).detach() + 0.1 * torch.randn(120, 1)
    uq = calibrate(model, (x, y), method=latedrop.Terms(["own_dropout", "leverage"]), progress=False)
    uq.save(tmp_path / "c.json")
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(latedrop.load(tmp_path / "c.json", model).predict(x).std, uq.predict(x).std)


def test_a_model_without_any_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    with pytest.raises(SiteError, match="dropout layers of the model's own"):
        OwnDropout().prepared(rows_of(model, torch.randn(4, 3)))


def test_parts_that_run_again_in_the_backward_pass() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    x = torch.randn(4, 3)
    found = InputNoise(0.2).values(rows_of(Checkpointed(plain), x))
    assert_same_up_to_rounding(found, InputNoise(0.2).values(rows_of(plain, x)))
