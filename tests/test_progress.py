"""Progress: lines where there is no terminal, a bar where there is one, nothing where it is not wanted."""

import io
import sys

import pytest
from torch import nn

import latedrop
from latedrop import terminal as module
from latedrop.terminal import progress, shown_on
from networks import mlp, noisy

EVERY = module._EVERY  # of which the other tests see nothing


class Clock:
    def __init__(self) -> None:
        self.now, self.step = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "_now", made)
    monkeypatch.setattr(module, "_EVERY", EVERY)
    return made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_every_few_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("calibrating", 3000) as tick:
        for _ in range(10):
            clock.now += 1
            tick(120)
    assert capsys.readouterr() == (
        "",
        "latedrop: calibrating: 600 of 3,000 rows, 120 rows/s, 20 s left\n"
        "latedrop: calibrating: 1,200 of 3,000 rows, 120 rows/s, 15 s left\n",
    )


def test_without_a_total(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in shown_on(iter(range(3)), "counting", unit="frames", show=True):
        clock.now += 4
    assert capsys.readouterr().err == "latedrop: counting: 2 frames, 0.25 frames/s\n"


@pytest.mark.parametrize(("total", "left"), [(2000, "33 min left"), (20_000, "5.6 h left"), (10, "0 s left")])
def test_times(clock: Clock, capsys: pytest.CaptureFixture[str], total: int, left: str) -> None:
    with progress("training", total, "epochs") as tick:
        clock.now += 10
        tick(10)
    assert capsys.readouterr().err.strip().endswith(left)


@pytest.mark.parametrize("terminal", [False, True])
def test_silence(clock: Clock, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    err = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with progress("calibrating", 30, show=False) as tick:
        clock.now += 100
        tick(30)
    with progress("calibrating", 30) as tick:  # short work
        tick(30)
    assert err.getvalue() == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(module, "_DELAY", 0.0)
    with progress("calibrating", 30) as tick:
        tick(10.5)
    assert "calibrating" in err.getvalue()
    assert "latedrop:" not in err.getvalue()


@pytest.mark.parametrize("rates", [None, [0.1, 0.2, 0.4]], ids=["terms", "rates"])
def test_calibrate_counts_rows(monkeypatch: pytest.MonkeyPatch, clock: Clock, rates: list[float] | None) -> None:
    net = mlp(2, 9, 1, act=nn.ReLU)
    x, y = noisy(net, 60, noise=0.1, inputs=2)
    method = latedrop.Sampling(rates=rates, draws=5) if rates else latedrop.Terms()
    err = io.StringIO()
    monkeypatch.setattr(clock, "step", 6.0)
    monkeypatch.setattr(sys, "stderr", err)
    latedrop.calibrate(net, (x, y), method=method, batches=latedrop.Batches(20))
    lines = err.getvalue().splitlines()
    assert lines[-1].startswith("latedrop: calibrating: 60 of 60 rows, ")
    assert len(lines) == 3 * (len(rates) if rates else 1)
    err.truncate(0)
    latedrop.calibrate(net, (x, y), method=method, batches=latedrop.Batches(20), progress=False)
    assert err.getvalue().strip("\0") == ""
