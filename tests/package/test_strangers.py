"""Networks of kinds that nobody prepared for, as regressors and as classifiers: calibrate, predict, judge, report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import latedrop
from latedrop.data.rows import take_rows
from latedrop.errors import SiteError
from latedrop.evaluation.judgement import judge, judge_classes
from latedrop.report import write_class_report, write_report
from latedrop.weights import fingerprint
from rounding import assert_same_up_to_rounding

ROWS, HELD = 60, 40


class Grouped(nn.Module):
    """Convolutions in groups, and one for each channel."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.groups = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=4)
        self.norm, self.each, self.last = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.each(self.norm(self.groups(self.first(x).relu())).relu()).mean((2, 3)))


class Packed(nn.Module):
    """Sequences of several lengths, packed inside."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.gru, self.last = nn.GRU(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, outputs)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.last(self.gru(packed)[1].transpose(0, 1).flatten(1))


class Siamese(nn.Module):
    """One network for two inputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.twin = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.last = nn.Linear(8, outputs)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last((self.twin(a) - self.twin(b)).abs())


@dataclass
class Output:
    loss: Tensor | None = None
    logits: Tensor | None = None


class Parts(nn.Module):
    """Gives its output in one of several forms."""

    def __init__(self, outputs: int, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.form = nn.Linear(5, 16), nn.Linear(16, outputs), form

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.form(self.last(hidden), hidden)


class Complex(nn.Module):
    """Complex numbers, and a complex weight, in between."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, outputs)
        self.weight = nn.Parameter(0.5 * torch.randn(5, 5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x).tanh()) @ self.weight, 8).relu())


def _inputs(dice: torch.Generator) -> dict[str, Any]:
    n = ROWS + HELD
    flat = torch.randn(n, 5, generator=dice)
    lengths = torch.cat([torch.tensor([7]), torch.randint(1, 8, (n - 1,), generator=dice)])
    return {
        "grouped": torch.randn(n, 2, 6, 6, generator=dice),
        "packed": (torch.randint(0, 20, (n, 7), generator=dice), lengths),
        "siamese": (flat, torch.randn(n, 5, generator=dice)),
        "complex": torch.randn(n, 8, generator=dice),
        "double": flat.double(),
        "dict": flat,
        "object": flat,
        "tuple": flat,
    }


MADE: dict[str, tuple[Callable[[int], nn.Module], Any]] = {
    "grouped": (Grouped, None),
    "packed": (Packed, None),
    "siamese": (Siamese, None),
    "complex": (Complex, None),
    "double": (lambda outputs: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, outputs)).double(), None),
    "dict": (lambda outputs: Parts(outputs, lambda y, h: {"logits": y, "hidden": h}), "logits"),
    "object": (lambda outputs: Parts(outputs, lambda y, h: Output(None, y)), None),
    "tuple": (lambda outputs: Parts(outputs, lambda y, h: (y, h)), 0),
}


def case(kind: str, outputs: int) -> tuple[nn.Module, Any, Tensor, dict[str, Any]]:
    make, readout = MADE[kind]
    dice = torch.Generator().manual_seed(0)
    x = _inputs(dice)[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(outputs).eval()
    options = {} if readout is None else {"readout": readout}
    y = latedrop.sample(model, x, 0, 2, **options).mean
    noise = torch.randn(y.shape, generator=dice).to(y)
    return model, x, y + 0.1 * noise if outputs == 1 else (y / y.std() + noise).argmax(1), options


@pytest.mark.parametrize("kind", MADE)
def test_a_regressor(kind: str, tmp_path: Path) -> None:
    model, x, y, options = case(kind, 1)
    fit, held = take_rows(x, slice(ROWS)), take_rows(x, slice(ROWS, None))
    uq = latedrop.calibrate(model, (fit, y[:ROWS]), progress=False, **options)
    p = uq.predict(held)
    assert_same_up_to_rounding(uq.predict(take_rows(held, slice(1))).std, p.std[:1])
    assert judge(p, y[ROWS:]).rows == HELD
    write_report(tmp_path / "page.html", title=kind, calibration=uq.calibration, prediction=p, target=y[ROWS:])
    small, sites = take_rows(x, slice(10)), uq.calibration.sites
    drawn = latedrop.sample(model, small, 0.02, 400, sites=sites, **options).variance.sum()
    linear = latedrop.linearize(model, small, sites, **options).variance(0.02).sum()
    assert float(linear / drawn) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("kind", MADE)
def test_a_classifier(kind: str, tmp_path: Path) -> None:
    model, x, y, options = case(kind, 3)
    fit, held = take_rows(x, slice(ROWS)), take_rows(x, slice(ROWS, None))
    terms = None if kind == "complex" else ["leverage"]  # which is quick
    uq = latedrop.calibrate(model, (fit, y[:ROWS]), method=latedrop.Terms(terms), progress=False, **options)
    assert isinstance(uq, latedrop.ClassPredictor)
    p = uq.predict(held)
    assert_same_up_to_rounding(uq.predict(take_rows(held, slice(1))).probabilities, p.probabilities[:1])
    assert judge_classes(p, y[ROWS:]).verdict.rows == HELD
    write_class_report(tmp_path / "page.html", title=kind, prediction=p, labels=y[ROWS:])


def test_complex_weights_are_told_apart() -> None:
    model, other = Complex(1), Complex(1)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.weight.imag += 1
    assert fingerprint(model) != fingerprint(other)


def test_a_quantised_model_is_named() -> None:
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    quantised = pytest.importorskip("torch.ao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantised.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        with pytest.raises(SiteError, match="found quantised or complex ones, 0, 2"):
            latedrop.find_sites(model, torch.randn(4, 5))  # it scales a batch as a whole, so its rows may meet
