"""The surface of the NLL over rate and scale: the closed form."""

from typing import Any

import numpy as np
import torch

from latedrop.metrics import nll
from studies.uci.pages import valley
from uci_records import RATES, made_record, rows


def with_rows(seed: int = 0) -> tuple[dict[str, Any], torch.Tensor, dict[float, torch.Tensor]]:
    """A record whose scale and scaled NLL are those of real rows: errors, and a variance for each rate."""
    generator = torch.Generator().manual_seed(seed)
    error = torch.randn(40, generator=generator, dtype=torch.float64)
    base = torch.rand(40, generator=generator, dtype=torch.float64) + 0.1
    variances = {rate: rate / (1 - rate) * base**power for rate, power in zip(RATES, (1, 2, 3), strict=True)}
    scales = {rate: float((error**2 / v).mean()) for rate, v in variances.items()}
    record = made_record()
    for kind in ("injected", "embedded"):
        held = record[kind]["validation"]
        held["scale"] = rows(*scales.values())
        held["nll_scaled"] = rows(*(of(error, scales[rate] * v) for rate, v in variances.items()))
    return record, error, variances


def of(error: torch.Tensor, variance: torch.Tensor) -> float:
    return float(nll(torch.zeros_like(error), variance, error, constant=False))


def test_the_surface_is_the_nll_at_every_rate_and_scale() -> None:
    record, error, variances = with_rows()
    found = valley(record, "injected", points=2)  # the first and the last of the rates
    scales = np.array([0.3, 1.0, 7.0])
    for row, rate in zip(found.surface(scales), (RATES[0], RATES[-1]), strict=True):
        np.testing.assert_allclose(row, [of(error, scale * variances[rate]) for scale in scales], rtol=1e-10)
    np.testing.assert_allclose(found.rates, [RATES[0], RATES[-1]])


def test_between_rates_the_valley_is_interpolated_in_logarithms() -> None:
    record = made_record()
    record["rates"] = [0.001, 0.01, 0.1]
    record["injected"]["validation"]["scale"] = rows(100.0, 10.0, 1.0)
    found = valley(record, "injected", points=5)
    np.testing.assert_allclose(found.scales, np.sqrt(10) ** np.arange(4, -1, -1))
