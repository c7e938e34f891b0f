"""Models that differentiate inside their `forward`: forces, physics-informed networks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import Terms, calibrate, find_sites, inject, linearize, load, propagate, sample
from latedrop.errors import ArgumentError, DataError, OutputError, SiteError
from networks import Net, mlp
from rounding import assert_same_up_to_rounding
from untouched import assert_same, state


def energy(model: Net, x: Tensor) -> dict[str, Tensor]:
    """Give the energy, its forces, and the second derivative; ask for gradients as users do, in `forward`."""
    x.requires_grad_(True)
    value = model.net(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return {"energy": value, "forces": -slope, "bend": bend}


def forces(model: Net, x: Tensor) -> Tensor:
    """Give forces alone, with gradients switched on by itself and no graph kept."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        return -torch.autograd.grad(model.net(x).sum(), x)[0]


def backward(model: Net, x: Tensor) -> Tensor:
    """Give forces by `backward`, which also writes a gradient into every parameter."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        model.net(x).sum().backward()
    return -x.grad


def functional(model: Net, x: Tensor) -> Tensor:
    """Give forces by `torch.func`."""
    return -torch.func.grad(lambda z: model.net(z).sum())(x)


def with_respect_to_weights(model: Net, x: Tensor) -> Tensor:
    """Differentiate with respect to weights of its own."""
    value = model.net(x)
    slope = torch.autograd.grad(value.sum(), model.net[0].bias, create_graph=True)[0]
    return value + 0 * slope.sum()


KINDS = {"energy": (energy, "forces"), "second": (energy, "bend"), "own switch": (forces, None)}
KINDS |= {"backward": (backward, None), "functional": (functional, None)}


def potential(run: Callable[[Net, Tensor], Any]) -> Net:
    return Net(run, net=mlp(3, 8, 8, 1)).eval()


def made(kind: str) -> tuple[nn.Module, Tensor, str | None]:
    torch.manual_seed(0)
    run, readout = KINDS[kind]
    return potential(run), torch.randn(6, 3), readout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["auto", "rows", "loop"])
def test_draws_are_those_of_a_model_that_is_called(kind: str, engine: str) -> None:
    model, x, readout = made(kind)
    before = state(model)
    sites = find_sites(model, x)
    assert [site.name for site in sites] == ["net.2", "net.4"]
    moments = sample(model, x, 0.2, 5, sites=sites, readout=readout, engine=engine, keep_draws=True)  # type: ignore[arg-type]
    assert not moments.mean.requires_grad
    assert not x.requires_grad
    assert_same(before, state(model))
    with inject(model, sites, 0.2):
        drawn = [model(x.clone()) for _ in range(5)]
    drawn = [output if readout is None else output[readout] for output in drawn]
    assert_same_up_to_rounding(moments.outputs, torch.stack(drawn).detach())


@pytest.mark.parametrize("kind", ["energy", "own switch", "functional"])
def test_rate_0_and_a_row_alone(kind: str) -> None:
    model, x, readout = made(kind)
    plain = model(x.clone())
    plain = plain if readout is None else plain[readout]
    # Rate 0 multiplies by 1, on the same batch.
    assert torch.equal(sample(model, x, 0.0, 2, readout=readout).mean, plain.detach())
    whole = sample(model, x, 0.2, 10, readout=readout)
    alone = sample(model, x[2:3], 0.2, 10, readout=readout)
    assert_same_up_to_rounding(alone.variance, whole.variance[2:3])


def test_inside_inference_mode_and_no_grad() -> None:
    model, x, _ = made("energy")
    expected = sample(model, x, 0.2, 10, readout="forces").variance
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            variance = sample(model, x.clone(), 0.2, 10, readout="forces").variance
        assert_same_up_to_rounding(variance, expected)


def test_weights_get_no_gradients_from_a_calibration_or_a_loaded_one(tmp_path: Path) -> None:
    """A model that switches gradients on by itself, and writes them, is not known before its first pass."""
    model, x = potential(backward), torch.randn(60, 3)
    uq = calibrate(model, (x, torch.randn(60, 3)), method=Terms(["leverage"]), progress=False)
    uq.save(tmp_path / "uq.json")
    other = deepcopy(model)
    assert_same_up_to_rounding(load(tmp_path / "uq.json", other).predict(x).variance, uq.predict(x).variance)
    assert all(parameter.grad is None for parameter in [*model.parameters(), *other.parameters()])


def test_our_own_gradients_are_not_the_models(tmp_path: Path) -> None:
    """A model that fails after a pass of first order is not run again, as one that needs gradients would be."""
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(60, 3)
    uq = calibrate(model, (x, torch.randn(60, 1)), method="linear", progress=False)
    uq.save(tmp_path / "uq.json")
    loaded = load(tmp_path / "uq.json", deepcopy(model))
    loaded.predict(x)
    with pytest.raises(DataError, match="expected inputs that the model takes"):
        loaded.predict(x[:, :2])


def test_first_order_where_the_model_keeps_its_graph() -> None:
    model, x, _ = made("energy")
    energy = linearize(model, x, readout="energy")
    assert_same_up_to_rounding(energy.variance_by_site, linearize(model.net, x).variance_by_site)  # type: ignore[arg-type]
    forces = linearize(model, x, readout="forces")
    first = linearize(model, x, readout=lambda output: output["forces"][:, :1])
    assert_same_up_to_rounding(first.variance_by_site, forces.variance_by_site[:, :1])
    draws = 20_000  # the relative standard error of a variance is about sqrt(2 / draws), 1 %
    drawn = sample(model, x, 0.001, draws, readout="forces").variance
    torch.testing.assert_close(drawn, forces.variance(0.001), rtol=0.25, atol=0.0)


def test_what_cannot_be_is_refused() -> None:
    _, x, _ = made("energy")

    def mixed(model: Net, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        value = model.net(x)
        return value + torch.autograd.grad(value.sum(), x, retain_graph=True)[0]

    with pytest.raises(OutputError, match="without create_graph=True"):
        linearize(potential(mixed), x)
    with pytest.raises(DataError, match="One of the differentiated Tensors does not require grad"):
        linearize(potential(with_respect_to_weights), x)
    for kind in ("energy", "own switch", "functional"):
        other, _, readout = made(kind)
        with pytest.raises(SiteError, match="found a derivative"):
            propagate(other, x, 0.1, readout=readout)
        with pytest.raises(ArgumentError, match=r"cannot be compiled.*engine='auto'"):
            sample(other, x, 0.1, 5, readout=readout, engine="compiled")
