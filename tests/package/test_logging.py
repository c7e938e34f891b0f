"""Loggers below `latedrop` tell what is done; the root logger is nobody's but the user's."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import latedrop
from networks import mlp, noisy


@pytest.fixture
def net() -> nn.Module:
    return mlp(2, 20, 1, act=nn.ReLU)


@pytest.fixture
def rows(net: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return noisy(net, 40, noise=1.0, inputs=2)


def test_a_calibration_is_told(net: nn.Module, rows: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "latedrop")
    latedrop.calibrate(net, rows, progress=False).save(tmp_path / "cal.json")
    messages = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "cal.json") in messages[-1]
    assert {record.name.partition(".")[0] for record in caplog.records} == {"latedrop"}
    caplog.clear()
    caplog.set_level(logging.DEBUG, "latedrop")
    latedrop.calibrate(net, rows, method=latedrop.Sampling(rates=[0.1, 0.3], draws=6), progress=False)
    assert any("rate 0.3" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_nothing_is_heard_unless_asked_for() -> None:
    code = """
import logging, torch, latedrop
from torch import nn
torch.manual_seed(0)
x = torch.randn(40, 2)
net = nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1))
latedrop.calibrate(net, (x, net(x).detach() + torch.randn(40, 1)), progress=False)
assert logging.getLogger().handlers == []
assert [type(handler) for handler in logging.getLogger("latedrop").handlers] == [logging.NullHandler]
assert logging.getLogger("latedrop").level == logging.NOTSET
"""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
