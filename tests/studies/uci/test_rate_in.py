"""Rate-In: the information that is kept against a count over drawn masks, and the rates that follow."""

import pytest
import torch

from studies.uci.rate_in import LOSS, _shares, information_kept, row_rates


def counted(shares: torch.Tensor, rate: float, draws: int = 400_000) -> float:
    """The mutual information of drawn bins and what dropout leaves of them, from a table of counts."""
    g = torch.Generator().manual_seed(0)
    before = torch.multinomial(shares, draws, replacement=True, generator=g)
    after = before * (torch.rand(draws, generator=g) >= rate)
    joint = torch.zeros(len(shares), len(shares), dtype=torch.float64)
    joint.index_put_((before, after), torch.ones(draws, dtype=torch.float64), accumulate=True)
    joint /= draws
    ratio = joint / (joint.sum(1, keepdim=True) * joint.sum(0)).clamp_min(1e-300)
    return float(torch.where(joint > 0, joint * ratio.clamp_min(1e-300).log(), 0.0).sum())


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_information_is_that_of_drawn_masks(rate: float) -> None:
    shares = torch.tensor([0.3, 0.4, 0.2, 0.1], dtype=torch.float64)
    exact = float(information_kept(shares[None], torch.tensor([rate], dtype=torch.float64)))
    assert exact == pytest.approx(counted(shares, rate), abs=0.01)


def test_rates_lose_the_wanted_share_and_differ_between_rows() -> None:
    g = torch.Generator().manual_seed(1)
    units = torch.relu(torch.randn(40, 50, generator=g, dtype=torch.float64) + torch.linspace(-2, 2, 40)[:, None])
    rates = row_rates(units)
    shares = _shares(units)
    kept = information_kept(shares, rates) / information_kept(shares, torch.zeros_like(rates))
    torch.testing.assert_close(kept, torch.full_like(kept, 1 - LOSS))
    assert float(rates.min()) > 0
    assert float(rates.max()) < 0.5
    assert float(rates.max() / rates.min()) > 1.2


def test_a_row_without_information_has_rate_zero() -> None:
    units = torch.zeros(2, 8, dtype=torch.float64)
    units[1] = 3.0
    assert row_rates(units).tolist() == [0.0, 0.0]
