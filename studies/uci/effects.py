"""The effects that claims about the UCI sets are decided by: one number for each split, paired.

Where an effect needs a best rate, the validation rows of the split choose it: the least of 15 noisy test numbers would
be too low by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from studies.claims import Effect, Record, Values
from studies.uci.tables import overlap

__all__ = [
    "LARGE",
    "Measure",
    "at_rates",
    "best_rates",
    "concordance",
    "curves",
    "deeper",
    "difference",
    "gain_apart",
    "growth",
    "large_rates",
    "mean_difference",
    "of_splits",
    "ruin",
    "scaling_apart",
    "swing",
    "worse_than_best",
]

Measure: TypeAlias = Callable[[Record], Effect | None]

LARGE = 0.25
"""From this rate on a rate is large."""


def curves(record: Record, kind: str, measure: str, part: str = "test") -> Values:
    """A measure of every rate and split, `(rates, splits)`."""
    return np.array(record[kind][part][measure])


def deeper(record: Record) -> Record | None:
    """The record of the networks with three hidden layers, in the form of that of one; None where it has no curves."""
    return {**record, **record["deep"]} if {"injected", "embedded"} <= set(record["deep"]) else None


def best_rates(record: Record, kind: str, measure: str) -> Values:
    """The place of the rate of the least measure on the validation rows, split by split; the first of equal ones."""
    found: Values = curves(record, kind, measure, "validation").argmin(0)
    return found


def at_rates(values: Values, places: Values) -> Values:
    """One rate for each split, `(splits,)`."""
    found: Values = values[places, np.arange(values.shape[1])]
    return found


def of_splits(record: Record, values: Values) -> Effect:
    """The mean of splits that share rows."""
    return Effect.mean(values, overlap(record))


def growth(record: Record, kind: str = "embedded") -> Effect:
    """RMSE at the largest rate over that at the smallest, minus 1."""
    rmse = curves(record, kind, "rmse")
    return of_splits(record, rmse[-1] / rmse[0] - 1)


def concordance(record: Record) -> Effect:
    """Of all pairs of rates, the share whose larger one has the larger embedded RMSE."""
    rmse = curves(record, "embedded", "rmse")
    first, second = np.triu_indices(len(rmse), 1)
    return of_splits(record, (rmse[second] > rmse[first]).mean(0))


def worse_than_best(place: int) -> Measure:
    """Embedded RMSE at the rate at a place over that at the rate of the least RMSE, minus 1."""

    def effect(record: Record) -> Effect:
        rmse = curves(record, "embedded", "rmse")
        return of_splits(record, rmse[place] / at_rates(rmse, best_rates(record, "embedded", "rmse")) - 1)

    return effect


def large_rates(record: Record) -> Effect:
    """Injected over embedded RMSE, minus 1, mean over the large rates."""
    injected, embedded = (curves(record, kind, "rmse")[_large(record)] for kind in ("injected", "embedded"))
    return of_splits(record, (injected / embedded - 1).mean(0))


def ruin(kind: str, measure: str) -> Measure:
    """How much larger an NLL is at the smallest rate than at the rate where it is least."""

    def effect(record: Record) -> Effect:
        nll = curves(record, kind, measure)
        return of_splits(record, nll[0] - at_rates(nll, best_rates(record, kind, measure)))

    return effect


def swing(kind: str, measure: str) -> Measure:
    """Largest minus smallest over the rates, in each split."""
    return lambda record: of_splits(record, np.ptp(curves(record, kind, measure), axis=0))


def mean_difference(first: tuple[str, str], second: tuple[str, str]) -> Measure:
    """Difference of two (kind, measure), mean over all rates."""
    return lambda record: of_splits(record, (curves(record, *first) - curves(record, *second)).mean(0))


def scaling_apart(record: Record) -> Effect:
    """What scaling takes off the injected NLL minus what it takes off the embedded one, mean over all rates."""
    gains = [curves(record, kind, "nll_unscaled") - curves(record, kind, "nll_scaled") for kind in _KINDS]
    return of_splits(record, (gains[0] - gains[1]).mean(0))


def gain_apart(record: Record) -> Effect | None:
    """The same, each of the four at the rate that its own validation NLL chooses."""
    methods = record["methods"]
    gains = [_method(methods, f"{kind}, raw", "nll") - _method(methods, f"{kind}, scaled", "nll") for kind in _KINDS]
    return of_splits(record, gains[0] - gains[1])


def difference(first: str, second: str, measure: str = "nll", *, deep: bool = False) -> Measure:
    """Of two methods; None where one of them is not in the results."""

    def effect(record: Record) -> Effect | None:
        methods = record["deep"]["methods"] if deep else record["methods"]
        if not {first, second} <= set(methods):
            return None
        return of_splits(record, _method(methods, first, measure) - _method(methods, second, measure))

    return effect


_KINDS = ("injected", "embedded")


def _large(record: Record) -> list[int]:
    """The places of the large rates; of the largest where none is."""
    found = [place for place, rate in enumerate(record["rates"]) if rate >= LARGE]
    return found or [len(record["rates"]) - 1]


def _method(methods: Record, method: str, measure: str) -> Values:
    return np.array(methods[method][measure])
