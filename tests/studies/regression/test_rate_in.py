"""Rate-In: the information that is kept against a count over drawn masks, and the rates that follow."""

import pytest
import torch

from studies.regression.methods import LOSS, information_kept, layer_rate


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
    exact = float(information_kept(shares, torch.tensor(rate, dtype=torch.float64)))
    assert exact == pytest.approx(counted(shares, rate), abs=0.01)


def test_a_rate_loses_the_wanted_share_of_all_activations_of_a_call() -> None:
    units = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 2.0, 10.0]], dtype=torch.float64)
    # Bins of width 1 up to 10, and one for 0: shares of 0, 1, 2, 3 and 10.
    shares = torch.tensor([3, 1, 2, 1, 1], dtype=torch.float64) / 8
    rate = layer_rate(units)
    share = information_kept(shares, rate) / information_kept(shares, torch.zeros_like(rate))
    assert float(share) == pytest.approx(1 - LOSS)
    assert rate.shape == ()
    assert 0 < float(rate) < 0.5
    torch.testing.assert_close(layer_rate(units[[1, 0, 1, 0]]), rate)  # the rows of a call share it


def test_activations_without_information_have_rate_zero() -> None:
    assert float(layer_rate(torch.zeros(2, 8, dtype=torch.float64))) == 0.0
    assert float(layer_rate(torch.full((2, 8), 3.0, dtype=torch.float64))) == 0.0
