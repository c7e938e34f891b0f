"""Csv in chunks: the rows, places and errors of Python's csv module, whatever is in the cells; and csv written."""

from __future__ import annotations

import csv
import gzip
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latedrop.cli import writing
from latedrop.cli.tables import Columns, open_table, read_batches, rows
from latedrop.errors import LatedropError

COLUMNS = Columns(("a", "b"), kept=("t",))


def found(path: Path, size: int) -> Any:
    """All rows as `(line, a, b, t)`, or the line that an error names."""
    rows: list[Any] = []
    try:
        for batch in read_batches(open_table(str(path)), COLUMNS, size):
            assert len(batch) <= size
            values = np.asarray(batch.inputs).tolist()
            rows += zip(batch.places, *zip(*values, strict=True), batch.kept["t"].to_pylist(), strict=True)
    except LatedropError as error:
        return str(error).partition(" in line ")[2].split(".")[0]
    return [tuple(map(repr, row)) for row in rows]  # NaN is NaN


def value(cell: str) -> float | None:
    """Return the number in a cell; None for text."""
    plain = cell.strip().lower()
    if plain in ("", "na", "n/a", "nan", "null", "none"):
        return math.nan
    if plain in ("true", "false"):
        return float(plain == "true")
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def expected(text: str, between: str = ",") -> Any:
    """Return the rows by Python's csv module, or the lines that are wrong."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=between)
    names, rows, wrong, line = None, [], set(), 1
    for cells in reader:
        if cells and names is None:
            names = [cell.strip() for cell in cells]
        elif cells:
            row = dict(zip(names or (), cells, strict=False))
            numbers = [value(row.get(name, "no cell")) for name in ("a", "b")]
            if len(cells) != len(names or ()) or None in numbers:
                wrong.add(str(line))
            rows.append((line, *numbers, row.get("t", "").replace("\r\n", "\n").replace("\r", "\n")))
        line = reader.line_num + 1
    return wrong or [tuple(map(repr, row)) for row in rows]


def assert_expected(path: Path, size: int, by_module: Any) -> None:
    if isinstance(by_module, set):
        assert found(path, size) in by_module
    else:
        assert found(path, size) == by_module


CELLS = ["1", "-2.5", "1e3", " 7 ", "", "NA", "nan", "None", "inf", "-Infinity", "true", "1_0", "+5", "0x1", "x", '"3"']
CELLS += ['"a,b"', '"two\nlines"', "é", "1.7976931348623157e308", "1e999", "0.1", ".5", "5.", "1,5", "nan(1)", '5" 2']
CELLS += ['"say ""no"""', '"\n"', '""']


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(*[st.one_of(st.sampled_from(CELLS[:3]), st.sampled_from(CELLS))] * 3), max_size=12),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    blank=st.integers(0, 12),
    size=st.integers(1, 5),
    last=st.booleans(),
)
def test_rows_and_errors_are_those_of_the_csv_module(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, end: str, blank: int, size: int, last: bool
) -> None:
    lines = ["a,b,t", *(",".join(row) for row in rows)]
    lines[blank:blank] = [""] * (blank % 2)
    text = end.join(lines) + end * last
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_bytes(text.encode())
    assert_expected(path, size, expected(text))


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    "text",
    [
        "\ufeffa,b,t\n1,2,x\n",
        "a;b;t\n1;2;x\n3;4;y",
        "a\tb\tt\n1\t2\tx\n",
        '"a","b",t\n1,2,x\n',
        '"a\nb",a,b,t\n0,1,2,x\n',
        "a,b,t,c\n1,2,x,9\n",
        "a,b,t\n" + "1,2,x\n" * 40 + '3,4,"y, z"\n' + "5,6,w\n" * 40,
        "a,b,t\n" + "1,2,x\n" * 40 + "3,4\n" + "5,6,w\n" * 40,
        "a,b,t\n" + "1,2,x\n" * 40 + "3,oh,y\noh,4,y\n",
        "a,b,t\n",
    ],
)
def test_all_kinds_of_files(tmp_path: Path, text: str, size: int) -> None:
    between = max(",;\t", key=text.count)
    for path, content in (
        (tmp_path / "rows.csv", text.encode()),
        (tmp_path / "rows.csv.gz", gzip.compress(text.encode())),
    ):
        path.write_bytes(content)
        assert_expected(path, size, expected(text.removeprefix("\ufeff"), between))


def test_other_bytes_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,b,t\n" + b"1,2,x\n" * 40 + b"3,4,\xff\n")
    with pytest.raises(LatedropError, match=r"as UTF-8 text; found other bytes in line 42, b'\\xff\\n'"):
        list(read_batches(open_table(str(path)), COLUMNS, 3))


def test_a_column_may_be_read_as_numbers_and_carried_along(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2.50\n3,NA\n")
    (rows,) = read_batches(open_table(str(path)), Columns(("a", "b"), kept=("b",)), 9)
    np.testing.assert_array_equal(rows.inputs, [[1, 2.5], [3, np.nan]])
    assert rows.kept["b"].to_pylist() == ["2.50", "NA"]


def test_plain_cells_are_not_looked_at_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b,t\n" + "1,NA,x\n" * 1000)
    monkeypatch.setattr(rows, "_number_of", None)
    assert sum(map(len, read_batches(open_table(str(path)), COLUMNS, 64))) == 1000


def written(columns: dict[str, Any]) -> str:
    file = io.StringIO()
    writing._csv_writer(file)(columns)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint32])
def test_numbers_come_back_to_the_last_bit(dtype: Any) -> None:
    dice = np.random.default_rng(0)
    values = dice.normal(size=5000) * 10.0 ** dice.integers(-12, 12, 5000)
    if np.issubdtype(dtype, np.floating):
        values = np.concatenate([values, [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e-4, 1e6, 999999.94, 3e38]])
    else:
        values = np.abs(values) % 1e9
    columns = {"a": values.astype(dtype), "b": values.astype(dtype)[::-1]}
    rows = list(csv.reader(io.StringIO(written(columns))))
    assert rows[0] == ["a", "b"]
    read = np.array([[cell or "nan" for cell in row] for row in rows[1:]]).astype(dtype)
    np.testing.assert_array_equal(read, np.column_stack(list(columns.values())))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet='a,;\t"\n\r=+-@1.é ', max_size=4), min_size=1, max_size=6), st.booleans())
def test_texts_come_back(texts: list[str], alone: bool) -> None:
    columns: dict[str, Any] = {"t": texts} | ({} if alone else {"a": np.arange(len(texts))})
    rows = list(csv.reader(io.StringIO(written(columns), newline="")))
    assert [row[0].removeprefix("'") for row in rows[1:]] == texts


def test_what_is_missing_is_empty() -> None:
    label = np.ma.masked_array(["x", "y"], [True, False])
    assert written({"t": [None, "x"], "n": label, "k": np.array([True, False])}) == "t,n,k\n,,True\nx,y,False\n"
    assert written({"mean": np.array([np.nan, 1.5])}) == 'mean\n""\n1.5\n'
