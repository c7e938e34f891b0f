"""What the paper claims of the UCI sets, decided from the numbers: holds or not, on how many sets, by how much.

An effect has one number for each split of a set (paired: the same split on both sides).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from latedrop.studies.claims import Claim, Effect, Record, Values, decide
from latedrop.studies.uci.tables import SHORT, Results

__all__ = ["CLAIMS", "Decision", "decide_all", "page"]


@dataclass(frozen=True)
class Decision:
    """On which sets a claim holds, fails, or cannot be told from the threshold, and the mean effects."""

    claim: Claim
    holds: tuple[str, ...]
    fails: tuple[str, ...]
    unclear: tuple[str, ...]
    effects: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """In two or three words."""
        sets = len(self.effects)
        if len(self.holds) == sets:
            return f"holds on all {sets}"
        if not self.holds:
            return f"does not hold (fails on {len(self.fails)} of {sets})" if self.fails else "not decided"
        return f"holds on {len(self.holds)}, fails on {len(self.fails)} of {sets}"


def decide_all(claim: Claim, results: Results) -> Decision:
    """Measure a claim on every set."""
    found: dict[str | None, list[str]] = {"holds": [], "fails": [], "not decided": []}
    effects = {}
    for name, record in results.items():
        verdict, effect = decide(claim, record)
        assert effect is not None  # every set of this study has every effect
        effects[name] = effect.value
        found[verdict].append(name)
    return Decision(claim, tuple(found["holds"]), tuple(found["fails"]), tuple(found["not decided"]), effects)


def page(results: Results) -> str:
    """Markdown: every claim, its verdict, and the effect on every set."""
    decisions = [decide_all(claim, results) for claim in CLAIMS]
    splits = sorted({len(record["methods"]["constant"]["nll"]) for record in results.values()})
    shares = sorted({record["settings"]["epochs"] for record in results.values()})
    lines = [
        "# What the paper claims, and what we found",
        "",
        f"Generated from the JSON files beside this page: {len(results)} sets, {' or '.join(map(str, splits))} splits "
        "each. A claim holds on a set where its mean effect is beyond the threshold by two standard errors over the "
        "splits, fails where it is on the other side by as much, and is otherwise not decided. NLLs are without "
        "log(2 pi)/2. All measures are of the test rows; rates and scales were chosen on the validation rows.",
        "",
    ]
    if shares != [1.0]:
        lines += [
            f"**Networks were trained for {shares[0]:g} of the paper's epochs: these numbers decide nothing.**",
            "",
        ]
    lines += ["| | claim | by | verdict | effect, median over sets |", "| --- | --- | --- | --- | --- |"]
    for number, found in enumerate(decisions, 1):
        median = float(np.median(list(found.effects.values())))
        claim = found.claim
        lines.append(f"| {number} | {claim.text} | {claim.source} | **{found.verdict}** | {_number(median)} |")
    for number, found in enumerate(decisions, 1):
        lines += ["", f"## {number}. {found.claim.text}", "", found.claim.threshold, ""]
        lines += ["| set | effect | |", "| --- | ---: | --- |"]
        for name, effect in found.effects.items():
            word = "holds" if name in found.holds else "fails" if name in found.fails else "not decided"
            lines.append(f"| {SHORT.get(name, name)} | {_number(effect)} | {word} |")
    return "\n".join(lines) + "\n"


def _test(record: Record, kind: str, measure: str) -> Values:
    """`(rates, splits)` on the test rows."""
    return np.array(record[kind]["test"][measure])


def _method(record: Record, method: str, measure: str, *, deep: bool = False) -> Values:
    methods = record["deep"]["methods"] if deep else record["methods"]
    return np.array(methods[method][measure])


def _growth(record: Record) -> Effect:
    rmse = _test(record, "embedded", "rmse")
    return Effect.mean(rmse[-1] / rmse[0] - 1)


def _ruin(kind: str, how: str) -> Callable[[Record], Effect]:
    """How much worse the smallest rate's NLL is than that of the rate with the best mean."""

    def effect(record: Record) -> Effect:
        nll = _test(record, kind, f"nll_{how}")
        return Effect.mean(nll[0] - nll[nll.mean(1).argmin()])

    return effect


def _fine(kind: str) -> Callable[[Record], Effect]:
    def effect(record: Record) -> Effect:
        rmse = _test(record, kind, "rmse")
        return Effect.mean(rmse[0] / rmse[rmse.mean(1).argmin()] - 1)

    return effect


def _swing(kind: str, measure: str) -> Callable[[Record], Effect]:
    """Largest minus smallest over the rates, in each split."""
    return lambda record: Effect.mean(np.ptp(_test(record, kind, measure), axis=0))


def _difference(first: str, second: str, measure: str, *, deep: bool = False) -> Callable[[Record], Effect]:
    def effect(record: Record) -> Effect:
        a, b = (_method(record, method, measure, deep=deep) for method in (first, second))
        return Effect.mean(a - b)

    return effect


CLAIMS = (
    Claim(
        "Embedded: the RMSE grows with the rate",
        "RMSE at rate 0.5 over RMSE at 0.001, minus 1", _growth, above=0.0,
    ),
    Claim(
        "Injected: at the smallest rate the unscaled NLL is ruined",
        "unscaled NLL at 0.001 minus that at the best rate", _ruin("injected", "unscaled"), above=1.0,
    ),
    Claim(
        "Embedded: at the smallest rate the unscaled NLL is ruined",
        "unscaled NLL at 0.001 minus that at the best rate", _ruin("embedded", "unscaled"), above=1.0,
    ),
    Claim(
        "Embedded: at the smallest rate the RMSE is fine",
        "RMSE at 0.001 over that at the best rate, minus 1", _fine("embedded"), below=0.05,
    ),
    Claim(
        "Injected: at the smallest rate the scaled NLL is not ruined",
        "scaled NLL at 0.001 minus that at the best rate", _ruin("injected", "scaled"), below=0.1,
    ),
    Claim(
        "Embedded: at the smallest rate the scaled NLL is not ruined",
        "scaled NLL at 0.001 minus that at the best rate", _ruin("embedded", "scaled"), below=0.1,
    ),
    Claim(
        "Injected: the unscaled MA swings with the rate",
        "largest minus smallest unscaled MA over the rates", _swing("injected", "ma_unscaled"), above=0.1,
    ),
    Claim(
        "Embedded: the unscaled MA swings with the rate",
        "largest minus smallest unscaled MA over the rates", _swing("embedded", "ma_unscaled"), above=0.1,
    ),
    Claim(
        "Injected: the scaled MA does not swing",
        "largest minus smallest scaled MA over the rates", _swing("injected", "ma_scaled"), below=0.1,
    ),
    Claim(
        "Embedded: the scaled MA does not swing",
        "largest minus smallest scaled MA over the rates", _swing("embedded", "ma_scaled"), below=0.1,
    ),
    Claim(
        "Injected: the scaled NLL does not depend on the rate at all (one site before the output)",
        "largest minus smallest scaled NLL over the rates", _swing("injected", "nll_scaled"), below=1e-3, source="us",
    ),
    Claim(
        "Injection, scaled, is not worse than embedded dropout, scaled, at the rate that validation chooses",
        "NLL injected minus embedded", _difference("injected, scaled", "embedded, scaled", "nll"), below=0.02,
    ),
    Claim(
        "Scaling lowers the NLL of injected dropout at the rate that validation chooses",
        "NLL scaled minus unscaled, each at its own rate",
        _difference("injected, scaled", "injected, raw", "nll"), below=0.0, source="us",
    ),
    Claim(
        "The relaxed scale lowers the MA of injected dropout",
        "MA relaxed minus scaled", _difference("injected, relaxed", "injected, scaled", "ma"), below=0.0,
        source="paper, on crowds",
    ),
    Claim(
        "The relaxed scale costs little NLL",
        "NLL relaxed minus scaled", _difference("injected, relaxed", "injected, scaled", "nll"), below=0.1,
        source="paper, on crowds",
    ),
    Claim(
        "Injection, scaled, beats a constant variance",
        "NLL injected minus constant", _difference("injected, scaled", "constant", "nll"), below=0.0, source="us",
    ),
    Claim(
        "A floor improves on scaled injection (one hidden layer)",
        "NLL with floor minus scaled",
        _difference("injected, floor", "injected, scaled", "nll"), below=0.0, source="us",
    ),
    Claim(
        "Three hidden layers: rates per site with floor beat a constant variance",
        "NLL minus that of constant", _difference("injected per site, floor", "constant", "nll", deep=True),
        below=0.0, source="us",
    ),
    Claim(
        "Three hidden layers: rates per site with floor beat scaled injection at one rate",
        "NLL minus that of scaled injection",
        _difference("injected per site, floor", "injected, scaled", "nll", deep=True), below=0.0, source="us",
    ),
)  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.3f}"
