"""Read what commands wrote: rows of csv, arrays of npz."""

import csv
from pathlib import Path

import numpy as np


def rows_of(path: str) -> list[dict[str, str]]:
    """Read the rows of a csv file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def arrays_of(path: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a npz file, which is closed again."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
