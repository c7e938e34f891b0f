"""Guards of speed that a noisy machine cannot break: they count passes, modules, waits and bytes, and no seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.timing import peak_bytes
from counting import Runs
from latedrop import Batches, Sampling, calibrate, find_sites, sample
from latedrop.calibration.methods import PAPER_RATES
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import fitting_chunk, sample_rates
from latedrop.network.network import Network
from latedrop_crowd import MCNN
from networks import Net

CPU = torch.device("cpu")


def layers(width: int = 8, outputs: int = 1) -> nn.Module:
    """Three layers; the second and the third are sites."""
    parts = {"first": nn.Linear(5, width), "second": nn.Linear(width, width), "head": nn.Linear(width, outputs)}
    return Net(lambda net, x: net.head(net.second(net.first(x).relu()).relu()), **parts)


def counted(run: Callable[[], Any], model: nn.Module | None = None) -> Runs:
    """Count what a call runs after it ran once: the first with a network checks on some rows that draws can be rows."""
    run()
    with Runs(model) as runs:
        run()
    return runs


@pytest.mark.parametrize(("draws", "chunk", "passes"), [(10, 10, 1), (10, 4, 3), (10, 1, 10)])
def test_passes_are_chunks_and_the_first_layer_runs_once(draws: int, chunk: int, passes: int) -> None:
    model, x = layers(), torch.randn(16, 5)
    sites, network = find_sites(model, x), Network(model)
    runs = counted(lambda: sample(network, x, 0.1, draws, sites=sites, chunk=chunk), model)
    assert runs.layers == {"first": 1, "second": passes, "head": passes}


def test_a_calibration_costs_its_rates_and_nothing_more() -> None:
    model, x = layers(), torch.randn(600, 5)
    sites = find_sites(model, x)
    runs = counted(
        lambda: calibrate(
            model, (x, torch.randn(600)), method=Sampling(draws=20, chunk=5), batches=Batches(200), sites=sites
        ),
        model,
    )
    passes = 3 * len(PAPER_RATES) * 20 // 5
    looks = 1  # on few rows, where a draw runs alone
    assert runs.layers == {"first": 3 + looks, "second": passes + looks, "head": passes + looks}


def test_a_predictor_runs_what_it_needs() -> None:
    model, x = layers(), torch.randn(64, 5)
    data = (x, torch.randn(64))
    for center, passes in (("draws", 1), ("model", 2)):
        uq = calibrate(model, data, method=Sampling(rates=[0.1], draws=20, mean=center))
        runs = counted(partial(uq.predict, x), model)
        assert runs.layers["first"] == passes


@pytest.mark.parametrize("chunk", [50, 5, 1])
def test_waits_for_results_do_not_grow_with_draws(chunk: int) -> None:
    """A value that Python looks at is a wait for the device: of a CPU there are two, for inputs and for outputs."""
    model, x = layers(), torch.randn(16, 5)
    sites, network = find_sites(model, x), Network(model)
    runs = counted(lambda: sample(network, x, 0.1, 50, sites=sites, chunk=chunk))
    assert runs.operators["_local_scalar_dense"] == 2


def test_rates_wait_once_each() -> None:
    model, x = layers(), torch.randn(16, 5)
    sites, network = find_sites(model, x), Network(model)
    for draws in (10, 40):
        runs = counted(partial(sample_rates, network, x, [0.1, 0.2, 0.3], sites, DrawOptions(draws, chunk=5)))
        assert runs.operators["_local_scalar_dense"] == 4  # the inputs, and the outputs of each rate


@pytest.mark.slow
@pytest.mark.parametrize(("model", "x"), [(layers(512), torch.randn(1024, 5)), (MCNN(), torch.rand(2, 1, 64, 96))])
def test_memory_is_flat_in_the_draws(model: nn.Module, x: Tensor) -> None:
    sites, network = find_sites(model, x), Network(model)
    most = max(fitting_chunk(network, x, sites, draws) for draws in range(2, 100))
    assert most <= 20
    both = (2 * most, 20 * most)  # as many at once in all passes
    few, many = (peak_bytes(lambda draws=draws: sample(network, x, 0.1, draws, sites=sites), CPU)[1] for draws in both)
    assert many <= 1.1 * few


def test_memory_stays_below_that_of_stacked_outputs() -> None:
    """Where outputs are large, as maps are."""
    model, x, draws = layers(64, outputs=2000), torch.randn(256, 5), 100
    sites = find_sites(model, x)
    _, most = peak_bytes(lambda: sample(model, x, 0.1, draws, sites=sites), CPU)
    assert most < draws * 256 * 2000 * 4


@pytest.mark.parametrize(("gigabytes", "rows", "expected"), [(139, 1, 50), (8, 1, 13), (139, 32, 13)])
def test_few_rows_run_at_once_on_a_large_gpu(monkeypatch: Any, gigabytes: int, rows: int, expected: int) -> None:
    model, x = nn.Sequential(nn.Linear(1, 1_680_000, bias=False), nn.Linear(1_680_000, 1)), torch.zeros(rows, 1)
    sites, network = find_sites(model, x[:1]), Network(model)
    gpu = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 4)
    monkeypatch.setattr(network, "weight", gpu)
    memory = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr("latedrop.dropout.sampling._memory", lambda device: memory.total_memory)
    assert fitting_chunk(network, x, sites, 50) == expected
