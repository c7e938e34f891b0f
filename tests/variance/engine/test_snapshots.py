"""What is fixed in a compiled program: whatever changes about the model, the next prediction is that of the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from latedrop.variance.engine import compiled
from latedrop.variance.engine.kept import PROGRAMS
from torch import Tensor, nn

import latedrop
from latedrop import find_sites, sample
from latedrop.errors import ArgumentError
from rounding import assert_same_up_to_rounding


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they are."""
    monkeypatch.setattr(compiled, "Compiled", lambda graph: graph)
    yield
    PROGRAMS.clear()


class Model(nn.Module):
    """Its code looks at all that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.bend = nn.LeakyReLU(0.1)
        self.number, self._hidden, self.flag, self.nested = 1.0, 1.0, False, [1.0, {"factor": 1.0}]
        self.config = SimpleNamespace(inner=SimpleNamespace(factor=1.0))
        self.array = np.ones(2, np.float32)
        self.plain = torch.ones(6)
        self.register_buffer("read", torch.ones(6))
        self.register_buffer("looked_at", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.bend(self.first(x)))
        h = h * self.number * self._hidden * self.nested[0] * self.nested[1]["factor"] * self.config.inner.factor
        h = h * self.plain * self.read * self.looked_at.item() * float(self.array[0])
        return self.head(-h if self.flag else h)


def override(model: Any) -> None:
    model.bend.forward = torch.tanh


def transposed(model: Any) -> None:
    model.middle.weight.data = model.middle.weight.data.T


def exchanged(model: Any) -> None:
    handle = model.bend.register_forward_hook(lambda *a: a[2] * 2)
    sample(model, torch.ones(3, 4), 0.2, 6, engine="compiled")
    handle.remove()
    model.bend.register_forward_hook(lambda *a: a[2] * 3)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "number", 2.0),
    "private number": lambda m: setattr(m, "_hidden", 2.0),
    "flag": lambda m: setattr(m, "flag", True),
    "list": lambda m: m.nested.__setitem__(0, 2.0),
    "dict in a list": lambda m: m.nested[1].update(factor=2.0),
    "object": lambda m: setattr(m.config.inner, "factor", 2.0),
    "array": lambda m: m.array.fill(2.0),
    "tensor in place": lambda m: m.plain.mul_(2),
    "tensor replaced": lambda m: setattr(m, "plain", torch.full((6,), 2.0)),
    "buffer in place": lambda m: m.read.mul_(2),
    "buffer replaced": lambda m: setattr(m, "read", torch.full((6,), 2.0)),
    "buffer looked at": lambda m: m.looked_at.mul_(2),
    "attribute of a layer of torch": lambda m: setattr(m.bend, "negative_slope", 0.9),
    "forward of an instance": override,
    "layer": lambda m: setattr(m, "bend", nn.Tanh()),
    "weight in place": lambda m: m.middle.weight.data.mul_(2),
    "weight replaced": lambda m: setattr(m.middle, "weight", nn.Parameter(torch.randn(6, 6))),
    "weight transposed": transposed,
    "state dict": lambda m: m.load_state_dict({k: 2 * v for k, v in m.state_dict().items()}),
    "hook": lambda m: m.bend.register_forward_hook(lambda *a: a[2] * 2),
    "pre-hook": lambda m: m.bend.register_forward_pre_hook(lambda *a: (a[1][0] * 2,)),
    "hook exchanged": exchanged,
    "moved and back": lambda m: m.double().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(3, 4)
    sites = find_sites(model, x)
    before = sample(model, x, 0.2, 6, sites=sites, engine="compiled")
    assert_same_up_to_rounding(before.mean, sample(model, x, 0.2, 6, sites=sites).mean)
    CHANGES[change](model)
    expected = sample(model, x, 0.2, 6, sites=sites)
    found = sample(model, x, 0.2, 6, sites=sites, engine="compiled")
    assert_same_up_to_rounding(found.mean, expected.mean)
    assert_same_up_to_rounding(found.variance, expected.variance)
    if change != "moved and back":
        assert not torch.allclose(found.mean, before.mean)


def test_without_a_change_there_is_one_program() -> None:
    model, x = Model(), torch.randn(3, 4)
    for train in (True, False):
        model.train(train).requires_grad_(train)
        for grad in (torch.enable_grad, torch.no_grad):
            with grad():
                sample(model, x, {"head": 0.1 + 0.1 * train}, 6, engine="compiled")
    assert len(PROGRAMS[model]) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:more than 8 programs")
def test_dtypes_rates_sites_and_switches() -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(3, 4)

    class Makes(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.full((1,), 1 / 3).to(x)  # of the default dtype

    def check(model: nn.Module, x: Tensor, rate: Any = 0.2, **options: Any) -> None:
        expected = sample(model, x, rate, 6, **options)
        assert_same_up_to_rounding(sample(model, x, rate, 6, engine="compiled", **options).mean, expected.mean)

    check(model, x)
    check(model, x, 0.5)
    check(model, x, {"head": 0.3})
    check(model, x, sites=find_sites(model, x, kind="channel"))
    check(model, x, shared=False)
    check(model, x, seed=3)
    check(model, x, readout=lambda y: y[:, :1])
    with torch.inference_mode():
        check(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        check(model, x)
    model.double()
    check(model, x.double())
    other = Makes().eval().double()
    check(other, x.double())
    torch.set_default_dtype(torch.float64)
    try:
        check(other, x.double())
    finally:
        torch.set_default_dtype(torch.float32)


class Counts(nn.Module):
    """Writes into what it holds, in every pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("buffer", torch.zeros(()))
        self.plain, self.listed = torch.zeros(()), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        held = {"buffer": self.buffer, "plain": self.plain, "listed": self.listed[0]}[self.where]
        held += 1  # type: ignore[misc]
        return self.head(self.first(x) * held)


@pytest.mark.parametrize("where", ["buffer", "plain", "listed"])
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_model_writes_into_itself_is_refused_and_left(where: str, inference: bool) -> None:
    model, x = Counts(where), torch.randn(3, 4)
    sites = find_sites(model, x)
    with (
        torch.inference_mode(inference),
        pytest.raises(ArgumentError, match=r"tensors of its own that it writes into.*Use engine='auto'"),
    ):
        sample(model, x, 0.2, 4, sites=sites, engine="compiled")
    assert not any(float(held) for held in (model.buffer, model.plain, model.listed[0]))


class Branches(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h if h.sum() > 0 else -h)


@pytest.mark.filterwarnings("ignore:expected examples that do not depend on each other")
def test_a_branch_by_values_is_refused() -> None:
    model, x = Branches(), torch.randn(3, 4)
    with pytest.warns(latedrop.LatedropWarning, match="reached the parameters"):
        sites = find_sites(model, x, select="head")
    with pytest.raises(ArgumentError, match=r"found Python code that decides by values .*Use engine='auto'"):
        sample(model, x, 0.2, 4, sites=sites, engine="compiled")


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any) -> Any:
        def run(*args: Any) -> Any:
            raise RuntimeError("no working compiler\nand more")

        return run

    monkeypatch.setattr(compiled, "Compiled", broken)
    with pytest.raises(ArgumentError, match=r"what cannot be compiled \(RuntimeError: no working compiler\). Use"):
        sample(Model(), torch.randn(3, 4), 0.2, 4, engine="compiled")
