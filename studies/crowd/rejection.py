"""Measure the benefit of rejecting regions on test frames, against controls that do not use the uncertainty.

The area under the ROC curve measures how well a feature, or a linear score of several, separates false from true
regions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from latedrop.metrics import auroc
from latedrop.records import plain
from latedrop_crowd.blocks import block_size, blocks_of
from latedrop_crowd.regions import NEAR, Floats, Maps, Policy, RegionTable, fit_table, usual_threshold


def measure_rejection(
    validation: Maps,
    test: Maps,
    seed: int = 0,
    *,
    threshold: float | None = None,
    near: float = NEAR,
    repeats: int = 200,
    resamples: int = 2000,
) -> dict[str, Any]:
    """Fit rejection thresholds to validation frames, and measure errors on test frames; return a dict for JSON.

    There are four controls. `random` rejects the same number of test regions at random (mean and standard deviation
    over `repeats`). `lowest_mass` rejects the same number, those with the least mass. `low_density` is a policy on the
    mass alone, fitted in the same way. `shift` subtracts the mean validation error from every count and rejects no
    region. `separation` holds areas under the ROC curve for single features and for linear scores fitted to the
    validation regions; the uncertainty adds `all` minus `without_ratio`. Differences of the mean absolute error have
    95 % intervals from resampled blocks of consecutive frames, because neighbouring frames are correlated.
    """
    threshold = usual_threshold(validation.mean) if threshold is None else threshold
    fitted, table = RegionTable.of(validation, threshold, near), RegionTable.of(test, threshold, near)
    policy, low = fit_table(fitted, threshold, "count"), fit_table(fitted, threshold, "count", ("mass",))
    rng = np.random.default_rng(seed)
    gone, nothing = policy.rejects(table), np.zeros(len(table.mass), dtype=bool)
    shifted = table.errors(nothing) - (fitted.predicted - fitted.true).mean()
    errors = {"before": table.errors(nothing), "after": table.errors(gone)}
    errors |= {"low_density": table.errors(low.rejects(table)), "shift": shifted}
    differences = _differences(errors, rng, resamples)
    random, after = _at_random(table, int(gone.sum()), rng, repeats), score(table, gone)
    verdict, why = _verdict(policy, differences, random["mae"]["mean"], after["mae"])
    return {
        "frames": {"validation": len(validation), "test": len(test)},
        "threshold": threshold,
        "near_cells": near,
        "policy": plain(policy),
        "rejects_nothing": policy.rejects_nothing,
        "regions": {"all": len(table.mass), "false": int((~table.true_region).sum())},
        "before": score(table, nothing),
        "after": after,
        "controls": {
            "random": random,
            "lowest_mass": score(table, _lowest(table.mass, int(gone.sum()))),
            "low_density": _judged(low, table),
            "shift": error_summary(shifted),
        },
        "for_regions": {
            "policy": _judged(fit_table(fitted, threshold, "regions"), table),
            "low_density": _judged(fit_table(fitted, threshold, "regions", ("mass",)), table),
        },
        "separation": separation(table, fitted),
        "differences": differences,
        "block": block_size(len(test)),
        "seed": seed,
        "verdict": verdict,
        "why": why,
    }


def _judged(policy: Policy, table: RegionTable) -> dict[str, Any]:
    """Return a policy and its scores on a table, as a dict."""
    return {"policy": plain(policy), **score(table, policy.rejects(table))}


def _differences(errors: Mapping[str, Floats], rng: np.random.Generator, resamples: int) -> dict[str, dict[str, float]]:
    """Return the differences of the mean absolute error for the pairs that are reported."""
    pairs = (("after", "before"), ("low_density", "before"), ("after", "low_density"), ("after", "shift"))
    return {f"{a}_minus_{b}": _difference(errors[a], errors[b], rng, resamples) for a, b in pairs}


def _difference(a: Floats, b: Floats, rng: np.random.Generator, resamples: int) -> dict[str, float]:
    """Return the difference of the mean absolute errors on the same frames, with a 95 % interval."""
    gap = np.abs(a) - np.abs(b)
    parts = blocks_of(gap)
    sums, sizes = np.array([part.sum() for part in parts]), np.array([len(part) for part in parts])
    times = rng.multinomial(len(parts), np.full(len(parts), 1 / len(parts)), size=resamples)
    low, high = np.quantile((times @ sums) / (times @ sizes), [0.025, 0.975])
    return {"mae": float(gap.mean()), "low": float(low), "high": float(high)}


def _at_random(table: RegionTable, number: int, rng: np.random.Generator, repeats: int) -> dict[str, Any]:
    """Reject `number` regions at random; return mean and standard deviation of the scores over repeats."""
    scores = []
    for _ in range(repeats):
        gone = np.zeros(len(table.mass), dtype=bool)
        gone[rng.choice(len(gone), number, replace=False)] = True
        scores.append(score(table, gone))
    return {
        name: {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))}
        for name in scores[0]
        for values in [[score[name] for score in scores]]
    } | {"repeats": repeats}


def _lowest(mass: Floats, number: int) -> npt.NDArray[np.bool_]:
    gone = np.zeros(len(mass), dtype=bool)
    gone[np.argsort(mass, kind="stable")[:number]] = True
    return gone


def _verdict(
    policy: Policy, differences: dict[str, dict[str, float]], random_mae: float, after_mae: float
) -> tuple[str, str]:
    """Return the verdict in a few words, and the reason in a sentence."""
    gain, beside = differences["after_minus_before"], differences["after_minus_low_density"]
    said = f"count MAE changes by {gain['mae']:+.3f} (95 % interval {gain['low']:+.3f} to {gain['high']:+.3f})"
    if policy.rejects_nothing:
        return "nothing rejected", "no thresholds help on the validation frames, so nothing is rejected"
    if gain["low"] > 0:
        return "hurts", said
    if gain["high"] >= 0:
        return "no effect", f"{said}: the interval holds 0"
    against = f"against low density alone by {beside['mae']:+.3f} ({beside['low']:+.3f} to {beside['high']:+.3f})"
    if after_mae >= random_mae:
        return "helps as chance does", f"{said}, but regions rejected at random do as well: MAE {random_mae:.3f}"
    if beside["high"] >= 0:
        return "helps without uncertainty", f"{said}, {against}: the uncertainty adds nothing that can be told"
    bias = differences["after_minus_shift"]
    if bias["high"] >= 0:
        shifted = f"by {bias['mae']:+.3f} ({bias['low']:+.3f} to {bias['high']:+.3f})"
        return "helps no more than subtracting the bias", f"{said}; against subtracting the mean error {shifted}"
    return "helps", f"{said}, {against}"


def score(table: RegionTable, gone: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return errors of the count, and numbers of wrongly kept and wrongly rejected regions."""
    return error_summary(table.errors(gone)) | {
        "rejected": int(gone.sum()),
        "rejected_mass": float(table.mass[gone].sum()),
        "false_kept": int((~table.true_region & ~gone).sum()),
        "true_rejected": int((table.true_region & gone).sum()),
    }


def separation(table: RegionTable, fitted: RegionTable) -> dict[str, float | None]:
    """Return areas under the ROC curve (0.5 is chance), None if a table has only one kind of region."""
    false = ~table.true_region
    areas = {"low_mass": auc(-table.mass, false), "ratio": auc(table.ratio, false)}
    areas["isolation"] = auc(table.isolation, false)
    for name, features in (("without_ratio", ("mass", "isolation")), ("all", ("mass", "isolation", "ratio"))):
        weights = _discriminant(_logs(fitted, features), ~fitted.true_region)
        areas[name] = None if weights is None else auc(_logs(table, features) @ weights, false)
    return areas


def _logs(table: RegionTable, features: Sequence[str]) -> Floats:
    """Return the logarithms of some features, `(R, F)`."""
    columns = [np.log(np.maximum(getattr(table, name), 1e-12)) for name in features]
    return np.stack(columns, 1)


def error_summary(errors: Floats) -> dict[str, Any]:
    """Return MAE, RMSE and mean of errors `(N,)`."""
    return {
        "mae": float(np.abs(errors).mean()),
        "rmse": float(np.sqrt(np.square(errors).mean())),
        "bias": float(errors.mean()),
    }


def auc(score: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the area under the ROC curve; None if one kind is missing."""
    if positive.all() or not positive.any():
        return None
    return float(auroc(torch.from_numpy(np.asarray(score, dtype=float)), torch.from_numpy(positive)))


def _discriminant(values: Floats, positive: npt.NDArray[np.bool_]) -> Floats | None:
    """Return the weights `(F,)` of Fisher's linear discriminant; None if one kind is missing."""
    number = int(positive.sum())
    if not number or number == len(positive):
        return None
    inside = values - np.where(positive[:, None], values[positive].mean(0), values[~positive].mean(0))
    scatter = inside.T @ inside / len(values)
    # The ridge gives weight 0 to a feature that does not vary.
    ridge = 1e-9 * (np.trace(scatter) + 1e-9) * np.eye(len(scatter))
    return np.asarray(np.linalg.solve(scatter + ridge, values[positive].mean(0) - values[~positive].mean(0)))
