"""The surface of the NLL: the closed form, the bands, and the page."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch

from latedrop.metrics import nll
from studies.uci.surface import reach, rise, valley
from studies.uci.surface_page import surface_page
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


@pytest.mark.parametrize("height", [1e-3, 0.05, 0.5, 3.0, 40.0])
def test_the_ends_of_a_band_are_at_its_height(height: float) -> None:
    low, high = reach(height)
    assert low < 1 < high
    np.testing.assert_allclose(rise(1 / np.array([low, high])), height, rtol=1e-9)
    assert reach(0.0) == (1.0, 1.0)


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def page() -> str:
    record, *_ = with_rows()
    return surface_page({"yacht": record, "a<b": with_rows(1)[0]})


def test_the_page_asks_nobody(page: str) -> None:
    assert "http" not in page.replace("http-equiv", "")
    assert not [value for _, found in Elements(page).found for name, value in found.items() if name in ("src", "href")]
    assert "default-src 'none'" in page


def test_without_scripts_the_first_set_is_a_picture(page: str) -> None:
    groups = [found for tag, found in Elements(page).found if tag == "g"]
    assert [found["data-set"] for found in groups] == ["yacht", "a<b"]
    assert ["style" in found for found in groups] == [False, True]
    still = page.split('<g class="set"')[1]
    assert len(re.findall('<polyline class="valley"', still)) == 2
    assert len(re.findall('<polyline class="slice"', still)) == 2
    assert "<polygon" in still
    numbers = [float(word) for points in re.findall('points="([^"]*)"', page) for word in re.split("[ ,]", points)]
    assert len(numbers) > 100
    assert 0 <= min(numbers) <= max(numbers) <= 1000


def test_the_script_has_the_valley_of_every_set(page: str) -> None:
    data = json.loads(re.findall(r"const data = (.*);\n", page)[0])
    record, *_ = with_rows()
    found = valley(record, "embedded", points=len(data["yacht"]["rates"]))
    np.testing.assert_allclose(data["yacht"]["embedded"]["scale"], found.scales, rtol=1e-4)
    np.testing.assert_allclose(data["yacht"]["embedded"]["nll"], found.nll, rtol=1e-4)
    assert set(data) == {"yacht", "a<b"}
    assert "{{" not in page
