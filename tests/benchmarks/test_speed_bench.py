"""The comparison in speed is fair: same work for all, a strict yardstick, and tables that only repeat the JSON."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import speed
from benchmarks.nets import Forecaster, Residual, ViT
from benchmarks.peers import PEERS, Case, not_installed, twin
from benchmarks.timing import peak_bytes, turns_within
from latedrop import find_sites, sample
from latedrop.errors import ArgumentError
from latedrop_crowd import MCNN

CPU = torch.device("cpu")
PLAN = speed.Plan(budget=0, cap=20, bytes=2**30, repeats=1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5, 4)),
    "wide": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1000)), (5, 4)),
    "residual": (lambda: Residual(6, 1), (3, 3, 8, 8)),
    "vit": (lambda: ViT(16, 8, 16, 2, 2), (3, 3, 16, 16)),
    "mcnn": (MCNN, (2, 1, 16, 24)),
    "lstm": (lambda: Forecaster(6), (3, 5, 16)),
}


def case(name: str, rate: float = 0.2) -> tuple[Case, Any]:
    build, shape = NETS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = build().eval().requires_grad_(False), torch.randn(shape)
        sites = find_sites(model, x)
    return Case(model, twin(model, sites, rate), x), sites


@pytest.mark.parametrize("name", NETS)
def test_twin_is_the_model_while_dropout_is_off(name: str) -> None:
    made, sites = case(name)
    assert torch.equal(made.twin(made.x), made.model(made.x))  # dropout that is off does nothing, on the same batch
    dropouts = [module for module in made.twin.modules() if isinstance(module, nn.Dropout)]
    assert len(dropouts) == len(sites) > 0
    assert not any(isinstance(module, nn.Dropout) for module in made.model.modules())
    assert all(a is not b for a, b in zip(made.model.parameters(), made.twin.parameters(), strict=True))


@pytest.mark.parametrize("name", ["mlp", "residual", "vit", "lstm"])
def test_loop_over_the_twin_has_the_variance_of_sampling(name: str) -> None:
    made, sites = case(name)
    draws = 800
    moments = sample(made.model, made.x, 0.2, draws, sites=sites)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        mean, variance = PEERS["loop"](made, draws)()
    assert mean.shape == variance.shape == moments.mean.shape
    # Four standard errors of one row: rows share masks in one of the two, so that averaging them gains little.
    assert float(variance.sqrt().mean() / moments.variance.sqrt().mean()) == pytest.approx(
        1, abs=4 * (1 / draws) ** 0.5
    )
    assert float(((mean - moments.mean) / variance.sqrt()).square().mean().sqrt()) < 4 * (2 / draws) ** 0.5


@pytest.mark.parametrize("name", [name for name in PEERS if name != "loop"])
def test_peers_agree_with_sampling(name: str) -> None:
    if not_installed(name):
        pytest.skip("not installed; `make bench` makes an environment that has it")
    made, sites = case("mlp")
    mean, variance = PEERS[name](made, 1000)()
    assert mean.shape == variance.shape == made.model(made.x).shape
    moments = sample(made.model, made.x, 0.2, 1000, sites=sites)
    assert float(variance.sqrt().mean() / moments.variance.sqrt().mean()) == pytest.approx(1, abs=0.13)


def test_twin_refuses_what_a_dropout_layer_cannot_do() -> None:
    model = mlp()
    sites = find_sites(model, torch.randn(3, 4), kind="channel")
    with pytest.raises(ArgumentError, match="expected layers with element masks; found '2', a channel site"):
        twin(model, sites, 0.1)


@pytest.mark.parametrize(("multiple", "draws", "calls", "share"), [(1, 10, 10, 1.0), (4, 10, 2, 0.8), (16, 10, 1, 1.6)])
def test_plain_passes_count_what_they_do(multiple: int, draws: int, calls: int, share: float) -> None:
    seen: list[int] = []

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return x

    run, actual = speed.plain_passes(Model(), torch.zeros(3, 2), multiple, draws)
    run()
    assert seen == [3 * multiple] * calls
    assert actual == pytest.approx(share)
    assert sum(seen) == pytest.approx(share * draws * 3)


def test_passes_measures_powers_of_two_within_memory() -> None:
    x = torch.randn(2, 4)
    size, seconds = speed.passes(mlp(), x, CPU, PLAN)
    assert list(seconds) == [1, 2, 4, 8, 16, 32]
    assert size > 0
    tight = speed.Plan(budget=0, cap=20, bytes=16 * size, repeats=1)
    assert list(speed.passes(mlp(), x, CPU, tight)[1]) == [1, 2]


def test_peak_of_a_known_allocation() -> None:
    mebibyte = 2**20
    before = torch.ones(50 * mebibyte, dtype=torch.uint8)

    def run() -> Tensor:
        first = torch.ones(10 * mebibyte, dtype=torch.uint8)
        del first
        second, remaining = (torch.ones(size * mebibyte, dtype=torch.uint8) for size in (20, 5))
        del second
        return remaining

    result, most = peak_bytes(run, CPU)
    assert len(result) == 5 * mebibyte
    assert most == 25 * mebibyte
    assert peak_bytes(before.max, CPU)[1] < 1024, "what was there before does not count"


def test_turns_report_failures_and_rounds() -> None:
    calls: list[str] = []

    def broken() -> None:
        raise ValueError("no batching rule\nand more")

    candidates = {"a": lambda: calls.append("a"), "broken": broken, "b": lambda: calls.append("b")}
    times, rounds, failed = turns_within(candidates, repeats=3, seconds=0, device=CPU)
    assert (rounds, sorted(calls)) == (1, ["a", "b"]), "one round whatever the budget"
    assert failed == {"broken": "ValueError: no batching rule"}
    assert list(times) == ["a", "b"]


def test_turns_change_their_order_and_what_is_quick_runs_before_it_is_timed() -> None:
    calls: list[str] = []
    candidates = {name: partial(calls.append, name) for name in "abcd"}
    _, rounds, _ = turns_within(candidates, repeats=3, seconds=1, device=CPU)
    first, later = calls[:4], [calls[4 + 8 * i : 12 + 8 * i] for i in range(rounds - 1)]
    assert sorted(first) == list("abcd")
    assert all(sorted(names) == sorted("aabbccdd") and names[::2] == names[1::2] for names in later)
    assert len({tuple(names) for names in later}) > 1
