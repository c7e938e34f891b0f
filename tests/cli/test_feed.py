"""Between tables and models: no more than a batch of rows at a time, and everything in its place."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import latedrop
from held import Held
from latedrop.cli.feed import Source
from latedrop.cli.options import Tabled
from latedrop.cli.predicting import predicted
from latedrop.cli.tables import read_batches
from latedrop.cli.writing import write_rows
from latedrop.prediction.predictor import Predictor


def calibrated(outputs: int, dtype: torch.dtype) -> Predictor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)
    x = torch.randn(60, 2, dtype=dtype)
    return latedrop.calibrate(net, (x, x[:, :outputs] ** 2), method=latedrop.Sampling(rates=[0.3], draws=10))


@pytest.fixture(scope="module")
def uq() -> Predictor:
    return calibrated(1, torch.float32)


def csv_file(folder: Path, rows: int, bad: tuple[int, ...] = ()) -> str:
    path = folder / "data.csv"
    with path.open("w") as file:
        file.write("id,b,a,y\n")
        file.writelines(f"r{i},{'' if i in bad else i / rows},{-i / rows},{i}\n" for i in range(rows))
    return str(path)


class Lines(io.BufferedIOBase):
    """Standard input that counts the lines it has handed out."""

    def __init__(self, rows: int) -> None:
        self.buffer, self.handed, self._rows = self, -1, rows

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        """Give one line, as a pipe does that others write to slowly."""
        self.handed += 1
        if self.handed == 0:
            return b"b,a\n"
        return b"%d,%d\n" % (self.handed, -self.handed) if self.handed <= self._rows else b""


class TestMemory:
    ROWS, SIZE = 2000, 50

    def run(self, uq: Predictor, path: str, out: Path) -> None:
        source = Source.of(path, Tabled("x" if path.endswith("npz") else "b,a"))
        with write_rows(str(out)) as append:
            for rows in read_batches(source.table, source.columns, self.SIZE):
                append(predicted(uq, rows, 0.9, flat=out.suffix != ".npz"))

    @pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
    @pytest.mark.parametrize("out", ["out.csv", "out.npz"])
    def test_rows_held_at_once(self, uq: Predictor, tmp_path: Path, monkeypatch: Any, kind: str, out: str) -> None:
        path = csv_file(tmp_path, self.ROWS)
        if kind == "parquet":
            parquet, arrow_csv = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.csv")
            table = arrow_csv.read_csv(path)
            path = str(tmp_path / "data.parquet")
            parquet.write_table(table, path, row_group_size=400)
        elif kind == "npz":
            path = str(tmp_path / "data.npz")
            np.savez(path, x=np.random.default_rng(0).random((self.ROWS, 2)))
        held_out = Held(monkeypatch)
        self.run(uq, path, tmp_path / out)
        assert held_out.all == self.ROWS
        assert held_out.most <= 2 * self.SIZE  # the old batch goes when the next one has come

    def test_lines_read_ahead_of_what_is_written(self, uq: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = Lines(self.ROWS)
        monkeypatch.setattr(sys, "stdin", lines)
        source, written, ahead = Source.of("-"), 0, []
        for rows in read_batches(source.table, source.columns, self.SIZE):
            ahead.append(lines.handed - written)
            written += len(predicted(uq, rows, 0.9, flat=True)["mean"])
        assert written == self.ROWS
        assert max(ahead) <= self.SIZE


class TestPredicted:
    def test_float64(self, tmp_path: Path) -> None:
        double = calibrated(2, torch.float64)
        source = Source.of(csv_file(tmp_path, 4, bad=(0, 1)), Tabled("b,a"))
        first, second = (
            predicted(double, rows, 0.9, flat=False) for rows in read_batches(source.table, source.columns, 2)
        )
        assert {value.dtype for value in (*first.values(), *second.values())} == {np.dtype(np.float64)}
        assert first["low"].shape == second["low"].shape == (2, 2)
