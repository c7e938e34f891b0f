"""Records in files: one codec from frozen dataclasses to JSON with a checksum, and back with every field checked.

A record is a dataclass whose annotations say what a file may hold::

    @record
    @dataclass(frozen=True)
    class Step:
        scale: tuple[Annotated[float, Limits(0, 3.4e38)], ...]

        def checked(self) -> Step: ...  # fields against each other; raises `FieldError`


    STEP = Format(Step, "step", "a step of a path", "Calibrate again.")
    STEP.read(path) == step  # after STEP.write(path, step)

A checksum tells that a file was edited by mistake; whoever edits on purpose makes it fit, so every field is checked
too. pydantic does that, and is imported only where a file is read: calibration and prediction work without it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from math import inf
from typing import Any, Generic, TypeVar, get_args

from latedrop.errors import DataError, FileError, LatedropError
from latedrop.files import parsed, read_text, write_aside

__all__ = [
    "FieldError",
    "Format",
    "Infinite",
    "Limits",
    "Tagged",
    "Via",
    "checked",
    "checksum_of",
    "match",
    "naming",
    "plain",
    "record",
]

_T = TypeVar("_T")
FORMAT = 4
"""The version of all files; those of other versions are refused, with the advice to make them again."""


class FieldError(ValueError):
    """A field does not fit the others of its record; raised by `checked`, and reported with file and place."""

    def __init__(self, field: str, expected: str, value: Any) -> None:
        super().__init__(field)
        self.field, self.expected, self.value = field, expected, value

    def message(self, place: str) -> str:
        """Say what was expected and found, for a record at a place."""
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        return f"expected {f'{place}.{self.field}'.rstrip('.')} to be {self.expected}; found {shown}."


def match(fits: bool, field: str, expected: str, value: Any) -> None:
    """Raise `FieldError` unless a field fits the others of its record."""
    if not fits:
        raise FieldError(field, expected, value)


def record(cls: type[_T]) -> type[_T]:
    """Mark a dataclass as a record: unknown fields are refused, and `checked()` is called after reading, if it has it.

    All fields must be in the file. `checked` may return another object, which then stands for it.
    """

    def schema(cls: type[_T], source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        schema = handler(source)
        for field in schema["schema"]["fields"]:  # a default serves Python; a file has every field
            if field["schema"]["type"] == "default":
                field["schema"] = field["schema"].get("schema", field["schema"])
        check = getattr(cls, "checked", None)
        if check is None:
            return schema
        # pydantic keeps a schema under its `ref` for the next field of this type: the one with the check.
        ref = schema.pop("ref", None)
        return core_schema.no_info_after_validator_function(check, schema, ref=ref)

    cls.__pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # type: ignore[attr-defined]
    cls.__get_pydantic_core_schema__ = classmethod(schema)  # type: ignore[attr-defined]
    return cls


@dataclass(frozen=True)
class Limits:
    """The least and the largest number that a field may hold, both included; of a tuple or a text, its length."""

    least: float | None = None
    most: float | None = None
    pattern: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        schema = handler(source)
        names = ("ge", "le") if schema["type"] in ("float", "int") else ("min_length", "max_length")
        limits = {**dict(zip(names, (self.least, self.most), strict=True)), "pattern": self.pattern}
        return {**schema, **{name: value for name, value in limits.items() if value is not None}}


@dataclass(frozen=True)
class Infinite:
    """Marks a number that may be infinite, which JSON writes as null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        nullable = core_schema.nullable_schema(handler(source))
        return core_schema.no_info_after_validator_function(lambda value: inf if value is None else value, nullable)


@dataclass(frozen=True)
class Tagged:
    """Marks a union of records of which each is known by a field that has one value, as `kind: Literal["log"]`.

    Other values of that field, and that field alone, belong to the record `otherwise`.
    """

    field: str = "kind"
    otherwise: type | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        kinds = {getattr(kind, self.field): kind for kind in get_args(source) if kind is not self.otherwise}
        choices = {tag: handler.generate_schema(kind) for tag, kind in kinds.items()}
        if self.otherwise is None:
            return core_schema.tagged_union_schema(choices, self.field)
        choices[""] = handler.generate_schema(self.otherwise)
        return core_schema.tagged_union_schema(choices, lambda value: _tag(value, self.field, choices))


@dataclass(frozen=True)
class Via:
    """Marks a type that a file holds as another one, and the function that makes it from that."""

    stored: Any
    make: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.make, handler.generate_schema(self.stored))


def plain(value: Any, tensor: Callable[[Any], Any] | None = None) -> Any:
    """The data of a record as JSON knows it; `tensor` makes plain data of tensors.

    An object with `to_record()` is written as what that gives. Infinite fields are written as null.
    """

    def data(value: Any) -> Any:
        if hasattr(value, "to_record"):
            value = value.to_record()
        if is_dataclass(value) and not isinstance(value, type):
            values = {field.name: getattr(value, field.name) for field in fields(value)}
            return {name: None if isinstance(v, float) and v == inf else v for name, v in values.items()}
        if tensor is not None and hasattr(value, "dtype"):
            return tensor(value)
        raise TypeError(f"{type(value).__name__} has no place in a record")

    return json.loads(json.dumps(value, default=data, allow_nan=False))


def checked(kind: Any, value: Any, name: str, remedy: str) -> Any:
    """The record in plain data, of a dataclass or any other annotation; `DataError` names the field that is wrong."""
    try:
        from pydantic import ValidationError
    except ImportError as error:
        raise LatedropError(
            "expected pydantic to read files; it is not installed. Run: pip install pydantic"
        ) from error
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise DataError(f"{_message(error.errors(include_url=False), value, name)} {remedy}") from error


_READERS = {
    "latedrop": "latedrop.load(path, model)",
    "latedrop-classes": "latedrop.load(path, model)",
    "latedrop-multilabel": "latedrop.load_multilabel(path, model)",
    "latedrop-boxes": "latedrop.load_boxes(path, model)",
}
"""What reads each kind of calibration, for messages."""


@dataclass(frozen=True)
class Format(Generic[_T]):
    """A kind of file: JSON of one record under a key, with the version of the format and a checksum.

    Attributes:
        kind: the record's class.
        key: under which it stands.
        what: in words, such as "a calibration".
        again: what to do where a file is damaged, or of another version.
        name: of the whole record in messages about its fields.
        indent: of the lines; None writes one line, which is faster.
        sealed: whether the text has a checksum of its own; False where what holds the text has one.
    """

    kind: type[_T]
    key: str
    what: str
    again: str
    name: str
    indent: int | None = 1
    sealed: bool = True

    def to_json(self, value: _T, tensor: Callable[[Any], Any] | None = None) -> str:
        """The text of a file; `tensor` makes plain data of tensors."""
        data = {"format": FORMAT, **plain(value, tensor)}
        return json.dumps({self.key: data, **self._seal(data)}, indent=self.indent)

    def from_json(self, content: str) -> _T:
        """The inverse of `to_json`; `DataError` where the text is damaged, edited or of another version."""
        document = parsed(content, self.what, self.again, finite=True)
        data = document.get(self.key) if isinstance(document, dict) else None
        if not isinstance(data, dict):
            other = next((key for key in _READERS if isinstance(document, dict) and key in document), None)
            if other is not None:
                raise DataError(f"expected {self.what}; found {other!r}. Read this file with {_READERS[other]}.")
            raise DataError(
                f"expected the JSON of {self.what}; found something else, without {self.key!r}. {self.again}"
            )
        if data.get("format") != FORMAT or isinstance(data["format"], bool):
            there = repr(data.get("format", "none"))[:40]
            raise DataError(
                f"expected {self.what} in format {FORMAT}, that of this version; found format {there}. {self.again}"
            )
        if document != {self.key: data, **self._seal(data)}:
            raise DataError(
                "expected the content that was saved; the checksum does not match: the file was edited or damaged. "
                f"{self.again}"
            )
        rest = {name: value for name, value in data.items() if name != "format"}
        value: _T = checked(self.kind, rest, self.name, self.again)
        return value

    def _seal(self, data: Any) -> dict[str, str]:
        return {"checksum": checksum_of(data)} if self.sealed else {}

    def write(self, path: str | os.PathLike[str], value: _T, tensor: Callable[[Any], Any] | None = None) -> None:
        """Write a file, whole or not at all."""
        write_aside(path, self.to_json(value, tensor))

    def read(self, path: str | os.PathLike[str]) -> _T:
        """Read a file; `FileError` names the file, and the field that is wrong."""
        content = read_text(path, self.what)
        with naming(path):
            return self.from_json(content)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the name of a file before what is wrong with its content: `FileError` for `DataError`."""
    try:
        yield
    except DataError as error:
        raise FileError(f"{path}: {error}") from error


def checksum_of(data: Any) -> str:
    """SHA-256 of plain data as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _tag(value: Any, field: str, choices: dict[str, Any]) -> str:
    tag = value.get(field) if isinstance(value, dict) else None
    return tag if isinstance(tag, str) and tag in choices and len(value) > 1 else ""


def _message(errors: Sequence[Any], value: Any, name: str) -> str:
    """Say what was expected and found, and where: of the alternatives of a union, the one that led furthest."""
    places = [_place(error, value, name) for error in errors]
    top = places[0].partition("[")[0].split(".")[:2]
    alike = [i for i, place in enumerate(places) if place.partition("[")[0].split(".")[:2] == top]
    deepest = max(alike, key=lambda i: places[i].count(".") + places[i].count("["))
    error, place = errors[deepest], places[deepest]
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return cause.message(place)
    if isinstance(cause, LatedropError):  # of a constructor, which checks what users pass
        return f"in {place}: {cause}"
    if error["type"] == "missing":
        return f"expected a field {place}; it is missing."
    if error["type"] == "unexpected_keyword_argument":
        return f"expected no other fields in {place.rpartition('.')[0]}; found {str(error['loc'][-1])[:60]!r}."
    words = [_words(errors[i]) for i in alike if places[i] == place]
    return FieldError("", " or ".join(dict.fromkeys(words)), error["input"]).message(place)


def _words(error: Any) -> str:
    """Return what pydantic expected, after "to be"."""
    for name, words in (("ge", "at least"), ("le", "at most")):
        if name in error.get("ctx", ()):
            return f"{words} {error['ctx'][name]!r}".removesuffix(".0")
    text: str = error["msg"]
    return text.removeprefix("Input should be ").replace("Tuple should have", "a list with").partition(" after")[0]


def _place(error: Any, value: Any, name: str) -> str:
    """The path of an error in plain data; names that pydantic gives to alternatives are left out."""
    for part in error["loc"]:
        if isinstance(value, dict) and part in value:
            name, value = f"{name}.{part}"[:200], value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            name, value = f"{name}[{part}]", value[part]
    return f"{name}.{error['loc'][-1]}" if error["type"] == "missing" else name
