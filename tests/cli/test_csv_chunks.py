"""Csv read and written by pyarrow: the same rows, texts and errors as line by line."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latedrop.cli import csv_text, writing
from latedrop.cli.tables import Columns, csv_chunks, csv_files, open_table, read_batches
from latedrop.errors import LatedropError

pytest.importorskip("pyarrow")
COLUMNS = Columns(("a", "b"), kept=("t",))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few lines are several chunks."""
    for name, size in (("_LINE", 1), ("_LEAST", 32)):
        monkeypatch.setattr(csv_chunks, name, size)


def found(path: Path, size: int) -> Any:
    """Everything of the batches, and the error that ended them."""
    batches: list[Any] = []
    try:
        for rows in read_batches(open_table(str(path)), COLUMNS, size):
            values = np.asarray(rows.inputs)
            batches.append((list(rows.places), values.tobytes(), rows.kept, rows.finite.tolist()))
    except LatedropError as error:
        return batches, type(error), str(error)
    return batches, None, ""


def line_by_line(path: Path, size: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_files, "_start", lambda path: None)
        return found(path, size)


CELLS = ["1", "-2.5", "1e3", " 7 ", "", "NA", "nan", "None", "inf", "-Infinity", "true", "1_0", "+5", "0x1", "x", '"3"']
CELLS += ['"a,b"', '"two\nlines"', "é", "1.7976931348623157e308", "1e999", "0.1", ".5", "5.", "1,5", "nan(1)", "\x00"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(*[st.one_of(st.sampled_from(CELLS[:3]), st.sampled_from(CELLS))] * 3), max_size=12),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    blank=st.integers(0, 12),
    size=st.integers(1, 5),
    last=st.booleans(),
)
def test_rows_and_errors_are_those_of_the_other_reader(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, end: str, blank: int, size: int, last: bool
) -> None:
    lines = ["a,b,t", *(",".join(row) for row in rows)]
    lines[blank:blank] = [""] * (blank % 2)
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_bytes((end.join(lines) + end * last).encode())
    if lines[0] == "" and end == "\r":
        return
    assert found(path, size) == line_by_line(path, size)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfa,b,t\n1,2,x\n",
        b"a;b;t\n1;2;x\n3;4;y",
        b"a\tb\tt\n1\t2\tx\n",
        b'"a","b",t\n1,2,x\n',
        b'"a\nb",a,b,t\n0,1,2,x\n',
        b"a,b,t,a\n1,2,x,9\n",
        b"a,b,t\n1,2,x\n" * 1 + b"3,4,\xff\n",
        b"a,b,t\n" + b"1,2,x\n" * 40 + b'3,4,"y, z"\n' + b"5,6,w\n" * 40,
        b"a,b,t\n" + b"1,2,x\n" * 40 + b"3,4\n" + b"5,6,w\n" * 40,
        b"a,b,t\n" + b"1,2,x\n" * 40 + b"3,oh,y\noh,4,y\n",
        b"a,b,t\n",
    ],
    ids=range(11),
)
def test_all_kinds_of_files(tmp_path: Path, text: bytes, size: int) -> None:
    for path, content in ((tmp_path / "rows.csv", text), (tmp_path / "rows.csv.gz", gzip.compress(text))):
        path.write_bytes(content)
        assert found(path, size) == line_by_line(path, size)


def test_a_damaged_archive_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"a,b,t\n" + b"".join(b"%d,2,x\n" % i for i in range(10_000)))[:-2000])
    kind, message = found(path, 100)[1:]
    assert (kind, message) == line_by_line(path, 100)[1:]
    assert "expected gzip" in message


def test_plain_files_are_not_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b,t\n" + "1,NA,x\n" * 1000)
    table = open_table(str(path))
    monkeypatch.setattr(csv_files, "_numbered", None)
    assert sum(map(len, read_batches(table, COLUMNS, 64))) == 1000


def written(columns: dict[str, Any], fast: bool) -> str:
    file = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr(writing, "csv_text", lambda columns, between: None)
        writing._csv_writer(file)(columns)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint32])
def test_numbers_are_written_as_numpy_writes_them(dtype: Any) -> None:
    dice = np.random.default_rng(0)
    values = dice.normal(size=5000) * 10.0 ** dice.integers(-12, 12, 5000)
    if np.issubdtype(dtype, np.floating):
        values = np.concatenate([values, [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e-4, 1e6, 999999.94, 3e38]])
    else:
        values = np.abs(values) % 1e9
    columns = {"a": values.astype(dtype), "b": values.astype(dtype)[::-1]}
    assert csv_text.csv_text(columns, ",") is not None
    assert written(columns, True) == written(columns, False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet='a,;\t"\n\r=+-@1.é ', max_size=4), min_size=1, max_size=6))
def test_texts_are_written_as_by_the_other_writer(texts: list[str]) -> None:
    columns = {"t": texts, "a": np.arange(len(texts)) + 0.5}
    assert written(columns, True) == written(columns, False)


@pytest.mark.parametrize("kept", [[None, "x"], [1, 2], np.array([True, False]), np.array(["a", "b"])])
def test_other_columns_are_left_to_the_other_writer(kept: Any) -> None:
    columns = {"t": kept, "a": np.array([0.5, 1.5])}
    assert csv_text.csv_text(columns, ",") is None
    assert written(columns, True) == written(columns, False)
