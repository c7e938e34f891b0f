"""What no mask reaches runs once, and nothing else is skipped."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from latedrop.variance.engine.rows import ThinnedNetworks
from latedrop.variance.engine.shared import worth_sharing
from torch import Tensor, nn

from counting import Runs
from latedrop import calibrate, find_sites, sample
from latedrop.crowd import MCNN
from latedrop.dropout.options import Sampling
from latedrop.dropout.sampling import sample_rates


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
    sample(model, x, 0.1, 12, sites=sites, chunk=4, engine="rows")
    with Runs(model) as runs:  # after a first call, which checks that draws can be rows
        sample(model, x, 0.1, 12, sites=sites, chunk=4, engine="rows")
    for column in range(3):
        assert [runs.layers[f"columns.{column}.{layer}"] for layer in (0, 3, 6, 8)] == [1, 3, 3, 3]
    assert runs.layers["fuse"] == 3
    assert runs.operators["max_pool2d_with_indices"] == 3 + 3 * 3


@pytest.mark.parametrize(("device", "side", "shared"), [("cpu", 8, False), ("cpu", 32, True), ("meta", 32, False)])
def test_few_inputs_are_not_worth_it(device: str, side: int, shared: bool) -> None:
    """On a device that is not the CPU the layers of a larger batch take no longer."""
    x = torch.empty(1, 1, side, side, device=device)
    assert worth_sharing((x, {"more": x}), 50, passes=1) is shared
    assert worth_sharing(x, 50, passes=2)
    assert worth_sharing(torch.empty(1, 3, 224, 224, device=device), 50, passes=1)


def test_loops_share_it_too() -> None:
    model, x = MCNN(), torch.rand(2, 1, 32, 48)
    sites = find_sites(model, x)
    sample(model, x, 0.1, 5, sites=sites, chunk=1)
    with Runs(model) as runs:  # after a first call, which checks that draws can be rows
        sample(model, x, 0.1, 5, sites=sites, chunk=1)
    assert [runs.layers[name] for name in ("columns.0.0", "columns.0.3", "fuse")] == [1, 5, 5]


@pytest.mark.filterwarnings("ignore:the best rate")  # targets are noise
def test_a_calibration_runs_it_once_for_all_rates() -> None:
    model, x = Stem(torch.sin), torch.randn(64, 5)
    sites = find_sites(model, x)
    calibrate(model, (x, torch.randn(64)), rates=(0.1, 0.2, 0.3), draws=10, sites=sites, chunk=4, batch_size=32)
    with Runs(model) as runs:  # after a first call, which checks that draws can be rows
        calibrate(model, (x, torch.randn(64)), rates=(0.1, 0.2, 0.3), draws=10, sites=sites, chunk=4, batch_size=32)
    assert runs.layers == {"first": 2, "second": 2 * 3 * 3, "head": 2 * 3 * 3}


@pytest.mark.parametrize("after", [torch.sin, torch.clone, add_one, torch.relu_, lambda h: h[:, :8]])
@pytest.mark.parametrize("inplace", [False, True])
def test_moments_are_those_without_it(after: Callable[[Tensor], Tensor], inplace: bool) -> None:
    model, x = Stem(after), torch.randn(6, 5)
    model.relu.inplace = inplace
    sites = find_sites(model, x)
    expected = sample(model, x, 0.2, 9, sites=sites, chunk=9, engine="rows")
    equal(sample(model, x, 0.2, 9, sites=sites, chunk=2, engine="rows"), expected)
    equal(sample(model, x, 0.2, 9, sites=sites, chunk=1), expected)
    equal(sample(model, x, 0.2, 9, sites=sites, engine="loop"), expected)


def test_what_others_change_in_place_is_a_copy() -> None:
    model, x = Stem(add_one), torch.randn(6, 5)
    sites = find_sites(model, x)
    sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="rows")
    with Runs(model) as runs:  # after a first call, which checks that draws can be rows
        sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="rows")
    assert runs.operators["relu"] == 1  # somebody adds to a copy of what it gives
    assert runs.layers["first"] == 1


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
    equal(sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="rows"), expected)


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
    equal(sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="rows"), expected)
    with Runs(model) as runs:  # after a first call, which checks that draws can be rows
        equal(sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="rows"), expected)
    assert (runs.layers["first"], runs.layers["middle"]) == (1, 4)


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
    equal(sample(model, x, 0.2, 8, sites=sites, chunk=2, engine="rows"), expected)


def test_the_model_is_as_before_also_after_an_error() -> None:
    model, x = Stem(torch.sin), torch.randn(6, 5)
    sites = find_sites(model, x)
    own = model.second.forward = model.second.forward
    for readout in (None, lambda y: 1 / 0):
        with suppress(ZeroDivisionError):
            sample(model, x, 0.2, 8, sites=sites, chunk=2, readout=readout)
        assert model.second.__dict__["forward"] is own
        assert all("forward" not in module.__dict__ for module in (model.relu, model.first, model.head))


def test_kept_memory_is_what_the_sites_read() -> None:
    model, x = MCNN(), torch.rand(1, 1, 32, 48)
    networks = ThinnedNetworks(model, x, find_sites(model, x), Sampling(6, chunk=2))
    networks.moments(dict.fromkeys((site.name for site in networks._sites), 0.1))
    sources = networks._layers._sources.values()
    held = sorted(source.held.untyped_storage().nbytes() for source in sources if source.held is not None)
    assert held == sorted([x.untyped_storage().nbytes(), *(width * 16 * 24 * 4 for width in (16, 20, 24))])
    assert all(source.seen is None or source.seen() is None for source in sources if source.held is None)


class Fills(nn.Module):
    """Changes, in place, a tensor that no layer made, and lets nobody know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.head = nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1.5
        self.relu(h)
        return self.head(h)


class Appends(nn.Module):
    """A module of the user's own that leaves things behind."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 8)

        def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
            self.last = self.layer(x)
            found.append(self.last)
            return self.last

    def __init__(self) -> None:
        super().__init__()
        self.part, self.second, self.head = self.Part(), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        h = self.second(self.part(x, found))
        return self.head(h + found[0] + self.part.last)


class SharedNorm(nn.Module):
    """One norm inside a module that gives a dict, and outside."""

    class Part(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(5, 8), norm

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"h": self.norm(self.layer(x)) + self.norm(2 * self.layer(x).exp())}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.part, self.second, self.head = self.Part(self.norm), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(x)["h"]
        return self.head(self.norm(self.second(self.norm(h.sin()))))


class Functional(nn.Module):
    """A weight that a module makes from a parameter, and a constant times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(5, 8), nn.Tanh()
        self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(self.first(x), self.act(self.w))
        return nn.functional.linear(h, self.act(self.w)) @ self.v


@pytest.mark.parametrize("make", [Fills, Appends, SharedNorm, Functional])
def test_models_that_do_more_than_layers_do(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, 5)
    sites = find_sites(model, x)
    expected = sample(model, x, 0.2, 7, sites=sites, engine="loop", keep_draws=True)
    for options in ({"engine": "rows", "chunk": 3}, {"chunk": 3}, {"chunk": 1}):
        found = sample(model, x, 0.2, 7, sites=sites, keep_draws=True, **options)
        torch.testing.assert_close(found.outputs, expected.outputs)


def test_a_site_without_a_rate_at_first_is_no_part_of_it() -> None:
    model, x = Stem(torch.sin), torch.randn(6, 5)
    sites = find_sites(model, x)
    rates = [{"second": 0.0, "head": 0.3}, {"second": 0.3, "head": 0.3}, 0.0]
    for rate, found in zip(rates, sample_rates(model, x, rates, sites, Sampling(20, chunk=5)), strict=True):
        equal(found, sample(model, x, rate, 20, sites=sites, engine="loop"))


def test_threads_share_a_model() -> None:
    model, x = Stem(torch.sin), torch.randn(6, 5)
    sites = find_sites(model, x)
    expected = sample(model, x, 0.2, 9, sites=sites)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: sample(model, x, 0.2, 9, sites=sites, chunk=2), range(12)))
    for moments in found:
        equal(moments, expected)
    assert torch.backends.mha.get_fastpath_enabled()


class Residual(nn.Module):
    """Adds to what a norm gave, in place, as many residual networks do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv1, self.conv2 = (nn.Conv2d(n, 4, 3, padding=1) for n in (1, 4, 4))
        self.norm1, self.norm2, self.head = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        out = self.norm2(self.conv2(self.norm1(self.conv1(h)).relu()))
        out += h
        return self.head(out.mean((2, 3)))


@pytest.mark.parametrize("chunk", [5, 1])
def test_functions_between_layers_do_not_end_it(chunk: int) -> None:
    model, x = Residual().eval(), torch.randn(3, 1, 6, 6)
    sites = find_sites(model, x, select=["head"])
    found = sample(model, x, 0.2, 20, sites=sites, chunk=chunk)
    with Runs(model) as runs:  # after a first call, which checks that draws can be rows
        found = sample(model, x, 0.2, 20, sites=sites, chunk=chunk)
    assert [runs.layers[name] for name in ("stem", "conv1", "conv2")] == [1, 1, 1]
    assert runs.layers["head"] == 20 // chunk
    equal(found, sample(model, x, 0.2, 20, sites=sites, chunk=20))


class Branches(nn.Module):
    """Looks at a layer's values without any operator."""

    def __init__(self, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head, self.look = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1), look

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(self.second(h)) * (1 + int(max(self.look(h)[0]) > 0))


@pytest.mark.parametrize("look", [Tensor.tolist, Tensor.numpy], ids=["tolist", "numpy"])
@pytest.mark.parametrize("chunk", [2, 1])
def test_values_that_are_looked_at_are_computed(look: Callable[[Tensor], Any], chunk: int) -> None:
    model, x = Branches(look), torch.randn(3, 4)
    sites = find_sites(model, x, select=["head"])
    equal(sample(model, x, 0.2, 8, sites=sites, chunk=chunk), sample(model, x, 0.2, 8, sites=sites, engine="loop"))


class Copies(nn.Module):
    """Works on a copy of a part of itself, as meta learning does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.copied = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.made = deepcopy(self.copied)
        return self.made(self.second(self.first(x)))


def test_a_copy_of_a_layer_has_its_own_forward() -> None:
    model, x = Copies(), torch.randn(3, 4)
    sites = find_sites(model, x, select=["second"])
    expected = sample(model, x, 0.2, 8, sites=sites, engine="loop")
    for chunk in (8, 2, 1):
        equal(sample(model, x, 0.2, 8, sites=sites, chunk=chunk), expected)
        assert "made" not in model.__dict__["_modules"]
