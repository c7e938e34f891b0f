"""Networks that somebody else trained keep the contract, and their rows are what they were trained on."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.trained import KINDS, MATERIALS, inputs, network, percent, table, task, waves
from latedrop import find_sites, linearize, sample
from latedrop.network.network import call
from rounding import assert_same_up_to_rounding

pytestmark = pytest.mark.skipif(
    find_spec("magnet") is None or find_spec("h5py") is None, reason="needs: pip install --no-deps mag-net==0.1.0 h5py"
)
RATE, DRAWS, ROWS = 0.1, 6, 5
MLP = ["layers.2", "layers.4", "layers.6"]
SITES = {
    "Sinusoidal": MLP,
    "Trapezoidal": MLP,
    "LSTM": ["fc1.0", "fc1.2", "fc1.4", "fc2.0", "fc2.2", "fc2.4"],
}


def loss_network(material: str, kind: str) -> tuple[nn.Module, Any]:
    rows = table(material)
    chosen = np.flatnonzero(rows["Duty_1"] < 0 if kind == "Sinusoidal" else rows["Duty_2"] > 0)[::100][:ROWS]
    return network(material, kind), inputs(kind, {name: values[chosen] for name, values in rows.items()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("material", ["N87", "3C90"])
def test_the_contract(material: str, kind: str) -> None:
    net, x = loss_network(material, kind)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        plain = percent(call(net, x))
    sites = find_sites(net, x)
    assert [site.name for site in sites] == SITES[kind]
    none = sample(net, x, 0.0, sites=sites, readout=percent)
    assert torch.equal(none.mean, plain)  # rate 0 multiplies by 1, on the same batch
    assert not none.variance.any()
    rows, loop = (sample(net, x, RATE, DRAWS, sites=sites, readout=percent, engine=way) for way in ("rows", "loop"))
    assert_same_up_to_rounding(rows.variance, loop.variance)
    first = linearize(net, x, sites, percent)
    assert_same_up_to_rounding(first.mean, plain)
    for variance in (rows.variance, first.variance_by_site.sum(-1)):
        assert variance.dtype == torch.float64
        assert bool(torch.isfinite(variance).all() and (variance > 0).all())
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_waves_are_what_the_networks_were_trained_on() -> None:
    columns = {
        "Flux_Density": np.array([0.1, 0.2, 0.05]),
        "Duty_1": np.array([-1, 0.3, 0.2]),
        "Duty_2": np.array([-1, 0, 0.2]),
        "Duty_3": np.array([-1, 0.7, 0.4]),
    }
    periods = waves(columns, steps=1001)
    np.testing.assert_allclose(periods.mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(np.ptp(periods, axis=1), 2 * columns["Flux_Density"], rtol=1e-3)
    # A trapezoid has as much time on its flat parts as the duty ratios say; the slope there is the smallest.
    slopes = np.abs(np.diff(periods[2]))
    assert abs(float(np.mean(slopes < 0.5 * slopes.max())) - 0.4) < 0.01
    for material in MATERIALS:
        made = task(material, "LSTM", rows=300)
        for x, y in (made.home, *made.shifted.values()):
            with torch.no_grad():
                assert float((percent(call(made.model, x)) - y).square().mean().sqrt()) < 25
