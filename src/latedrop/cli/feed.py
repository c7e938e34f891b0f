"""Between tables and models: rows as what a model takes, one batch at a time, so that no table has to fit memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from warnings import warn

import numpy as np
import torch
from torch import nn

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.methods import Classification
from latedrop.calibration.record import Calibration
from latedrop.calibration.verdict import Verdict
from latedrop.cli.options import Classes, Tabled, split
from latedrop.cli.tables import Columns, Labels, Rows, Table, choose, distinct, open_images, open_table, read_batches
from latedrop.data.arrays import place
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.files import readable
from latedrop.named import as_arguments
from latedrop.prediction.predictor import ClassPredictor, Predictor
from latedrop.terminal import listed

__all__ = [
    "Pictures",
    "Places",
    "Source",
    "TableBatches",
    "conformal_rows",
    "example",
    "remembering",
    "task_of",
]

_SHOWN, _LABELS = 5, 12  # names, and labels, that a message quotes at most
_AT_ONCE = 4096
_OF_CLASSES = "expected labels from", "expected labels of at least", "expected names of"
_KEYS = {False: ("inputs", "targets"), True: ("input_arrays", "target_arrays")}
_ALL = Tabled()


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
        options: Tabled = _ALL,
        targets: Sequence[str] = (),
        *,
        labelled: bool = False,
        carried: Sequence[str] = (),
        record: Calibration | ClassCalibration | None = None,
    ) -> Source:
        """Open a table; what options do not name is as `record` remembers, or chosen by `choose`.

        With `labelled` there must be targets; the labels of classes are those that the record of a classifier has.
        """
        remembered = (record.columns if record is not None else None) or {}
        images, table = _pictures(options, remembered.get("images")), open_table(path)
        input_key, target_key = _KEYS[table.arrays]
        if labelled:
            targets = targets or remembered.get(target_key, ()) or (["y"] if table.arrays else ())
            if not targets:
                raise ArgumentError(f"expected --target, the column of {path} that is to be predicted; found none.")
        inputs: Sequence[str] = split(options.inputs)
        if images is not None:
            if inputs and inputs != [images.column]:
                raise ArgumentError("expected --inputs or --images; found both. The images are the inputs.")
            table, inputs = open_images(table, *images), [images.column]
        chosen = choose(table, inputs or remembered.get(input_key, ()), targets, carried, split(options.ignore))
        if labelled and isinstance(record, ClassCalibration):
            chosen = replace(chosen, labels=Labels(_only_target(chosen), record.names))
        return cls(table, chosen, images)

    def another(self, path: str, *, labelled: bool) -> Source:
        """Open another file with the same columns; without `labelled` its targets are not read."""
        table = open_table(path) if self.images is None else open_images(open_table(path), *self.images)
        columns = choose(table, self.columns.inputs, self.columns.targets if labelled else ())
        return Source(table, replace(columns, labels=self.columns.labels if labelled else None), self.images)

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
        inputs = replace(self, columns=replace(self.columns, targets=(), labels=None))
        for rows in inputs.read(8):
            if rows.finite.any():
                return place(as_arguments(model, rows.where(rows.finite).inputs), model)
        raise DataError(f"expected rows to run the model on in {self.table.path}; found none.")

    def with_labels(self, options: Classes) -> Source:
        """Read the target column as class labels if it may hold classes.

        Text is read as classes, in alphabetical order or in that of `--class-names`. Whether whole numbers are classes
        is decided by `latedrop.calibrate` from the shape of the model's output, and it compares the number of names.
        """
        names, sure = tuple(split(options.class_names)), options.task == "classification"
        several = options.task == "auto" and len(self.columns.targets) > 1
        labels: tuple[str, ...] | bool = False
        if options.task != "regression" and not several:
            labels = names or distinct(_only_target(self.columns), self._values(_only_target(self.columns)))
        elif names:
            raise ArgumentError("expected --class-names with one target of class labels; found a regression.")
        options.check(classes=labels is not False or sure)
        if labels is False and not sure:
            return self
        read = Labels(_only_target(self.columns), () if isinstance(labels, bool) else labels)
        return replace(self, columns=replace(self.columns, labels=read))

    def _values(self, column: str) -> Iterator[Any]:
        """Yield the values of a column, some rows at a time."""
        with readable(self.table.path, "data"):
            for _, values in self.table.read(Columns((), kept=(column,)), _AT_ONCE):
                yield values[column]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what inputs and targets were, where the model fails on them, or its output has another shape."""
        try:
            yield
        except (DataError, ArgumentError) as error:
            message, labels = str(error).rstrip("."), self.columns.labels
            if labels is not None and labels.names and message.startswith(_OF_CLASSES):
                raise type(error)(
                    f"{message}. The classes in {labels.column!r} of {self.table.path} are, from 0 on, "
                    f"{listed(labels.names, _LABELS, quote=True)}. Name all, in the order of the model's outputs: "
                    "--class-names."
                ) from error
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


def _pictures(options: Tabled, remembered: Sequence[str] | None) -> Pictures | None:
    """Return the images that options name; what these leave out is as a calibration remembers."""
    if options.images is not None:
        column, transform = remembered or ("file", "")
        return Pictures(options.images, options.column or column, options.transform or transform)
    if remembered:
        raise ArgumentError(
            "expected --images, the folder of the images, as the calibration was made with images; found none."
        )
    if options.column or options.transform:
        raise ArgumentError("expected --images, a folder, with --column and --transform; found none.")
    return None


def example(
    options: Tabled,
    network: nn.Module,
    data: str | None,
    shapes: Sequence[str] | None,
    record: Any = None,
    target: str | None = None,
) -> Any:
    """Return rows to run a network on: of a file, or random ones."""
    if data is not None and shapes:
        raise ArgumentError("expected --data or --input-shape; found both. Leave one out.")
    if data is not None:
        return Source.of(data, options, split(target), record=record).example(network)
    if not shapes:
        raise ArgumentError("expected --data or --input-shape, rows to run the model on; found none.")
    dice, made = torch.Generator().manual_seed(0), []
    for text in shapes:
        sizes = [int(part) for part in split(text) if part.isdecimal()]
        if len(sizes) != len(split(text)) or not sizes or min(sizes) < 1:
            raise ArgumentError(f"expected --input-shape as the sizes of one row, such as 3,224,224; found {text!r}.")
        made.append(torch.randn(3, *sizes, generator=dice))
    return place(tuple(made) if len(made) > 1 else made[0], network)


def _only_target(columns: Columns) -> str:
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
    are an error, or with `drop` left out and counted in `dropped`. `notice` is shown the rows of every batch.
    """

    source: Source
    model: nn.Module
    batch_size: int = 256
    drop: bool = False
    part: str = "all"
    seed: int = 0
    notice: Callable[[Rows], Any] = lambda rows: None
    dropped: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Any]:
        dice = np.random.default_rng(self.seed)
        self.dropped = 0
        for rows in self.source.read(self.batch_size):
            if self.part != "all":
                rows = rows.where((dice.random(len(rows)) < 0.5) == (self.part == "held"))
            if not (self.drop or rows.finite.all()):
                raise DataError(
                    f"expected finite numbers in {self.source.table.path}; found NaN, infinite or missing ones, first "
                    f"at {Places(self.source.table.unit).add(rows)}. Mend them, or leave such rows out: --drop-nan."
                )
            self.dropped += int((~rows.finite).sum())
            rows = rows.where(rows.finite)
            if not len(rows):
                continue
            self.notice(rows)
            x, y = as_arguments(self.model, rows.inputs), rows.target
            if y is not None and self.source.columns.labels is not None:
                # Classes are told from other numbers by their type.
                whole = y.ndim == 1 and bool(((y == np.round(y)) & (np.abs(y) < 2**53)).all())
                y = y.astype(np.int64) if whole else y
            yield x if y is None else (x, y)

    @property
    def row_total(self) -> int | None:
        """How many rows there are at most; None where the table does not tell."""
        return self.source.table.count


def conformal_rows(rows: TableBatches, path: str | None, *, halve: bool) -> tuple[TableBatches, TableBatches | None]:
    """Return rows to fit to, and rows for conformal intervals: those of another file, half of these, or none."""
    if path is not None:
        return rows, replace(rows, source=rows.source.another(path, labelled=True))
    return (replace(rows, part="fit"), replace(rows, part="held")) if halve else (rows, None)


def task_of(task: str, source: Source) -> Any:
    """Return the `task=` for `latedrop.calibrate`, with the class names if labels are text."""
    names = () if source.columns.labels is None else source.columns.labels.names
    return Classification(names) if names or task == "classification" else task


def remembering(
    uq: Predictor | ClassPredictor, source: Source, options: Classes, held_out: Any
) -> Predictor | ClassPredictor:
    """Store the column names in a predictor, and add the prediction sets or the rejection rule that options ask for.

    Sets and rule are calibrated on the rows `held_out`, which are read only then.
    """
    options.check(classes=isinstance(uq, ClassPredictor))
    if not isinstance(uq, ClassPredictor):
        uq.calibration = replace(uq.calibration, columns=source.names(), verdict=_named(uq.calibration.verdict, source))
        return uq
    c = uq.calibration = replace(uq.calibration, columns=source.names())
    if c.verdict.accuracy < 1 / c.classes:
        warn(
            f"the model is right in {c.verdict.accuracy:.0%} of the validation rows, less than by chance: the classes "
            f"may have another order than {listed(c.known_names, _SHOWN, quote=True)}. Pass the names in the "
            "order of the outputs: --class-names.",
            LatedropWarning,
            stacklevel=2,
        )
    if options.sets is not None:
        uq = uq.conformal(held_out, options.sets, per_class=options.per_class)
    return uq if options.reject is None else uq.reject(held_out, options.reject)


def _named(verdict: Verdict | None, source: Source) -> Verdict | None:
    """Return a verdict whose slices name columns of the file; batches of a table have inputs by number."""
    if verdict is None:
        return None
    names = {f"input {k}": name for k, name in enumerate(source.columns.inputs)}
    return replace(verdict, slices=tuple(replace(part, by=names.get(part.by, part.by)) for part in verdict.slices))


@dataclass
class Places:
    """Where rows are that are not finite: how many, and the first few."""

    unit: str
    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, rows: Rows) -> Places:
        """Count the rows that are not finite."""
        bad = np.flatnonzero(~rows.finite).tolist()
        self.first += [rows.places[i] for i in bad[: _SHOWN - len(self.first)]]
        self.count += len(bad)
        return self

    def __str__(self) -> str:
        plural = {"line": "lines", "index": "indices"}[self.unit] if len(self.first) > 1 else self.unit
        return f"{plural} {', '.join(map(str, self.first))}{', ...' if self.count > len(self.first) else ''}"
