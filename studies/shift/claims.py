"""Decide claims about a variance under shift from the results.

The cuts of a set overlap, so each set is one observation: its effect is the mean over its cuts. NLL and CRPS have
outliers of several hundred, so methods are compared by the share of cuts in which one has the lower value.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from studies.claims import Claim, Effect, Record, Values, bound, claims_section, decide_pooled
from studies.pages import Results, counted, words


def values(record: Record, method: str, measure: str) -> Values | None:
    """Return a measure on every cut of a set; None if the set does not have the method."""
    measures = record["methods"].get(method)
    return None if measures is None else np.array(measures[measure])


def slope(record: Record, method: str) -> float | None:
    """Regress variance growth on error growth over the cuts; return the slope, None with fewer than 3 cuts.

    >>> growth = {"error_growth": [0.0, 1.0, 2.0], "variance_growth": [1.0, 1.5, 2.0]}
    >>> slope({"methods": {"a": growth}}, "a")
    0.5
    """
    error, variance = (values(record, method, f"{name}_growth") for name in ("error", "variance"))
    if error is None or variance is None or len(error) < 3:
        return None
    off = error - error.mean()
    return float(off @ variance / (off @ off))


def _level(record: Record, method: str, measure: str = "coverage") -> Effect | None:
    shares = values(record, method, measure)
    return None if shares is None else Effect(float(shares.mean()))


def _more(record: Record, first: str, second: str, measure: str = "coverage") -> Effect | None:
    """Return the mean over cuts of first minus second."""
    a, b = values(record, first, measure), values(record, second, measure)
    return None if a is None or b is None else Effect(float((a - b).mean()))


def _wins(record: Record, first: str, second: str, measure: str = "nll") -> Effect | None:
    """Return the share of cuts in which `first` has the lower measure; ties count half."""
    a, b = values(record, first, measure), values(record, second, measure)
    return None if a is None or b is None else Effect(float(((a < b).mean() + (a <= b).mean()) / 2))


def _slope(record: Record, method: str) -> Effect | None:
    steepness = slope(record, method)
    return None if steepness is None else Effect(steepness)


def _lag(record: Record, method: str) -> Effect | None:
    """Return the log growth of the squared error minus that of the variance, averaged over cuts."""
    error, variance = (values(record, method, f"{name}_growth") for name in ("error", "variance"))
    return None if error is None or variance is None else Effect(float((error - variance).mean()))


_COVERAGE = "coverage of shifted rows"
_LOWER = "share of cuts in which its NLL of shifted rows is lower"
_LOWER_CRPS = "share of cuts in which its CRPS of shifted rows is lower"
_SLOPE = "slope of variance growth over error growth, across the cuts of a set"
_STATED = (
    Claim("A constant's 90 % intervals hold less than 80 % of shifted rows", _COVERAGE, bound(_level, "constant"),
          below=0.8),
    Claim("Injected dropout without a floor holds more than with a floor", f"{_COVERAGE}, scaled minus floor",
          bound(_more, "injected, scaled", "injected, floor"), above=0.0),
    Claim("Inside, injected dropout has a lower NLL with a floor than without", "share of cuts, rows inside",
          bound(_wins, "injected, floor", "injected, scaled", "inside_nll"), above=0.5),
    Claim("Injected dropout with a floor holds more than a constant", f"{_COVERAGE}, difference",
          bound(_more, "injected, floor", "constant"), above=0.0),
    Claim("The default holds more than injected dropout with a floor", f"{_COVERAGE}, difference",
          bound(_more, "default", "injected, floor"), above=0.0),
    Claim("The default with reference rows holds more than the default without", f"{_COVERAGE}, difference",
          bound(_more, "default + reference", "default"), above=0.0),
    Claim("The default with reference rows holds more than an ensemble of five with a floor",
          f"{_COVERAGE}, difference", bound(_more, "default + reference", "ensemble, floor"), above=0.0),
    Claim("The default with reference rows holds at least 85 %", _COVERAGE, bound(_level, "default + reference"),
          above=0.85),
    Claim("The default with reference rows has a lower NLL than a constant", _LOWER,
          bound(_wins, "default + reference", "constant"), above=0.5),
    Claim("The default with reference rows has a lower NLL than an ensemble of five with a floor", _LOWER,
          bound(_wins, "default + reference", "ensemble, floor"), above=0.5),
    Claim("The default with reference rows has a lower CRPS than a constant: what it holds is worth its width",
          _LOWER_CRPS, bound(_wins, "default + reference", "constant", "crps"), above=0.5),
    Claim("The default with reference rows has a lower CRPS than an ensemble of five with a floor", _LOWER_CRPS,
          bound(_wins, "default + reference", "ensemble, floor", "crps"), above=0.5),
    Claim(
        "The guard's variance grows with the error: where the error grows more, so does the variance of the default "
        "with reference rows", _SLOPE, bound(_slope, "default + reference"), above=0.0,
    ),
    Claim("The scaled variance of injected dropout grows with the error", _SLOPE, bound(_slope, "injected, scaled"),
          above=0.0),
    Claim("An ensemble's variance, with a floor, grows less than its squared error",
          "error growth minus variance growth", bound(_lag, "ensemble, floor"), above=0.0),
    Claim("The variance of the default with reference rows grows less than its squared error",
          "error growth minus variance growth", bound(_lag, "default + reference"), above=0.0),
    Claim("Leverage tells shifted rows from rows inside better than draws", "AUROC, difference",
          bound(_more, "leverage, scaled", "injected, scaled", "auroc"), above=0.0),
    Claim("Distance to neighbours tells shifted rows from rows inside better than draws", "AUROC, difference",
          bound(_more, "neighbours, scaled", "injected, scaled", "auroc"), above=0.0),
    Claim("Embedded dropout, scaled, holds more than injected dropout, scaled", f"{_COVERAGE}, difference",
          bound(_more, "embedded, scaled", "injected, scaled"), above=0.0),
    Claim("Embedded dropout with a floor holds more than injected dropout with a floor", f"{_COVERAGE}, difference",
          bound(_more, "embedded, floor", "injected, floor"), above=0.0),
    Claim("Laplace with a floor holds more than injected dropout with a floor", f"{_COVERAGE}, difference",
          bound(_more, "laplace, floor", "injected, floor"), above=0.0),
    Claim("A Gaussian head, scaled, holds more than a constant", f"{_COVERAGE}, difference",
          bound(_more, "gaussian, scaled", "constant"), above=0.0),
    Claim("A constant has a lower NLL than a Gaussian head, scaled", _LOWER,
          bound(_wins, "constant", "gaussian, scaled"), above=0.5),
    Claim("An ensemble of Gaussian heads, scaled, holds more than one of them", f"{_COVERAGE}, difference",
          bound(_more, "gaussian ensemble, scaled", "gaussian, scaled"), above=0.0),
)  # fmt: skip
CLAIMS = tuple(replace(claim, source="us") for claim in _STATED)


def claims_page(results: Results) -> list[str]:
    """Write the Markdown page with every claim, its verdict, and the effect on every set."""
    cuts = sum(len(record["cuts"]) for record in results.values())
    lines = ["# The shift study: what is claimed, and what we found", ""]
    lines += [
        f"Generated from the JSON files beside this page: {counted(results)}, {cuts} cuts. {words('shift')['claims']}",
        "",
    ]
    if sorted({record["settings"]["epochs"] for record in results.values()}) != [1.0]:
        lines += ["**Networks were trained for a part of the epochs: these numbers decide nothing.**", ""]
    if len(results) == 1:
        lines += ["One set alone decides nothing; the effects below say where it lies.", ""]
    decisions = decide_pooled(CLAIMS, results)
    return [*lines, *claims_section({"Claims": decisions}, write=lambda value: f"{value:.3f}")]
