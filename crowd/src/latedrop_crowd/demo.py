"""The whole chain without any data: synthetic scenes, a shipped counter, calibration, intervals, maps and rejection.

The counter was trained without dropout on scenes with little clutter. Here it meets scenes with more of it: dropout is
injected and its variance sampled, and worked out without sampling; both are calibrated on validation scenes and
scored on test scenes.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop import Batches, Prediction, Predictor, Sampling, calibrate
from latedrop.devices import versions
from latedrop.errors import ArgumentError
from latedrop.evaluation.evaluation import Evaluation, compare, evaluate
from latedrop.files import write_aside
from latedrop.progress import shown_on
from latedrop.records import plain
from latedrop.report import Picture, overview, png, write_report
from latedrop_crowd.calibration import CrowdCalibration, calibrate_counter, counted_heads, read_maps
from latedrop_crowd.counting import CountedFrame, count_people, write_counts
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained, load_weights, shipped
from latedrop_crowd.panels import draw_panel
from latedrop_crowd.regions import Maps, fit_policy, measure_rejection, near_cells
from latedrop_crowd.scenes import make_scenes

__all__ = ["NOTES", "UNIT", "CrowdDemo", "rejection_table", "run", "write"]

UNIT = "people"
NOTES = {
    "sampled, raw": "the variance over draws of the count, as it is.",
    "sampled, scaled": "the same, times the scale of least NLL on the validation scenes, and a floor.",
    "sampling-free": "a floor and terms (dropout to first order, size of the count, leverage), without draws.",
    "constant": "no dropout: the validation RMSE as standard deviation of every scene.",
}
_ABOUT = (
    "Scenes of a square with people of known number, made by the package. The network, an MCNN without dropout, was "
    "trained on scenes with little clutter; validation ({validation}) and test scenes ({test}) have more of it, and "
    "kinds that training did not show. Dropout was injected before every convolution but the first of each column."
)
_SCENES = 40
_RATES = (0.01,)
_PANELS = 3


@dataclass(frozen=True)
class CrowdDemo:
    """What the demo measured.

    Attributes:
        seed: fixes the scenes and the masks.
        scenes: how many, by part.
        calibration: sampling-free, with its policy.
        prediction: of the test scenes' counts, sampling-free, `(N,)`.
        sampled: the same from draws.
        target: their true counts, `(N,)`.
        evaluations: of the intervals on the count.
        rejection: what `measure_rejection` says.
        counted: the test scenes.
        heads: their heads, as x, y in pixels.
        versions: of what the numbers depend on.
        seconds: by step.
    """

    seed: int
    scenes: dict[str, int]
    calibration: CrowdCalibration
    prediction: Prediction
    sampled: Prediction
    target: Tensor
    evaluations: tuple[Evaluation, ...]
    rejection: dict[str, Any]
    counted: tuple[CountedFrame, ...] = field(repr=False)
    heads: tuple[Any, ...] = field(repr=False)
    versions: dict[str, str]
    seconds: dict[str, float]

    def headline(self) -> str:
        """Two lines for people."""
        mae = float((self.prediction.mean - self.target).abs().mean())
        return (
            f"Scenes: a counter without dropout, calibrated on {self.scenes['validation']} scenes, evaluated on "
            f"{self.scenes['test']} others\nwith {self.target.mean():.1f} people on average; its count is off by "
            f"{mae:.2f} on average."
        )

    def summary(self) -> dict[str, Any]:
        """The numbers of the tables and where they come from, as plain data."""
        curve = ("levels", "observed")
        return {
            "data": "scenes",
            "unit": UNIT,
            "seed": self.seed,
            "scenes": self.scenes,
            "evaluations": [{k: v for k, v in asdict(row).items() if k not in curve} for row in self.evaluations],
            "rejection": self.rejection,
            "policy": None if self.calibration.policy is None else plain(self.calibration.policy),
            "versions": self.versions,
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """All numbers as JSON: those of the summary, the calibration, and every test scene."""
        rows = [row.row() | {"true": int(true)} for row, true in zip(self.counted, self.target.tolist(), strict=True)]
        record = self.summary() | {"test": rows, "calibration": json.loads(self.calibration.to_json())}
        return json.dumps(record, indent=1) + "\n"


def run(
    draws: int = 10,
    seed: int = 0,
    *,
    scenes: CrowdSet | None = None,
    trained: Trained | None = None,
    progress: bool = True,
) -> CrowdDemo:
    """Calibrate, count, reject; the global random state is left alone.

    Args:
        draws: thinned networks, where the variance is sampled.
        seed: fixes the scenes and the masks.
        scenes: to calibrate on and to count; 40 of each, made from the seed, where None.
        trained: the counter; the shipped one for scenes where None.
        progress: show bars.
    """
    if not 0 <= seed < 2**32:
        raise ArgumentError(f"expected a seed from 0 to 2**32 - 1; found {seed}.")
    method = Sampling(rates=_RATES, draws=draws, floor=True, seed=seed)  # checks draws and seed before the work
    trained = load_weights(shipped("scenes")) if trained is None else trained
    watch = _Watch()
    scenes = make_scenes(_SCENES, _SCENES, _SCENES, seed=seed) if scenes is None else scenes
    watch.lap("scenes")
    calibration = calibrate_counter(trained, scenes, policy=False, progress=progress)
    fitted = read_maps(trained, calibration, scenes, scenes.validation, progress=progress)
    calibration = replace(calibration, policy=fit_policy(fitted, near=near_cells(scenes.sigma)))
    watch.lap("calibration, sampling-free")
    counted = tuple(_bar(count_people(trained, calibration, _images(scenes)), len(scenes.test), progress))
    watch.lap("counting, sampling-free")
    rejection = measure_rejection(fitted, _maps(counted, scenes), seed, near=near_cells(scenes.sigma))
    watch.lap("rejection")
    target = scenes.counts(scenes.test)
    sampled = _sampled(trained, scenes, method, progress)
    watch.lap("calibration and counting, sampled")
    free = Prediction(
        torch.cat([row.prediction.mean for row in counted]).cpu(),
        torch.cat([row.prediction.raw_variance for row in counted]).cpu(),
        calibration.count,
    )
    return CrowdDemo(
        seed=seed,
        scenes={"validation": len(scenes.validation), "test": len(scenes.test)},
        calibration=calibration,
        prediction=free,
        sampled=sampled,
        target=target,
        evaluations=_evaluations(sampled, free, calibration, target),
        rejection=rejection,
        counted=counted,
        heads=tuple(scenes.frames[i].points for i in scenes.test),
        versions=versions() | {"system": f"{platform.system()} {platform.machine()}"},
        seconds=watch.laps,
    )


def write(result: CrowdDemo, folder: Path) -> list[Path]:
    """Write report, overview, panels, counts, calibration and result into a folder that exists; needs matplotlib."""
    names = ("report.html", "demo.png", "result.json", "counts.csv", "scenes.calibration.json")
    report, picture, record, counts, calibration = (folder / name for name in names)
    chosen = _telling(result.counted)
    pictures, panels = [], []
    for index in chosen:
        row = result.counted[index]
        content = png(draw_panel(row, heads=result.heads[index]))
        panels.append(folder / f"{row.name}.panel.png")
        write_aside(panels[-1], content)
        said = f"{row}; truly {int(result.target[index])}. {int(row.faint.sum())} faint regions, "
        said += f"{int(row.rejected.sum())} rejected."
        pictures.append(Picture(row.name, said, f"Scene, density, deviation and regions. {said}", content))
    write_aside(picture, png(overview(result.sampled, result.target, result.evaluations, unit=UNIT)))
    write_aside(record, result.to_json().encode())
    counts.unlink(missing_ok=True)
    write_counts(result.counted, counts)
    result.calibration.save(calibration)
    write_report(
        report,
        title="latedrop crowd demo: people on a square",
        calibration=result.calibration.count,
        prediction=result.prediction,
        target=result.target,
        evaluations=result.evaluations,
        pictures=pictures,
        unit=UNIT,
        names=["count"],
        in_use="sampling-free",
        about=f"{_ABOUT.format(**result.scenes)} Rejection of regions: {result.rejection['why']}.",
        notes=NOTES,
        reproduce={"command": f"latedrop crowd demo --seed {result.seed}", **result.versions},
    )
    return [report, picture, record, counts, calibration, *panels]


def rejection_table(result: Mapping[str, Any]) -> list[list[str]]:
    """What rejection does to the test frames, against its controls, as text; header first."""
    head = ["", "regions\nrejected", "false\nleft", "true\nlost", "count\nMAE", "count\nRMSE", "count\nbias"]
    controls = result["controls"]
    lines = {
        "before": result["before"],
        "after rejection": result["after"],
        "as many at random": {k: v["mean"] for k, v in controls["random"].items() if isinstance(v, dict)},
        "as many of least mass": controls["lowest_mass"],
        "low density, tuned": controls["low_density"],
    }
    table = [head]
    for label, row in lines.items():
        counts = [f"{row[name]:.0f}" for name in ("rejected", "false_kept", "true_rejected")]
        table.append([label, *counts, f"{row['mae']:.3f}", f"{row['rmse']:.3f}", f"{row['bias']:+.3f}"])
    return table


def _sampled(trained: Trained, scenes: CrowdSet, method: Sampling, progress: bool) -> Prediction:
    """The count by draws: calibrated on the same validation scenes, predicted on the test scenes."""
    device = trained.device

    def batch(indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = torch.stack([scenes.image(i, trained.channels) for i in indices])
        return images.to(device), scenes.counts(indices)

    predictor: Predictor = calibrate(
        trained.model,
        batch(scenes.validation),
        method=method,
        readout=trained.count_of,
        batches=Batches(8),
        progress=progress,
    )
    return predictor.predict(batch(scenes.test)[0])


def _evaluations(
    sampled: Prediction, free: Prediction, calibration: CrowdCalibration, target: Tensor
) -> tuple[Evaluation, ...]:
    raw, scaled, *_ = compare(sampled, target)
    _, first_order, *_ = compare(free, target)
    spread = torch.full_like(free.mean, calibration.count.table[0].rmses[0] ** 2)
    return (
        replace(raw, label="sampled, raw"),
        replace(scaled, label="sampled, scaled"),
        replace(first_order, label="sampling-free"),
        evaluate(free.mean, spread, target, label="constant"),
    )


def _images(scenes: CrowdSet) -> Any:
    return ((scenes.frames[i].name, scenes.image(i)) for i in scenes.test)


def _maps(counted: Sequence[CountedFrame], scenes: CrowdSet) -> Maps:
    heads = [counted_heads(scenes, index) for index in scenes.test]
    return Maps(np.stack([row.density for row in counted]), np.stack([row.std_map for row in counted]), heads)


def _telling(counted: Sequence[CountedFrame]) -> list[int]:
    """Frames to draw: most mass rejected, most faint regions, widest interval; no frame twice."""
    order = [
        [float(row.density.sum() - row.kept.sum()) for row in counted],
        [float(row.faint.sum()) for row in counted],
        [row.high - row.low for row in counted],
    ]
    chosen: list[int] = []
    for values in order:
        chosen.append(max((i for i in range(len(counted)) if i not in chosen), key=lambda i: values[i]))
    return chosen[:_PANELS]


class _Watch:
    """Seconds by step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 2)
        self._last = now


def _bar(rows: Any, total: int, show: bool) -> Any:
    return shown_on(rows, "counting", total, "frames", show=show)
