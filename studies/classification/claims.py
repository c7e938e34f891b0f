"""Claims about classifiers, decided from the numbers, set by set: differences paired by repeat."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from studies.claims import Claim, Effect, Record, Values, bound, claims_section, decide
from studies.classification.data import SHIFTS, SOURCES
from studies.pages import Results, words

Measure = Callable[[Record], Effect | None]
_LESS = ("nll", "ece", "aurc", "brier")


def values(record: Record, method: str, measure: str, where: str = "test") -> Values | None:
    """A measure of every repeat, `(J,)`, on `"test"`, a part such as `"blur-3"`, a shift, or all: `"shift"`.

    Over several parts it is their mean; None where the set does not have the method.
    """
    rows = []
    for unit in record["units"]:
        parts = unit["labelled"]
        chosen = [i for i, part in enumerate(parts) if is_part(part, where)]
        if method not in unit["methods"] or not chosen:
            return None
        rows.append(np.mean([unit["methods"][method][measure][i] for i in chosen]))
    return np.array(rows)


def told(record: Record, score: str, measure: str = "auroc", where: str = "others") -> Values | None:
    """How well a score tells strange rows, `(J,)`: those of one other set, of `"others"`, or of a shift."""
    rows = []
    for unit in record["units"]:
        chosen = [i for i, part in enumerate(unit["others"]) if is_part(part, where)]
        if score not in unit["scores"] or not chosen:
            return None
        rows.append(np.mean([unit["scores"][score][measure][i] for i in chosen]))
    return np.array(rows)


def is_part(part: str, where: str) -> bool:
    """Return whether a part is the one asked for, a strength of that shift, any shift, or rows of another set."""
    if where == "shift":
        return part.rsplit("-", 1)[0] in SHIFTS
    if where == "others":
        return part in SOURCES
    return part == where or (where in SHIFTS and part.startswith(f"{where}-"))


def _gain(record: Record, first: str, second: str, measure: str = "nll", where: str = "test") -> Effect | None:
    """By how much the first is better, repeat by repeat."""
    a, b = (values(record, method, measure, where) for method in (first, second))
    if a is None or b is None:
        return None
    return Effect.mean(b - a if measure in _LESS else a - b, record["overlap"])


def _tells(record: Record, first: str, second: str, where: str = "others") -> Effect | None:
    """AUROC of the first minus that of the second."""
    a, b = (told(record, score, "auroc", where) for score in (first, second))
    return None if a is None or b is None else Effect.mean(a - b, record["overlap"])


_WORDS = {
    "nll": "nats gained",
    "ece": "calibration error gained",
    "accuracy": "accuracy gained",
    "aurc": "area under the risk-coverage curve gained",
}
_ROWS = {
    "test": "test rows",
    "shift": "shifted rows",
    "rotation": "turned rows",
    "noise": "noisy rows",
    "blur": "blurred rows",
    "others": "rows of other sets",
}
_MI = "injected, mutual information"


def _better(
    text: str, first: str, second: str, measure: str = "nll", where: str = "test", *, above: float = 0.0
) -> Claim:
    words = f"{_WORDS[measure]} on {_ROWS[where]}"
    return Claim(text, words, bound(_gain, first, second, measure, where), above=above, source="us")


def _finds(text: str, first: str, second: str, where: str = "others") -> Claim:
    return Claim(text, f"AUROC gained, {_ROWS[where]}", bound(_tells, first, second, where), above=0.0, source="us")


CLAIMS = (
    _better("One temperature has a lower NLL than the network's softmax", "temperature", "softmax"),
    _better("Draws of injected dropout have a lower NLL than one temperature", "draws", "temperature"),
    _better("Injected dropout to first order has a lower NLL than one temperature", "dropout", "temperature"),
    Claim("Injected dropout gains less than 0.01 nats over one temperature", "nats gained on test rows",
          bound(_gain, "dropout", "temperature"), below=0.01, source="us"),
    _better("The default has a lower NLL than one temperature", "default", "temperature"),
    _better("The default is worse than one temperature by less than 0.005 nats", "default", "temperature",
            above=-0.005),
    _better("An ensemble of five has a lower NLL than the default", "ensemble", "default"),
    _better("Embedded dropout has a lower NLL than draws of injected dropout", "embedded", "draws"),
    _better("Laplace in the last layer has a lower NLL than one temperature", "laplace", "temperature"),
    _better("Under shift the default has a lower NLL than one temperature", "default", "temperature", where="shift"),
    _better("Under rotation the default has a lower NLL than one temperature", "default", "temperature",
            where="rotation"),
    _better("Under noise the default has a lower NLL than one temperature", "default", "temperature", where="noise"),
    _better("Under blur the default has a lower NLL than one temperature", "default", "temperature", where="blur"),
    _better("Under shift the guard alone has a lower NLL than one temperature", "guard", "temperature", where="shift"),
    _better("Under shift draws of injected dropout have a lower NLL than one temperature", "draws", "temperature",
            where="shift"),
    _better("Under shift dropout on top of leverage lowers the NLL", "leverage + dropout", "leverage", where="shift"),
    _better("Under shift the default has a lower NLL than an ensemble of five", "default", "ensemble", where="shift"),
    _better("Under shift the default has a lower NLL than embedded dropout", "default", "embedded", where="shift"),
    _better("Under shift the default has a lower calibration error than an ensemble of five", "default", "ensemble",
            "ece", "shift"),
    _better("Draws of injected dropout cost less than half a point of accuracy", "draws", "softmax", "accuracy",
            above=-0.005),
    _better("Draws of injected dropout rank rows better than one temperature", "draws", "temperature", "aurc"),
    _better("The default ranks rows better than one temperature", "default", "temperature", "aurc"),
    _better("The default ranks shifted rows better than one temperature", "default", "temperature", "aurc", "shift"),
    _finds("Strangeness tells rows of other sets better than the largest probability", "strangeness",
           "max probability"),
    _finds("Strangeness tells rows of other sets better than energy", "strangeness", "energy"),
    _finds("Strangeness tells rows of other sets better than the mutual information of an ensemble of five",
           "strangeness", "ensemble, mutual information"),
    _finds("Mutual information under injected dropout tells rows of other sets better than the largest probability",
           _MI, "max probability"),
    _finds("Mutual information under injected dropout tells rows of other sets better than energy", _MI, "energy"),
    _finds("Mutual information tells rows of other sets better under embedded than under injected dropout",
           "embedded, mutual information", _MI),
    _finds("The default's entropy tells shifted rows better than that of an ensemble of five", "default, entropy",
           "ensemble, entropy", "shift"),
)  # fmt: skip


def claims_page(results: Results) -> list[str]:
    """Markdown: every claim with its verdict, set by set, and every effect."""
    lines = [
        "# The classification study: what is claimed, and what we found",
        "",
        words("classification")["claims"],
        "",
    ]
    if any(unit["settings"]["epochs"] != 1.0 for record in results.values() for unit in record["units"]):
        lines += ["**Networks were trained for a part of the epochs: these numbers decide nothing.**", ""]
    return [*lines, *claims_section({"Claims": [decide(claim, results) for claim in CLAIMS]}, by_set=True)]
