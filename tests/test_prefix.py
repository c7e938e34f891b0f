"""What no mask reaches runs once, and nothing else is skipped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import calibrate, find_sites, sample
from latedrop.crowd import MCNN
from latedrop.inject import hooked
from latedrop.prefix import Prefix


def counted(model: nn.Module) -> dict[str, int]:
    """How often the `forward` of each leaf really runs."""
    runs: dict[str, int] = {}

    def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            runs[name] = runs.get(name, 0) + 1
            return forward(*args, **kwargs)

        return run

    for name, module in model.named_modules():
        if not list(module.children()):
            module.forward = wrap(name, module.forward)
    return runs


class Stem(nn.Module):
    """A first layer whose output is used by `after`, then two layers with a site each."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.relu = nn.Linear(5, 8), nn.ReLU()
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        h = self.after(self.relu(self.first(x)))
        return self.head(self.second(h).tanh() + h)


def add_one(h: Tensor) -> Tensor:
    return h.add_(1)


def equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a.mean, b.mean)
    torch.testing.assert_close(a.variance, b.variance)


def test_columns_of_a_counter_run_their_first_layers_once() -> None:
    model, x = MCNN(), torch.rand(2, 1, 32, 48)
    sites = find_sites(model, x)
    runs = counted(model)
    sample(model, x, 0.1, 12, sites=sites, chunk=4, engine="vmap")
    for column in range(3):
        assert [runs[f"columns.{column}.{layer}"] for layer in (0, 1, 2, 3, 6, 8)] == [1, 1, 1, 3, 3, 3]
    assert runs["fuse"] == 3


def test_loops_share_it_too() -> None:
    model, x = MCNN(), torch.rand(2, 1, 32, 48)
    sites = find_sites(model, x)
    runs = counted(model)
    sample(model, x, 0.1, 5, sites=sites, chunk=1)
    assert (runs["columns.0.0"], runs["columns.0.3"], runs["fuse"]) == (1, 5, 5)


def test_a_calibration_runs_it_once_for_all_rates() -> None:
    model, x = Stem(torch.sin), torch.randn(64, 5)
    sites = find_sites(model, x)
    runs = counted(model)
    calibrate(model, (x, torch.randn(64)), rates=(0.1, 0.2, 0.3), draws=10, sites=sites, chunk=4, batch_size=32)
    assert runs == {"first": 2, "relu": 2, "second": 2 * 3 * 3, "head": 2 * 3 * 3}


@pytest.mark.parametrize("after", [torch.sin, torch.clone, add_one, torch.relu_, lambda h: h[:, :8]])
@pytest.mark.parametrize("inplace", [False, True])
def test_moments_are_those_without_it(after: Callable[[Tensor], Tensor], inplace: bool) -> None:
    model, x = Stem(after), torch.randn(6, 5)
    model.relu.inplace = inplace
    sites = find_sites(model, x)
    expected = sample(model, x, 0.2, 9, sites=sites, chunk=9, engine="vmap")
    equal(sample(model, x, 0.2, 9, sites=sites, chunk=2, engine="vmap"), expected)
    equal(sample(model, x, 0.2, 9, sites=sites, chunk=1), expected)
    equal(sample(model, x, 0.2, 9, sites=sites, engine="loop"), expected)


def test_what_others_change_in_place_is_computed_again() -> None:
    model, x = Stem(add_one), torch.randn(6, 5)
    sites = find_sites(model, x)
    runs = counted(model)
    sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="vmap")
    assert (runs["first"], runs["relu"]) == (1, 4)  # the first layer's output is kept for the ReLU


class ReadBefore(nn.Module):
    """Reads a tensor, then lets a module change it in place, then reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.head = nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        before = h * 2
        self.relu(h)
        return self.head(before + h)


def test_a_tensor_read_before_and_after_its_change() -> None:
    model, x = ReadBefore(), torch.randn(6, 5)
    sites = find_sites(model, x)
    expected = sample(model, x, 0.2, 8, sites=sites, engine="loop")
    equal(sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="vmap"), expected)


class Reused(nn.Module):
    """One layer that runs before the first site, and again after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle, self.head = (
            nn.Linear(5, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.norm(self.first(x)))))


def test_a_module_that_runs_on_both_sides_of_a_mask() -> None:
    model, x = Reused(), torch.randn(6, 5)
    sites = find_sites(model, x)
    expected = sample(model, x, 0.2, 8, sites=sites, engine="loop")
    runs = counted(model)
    equal(sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="vmap"), expected)
    assert (runs["first"], runs["norm"], runs["middle"]) == (1, 1 + 4, 4)


class Remembers(nn.Module):
    """A module without inputs gives what a masked one left behind."""

    class Memory(nn.Module):
        def forward(self) -> Tensor:
            return self.held

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head, self.memory = (
            nn.Linear(5, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 1),
            self.Memory(),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.memory.held = self.second(self.first(x))
        return self.head(self.memory())


def test_a_module_that_gets_at_a_masked_tensor_by_another_way() -> None:
    model, x = Remembers(), torch.randn(6, 5)
    sites = find_sites(model, x)
    expected = sample(model, x, 0.2, 8, sites=sites, engine="loop")
    equal(sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="vmap"), expected)


def test_the_model_is_as_before_also_after_an_error() -> None:
    model, x = Stem(torch.sin), torch.randn(6, 5)
    sites = find_sites(model, x)
    own = model.first.forward = model.first.forward
    for readout in (None, lambda y: 1 / 0):
        with suppress(ZeroDivisionError):
            sample(model, x, 0.2, 8, sites=sites, chunk=2, readout=readout)
        assert model.first.__dict__["forward"] is own
        assert all("forward" not in module.__dict__ for module in (model.relu, model.second, model.head))


def test_kept_memory_is_what_the_sites_read() -> None:
    model, x = MCNN(), torch.rand(1, 1, 32, 48)
    sites = find_sites(model, x)
    prefix = Prefix(model, sites)

    def run(shift: Tensor) -> Tensor:
        with hooked(model, sites, lambda *_: shift):
            return model(x)

    with prefix.patched():
        with prefix.recorded(), torch.no_grad():
            torch.vmap(run)(torch.ones(2))
        sizes = [value.untyped_storage().nbytes() for value in prefix._kept.values()]
    pooled = [16 * 16 * 24 * 4, 20 * 16 * 24 * 4, 24 * 16 * 24 * 4]
    assert sorted(size for size in sizes if size > 4) == pooled
