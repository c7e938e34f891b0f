"""What a calibration of a classifier found, as plain data."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

from torch import Tensor

from latedrop.calibration.classes.fit import ALONE, ClassCandidate, ClassFit
from latedrop.calibration.classes.sets import ClassSets, Rejection, Score, checked_score
from latedrop.calibration.fitted_terms import aligned
from latedrop.calibration.seen import seen_of
from latedrop.calibration.term_record import Stored, plain_tensors, tensors_in
from latedrop.errors import LatedropError
from latedrop.network.sites import Sites
from latedrop.records import (
    Fields,
    each,
    flag,
    mapping,
    number,
    numbers,
    or_none,
    parsed,
    sealed,
    text,
    unsealed,
    whole,
    wrong,
)
from latedrop.terms import Leverage
from latedrop.terms.features import Features

__all__ = ["FIELD", "ClassCalibration", "ClassVerdict"]

FIELD = "latedrop-classes"
_FORMAT = 1


@dataclass(frozen=True)
class ClassVerdict:
    """What the probabilities are worth on rows that they were not fitted to.

    Attributes:
        rows: how many.
        fitted: how they were kept apart: `"cross-validation"` or `"other rows"`.
        gain: nats per row by which they are better than one temperature for all rows.
        gain_error: standard error of that.
        nll: of the labels, in nats.
        accuracy: share of labels that are the likeliest class.
        ece: expected calibration error, 15 bins of equal mass.
        unit: what was counted, `"rows"` or `"pixels"`.
    """

    rows: int
    fitted: str
    gain: float
    gain_error: float
    nll: float
    accuracy: float
    ece: float
    unit: str = "rows"

    @property
    def better(self) -> bool | None:
        """Whether they are better than a temperature alone; None where the rows cannot tell (two standard errors)."""
        return None if abs(self.gain) <= 2 * self.gain_error else self.gain > 0

    def __str__(self) -> str:
        words = {True: "better than one temperature by", False: "worse than one temperature by"}
        size = f"{abs(self.gain):.4f} nats (± {self.gain_error:.4f})"
        worth = f"no better than one temperature ({self.gain:+.4f} ± {self.gain_error:.4f} nats)"
        if self.better is not None:
            worth = f"{words[self.better]} {size}"
        where = "by cross-validation" if self.fitted == "cross-validation" else "not used for fitting"
        return (
            f"{worth}; NLL {self.nll:.4f}, accuracy {self.accuracy:.1%}, calibration error {self.ece:.1%} on "
            f"{self.rows} {self.unit} {where}"
        )


@dataclass(frozen=True)
class ClassCalibration:
    """The frozen record of a calibrated classifier.

    Attributes:
        classes: how many.
        names: of the classes; empty where they have none.
        binary: whether the model has one logit for two classes.
        fit: from logits to probabilities.
        alone: one temperature for all rows, the trivial answer.
        rate: of the draws that are averaged; None: none are run.
        draws, seed: of these.
        sites: where dropout goes.
        features: which the leverage looks at; None where there are none.
        leverage: what it has learned from reference rows.
        limit: what 90 % of the validation rows' leverages stay below.
        reference_rows: how many reference rows there were; 0 where the validation rows stood in.
        rows: validation rows, or images.
        choice: the candidate in use.
        candidates: all that were compared.
        verdict: what it is worth.
        readout: from the raw output to the logits, where it has a name or an index.
        custom_readout: the name of a function that a file cannot hold.
        fingerprint: of the weights.
        sets: what makes prediction sets; None before `conformal`.
        rule: which rows are kept; None before `reject`.
        columns: the names of the inputs and labels, in tables of validation data; None where there are none.
        maps: whether every pixel of an image has a class.
        ignore_index: the label of pixels that have none; None where all have one.
        seen: marks of the validation rows, see `calibration.seen`; none of maps, and in files of earlier versions.
    """

    classes: int
    names: tuple[str, ...]
    binary: bool
    fit: ClassFit
    alone: float
    rate: float | None
    draws: int
    seed: int
    sites: Sites
    features: Features | None
    leverage: Leverage | None
    limit: float
    reference_rows: int
    rows: int
    choice: str
    candidates: tuple[ClassCandidate, ...]
    verdict: ClassVerdict
    readout: str | int | None
    custom_readout: str | None
    fingerprint: str
    sets: ClassSets | None = None
    rule: Rejection | None = None
    columns: dict[str, tuple[str, ...]] | None = None
    maps: bool = False
    ignore_index: int | None = None
    seen: str = ""

    @property
    def known_names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.names or tuple(map(str, range(self.classes)))

    def to_json(self, stored: dict[str, Tensor] | None = None, file: str = "") -> str:
        """Readable JSON, with a checksum over its content; see `Calibration.to_json`."""
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("fit", "verdict", "sets", "rule"):
            record[name] = None if record[name] is None else asdict(record[name])
        if self.rule is not None and not self.rule.kept:
            record["rule"]["threshold"] = None  # JSON knows no infinity
        record["candidates"] = [asdict(candidate) for candidate in self.candidates]
        record["sites"] = self.sites.to_list()
        record["features"] = None if self.features is None else self.features.sites
        state = None if self.leverage is None else dict(self.leverage.state())
        record["leverage"] = plain_tensors(state, stored, file, "leverage")
        return sealed(FIELD, {"format": _FORMAT, **json.loads(json.dumps(record))})

    @classmethod
    def from_json(cls, content: str, stored: Stored = lambda file: {}) -> ClassCalibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited or of another format."""
        document = parsed(content, "a calibration", "Calibrate again.")
        again = "Calibrate again with this version."
        record = unsealed(document, FIELD, "a calibration of a classifier", _FORMAT, again, "Calibrate again.")
        fields = Fields({**record, "leverage": tensors_in(record.get("leverage"), "leverage", stored)}, "calibration")
        classes, sites = fields.take("classes", whole, least=2), fields.take("sites", Sites.from_list)
        found = cls(
            classes=classes,
            names=fields.take("names", _texts, length=classes),
            binary=fields.take("binary", flag),
            fit=fields.take("fit", _fit, sites=len(sites), classes=classes),
            alone=fields.take("alone", number, least=1e-30, most=1e30),
            rate=fields.take("rate", or_none(number), least=1e-12, most=1 - 1e-12),
            draws=fields.take("draws", whole, least=0),
            seed=fields.take("seed", whole),
            sites=sites,
            features=fields.take("features", _features),
            leverage=fields.take("leverage", or_none(_leverage)),
            limit=fields.take("limit", number, least=1e-300, most=1e300),
            reference_rows=fields.take("reference_rows", whole, least=0),
            rows=fields.take("rows", whole, least=2),
            choice=fields.take("choice", text),
            candidates=fields.take("candidates", each(_candidate)),
            verdict=fields.take("verdict", _verdict),
            readout=fields.take("readout", _readout),
            custom_readout=fields.take("custom_readout", or_none(text)),
            fingerprint=fields.take("fingerprint", text),
            sets=fields.take("sets", or_none(_sets), classes=classes),
            rule=fields.maybe("rule", None, or_none(_rule)),
            columns=fields.maybe("columns", None, or_none(mapping(each(text)))),
            maps=fields.maybe("maps", False, flag),
            ignore_index=fields.maybe("ignore_index", None, or_none(whole)),
            seen=fields.maybe("seen", "", seen_of),
        )
        fields.end()
        known = () if found.features is None else found.features.sites
        if (found.leverage is not None and not known) or not set(known) <= {site.name for site in sites}:
            wrong("calibration.features", "the sites that the leverage looks at", known or None)
        if found.rate is not None and found.draws < 2:
            wrong("calibration.draws", "how many draws are averaged, 2 or more", found.draws)
        return found

    def __str__(self) -> str:
        fit = self.fit
        follows = "" if fit.slope is None else f", growing with leverage (exponent {fit.slope:.2f} inside, 1 beyond)"
        lines = [str(self.verdict), f"{self.choice}: temperature {fit.temperature:.3f}{follows}"]
        table = [["", "candidate", f"gain over {ALONE}"]]
        for found in self.candidates:
            mark = "*" if found.name == self.choice else ""
            table.append([mark, found.name, f"{found.gain:+.4f} ± {found.gain_error:.4f}"])
        return "\n".join([*lines, *aligned(table)])


def _texts(value: Any, name: str, *, length: int) -> tuple[str, ...]:
    return () if value == [] else each(text)(value, name, length=length)


def _fit(value: Any, name: str, *, sites: int, classes: int) -> ClassFit:
    fields = Fields(value, name)
    temperature = fields.take("temperature", number, least=1e-30, most=1e30)
    slope = fields.take("slope", or_none(number), least=0, most=1e30)
    given = fields.take("odds", lambda odds, where: odds)
    odds = () if given == [] else numbers(given, f"{name}.odds", least=0, most=1e60)
    if odds and len(odds) not in (1, sites):
        wrong(f"{name}.odds", f"one number or {sites}", given)
    none: tuple[float, ...] = ()
    weights, biases = (fields.maybe(part, none, _of_classes, classes=classes) for part in ("weights", "biases"))
    fields.end()
    return ClassFit(temperature, slope, odds, weights, biases)


def _of_classes(value: Any, name: str, *, classes: int) -> tuple[float, ...]:
    return () if value == [] else numbers(value, name, least=-1e30, most=1e30, length=classes)


def _candidate(value: Any, name: str) -> ClassCandidate:
    fields = Fields(value, name)
    found = ClassCandidate(*(fields.take("name", text), fields.take("gain", number), fields.take("gain_error", number)))
    fields.end()
    return found


def _verdict(value: Any, name: str) -> ClassVerdict:
    fields = Fields(value, name)
    rest = {part: fields.take(part, number) for part in ("gain", "gain_error", "nll", "accuracy", "ece")}
    unit = fields.maybe("unit", "rows", text)
    found = ClassVerdict(
        rows=fields.take("rows", whole, least=1), fitted=fields.take("fitted", text), **rest, unit=unit
    )
    fields.end()
    return found


def _features(value: Any, name: str) -> Features | None:
    return None if value is None else Features(each(text)(value, name))


def _leverage(value: Any, name: str) -> Leverage:
    try:
        if value["root"] is not None:
            return Leverage(**value)
        wrong(name, "what a leverage has learned", value)
    except (LatedropError, TypeError, AttributeError, KeyError) as error:
        wrong(name, f"what a leverage has learned ({error})", value)


def _readout(value: Any, name: str) -> str | int | None:
    return value if value is None or isinstance(value, (str, int)) else wrong(name, "a name, a number or null", value)


def _sets(value: Any, name: str, *, classes: int) -> ClassSets:
    fields = Fields(value, name)
    score = checked_score(fields.take("score", text, among=get_args(Score)))
    given = fields.take("scores", lambda scores, where: scores)
    if not isinstance(given, list) or len(given) not in (1, classes):
        wrong(f"{name}.scores", f"one list, or {classes}", given)
    scores = tuple(() if part == [] else numbers(part, f"{name}.scores", least=-10, most=1e6) for part in given)
    if any(list(part) != sorted(part) for part in scores):
        wrong(f"{name}.scores", "scores in rising order", given)
    fields.end()
    return ClassSets(score, scores)


def _rule(value: Any, name: str) -> Rejection:
    fields = Fields(value, name)
    threshold = fields.take("threshold", or_none(number), least=0, most=1)
    shares = {part: fields.take(part, number, least=0, most=1) for part in ("risk", "confidence", "kept", "errors")}
    found = Rejection(math.inf if threshold is None else threshold, **shares, rows=fields.take("rows", whole, least=1))
    fields.end()
    return found
