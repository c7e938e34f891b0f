"""A network with complex numbers, as regressor and as classifier: calibrate, predict, judge, report."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import SiteError
from latedrop.evaluation.judgement import judge, judge_classes
from latedrop.report import write_class_report, write_report
from latedrop.weights import fingerprint
from networks import Net
from rounding import assert_same_up_to_rounding

ROWS, HELD = 60, 40


def with_complex_numbers(outputs: int) -> nn.Module:
    """Complex numbers, and a complex weight, in between."""

    def run(net: Net, x: Tensor) -> Tensor:
        return net.last(torch.fft.irfft(torch.fft.rfft(net.first(x).tanh()) @ net.weight, 8).relu())

    weight = nn.Parameter(0.5 * torch.randn(5, 5, dtype=torch.cfloat))
    return Net(run, first=nn.Linear(8, 8), last=nn.Linear(8, outputs), weight=weight)


def case(outputs: int) -> tuple[nn.Module, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS + HELD, 8, generator=dice)
    torch.manual_seed(0)
    model = with_complex_numbers(outputs)
    y = latedrop.sample(model, x, 0, 2).mean
    noise = torch.randn(y.shape, generator=dice).to(y)
    return model, x, y + 0.1 * noise if outputs == 1 else (y / y.std() + noise).argmax(1)


def test_a_regressor(tmp_path: Path) -> None:
    model, x, y = case(1)
    fit, others = x[:ROWS], x[ROWS:]
    uq = latedrop.calibrate(model, (fit, y[:ROWS]), progress=False)
    p = uq.predict(others)
    assert_same_up_to_rounding(uq.predict(others[:1]).std, p.std[:1])
    assert judge(p, y[ROWS:]).rows == HELD
    write_report(tmp_path / "page.html", title="complex", calibration=uq.calibration, prediction=p, target=y[ROWS:])
    small, sites = x[:10], uq.calibration.sites
    drawn = latedrop.sample(model, small, 0.02, 400, sites=sites).variance.sum()
    linear = latedrop.linearize(model, small, sites).variance(0.02).sum()
    assert float(linear / drawn) == pytest.approx(1, abs=0.3)


def test_a_classifier(tmp_path: Path) -> None:
    model, x, y = case(3)
    fit, others = x[:ROWS], x[ROWS:]
    uq = latedrop.calibrate(model, (fit, y[:ROWS]), progress=False)
    p = uq.predict(others)
    assert_same_up_to_rounding(uq.predict(others[:1]).probabilities, p.probabilities[:1])
    assert judge_classes(p, y[ROWS:]).verdict.rows == HELD
    write_class_report(tmp_path / "page.html", title="complex", prediction=p, labels=y[ROWS:])


def test_complex_weights_are_told_apart() -> None:
    model, other = with_complex_numbers(1), with_complex_numbers(1)
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
