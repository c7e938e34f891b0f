"""The contract, on architectures that people use; and the table of the docs says what the code does.

`python docs/make_architectures.py` writes the table anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from architectures import ARCHITECTURES, DRAWS, RATE, Architecture, Row, missing, tried
from latedrop import Sampling, calibrate, find_sites, inject, linearize, sample
from latedrop.data.rows import map_rows, take_rows
from latedrop.dropout.moments import Moments
from latedrop.errors import SiteError
from latedrop.network.network import call, read
from latedrop.network.sites import Sites
from untouched import assert_same, state

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

from make_architectures import rows_of  # noqa: E402

pytestmark = pytest.mark.slow


@dataclass
class Subject:
    """A model of the list, and what several tests need of it."""

    architecture: Architecture
    model: nn.Module
    x: Any

    @property
    def readout(self) -> Any:
        return self.architecture.readout

    @cached_property
    def sites(self) -> Sites:
        return find_sites(self.model, self.x)

    @cached_property
    def row(self) -> Row:
        return tried(self.architecture, self.model, self.x)

    @cached_property
    def loop(self) -> Moments:
        return self.sample(engine="loop", keep_draws=True)

    def sample(self, x: Any = None, rate: float = RATE, **options: Any) -> Moments:
        x = self.x if x is None else x
        return sample(self.model, x, rate, DRAWS, sites=self.sites, readout=self.readout, **options)

    def plain(self) -> Tensor:
        with torch.no_grad():
            return read(call(self.model, self.x), self.readout, len(self.loop.mean))


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda architecture: architecture.name)
def any_subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    absent = missing(request.param.library)
    if absent:
        pytest.skip(f"{absent[0]} is not installed")
    yield Subject(request.param, *request.param.make())
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def subject(any_subject: Subject) -> Subject:
    if isinstance(any_subject.model, torch.jit.ScriptModule):
        pytest.skip("nothing can be injected into TorchScript")
    return any_subject


def assert_near(value: Tensor, expected: Tensor, spread: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the rounding of a deep network, measured by what dropout itself does to the output."""
    tolerance = 0.3 if dtype == torch.bfloat16 else 1e-3
    assert float((value - expected).abs().max()) <= tolerance * float(spread.max())


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def test_rate_zero_is_the_plain_model_bit_for_bit(subject: Subject) -> None:
    asked = [p for p in subject.model.parameters() if p.requires_grad]
    for parameter in asked:  # torch computes some layers in another way where weights ask for gradients
        parameter.requires_grad_(False)
    plain = subject.plain()
    with inject(subject.model, subject.sites, 0.0), torch.no_grad():
        injected = read(call(subject.model, subject.x), subject.readout, len(plain))
    moments = subject.sample(rate=0.0)
    assert torch.equal(injected, plain)  # rate 0 multiplies by 1, on the same batch
    assert torch.equal(moments.mean, plain.float())  # rate 0 multiplies by 1, on the same batch
    assert not moments.variance.any()
    for parameter in asked:
        parameter.requires_grad_(True)


def test_the_variance_is_positive_and_finite(subject: Subject) -> None:
    for variance in (subject.loop.variance, subject.sample(shared=False).variance):
        assert bool(torch.isfinite(variance).all())
        assert bool((variance > 0).all())


def test_every_site_counts(subject: Subject) -> None:
    total = len(subject.loop.mean[0].flatten())
    readout = subject.readout
    if total > 1024:
        readout = lambda output: read(output, subject.readout, len(subject.loop.mean)).mean((1, 2, 3))  # noqa: E731
    variances = linearize(subject.model, subject.x, subject.sites, readout).variance_by_site
    assert bool(torch.isfinite(variances).all())
    idle = [s.name for s, v in zip(subject.sites, variances.sum((0, 1)), strict=True) if not v > 0]
    assert idle == []


def test_vectorised_equals_loop(subject: Subject) -> None:
    if subject.row.cells[1] == "yes":
        fast = subject.sample(engine="rows", keep_draws=True)
    else:
        assert subject.row.cells[1].startswith("a loop: ")
        fast = subject.sample(keep_draws=True)  # finds out by itself
    assert_near(fast.outputs, subject.loop.outputs, subject.loop.variance.sqrt(), dtype_of(subject.model))


def test_prediction_does_not_depend_on_the_batch(subject: Subject) -> None:
    spread = subject.loop.variance.sqrt()
    alone = subject.sample(take_rows(subject.x, slice(1, 2)), keep_draws=True)
    assert_near(alone.outputs, subject.loop.outputs[:, 1:2], spread, dtype_of(subject.model))
    turned = subject.sample(map_rows(subject.x, lambda t: t.flip(0)), keep_draws=True, chunk=1)
    assert_near(turned.outputs, subject.loop.outputs.flip(1), spread, dtype_of(subject.model))


def test_the_model_is_the_users(subject: Subject) -> None:
    model, x = subject.architecture.make()
    target = subject.plain().float() + torch.linspace(0.5, 1, subject.plain().numel()).reshape(subject.plain().shape)
    model.train()
    list(model.modules())[-1].eval()
    model.register_forward_hook(lambda *_: None)
    before = state(model)
    tried(subject.architecture, model, x)
    assert_same(before, state(model))
    draws = 2 * DRAWS  # some have few units, of which hardly any would drop
    with pytest.warns(UserWarning, match="validation rows"):
        uq = calibrate(
            model, (x, target), method=Sampling(rates=[RATE], draws=draws), sites=subject.sites, readout=subject.readout
        )
    assert bool((uq.predict(x).variance > 0).all())
    assert_same(before, state(model))


def test_the_table_of_the_docs(any_subject: Subject) -> None:
    page = (DOCS / "supported_models.md").read_text(encoding="utf-8")
    if isinstance(any_subject.model, torch.jit.ScriptModule):
        with pytest.raises(SiteError, match=r"found TorchScript.*torch\.export"):
            find_sites(any_subject.model, any_subject.x)
    assert str(any_subject.row) in rows_of(page), "run python docs/make_architectures.py"


def test_the_table_has_no_other_rows() -> None:
    page = (DOCS / "supported_models.md").read_text(encoding="utf-8")
    named = [row.split(" | ")[0].removeprefix("| ") for row in rows_of(page)]
    assert named == [
        f"{architecture.name}, {architecture.shown}" if architecture.shown else architecture.name
        for architecture in ARCHITECTURES
    ]
