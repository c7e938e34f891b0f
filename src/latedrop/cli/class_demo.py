"""The whole road for classes on real data: train without dropout, calibrate, a rule and sets, evaluate on test rows.

The data are the 1797 handwritten digits of 8 x 8 pixels that ship inside scikit-learn (Alpaydin, Kaynak 1998), so
nothing is downloaded. Digits turned by a quarter serve as rows unlike all others.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from latedrop import plots
from latedrop.calibration.class_sets import Rejection
from latedrop.cli.demo import Data, checked_run, shuffled
from latedrop.cli.printing import print_class_judgement
from latedrop.detection.detection import DetectorScores
from latedrop.devices import one_thread, versions
from latedrop.evaluation.class_judgement import ClassJudgement, judge_classes
from latedrop.files import write_aside
from latedrop.metrics.classes import confusion, reliability, risk_coverage
from latedrop.prediction.calibrate import calibrate
from latedrop.prediction.class_prediction import ClassPrediction
from latedrop.progress import shown_on
from latedrop.report import png, write_class_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ClassDemo", "digits", "network", "picture", "print_result", "run", "write"]

_PARTS = {"train": 600, "validation": 400, "held": 400, "test": 397}
_RISK, _LEVEL = 0.03, 0.95
_ABOUT = (
    "Handwritten digits of 8 x 8 pixels (Alpaydin, Kaynak 1998). A network of two hidden layers of 64 ReLU units, "
    "without dropout, was trained for {epochs} epochs. Rows were put at random into a training ({train}), a validation "
    "({validation}), a held-out ({held}: for the rule, the sets and the detector) and a test part ({test})."
)


@dataclass(frozen=True)
class ClassDemo:
    """What the demo chose and measured.

    Attributes:
        seed: fixes the split, the initial weights and the order of the batches.
        epochs: of training.
        rows: how many, by part.
        images: of the test rows, `(N, 8, 8)`.
        prediction: of the test rows; it carries the calibration, with prediction sets.
        judgement: what the test labels say about it.
        rule: which rows to keep.
        kept: share of the test rows that it keeps.
        errors: the error rate of those.
        detection: how well each score tells turned digits.
        versions: of what the numbers depend on.
        seconds: that all of it took.
    """

    seed: int
    epochs: int
    rows: dict[str, int]
    images: Tensor
    prediction: ClassPrediction
    judgement: ClassJudgement
    rule: Rejection
    kept: float
    errors: float
    detection: tuple[DetectorScores, ...]
    versions: dict[str, str]
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The numbers and where they come from, as plain data."""
        return {
            "data": "digits",
            "seed": self.seed,
            "epochs": self.epochs,
            **self.judgement.to_dict(),
            "rows_by_part": self.rows,
            "rule": {**asdict(self.rule), "test_kept": self.kept, "test_errors": self.errors},
            "detection": [asdict(row) for row in self.detection],
            "versions": self.versions,
            "seconds": round(self.seconds, 2),
        }


def run(seed: int = 0, *, epochs: int = 120, progress: bool = True) -> ClassDemo:
    """Train, calibrate, evaluate; the global random state is left alone."""
    seed = checked_run(seed, epochs)
    start = time.perf_counter()
    with one_thread():
        train, validation, held, (x, y) = parts(seed)
        model = network(*train, seed=seed, epochs=epochs, progress=progress)
        uq = calibrate(model, validation, reference=train[0], progress=progress).conformal(held)
        prediction, rule = uq.predict(x), uq.rejection(held, risk=_RISK)
        keep = prediction.kept(rule)
        found = uq.detector(held[0]).evaluate(x, x.reshape(-1, 8, 8).rot90(1, (1, 2)).flatten(1))
    return ClassDemo(
        seed=seed,
        epochs=epochs,
        rows=dict(_PARTS),
        images=x.reshape(-1, 8, 8),
        prediction=prediction,
        judgement=judge_classes(prediction, y, level=_LEVEL),
        rule=rule,
        kept=float(keep.double().mean()),
        errors=float((prediction.label != y)[keep].double().mean()) if bool(keep.any()) else 0.0,
        detection=found,
        versions=versions(),
        seconds=time.perf_counter() - start,
    )


def digits() -> Data:
    """Pixels `(1797, 64)` from 0 to 1, and labels `(1797,)`."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y, dtype=torch.int64)


def parts(seed: int) -> list[Data]:
    """Training, validation, held-out and test rows, in an order that the seed fixes."""
    return shuffled(digits(), _PARTS.values(), seed)


def network(x: Tensor, y: Tensor, *, seed: int, epochs: int, progress: bool = True) -> nn.Module:
    """Two hidden layers of 64 ReLU units, no dropout, fitted to `(N, 64)` and labels `(N,)`; gives logits."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in shown_on(range(epochs), "training", unit="epochs", show=progress):
            for batch in torch.randperm(len(x)).split(100):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return model.eval()


def write(result: ClassDemo, folder: Path) -> list[Path]:
    """Write report.html, demo.png and result.json into a folder that exists; needs matplotlib."""
    paths = [folder / name for name in ("report.html", "demo.png", "result.json")]
    write_class_report(
        paths[0],
        title="latedrop demo: digits",
        prediction=result.prediction,
        judgement=result.judgement,
        about=_ABOUT.format(**result.rows, epochs=result.epochs),
        reproduce={
            "command": f"latedrop demo --task classification --seed {result.seed}",
            **{name: value for name, value in result.versions.items() if name in ("python", "system")},
        },
    )
    write_aside(paths[1], png(picture(result)))
    write_aside(paths[2], json.dumps(result.summary()).encode())
    return paths


def picture(result: ClassDemo) -> Figure:
    """The result at a glance: reliability, risk over coverage, confusion with rejected rows, doubtful digits."""
    found, p = result.judgement, result.prediction
    figure = plots.new_figure(12, 10)
    axes = figure.subplots(2, 2)
    ways = found.probabilities.items()
    bins = {name: reliability(q, found.labels, bins=8, mass=True)[:2] for name, q in ways}
    plots.reliability_diagram(bins, axes[0, 0])
    risks = {name: risk_coverage(-q.amax(1), q.argmax(1) != found.labels) for name, q in ways}
    plots.risk_coverage(risks, axes[0, 1])
    plots.confusion(confusion(found.labels, p.label, 10, p.kept(result.rule)), ax=axes[1, 0])
    said = zip(p.label.tolist(), p.confidence.tolist(), found.labels.tolist(), strict=True)
    captions = [f"{label} ({sure:.0%}), is {true}" for label, sure, true in said]
    plots.doubtful_images(result.images, 1 - p.confidence, captions, axes[1, 1])
    return figure


def print_result(result: ClassDemo, files: list[Path], *, as_json: bool) -> None:
    """What was done, the verdict, the rule, and how turned digits are told."""
    if as_json:
        print(json.dumps({**result.summary(), "files": [str(path) for path in files]}, indent=1))
        return
    rows = result.rows
    print(
        f"Digits: a network without dropout, trained on {rows['train']} rows, calibrated on {rows['validation']}; "
        f"{rows['held']} more\nfor the rule, the sets and the detector."
    )
    print_class_judgement(result.judgement, "", [])
    print(f"\nThe rule: {result.rule}.")
    print(f"Of the test rows it keeps {result.kept:.1%}, of which {result.errors:.1%} are wrong.")
    print("\nDigits turned by a quarter, told from test rows:")
    for row in result.detection:
        print(f"  {row}")
    print(f"\nwritten: {', '.join(str(path) for path in files)}")
