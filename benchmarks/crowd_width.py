"""Does anything rank the errors of a count? Terms of the variance, each by blocked cross-validation.

    python -m benchmarks.crowd_width --data ../shared/data      # measures, then writes results/crowd_width.json
    python -m benchmarks.crowd_width --tables                   # from the JSON alone

The shipped counters count every k-th test frame of their sets; they have seen none of these. Each candidate is a floor
and its terms, `variance = floor + sum_j theta_j t_j`, fitted to four fifths of the frames and judged on the fifth that
was left out, a run of time, as neighbouring frames err alike. The forest learns squared errors from pooled features
(what enters the last layer, as means and deviations over the map), the count and the other terms, in the same folds.

*Rank correlation* is Spearman's, of the predicted standard deviation and the absolute error inside each left-out run.
*Gain* is how much likelier the errors are than by one constant variance, in nats a frame.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.ensemble import RandomForestRegressor
from torch import Tensor

from benchmarks.timing import RESULTS, machine, write
from latedrop.calibration.fitted_terms import TYPICAL, Block, fit_terms
from latedrop.progress import shown_on
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop_crowd.blocks import block_means, standard_error
from latedrop_crowd.calibration import load_calibration
from latedrop_crowd.layouts import CrowdSet, open_as_trained
from latedrop_crowd.mcnn import Trained, faster, load_weights, shipped

SETS = {"mall": ("mall", 4), "ucsd": ("ucsd", 4), "pets": ("pets2009", 1)}
"""The folder of each set, and which of its test frames are counted: every k-th."""
CANDIDATES = {
    "size": ("size",),
    "dropout": ("dropout",),
    "leverage of features": ("leverage",),
    "leverage of mask gradients": ("gradients",),
    "size + both leverages": ("size", "leverage", "gradients"),
    "forest": ("forest",),
    "all": ("size", "dropout", "leverage", "gradients", "forest"),
}
RUNS = 5
REFERENCE = 160


class Vectors(NamedTuple):
    """Of frames: counts `(N,)`, first-order variances `(N,)`, pooled features `(N, F)`, mask gradients `(N, 1, D)`."""

    count: Tensor
    dropout: Tensor
    features: Tensor
    gradients: Tensor


def vectors(trained: Trained, crowd_set: CrowdSet, indices: list[int]) -> Vectors:
    """One pass with gradients over each frame."""
    record = load_calibration(shipped(str(trained.about["set"]), ".calibration.json"), trained).count
    assert record.terms is not None
    found = []
    for index in shown_on(indices, crowd_set.name, unit="frames", show=True):
        image = crowd_set.image(index, trained.channels)[None]
        rows = BatchContext(
            trained.network, image, record.sites, trained.count_of, record.terms.features, gradients=True
        )
        gradients = rows.gradients
        found.append(Vectors(rows.mean, rows.linear.variance_by_site[:, 0].sum(1), rows.features, gradients))
    return Vectors(*(torch.cat(part).double() for part in zip(*found, strict=True)))


def columns_of(seen: Vectors, test: Vectors) -> dict[str, Tensor]:
    """Values of the terms `(N,)` on test frames; what is usual is told by training frames."""
    plain = Leverage().learned_from([seen.features], own=False)
    mask = GradientLeverage().learned_from([seen.gradients], own=False)
    return {
        "size": test.count.clamp_min(0) + 1,
        "dropout": test.dropout,
        "leverage": plain.directions(test.features[:, None]).square().sum(2)[0],
        "gradients": mask.directions(test.gradients).square().sum(2)[0],
    }


def judged(columns: dict[str, Tensor], features: Tensor, error: Tensor) -> dict[str, Any]:
    """Rank correlation and gain of each candidate on frames left out of its fit."""
    runs = [torch.from_numpy(part) for part in np.array_split(np.arange(len(error)), RUNS)]
    logs = torch.stack([value.clamp_min(1e-12).log() for value in columns.values()], 1)
    variance = {name: torch.zeros_like(error) for name in ("constant", *CANDIDATES)}
    for run in runs:
        rest = torch.from_numpy(np.setdiff1d(np.arange(len(error)), run.numpy()))
        known = columns | {"forest": _forest(torch.cat([features, logs], 1).numpy(), error, rest)}
        variance["constant"][run] = error[rest].square().mean()
        for name, terms in CANDIDATES.items():
            stacked = torch.stack([known[term] for term in terms], -1)[:, None]
            blocks = [Block([i], TYPICAL.get(term, 0.2)) for i, term in enumerate(terms)]
            fit = fit_terms(error[rest, None], stacked[rest], blocks)
            variance[name][run] = fit.variance(stacked[run])[:, 0]
    found = {}
    for name in CANDIDATES:
        ranks = np.array([float(spearmanr(variance[name][run], error[run].abs()).statistic) for run in runs])
        gain = _nats(error, variance["constant"]) - _nats(error, variance[name])
        found[name] = {
            "rank": round(float(ranks.mean()), 4),
            "rank_error": round(standard_error(ranks), 4),
            "gain": round(float(gain.mean()), 4),
            "gain_error": round(standard_error(block_means(gain)), 4),
            "with_count": round(float(spearmanr(variance[name], columns["size"]).statistic), 4),
        }
    return found


def _nats(error: Tensor, variance: Tensor) -> Any:
    return (0.5 * (error.square() / variance + variance.log())).numpy()


def _forest(inputs: Any, error: Tensor, rest: Tensor) -> Tensor:
    """Squared errors of all frames by trees that saw the frames of `rest`; of these, out of bag."""
    grown = RandomForestRegressor(200, min_samples_leaf=5, max_features=16, oob_score=True, random_state=0)
    grown.fit(inputs[rest], error[rest].square().numpy())
    found = torch.from_numpy(grown.predict(inputs))
    found[rest] = torch.from_numpy(grown.oob_prediction_)
    return found.clamp_min(1e-6)


def measured(name: str, data: Path) -> dict[str, Any]:
    """All candidates on one set."""
    trained = faster(load_weights(shipped(name)))
    folder, every = SETS[name]
    crowd_set = open_as_trained(name, data / folder, trained)
    train = [*crowd_set.train, *crowd_set.validation]
    seen = vectors(trained, crowd_set, sorted(train)[:: max(1, len(train) // REFERENCE)])
    indices = list(crowd_set.test[::every])
    test = vectors(trained, crowd_set, indices)
    error = crowd_set.counts(indices, torch.float64) - test.count
    return {
        "frames": {"reference": len(seen.count), "test": len(indices)},
        "mae": round(float(error.abs().mean()), 4),
        "candidates": judged(columns_of(seen, test), test.features, error),
    }


def width_table(record: dict[str, Any]) -> str:
    """Rank correlation with the error, and gain over one constant variance."""
    names = list(record["sets"])
    lines = ["| floor and | " + " | ".join(f"{n}: rank correlation | {n}: gain" for n in names) + " |"]
    lines.append("| --- |" + " ---: | ---: |" * len(names))
    for term in CANDIDATES:
        rows = [record["sets"][name]["candidates"][term] for name in names]
        cells = [f"{r['rank']:+.2f} ± {r['rank_error']:.2f} | {r['gain']:+.3f} ± {r['gain_error']:.3f}" for r in rows]
        lines.append(f"| {term} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--tables", action="store_true")
    words = parser.parse_args()
    path = RESULTS / "crowd_width.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"sets": {}}
    for name in [] if words.tables else words.sets:
        record["sets"][name] = measured(name, words.data)
        write("crowd_width", {**record, "machine": machine(torch.device("cpu"))})
    print(width_table(record))


if __name__ == "__main__":
    main()
