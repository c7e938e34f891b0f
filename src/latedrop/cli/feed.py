"""Between tables and models: rows as what a model takes.

Every function here works on one batch of rows at a time, so that no table has to fit memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.cli.tables import Columns, Labels, Rows, Table, choose, open_images, open_table, read_batches
from latedrop.data.arrays import place
from latedrop.errors import ArgumentError, DataError
from latedrop.files import readable
from latedrop.named import as_arguments
from latedrop.terminal import listed

__all__ = ["Pictures", "Places", "Source", "TableBatches", "arguments", "check_kept", "conformal_rows", "only_target"]

_SHOWN = 5
_AT_ONCE = 4096
_KEYS = {False: ("inputs", "targets"), True: ("input_arrays", "target_arrays")}


class Pictures(NamedTuple):
    """Where the images lie that a table names, in which of its columns, and what is made of each."""

    folder: str
    column: str
    transform: str


@dataclass(frozen=True)
class Source:
    """A table, and what its columns are for."""

    table: Table
    columns: Columns
    images: Pictures | None = None

    @classmethod
    def of(
        cls,
        path: str,
        inputs: Sequence[str] = (),
        targets: Sequence[str] = (),
        carried: Sequence[str] = (),
        ignored: Sequence[str] = (),
        weight: str | None = None,
        *,
        labelled: bool = False,
        record: Calibration | ClassCalibration | None = None,
        images: Pictures | None = None,
        labels: Labels | None = None,
    ) -> Source:
        """Open a table; columns that are not given are taken from `record`, or chosen by `choose`.

        With `labelled` there must be targets; their class labels come from `labels`, or from the record of a
        classifier. With `images`, the inputs are the image files that a column names.
        """
        table = open_table(path)
        remembered = (record.columns if record is not None else None) or {}
        input_key, target_key = _KEYS[table.arrays]
        if labelled:
            targets = targets or remembered.get(target_key, ()) or (["y"] if table.arrays else ())
            if not targets:
                raise ArgumentError(f"expected --target, the column of {path} that is to be predicted; found none.")
        if images is not None:
            if inputs and list(inputs) != [images.column]:
                raise ArgumentError("expected --inputs or --images; found both. The images are the inputs.")
            table, inputs = open_images(table, *images), [images.column]
        chosen = choose(table, inputs or remembered.get(input_key, ()), targets, carried, ignored, weight)
        if labelled and isinstance(record, ClassCalibration):
            labels = Labels(only_target(chosen), record.names, sure=True)
        return cls(table, replace(chosen, labels=labels), images)

    def values(self, column: str) -> Iterator[Any]:
        """Yield the values of a column, some rows at a time."""
        with readable(self.table.path, "data"):
            for _, _, carried in self.table.read(Columns((), kept=(column,)), _AT_ONCE):
                yield carried[column]

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the names that a calibration stores: those of columns, of arrays, or of images."""
        if self.images is not None:
            return {"images": self.images[1:], "targets": self.columns.targets}
        return dict(zip(_KEYS[self.table.arrays], (self.columns.inputs, self.columns.targets), strict=True))

    def read(self, size: int) -> Iterator[Rows]:
        """Read the rows, at most `size` at a time."""
        return read_batches(self.table, self.columns, size)

    def example(self, model: nn.Module) -> Any:
        """Return inputs of the first rows, on the model's device."""
        inputs = replace(self, columns=replace(self.columns, targets=(), labels=None, weight=None))
        for rows in inputs.read(8):
            if rows.finite.any():
                return place(arguments(model, rows.where(rows.finite).inputs), model)
        raise DataError(f"expected rows to run the model on in {self.table.path}; found none.")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what inputs and targets were, where the model fails on them, or its output has another shape."""
        try:
            yield
        except DataError as error:
            message = str(error).rstrip(".")
            if message.startswith("expected at least one row to predict"):
                raise DataError(f"expected rows to evaluate in {self.table.path}; found none.") from error
            if "it raised" in message:
                see = "--inputs" if self.images is None else "--transform"
                raise DataError(f"{message}. Its input was {self._named(self.columns.inputs)}: see {see}.") from error
            if message.startswith(("expected target of", "expected a target for each")):
                raise DataError(f"{message}. It was {self._named(self.columns.targets)}: see --target.") from error
            raise

    def _named(self, names: Sequence[str]) -> str:
        return f"{self.table.word}{'s' if len(names) > 1 else ''} {listed(names, _SHOWN)} of {self.table.path}"


def only_target(columns: Columns) -> str:
    """Return the column of labels; `ArgumentError` where there are several targets."""
    if len(columns.targets) != 1:
        raise ArgumentError(
            f"expected one target, the labels of the classes; found {listed(columns.targets, _SHOWN)}. Name one column "
            "with a label for each row: --target."
        )
    return columns.targets[0]


@dataclass
class TableBatches:
    """Batches (inputs, targets), or of inputs alone where no targets were chosen, read anew by each iteration.

    Of the part "fit" or "held" each row is in one half by chance, the same for the same seed. Rows that are not finite
    are an error, or with `drop` left out and counted in `dropped`; those of weight 0 are left out before. `notice` is
    shown the rows of every batch.
    """

    source: Source
    model: nn.Module
    batch_size: int = 256
    drop: bool = False
    part: str = "all"
    seed: int = 0
    notice: Callable[[Rows], Any] = lambda rows: None
    dropped: int = field(default=0, init=False)
    counts: list[npt.NDArray[np.float64]] = field(default_factory=list, init=False)

    def __iter__(self) -> Iterator[Any]:
        dice = np.random.default_rng(self.seed)
        self.dropped, self.counts = 0, []
        for rows in self.source.read(self.batch_size):
            if rows.weights is not None:  # those of weight 0 are as if they were not there
                rows = rows.where(rows.weights != 0)
            if self.part != "all":
                rows = rows.where((dice.random(len(rows)) < 0.5) == (self.part == "held"))
            if not (self.drop or rows.finite.all()):
                raise DataError(
                    f"expected finite numbers in {self.source.table.path}; found NaN, infinite or missing ones, first "
                    f"at {Places(self.source.table.unit).add(rows)}. Mend them, or leave such rows out: --drop-nan."
                )
            self.dropped += int((~rows.finite).sum())
            rows = rows.where(rows.finite)
            if rows.weights is not None:
                self.counts.append(rows.weights)
            if not len(rows):
                continue
            self.notice(rows)
            x, y = arguments(self.model, rows.inputs), rows.target
            if y is not None and self.source.columns.labels is not None:
                # Classes are told from other numbers by their type.
                whole = y.ndim == 1 and bool(((y == np.round(y)) & (np.abs(y) < 2**53)).all())
                y = y.astype(np.int64) if whole else y
            yield x if y is None else (x, y)

    @property
    def row_total(self) -> int | None:
        """How many rows there are at most; None where the table does not tell."""
        return self.source.table.count

    def weights(self) -> npt.NDArray[np.float64] | None:
        """Return those of the rows that were read last; None where all count the same."""
        return None if self.source.columns.weight is None else np.concatenate([np.zeros(0), *self.counts])

    def weights_to_come(self) -> WeightsRead | None:
        """Return the same as an array that can be asked for once the rows were read."""
        return None if self.source.columns.weight is None else WeightsRead(self)


@dataclass(frozen=True)
class WeightsRead:
    """The weights of rows as an array, which is known after they were read."""

    rows: TableBatches

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.rows.weights(), dtype)


def conformal_rows(rows: TableBatches, path: str | None, *, halve: bool) -> tuple[TableBatches, TableBatches | None]:
    """Return rows to fit to, and rows for conformal intervals: those of another file, half of these, or none."""
    if path is not None:
        columns = rows.source.columns
        about: dict[str, Any] = {"labelled": True, "images": rows.source.images, "labels": columns.labels}
        return rows, replace(rows, source=Source.of(path, columns.inputs, columns.targets, **about))
    return (replace(rows, part="fit"), replace(rows, part="held")) if halve else (rows, None)


@dataclass
class Places:
    """Where rows are that are not finite: how many, and the first few."""

    unit: str
    count: int = 0
    first: list[int | str] = field(default_factory=list)

    def add(self, rows: Rows) -> Places:
        """Count the rows that are not finite."""
        bad = np.flatnonzero(~rows.finite).tolist()
        self.first += [rows.places[i] for i in bad[: _SHOWN - len(self.first)]]
        self.count += len(bad)
        return self

    def __str__(self) -> str:
        plural = {"line": "lines", "index": "indices"}[self.unit] if len(self.first) > 1 else self.unit
        return f"{plural} {', '.join(map(str, self.first))}{', ...' if self.count > len(self.first) else ''}"


def check_kept(carried: Sequence[str], names: Sequence[str]) -> None:
    """Raise if an output column and a column of the data (`--keep`), or two output columns, have the same name."""
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ArgumentError(
            f"expected columns of different names in the output; found {', '.join(twice)} twice. A class has a column "
            "p_ and its name: give it another one with --class-names when you calibrate."
        )
    both = [name for name in carried if name in names]
    if both:
        raise ArgumentError(
            f"expected to keep columns beside {', '.join(names[:4])}; found {', '.join(both)}, names of the output. "
            "Rename them in the data."
        )


def arguments(model: nn.Module, inputs: Any) -> Any:
    """Return the inputs of rows as the model takes them."""
    return as_arguments(model, inputs) if isinstance(inputs, dict) else inputs
