"""Fitted terms as plain data, and back: every field is checked, and named where it is not as it should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import Tensor

from latedrop.calibration.fitted_terms import KINDS, FittedTerms, Guard, Missing
from latedrop.calibration.term_fit import Candidate
from latedrop.errors import LatedropError
from latedrop.records import Fields, each, flag, mapping, number, numbers, or_none, text, whole, wrong
from latedrop.streams.usual import USUAL, usual_from_dict
from latedrop.terms import Leverage, Term
from latedrop.terms.features import Features

__all__ = ["Stored", "plain_tensors", "terms_from_dict", "terms_to_dict"]

Stored: TypeAlias = Callable[[str], Mapping[str, Tensor]]
"""Gives the tensors of a file that is kept beside the JSON, from the checksum that the JSON names it by."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_LARGEST = 1e30
_GUARD = ("limit", "constants", "centres", "spreads", "grows", "most")


def terms_to_dict(terms: FittedTerms) -> dict[str, Any]:
    """Plain data; tensors stay tensors."""
    guard = None
    if terms.guard is not None:
        known_of_it = {name: getattr(terms.guard, name) for name in _GUARD}
        guard = {name: value for name, value in known_of_it.items() if value != ()}  # what older files do not have
        known = any(term is terms.guard.term for term in terms.terms)  # then that term keeps what both have learned
        guard["term"] = None if known else _kept(terms.guard.term)
    names = ("columns", "coefficients", "floors", "shares", "choice", "reference_rows")
    return {
        "terms": {term.name: _kept(term) for term in terms.terms},
        **{name: getattr(terms, name) for name in names},
        "guard": guard,
        "features": None if terms.features is None else terms.features.sites,
        "candidates": [asdict(candidate) for candidate in terms.candidates],
        "usual": None if terms.usual is None else {name: getattr(terms.usual, name) for name in USUAL},
    }


def _kept(term: Term) -> dict[str, Any] | None:
    """What a file holds of a term; nothing of the user's own."""
    state = term.state() if type(term) in KINDS.values() else None
    return None if state is None else dict(state)


def terms_from_dict(value: Any, name: str, *, stored: Stored, count: int) -> FittedTerms:
    """The inverse of `terms_to_dict`, for `count` outputs; a term of the user's own comes back as a `Missing` one."""
    fields = Fields(tensors_in(value, name, stored), name)
    terms = tuple(fields.take("terms", _terms).values())
    columns = fields.take("columns", _names)
    row = each(numbers) if columns else each(_nothing)
    found = FittedTerms(
        terms=terms,
        columns=columns,
        coefficients=fields.take("coefficients", row, length=count, **_within(columns)),
        floors=fields.take("floors", numbers, least=0, most=_LARGEST, length=count),
        shares=fields.take("shares", mapping(number), least=0, most=1 + 1e-6),
        guard=fields.take("guard", or_none(_guard), terms=terms, count=count),
        features=fields.take("features", _features),
        candidates=fields.take("candidates", each(_candidate)),
        choice=fields.take("choice", text),
        reference_rows=fields.take("reference_rows", whole, least=0),
        usual=fields.maybe("usual", None, or_none(usual_from_dict)),  # older files have none
    )
    fields.end()
    if set(found.shares) != {*columns, "floor"}:
        wrong(f"{name}.shares", "a share of every column and of the floor", list(found.shares))
    needed = found.guard is not None or any(term.needs_features for term in terms)
    if needed and found.features is None:
        wrong(f"{name}.features", "the sites that terms and guard look at", None)
    return found


def plain_tensors(value: Any, stored: dict[str, Tensor] | None = None, file: str = "", name: str = "terms") -> Any:
    """Nested data with its tensors as lists; or as `{"stored": name, "file": file}`, and the tensors in `stored`."""
    if isinstance(value, Tensor):
        if stored is None:
            return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
        stored[name] = value
        return {"stored": name, "file": file}
    if isinstance(value, Mapping):
        return {key: plain_tensors(item, stored, file, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain_tensors(item, stored, file, f"{name}.{i}") for i, item in enumerate(value)]
    return value


def tensors_in(value: Any, name: str, stored: Stored) -> Any:
    """The inverse of `plain_tensors`; `stored` is called where it is needed, and once for every file."""
    found: dict[str, Mapping[str, Tensor]] = {}

    def restored(value: Any, name: str) -> Any:
        if isinstance(value, Mapping) and set(value) == {"tensor", "dtype"}:
            return _tensor(value, name)
        if isinstance(value, Mapping) and set(value) == {"stored", "file"}:
            file = text(value["file"], f"{name}.file")
            found[file] = found[file] if file in found else stored(file)
            if value["stored"] not in found[file]:
                wrong(name, "a tensor of the file beside the calibration", value["stored"])
            return _finite(found[file][value["stored"]], name)
        if isinstance(value, Mapping):
            return {key: restored(item, f"{name}.{key}"[:80]) for key, item in value.items()}
        return [restored(item, f"{name}[{i}]") for i, item in enumerate(value)] if isinstance(value, list) else value

    return restored(value, name)


def _tensor(value: Mapping[str, Any], name: str) -> Tensor:
    dtype = text(value["dtype"], f"{name}.dtype", among=tuple(_DTYPES))
    try:
        return _finite(torch.tensor(value["tensor"], dtype=_DTYPES[dtype]), name)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        wrong(name, "a tensor", value["tensor"])


def _finite(value: Tensor, name: str) -> Tensor:
    # A feature that never varies has an infinite spread: what is divided by it is 0.
    if value.dtype not in _DTYPES.values() or bool(value.isnan().any()) or bool((value == -torch.inf).any()):
        wrong(name, "a tensor of numbers", value.dtype)
    return value


def _terms(value: Any, name: str) -> dict[str, Term]:
    return {key: _term(item, f"{name}.{key}"[:80], key) for key, item in mapping(_any)(value, name).items()}


def _term(state: Any, name: str, kind: str) -> Term:
    if state is None:
        return Missing(kind)
    if kind not in KINDS or not isinstance(state, dict):
        wrong(name, f"what one of {', '.join(KINDS)} has learned", kind)
    return _restored(KINDS[kind], state, name)


def _restored(kind: type[Term], state: dict[str, Any], name: str) -> Term:
    try:
        term = kind.restored(state)
    except (TypeError, ValueError, AttributeError, LatedropError) as error:
        wrong(name, f"what {kind.__name__} has learned", str(error))
    absent = [
        key
        for key, value in (term.state() or {}).items()
        if key not in state or (term.needs_features and value is None)
    ]
    return wrong(name, f"all that {kind.__name__} has learned", f"no {absent[0]}") if absent else term


def _guard(value: Any, name: str, *, terms: tuple[Term, ...], count: int) -> Guard:
    fields = Fields(value, name)
    state = fields.take("term", _any)
    own = next((term for term in terms if isinstance(term, Leverage)), None)
    term = own if state is None else _restored(Leverage, state, name) if isinstance(state, dict) else None
    if term is None:
        wrong(f"{name}.term", "what a guard has learned", state)
    guard = Guard(
        term,
        fields.take("limit", number, least=1e-30, most=_LARGEST),
        fields.take("constants", numbers, least=0, most=_LARGEST, length=count),
        fields.maybe("centres", (), numbers, least=-_LARGEST, most=_LARGEST, length=count),  # older files have none
        fields.maybe("spreads", (), numbers, least=0, most=_LARGEST, length=count),
        fields.take("grows", flag),
        fields.take("most", or_none(number), least=1, most=_LARGEST),
    )
    fields.end()
    return guard


def _candidate(value: Any, name: str) -> Candidate:
    fields = Fields(value, name)
    candidate = Candidate(
        fields.take("name", text), fields.take("gain", number), fields.take("gain_error", number, least=0)
    )
    fields.end()
    return candidate


def _features(value: Any, name: str) -> Features | None:
    return None if value is None else Features(each(text)(value, name))


def _names(value: Any, name: str) -> tuple[str, ...]:
    return () if value == [] else each(text)(value, name)


def _nothing(value: Any, name: str, **_: Any) -> tuple[float, ...]:
    return () if value == [] else wrong(name, "empty, as there are no columns", value)


def _within(columns: tuple[str, ...]) -> dict[str, Any]:
    return {"least": 0, "most": _LARGEST} if columns else {}


def _any(value: Any, name: str) -> Any:
    return value
