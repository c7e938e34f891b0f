"""The page of claims of the UCI study: theorems, verdicts over the sets, and every effect on every set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from studies.claims import Claim, Outcome, decide, theorem_table
from studies.uci.claims import CLAIMS, DEEP, THEOREMS
from studies.uci.effects import best_rates, curves
from studies.uci.tables import SHORT, Results, counted

__all__ = ["Decision", "decide_all", "effect_table", "page"]

_DEEP = (
    "The paper's networks have one hidden layer. With three, what is algebra for injection there becomes a question: "
    "its error and its scaled likelihood may depend on the rate."
)


@dataclass(frozen=True)
class Decision:
    """What all sets say of a claim."""

    claim: Claim
    outcomes: Mapping[str, Outcome]

    def sets(self, verdict: str) -> tuple[str, ...]:
        """Those with a verdict."""
        return tuple(name for name, outcome in self.outcomes.items() if outcome.verdict == verdict)

    @property
    def effects(self) -> list[float]:
        """The effect on every set that has it."""
        return [outcome.effect.value for outcome in self.outcomes.values() if outcome.effect is not None]

    @property
    def verdict(self) -> str:
        """In a few words."""
        holds, fails, total = len(self.sets("holds")), len(self.sets("fails")), len(self.effects)
        if not total:
            return "not measured"
        if total == 1:
            return "holds" if holds else "fails" if fails else "not decided"
        if total in (holds, fails):
            return f"{'holds' if holds else 'fails'} on all {total}"
        if not holds and not fails:
            return f"not decided on any of {total}"
        return f"holds on {holds}, fails on {fails} of {total}"


def decide_all(claim: Claim, results: Results) -> Decision:
    """Measure a claim on every set."""
    return Decision(claim, decide(claim, results))


def page(results: Results) -> str:
    """Markdown: theorems, every claim with its verdict, and the effect on every set."""
    found = [decide_all(claim, results) for claim in CLAIMS]
    lines = ["# What the paper claims, and what we found", "", *_how(results)]
    shares = sorted({record["settings"]["epochs"] for record in results.values()})
    if shares != [1.0]:
        lines += [
            f"**Networks were trained for {shares[0]:g} of the paper's epochs: these numbers decide nothing.**",
            "",
        ]
    lines += ["## True by algebra", "", *_theorems(results), "", "## The paper's claims", ""]
    numbered = list(enumerate(found, 1))
    paper = [(number, one) for number, one in numbered if one.claim.source != "us"]
    lines += _summary([item for item in paper if not _deep(item[1])])
    lines += ["", "## The paper's claims, asked of three hidden layers", "", _DEEP, ""]
    lines += _summary([item for item in paper if _deep(item[1])])
    ours = [(number, one) for number, one in numbered if one.claim.source == "us"]
    lines += ["", "## Ours, one hidden layer", "", *_summary([item for item in ours if not _deep(item[1])])]
    lines += ["", "## Ours, three hidden layers", "", *_summary([item for item in ours if _deep(item[1])])]
    lines += ["", "## Where the RMSE of embedded dropout is least", "", *_minimum(results), "", "## Every effect"]
    for number, one in numbered:
        lines += ["", f"### {number}. {one.claim.text}", "", one.claim.threshold, "", *effect_table(one)]
    return "\n".join(lines) + "\n"


def effect_table(found: Decision) -> list[str]:
    """Markdown: the effect on every set, its interval, p and verdict."""
    lines = ["| set | effect | 95 % interval | p after Holm | |", "| --- | ---: | --- | ---: | --- |"]
    for name, outcome in found.outcomes.items():
        if outcome.effect is None:
            lines.append(f"| {SHORT.get(name, name)} | | | | not measured |")
            continue
        low, high = outcome.effect.interval
        cells = f"{_number(outcome.effect.value)} | {_number(low)} to {_number(high)} | {outcome.said_p}"
        lines.append(f"| {SHORT.get(name, name)} | {cells} | {outcome.verdict} |")
    return lines


def _how(results: Results) -> list[str]:
    splits = sorted({len(record["methods"]["constant"]["nll"]) for record in results.values()})
    return [
        f"Generated from the JSON files beside this page: {counted(results)}, {' or '.join(map(str, splits))} splits "
        "each. NLLs are without log(2 pi)/2. All measures are of the test rows; rates, scales and floors were chosen "
        "on the validation rows, and so were the best rates of the effects below. Methods are compared like with like: "
        "as they are, scaled, or with scale and floor, on both sides.",
        "",
        "**How a claim is decided.** An effect is a mean over splits. Splits share rows, so its standard error is that "
        "of Nadeau and Bengio (2003), with variance times 1 / splits + test rows / training rows. It is tested against "
        "the threshold with Student's t, to both sides, and the p values of all sets of a claim are corrected after "
        "Holm, so that with 95 % none of its verdicts is wrong by chance. Where p is then above 0.05, the claim is not "
        "decided on that set. Intervals are of 95 %, of one set alone.",
        "",
    ]


def _theorems(results: Results) -> list[str]:
    return [
        "No evidence is needed for these; numbers only show that the program does what it should. Deviations are the "
        "largest over sets, splits and rates; the first three in units of the measure's largest value, the others in "
        "nats. Results are stored with six digits.",
        "",
        *theorem_table(THEOREMS, results),
    ]


def _deep(found: Decision) -> bool:
    return found.claim.text.startswith(DEEP)


def _summary(found: Sequence[tuple[int, Decision]]) -> list[str]:
    lines = ["| | claim | by | verdict | effect, median over sets |", "| --- | --- | --- | --- | ---: |"]
    for number, one in found:
        median = _number(float(np.median(one.effects))) if one.effects else ""
        lines.append(f"| {number} | {one.claim.text} | {one.claim.source} | **{one.verdict}** | {median} |")
    return lines


def _minimum(results: Results) -> list[str]:
    """Where embedded dropout's RMSE is least, and how far it falls and rises."""
    lines = [
        "Mean test RMSE over splits; the last column is the rate of the least validation RMSE, the median over splits.",
        "",
        "| set | smallest rate | least | at rate | largest rate | rate chosen |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, record in results.items():
        rmse = curves(record, "embedded", "rmse").mean(1)
        chosen = np.median(np.array(record["rates"])[best_rates(record, "embedded", "rmse")])
        cells = f"{rmse[0]:.4g} | {rmse.min():.4g} | {record['rates'][int(rmse.argmin())]:g} | {rmse[-1]:.4g}"
        lines.append(f"| {SHORT.get(name, name)} | {cells} | {chosen:g} |")
    return lines


def _number(value: float) -> str:
    if not np.isfinite(value):
        return "unbounded"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.3f}"
