"""Tables: what is read from each kind of file, one line for each thing that is wrong, and never many rows at once."""

import csv
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, parquet

import latedrop
from latedrop.cli.tables import Columns, Rows, choose, open_table, read_batches
from latedrop.errors import ArgumentError, DataError, FileError

CSV = "id,a,b,y\nr0,1,2,3\nr1,4,5,6\nr2,7,8,9\n"


def csv_file(folder: Path, text: str = CSV, name: str = "data.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def rows_of(path: str, columns: Columns, size: int = 2) -> list[Rows]:
    return list(read_batches(open_table(path), columns, size))


def inputs_of(path: str, *names: str, size: int = 2) -> np.ndarray:
    parts = [rows.inputs for rows in rows_of(path, Columns(names), size)]
    assert all(isinstance(part, np.ndarray) for part in parts)
    return np.concatenate(parts)  # type: ignore[arg-type]


class TestCsv:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "expected a first line with column names.*found nothing"),
            ("1,2\n3,4\n", "found only numbers. Put a line of names on top"),
            ("a,b\n1,2\n3\n", "expected 2 cells in every line.*found 1 in line 3"),
            ("a,b\n1,2,3\n", "found 3 in line 2"),
            ('a,b\n1,2\n"3,4\n' + "5,6\n" * 1_200_000, "line 3 found: field larger than .* Is a quote not closed"),
        ],
        ids=["empty", "no names", "too few", "too many", "quote not closed"],
    )
    def test_what_is_no_table(self, tmp_path: Path, text: str, message: str) -> None:
        csv.field_size_limit(2**17)  # Python's own, which some libraries raise for the whole process
        with pytest.raises(DataError, match=message):
            inputs_of(csv_file(tmp_path, text), "a")

    def test_standard_input_can_be_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + CSV))
        table = open_table("-")
        assert table.names == ("id", "a", "b", "y")
        assert sum(len(rows) for rows in read_batches(table, Columns(("a",)), 2)) == 3
        with pytest.raises(ArgumentError, match="standard input can be read once"):
            list(read_batches(table, Columns(("a",)), 2))


@pytest.mark.parametrize("kind", ["parquet", "feather"])
class TestArrow:
    def written(self, columns: Any, path: Path, kind: str) -> str:
        write = parquet.write_table if kind == "parquet" else feather.write_feather
        write(pyarrow.table(columns), path / f"data.{kind}")
        return str(path / f"data.{kind}")

    def test_rows(self, tmp_path: Path, kind: str) -> None:
        columns = {
            "id": ["r0", "r1", "r2"],
            "int": [1, 2, None],
            "bool": [True, False, True],
            "float": pyarrow.array([0.5, None, 2.5], pyarrow.float32()),
        }
        path = self.written(columns, tmp_path, kind)
        table = open_table(path)
        assert (table.names, table.arrays, table.count) == (tuple(columns), False, 3)
        lines = rows_of(path, Columns(("int", "bool"), ("float",), ("id",)))
        assert [rows.kept["id"].to_pylist() for rows in lines] == [["r0", "r1"], ["r2"]]
        assert [list(rows.places) for rows in lines] == [[0, 1], [2]]
        assert lines[0].inputs.tolist() == [[1, 1], [2, 0]]  # type: ignore[union-attr]
        assert [rows.finite.tolist() for rows in lines] == [[True, False], [False]]

    def test_text(self, tmp_path: Path, kind: str) -> None:
        path = self.written({"city": ["Oslo"]}, tmp_path, kind)
        with pytest.raises(DataError, match=r"numbers in column 'city' .*its type is string.*--ignore city"):
            inputs_of(path, "city")

    def test_another_file(self, tmp_path: Path, kind: str) -> None:
        path = csv_file(tmp_path, name=f"data.{kind}")
        with pytest.raises(FileError, match=rf"expected a {kind} file at .*damaged or another one"):
            open_table(path)


class TestArrays:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_npz(self, tmp_path: Path, save: Any, order: Any) -> None:
        x = np.asarray(np.arange(5 * 2 * 3, dtype=np.float32).reshape(5, 2, 3), order=order)
        y = np.arange(5)
        path = str(tmp_path / "data.npz")
        save(path, x=x, y=y)
        table = open_table(path)
        assert (table.names, table.arrays, table.count) == (("x", "y"), True, 5)
        lines = rows_of(path, Columns(("x",), ("y",)))
        assert [len(rows) for rows in lines] == [2, 2, 1]
        parts = [rows.inputs["x"] for rows in lines]
        np.testing.assert_array_equal(np.concatenate(parts), x)
        assert parts[0].dtype == np.float32
        assert np.concatenate([rows.target for rows in lines]).tolist() == y.tolist()

    @pytest.mark.parametrize(
        ("arrays", "error", "message"),
        [
            ({"x": np.array([{}, {}], dtype=object)}, DataError, "found Python objects, which only unpickling"),
            ({"x": np.zeros(2, complex)}, DataError, "expected real numbers in array 'x' .*complex128"),
            ({"x": np.array(["a", "b"])}, DataError, "expected numbers in array 'x' .*found text"),
            ({"x": np.float64(3)}, DataError, r"as many rows each .*'x' \(\)"),
            ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, DataError, r"'x' \(3, 2\), 'y' \(4,\)"),
        ],
        ids=["objects", "complex", "text", "scalar", "lengths"],
    )
    def test_arrays_that_are_no_rows(self, tmp_path: Path, arrays: dict[str, Any], error: Any, message: str) -> None:
        path = str(tmp_path / "data.npz")
        np.savez(path, **arrays)
        with pytest.raises(error, match=message):
            rows_of(path, Columns(("x",), tuple(arrays)[1:]))

    def test_damaged_npz(self, tmp_path: Path) -> None:
        path = tmp_path / "data.npz"
        np.savez(path, x=np.zeros(1000))
        content = path.read_bytes()
        path.write_bytes(content[:500])
        with pytest.raises(FileError, match=r"expected a npz file at .*damaged or another one"):
            open_table(str(path))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", b"no array")
        with pytest.raises(FileError, match=r"expected array 'x' in .*damaged"):
            open_table(str(path))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content[content.index(b"\x93NUMPY") :][:500])
        with pytest.raises(FileError, match=r"expected array 'x' in .*shape \(1000,\) .*found 372 bytes"):
            open_table(str(path))

    @pytest.mark.parametrize(
        ("dtype", "shape"),
        [("<f8", (10**15, 3)), ("<f8", (3,)), ("<f8", (-2, -2)), ("<f8", (10**15, 0)), ("<U0", (10**15,)), ("<f8", ())],
    )
    @pytest.mark.parametrize("pack", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    def test_a_head_that_promises_other_rows(self, dtype: str, shape: Any, pack: int, tmp_path: Path) -> None:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": dtype, "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(tmp_path / "lie.npz", "w", pack) as archive:
            archive.writestr("x.npy", head.getvalue() + bytes(32 if dtype == "<f8" and 0 not in shape else 0))
        with pytest.raises(FileError, match=r"expected array 'x' in .*It is damaged, or was cut off"):
            open_table(str(tmp_path / "lie.npz"))

    @pytest.mark.parametrize("pack", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    def test_an_archive_that_promises_what_it_cannot_hold(self, pack: int, tmp_path: Path) -> None:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
        with zipfile.ZipFile(tmp_path / "lie.npz", "w", pack) as archive:
            archive.writestr("x.npy", head.getvalue() + bytes(8000))
            archive.infolist()[0].file_size = len(head.getvalue()) + 8 * 10**15
        with pytest.raises(FileError, match="the sizes that the archive promises cannot be"):
            open_table(str(tmp_path / "lie.npz"))

    def test_rows_of_several_inputs(self, tmp_path: Path) -> None:
        path = str(tmp_path / "data.npz")
        np.savez(path, a=np.zeros((3, 2)), b=np.array([[1.0], [np.nan], [2.0]]), t=np.zeros((3, 4)), s=np.zeros(3))
        (rows,) = rows_of(path, Columns(("a", "b"), ("t",)), size=3)
        assert rows.finite.tolist() == [True, False, True]
        finite = rows.where(rows.finite)
        assert isinstance(finite.inputs, dict)
        assert {name: value.shape for name, value in finite.inputs.items()} == {"a": (2, 2), "b": (2, 1)}
        assert finite.target.shape == (2, 4)
        with pytest.raises(ArgumentError, match="one value per row in each of several targets; found more in 't'"):
            rows_of(path, Columns(("a",), ("s", "t")))


class TestFiles:
    @pytest.mark.parametrize("name", ["none.csv", "none.parquet", "none.npz"])
    def test_missing_file(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(FileError, match=f"expected data at .*{name}; the system says: .*No such file"):
            open_table(str(tmp_path / name))

    @pytest.mark.parametrize("name", ["data.xlsx", "data"])
    def test_other_endings(self, name: str) -> None:
        with pytest.raises(ArgumentError, match=r"expected data that end in \.csv, .*found"):
            open_table(name)


class TestChoose:
    def test_defaults(self, tmp_path: Path) -> None:
        table = open_table(csv_file(tmp_path))
        assert choose(table, targets=["y"], kept=["id"]) == Columns(("a", "b"), ("y",), ("id",))
        assert choose(table, targets=["y"], ignored=["id"]) == Columns(("a", "b"), ("y",))
        assert choose(table, ["b"], ["y"], ["b"]) == Columns(("b",), ("y",), ("b",))

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"inputs": ["c"]}, "expected column 'c' in .*It has 'id', 'a', 'b', 'y'"),
            ({"targets": ["idd"]}, "expected column 'idd' .*Did you mean 'id'"),
            ({"kept": ["zz"]}, "expected column 'zz'"),
            ({"ignored": ["zz"]}, "expected column 'zz'"),
            ({"inputs": ["a"], "targets": ["a"]}, "inputs and targets to differ; found 'a' in both"),
            ({"ignored": ["id", "a", "b", "y"]}, "expected input columns in .*found none"),
        ],
    )
    def test_wrong_names(self, tmp_path: Path, asked: dict[str, list[str]], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            choose(open_table(csv_file(tmp_path)), **asked)

    def test_an_index_without_a_name(self, tmp_path: Path) -> None:
        table = open_table(csv_file(tmp_path, ",a,y\n0,1,2\n"))
        with pytest.raises(ArgumentError, match=r"expected a name for every input column .*an index that was saved"):
            choose(table, targets=["y"])
        assert choose(table, ["a"]).inputs == ("a",)

    def test_names_twice(self, tmp_path: Path) -> None:
        table = open_table(csv_file(tmp_path, "a,a,b\n1,2,3\n"))
        with pytest.raises(DataError, match=r"expected one column 'a' in .*found several"):
            choose(table, targets=["b"])
        assert choose(table, ["b"]).inputs == ("b",)


def test_a_process_that_ends_early_after_a_csv_ends_in_order(tmp_path: Path) -> None:
    """With one thread for torch, threads of pyarrow used to abort such a process at its end, in most tries."""
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    code = (
        "import sys, torch; from latedrop.cli.tables import Columns, open_table, read_batches; "
        "table = open_table('rows.csv'); list(read_batches(table, Columns(('a',)), 8)); sys.exit(2)"
    )
    source = str(Path(latedrop.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr


def test_a_decimal_comma_is_named(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "a;y\n1,5;2\n2,5;3\n")
    with pytest.raises(DataError, match=r"found '1,5' in line 2\. Write a decimal point"):
        inputs_of(path, "a")
