"""A small regression in files: a network, its weights, validation and test rows, and its calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import latedrop
from latedrop.prediction.predictor import Predictor
from networks import trained

NAMES = ["load", "speed", "heat", "age"]
MODULE = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, OUTPUTS))
"""


def write(folder: Path, outputs: int = 1, rows: int = 300) -> Predictor:
    """`bearing.py`, `net.pt`, `cal.json` and `test.csv` in a folder."""
    torch.manual_seed(0)
    x = torch.randn(600 + rows, 4)
    noise = (0.1 + 0.35 * x[:, 1:2].abs()) * torch.randn(len(x), outputs)
    y = 20 + 3 * x[:, :1].sin() + x[:, 3:] + noise
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, outputs))
    trained(model, x[:300], y[:300] - 20, 120, 5e-3)
    with torch.no_grad():
        model[-1].bias += 20
    folder.mkdir(exist_ok=True)
    (folder / "bearing.py").write_text(MODULE.replace("OUTPUTS", str(outputs)))
    torch.save(model.state_dict(), folder / "net.pt")
    targets = ["wear", "noise"][:outputs]
    uq = latedrop.calibrate(model, (x[300:600], y[300:600]), reference=x[:300], progress=False)
    uq.save(folder / "cal.json")
    table = np.concatenate([x[600:].numpy(), y[600:].numpy()], 1)
    np.savetxt(folder / "test.csv", table, delimiter=",", header=",".join([*NAMES, *targets]), comments="", fmt="%.6g")
    return uq


def words(folder: Path, command: str) -> list[str]:
    """The beginning of a command line that reads the model."""
    return [command, "bearing:net", str(folder / "cal.json"), "--weights", str(folder / "net.pt")]
