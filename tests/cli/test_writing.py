"""Writing rows: what comes back is what went in, whatever is broken off leaves nothing behind."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from latedrop.cli import writing
from latedrop.cli.writing import check_output, write_rows
from latedrop.errors import ArgumentError, DataError, FileError
from written import arrays_of

MEAN = np.array([0.1, np.nan, 1e-20, 123456.78], dtype=np.float32)


def write(path: Path, columns: dict[str, Any], size: int = 2) -> None:
    count = len(next(iter(columns.values())))
    with write_rows(str(path)) as append:
        for start in range(0, count, size):
            append({name: values[start : start + size] for name, values in columns.items()})


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write(path, {"id": ["a", "b,c", 'd"', ""], "mean": MEAN, "count": np.arange(4)})
    assert path.read_text() == 'id,mean,count\na,0.1,0\n"b,c",,1\n"d""",1e-20,2\n,123456.78,3\n'
    assert list(tmp_path.iterdir()) == [path]


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with write_rows("-") as append:
        append({"mean": np.zeros(1)})
    assert capsys.readouterr().out == "mean\n0\n"
    other = io.StringIO()
    with write_rows("-", other) as append:
        append({"mean": np.ones(1)})
    assert (other.getvalue(), capsys.readouterr().out) == ("mean\n1\n", "")


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_GROUP", 3)
    path = tmp_path / "out.parquet"
    ids = pyarrow.array([None, None, "x", None, None])
    write(path, {"id": ids, "text": list("abcde"), "mean": np.append(MEAN, np.float32(2))})
    file = parquet.ParquetFile(path)
    assert [str(field.type) for field in file.schema_arrow] == ["string", "string", "float"]
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 1]
    table = file.read()
    assert table["id"].to_pylist() == ids.to_pylist()
    np.testing.assert_array_equal(table["mean"].to_numpy()[:4], MEAN)


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    maps = np.arange(5 * 2 * 2, dtype=np.float64).reshape(5, 2, 2)
    write(path, {"mean": maps, "id": np.arange(5), "text": ["1", "2.5", "3", "4", "5"]})
    arrays = arrays_of(path)
    np.testing.assert_array_equal(arrays["mean"], maps)
    assert arrays["mean"].dtype == np.float64
    assert arrays["id"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["text"].tolist() == [1, 2.5, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_npz_takes_numbers_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected numbers to keep in a npz file; found text in 'id'"):
        write(tmp_path / "out.npz", {"id": ["a", "b"]})


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_one_value_per_cell(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"one value per row in 'mean' .*found shape \(2, 3\). Write npz"):
        write(tmp_path / name, {"mean": np.zeros((2, 3))})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.npz"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_broken_off_leaves_the_old_file(tmp_path: Path, name: str, error: type[BaseException]) -> None:
    path = tmp_path / name
    path.write_text("old")

    def broken_off() -> None:
        with write_rows(str(path)) as append:
            append({"mean": np.zeros(3)})
            assert len(list(tmp_path.iterdir())) == 2
            raise error

    with pytest.raises(error):
        broken_off()
    assert [item.read_text() for item in tmp_path.iterdir()] == ["old"]


def test_check_output(tmp_path: Path) -> None:
    check_output(str(tmp_path / "out.CSV"), ".csv")
    with pytest.raises(ArgumentError, match=r"expected an output that ends in .csv or .npz; found 'out.txt'"):
        check_output("out.txt", ".csv", ".npz")
    with pytest.raises(ArgumentError, match="expected a file to write; found -"):
        check_output("-")
    with pytest.raises(FileError, match=r"expected a file to write at .*found a folder"):
        check_output(str(tmp_path))
    with pytest.raises(FileError, match=r"expected the folder of .*not there"):
        check_output(str(tmp_path / "none" / "out.csv"))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FileError, match=r"expected to write .*out.csv; the system says: .*No space left"):
        write(tmp_path / "out.csv", {"mean": np.zeros(2)})
    assert list(tmp_path.iterdir()) == []


def test_text_as_pandas_writes_it(tmp_path: Path) -> None:
    names = pyarrow.array(["a", "b,c"], pyarrow.large_string())
    with write_rows(str(tmp_path / "out.csv")) as append:
        append({"name": names, "again": names.dictionary_encode(), "mean": np.array([1.0, 2.5])})
    assert (tmp_path / "out.csv").read_text(encoding="utf-8") == 'name,again,mean\na,a,1\n"b,c","b,c",2.5\n'
