"""What the paper claims of the UCI sets, and what we do, decided from the numbers; and what is true by algebra."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from studies.claims import Claim, Effect, Record, Theorem
from studies.uci.effects import (
    LARGE,
    concordance,
    curves,
    deeper,
    difference,
    gain_apart,
    growth,
    large_rates,
    mean_difference,
    ruin,
    scaling_apart,
    swing,
    worse_than_best,
)

__all__ = ["CLAIMS", "DEEP", "THEOREMS"]

DEEP = "Three hidden layers: "
"""How claims about the deeper networks begin."""

_NOT_WORSE = 0.02
"""Nats that count as not worse."""
_AT = 0.01
"""Miscalibration area that counts as equal."""


def _flat(*measures: str) -> Callable[[Record], float | None]:
    """The largest change over the rates of injected measures of the test rows, in units of the largest value."""

    def deviation(record: Record) -> float | None:
        if record["settings"]["draws"] is not None:
            return None
        values = [curves(record, "injected", measure) for measure in measures]
        return max(float((np.ptp(value, axis=0) / np.abs(value).max()).max()) for value in values if value.any())

    return deviation


def _ordered(*measures: str) -> Callable[[Record], float]:
    """By how much a measure of the validation rows is above the next one, where it should not be."""

    def deviation(record: Record) -> float:
        found = [
            curves(record, kind, lower, "validation") - curves(record, kind, upper, "validation")
            for kind in ("injected", "embedded")
            for lower, upper in pairwise(measures)
        ]
        return max(0.0, *(float(off.max()) for off in found))

    return deviation


THEOREMS = (
    Theorem(
        "Injected, one hidden layer: mean, RMSE and ideal NLL do not depend on the rate",
        "the output is linear in the masked units, and a mask over 1 - rate has mean 1",
        _flat("rmse", "nll_ideal"),
    ),
    Theorem(
        "Injected, one hidden layer: scaled NLL, MA, CRPS, coverage and width do not depend on the rate",
        "Var = r v with r = rate / (1 - rate), so scale · Var = mean(e² / (r v)) · r v = mean(e² / v) · v",
        _flat(*(f"{name}_scaled" for name in ("nll", "ma", "crps", "coverage", "width"))),
    ),
    Theorem(
        "Injected, one hidden layer: the same holds with a floor",
        "the fit of a · r v + b over a and b reaches the same variances whatever r > 0 is",
        _flat(*(f"{name}_floor" for name in ("nll", "ma", "crps", "coverage", "width"))),
    ),
    Theorem(
        "On the validation rows the scaled NLL is at most the unscaled one",
        "scale 1 is one of the scales among which the least NLL was taken",
        _ordered("nll_scaled", "nll_unscaled"),
    ),
    Theorem(
        "On the validation rows the NLL with a floor is at most the scaled one",
        "a floor of 0 is one of the floors among which the least NLL was taken",
        _ordered("nll_floor", "nll_scaled"),
    ),
    Theorem(
        "The ideal NLL is at most that of any variance",
        "e² / v + log v is least at v = e², row by row",
        _ordered("nll_ideal", "nll_floor"),
    ),
)

_PAPER = (
    Claim(
        "Embedded: the RMSE grows with the rate",
        "RMSE at the largest rate over that at the smallest, minus 1", growth, above=0.0,
    ),
    Claim(
        "Embedded: the RMSE grows with the rate over the whole range",
        "of all pairs of rates, the share whose larger one has the larger RMSE", concordance, above=0.9,
    ),
    Claim(
        "Embedded: the RMSE does not fall before it rises",
        "RMSE at the smallest rate over that at the rate of least RMSE, minus 1", worse_than_best(0), below=0.01,
    ),
    Claim(
        "Embedded: after its minimum the RMSE rises",
        "RMSE at the largest rate over that at the rate of least RMSE, minus 1", worse_than_best(-1), above=0.0,
    ),
    Claim(
        "At large rates the injected RMSE is below the embedded one",
        f"injected over embedded RMSE, minus 1, mean over the rates from {LARGE:g} on", large_rates, below=0.0,
    ),
    Claim(
        "Injected: at the smallest rate the unscaled NLL is ruined",
        "unscaled NLL at the smallest rate minus that at the best rate", ruin("injected", "nll_unscaled"), above=1.0,
    ),
    Claim(
        "Embedded: at the smallest rate the unscaled NLL is ruined",
        "unscaled NLL at the smallest rate minus that at the best rate", ruin("embedded", "nll_unscaled"), above=1.0,
    ),
    Claim(
        "Embedded: at the smallest rate the RMSE is fine",
        "RMSE at the smallest rate over that at the rate of least RMSE, minus 1", worse_than_best(0), below=0.05,
    ),
    Claim(
        "Embedded: at the smallest rate the scaled NLL is not ruined",
        "scaled NLL at the smallest rate minus that at the best rate", ruin("embedded", "nll_scaled"), below=0.1,
    ),
    Claim(
        "Injected: the unscaled MA swings with the rate",
        "largest minus smallest unscaled MA over the rates", swing("injected", "ma_unscaled"), above=0.1,
    ),
    Claim(
        "Embedded: the unscaled MA swings with the rate",
        "largest minus smallest unscaled MA over the rates", swing("embedded", "ma_unscaled"), above=0.1,
    ),
    Claim(
        "Embedded: the scaled MA does not swing",
        "largest minus smallest scaled MA over the rates", swing("embedded", "ma_scaled"), below=0.1,
    ),
    Claim(
        "Embedded: the unscaled MA is at or below the scaled one",
        "unscaled minus scaled MA, mean over all rates",
        mean_difference(("embedded", "ma_unscaled"), ("embedded", "ma_scaled")), below=_AT,
    ),
    Claim(
        "Embedded: the unscaled MA is at or below the scaled one, each at the rate that validation chooses",
        "unscaled minus scaled MA", difference("embedded, raw", "embedded, scaled", "ma"), below=_AT,
    ),
    Claim(
        "The ideal NLL of injection is below that of embedded dropout",
        "ideal NLL injected minus embedded, mean over all rates",
        mean_difference(("injected", "nll_ideal"), ("embedded", "nll_ideal")), below=0.0,
    ),
    Claim(
        "Scaling helps injected dropout more than embedded dropout, over all rates",
        "NLL unscaled minus scaled, injected minus embedded, mean over all rates", scaling_apart, above=0.0,
    ),
    Claim(
        "Scaling helps injected dropout more than embedded dropout, at the rates that validation chooses",
        "NLL unscaled minus scaled, injected minus embedded, each at its own rate", gain_apart, above=0.0,
    ),
    Claim(
        "Injection, scaled, is not worse than embedded dropout, scaled, at the rate that validation chooses",
        "NLL injected minus embedded", difference("injected, scaled", "embedded, scaled"), below=_NOT_WORSE,
    ),
    Claim(
        "The relaxed scale lowers the MA of injected dropout",
        "MA relaxed minus scaled", difference("injected, relaxed", "injected, scaled", "ma"), below=0.0,
        source="paper, on crowds",
    ),
    Claim(
        "The relaxed scale costs little NLL",
        "NLL relaxed minus scaled", difference("injected, relaxed", "injected, scaled"), below=0.1,
        source="paper, on crowds",
    ),
)  # fmt: skip


def _beats(text: str, first: str, second: str, *, deep: bool, below: float = 0.0) -> Claim:
    """A claim of ours: the NLL of one method is below that of another."""
    text = f"{DEEP}{text}" if deep else f"{text[0].upper()}{text[1:]}"
    measure = difference(first, second, deep=deep)
    return Claim(text, f"NLL of `{first}` minus `{second}`", measure, below=below, source="us")


def _ours(*, deep: bool) -> tuple[Claim, ...]:
    """The same questions of both depths."""
    rivals = {
        "embedded dropout": "embedded",
        "concrete dropout": "concrete",
        "last-layer Laplace": "laplace",
        "the variance of five networks on the mean of one": "ensemble variance",
        "SWAG": "swag",
    }
    better = {
        "an ensemble of five": "ensemble",
        "a Gaussian head": "gaussian",
        "an ensemble of five Gaussian heads": "gaussian ensemble",
    }
    claims = [
        _beats("scaling lowers the NLL of injected dropout", "injected, scaled", "injected, raw", deep=deep),
        _beats("scaling lowers the NLL of embedded dropout", "embedded, scaled", "embedded, raw", deep=deep),
        _beats("injection, scaled, beats a constant variance", "injected, scaled", "constant", deep=deep),
        _beats("a floor improves on scaled injection", "injected, floor", "injected, scaled", deep=deep),
        _beats("a floor improves on scaled embedded dropout", "embedded, floor", "embedded, scaled", deep=deep),
        _beats("injection with floor beats a constant variance", "injected, floor", "constant", deep=deep),
        *(
            _beats(
                f"injection with floor is not worse than {words} with floor", "injected, floor", f"{name}, floor",
                deep=deep, below=_NOT_WORSE,
            )
            for words, name in rivals.items()
        ),
        *(
            _beats(f"{words} with floor beats injection with floor", f"{name}, floor", "injected, floor", deep=deep)
            for words, name in better.items()
        ),
        _beats("Rate-In, scaled, beats injection, scaled", "rate-in, scaled", "injected, scaled", deep=deep),
        _beats("Rate-In with floor beats injection with floor", "rate-in, floor", "injected, floor", deep=deep),
        _beats("the default of `calibrate` beats a constant variance", "default", "constant", deep=deep),
        _beats("the default of `calibrate` beats injection with floor", "default", "injected, floor", deep=deep),
        _beats(
            "with training inputs as reference the default beats injection with floor",
            "default + reference", "injected, floor", deep=deep,
        ),
    ]  # fmt: skip
    if deep:
        own = "injected per site, floor"
        claims += [
            _beats("rates per site with floor beat a constant variance", own, "constant", deep=True),
            _beats("rates per site with floor beat one rate with floor", own, "injected, floor", deep=True),
            _beats(
                "rates per site with floor are not worse than embedded dropout with floor",
                own, "embedded, floor", deep=True, below=_NOT_WORSE,
            ),
        ]  # fmt: skip
    return tuple(claims)


def _deeper(claim: Claim) -> Claim:
    """The same of the networks with three hidden layers, where injection is not flat by algebra."""

    def measure(record: Record) -> Effect | None:
        deep = deeper(record)
        return None if deep is None else claim.measure(deep)

    text = f"{DEEP}{claim.text[0].lower()}{claim.text[1:]}"
    return replace(claim, text=text, measure=measure, source=f"{claim.source}, deeper")


def _flatness() -> tuple[Claim, ...]:
    """What is a theorem with one hidden layer and a question with three."""
    return (
        Claim(
            f"{DEEP}the injected RMSE does not grow with the rate",
            "injected RMSE at the largest rate over that at the smallest, minus 1",
            lambda record: None if (deep := deeper(record)) is None else growth(deep, "injected"),
            below=0.01,
            source="paper, deeper",
        ),
        Claim(
            f"{DEEP}the scaled NLL of injection does not depend on the rate",
            "largest minus smallest scaled NLL over the rates, injected",
            lambda record: None if (deep := deeper(record)) is None else swing("injected", "nll_scaled")(deep),
            below=0.1,
            source="paper, deeper",
        ),
    )


CLAIMS = (*_PAPER, *_ours(deep=False), *_ours(deep=True), *_flatness(), *map(_deeper, _PAPER))
