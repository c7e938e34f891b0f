"""Folders of files as one table: the same rows in the same order as one csv file has."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from latedrop.cli.tables import Columns, choose, open_table, read_batches
from latedrop.cli.writing import write_rows
from latedrop.errors import DataError

NAMES = ("id", "a", "y")


def part(first: int, count: int = 4) -> dict[str, list[Any]]:
    rows = range(first, first + count)
    return {"id": [f"r{i}" for i in rows], "a": [float(i) for i in rows], "y": [2.0 * i for i in rows]}


def write(path: Path, columns: dict[str, list[Any]]) -> None:
    """A file of one of the kinds, by its ending."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
        return
    text = "\n".join(",".join(map(str, row)) for row in [tuple(columns), *zip(*columns.values(), strict=True)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def folder(where: Path, *names: str, **other: Any) -> str:
    made = where / "rows"
    made.mkdir()
    for index, name in enumerate(names):
        write(made / name, other.get(f"part{index}", part(4 * index)))
    return str(made)


def seen(path: str, size: int = 3) -> tuple[list[float], list[float], list[str]]:
    table = open_table(path)
    rows = list(read_batches(table, choose(table, ["a"], ["y"], ["id"]), size))
    assert all(len(batch) <= size for batch in rows)
    remaining = [name for batch in rows for name in batch.kept["id"]]
    inputs = [value for batch in rows for value in np.ravel(batch.inputs).tolist()]  # type: ignore[arg-type]
    return inputs, [v for b in rows for v in b.target.tolist()], [str(name) for name in remaining]  # type: ignore[union-attr]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv", ".parquet"])
def test_files_of_a_folder_are_one_table(tmp_path: Path, ending: str) -> None:
    path = folder(tmp_path, f"b{ending}", f"a{ending}", f"c{ending}", part0=part(4), part1=part(0), part2=part(8))
    for name in ("_SUCCESS", ".hidden.csv", "readme.txt"):
        (Path(path) / name).write_text("x")
    table = open_table(path)
    assert table.names == NAMES
    assert table.count == (12 if ending == ".parquet" else None)
    inputs, target, remaining = seen(path)
    assert inputs == list(range(12))
    assert target == [2.0 * i for i in range(12)]
    assert remaining == [f"r{i}" for i in range(12)]
    assert seen(path) == (inputs, target, remaining)  # it can be read again


def test_a_place_names_the_file(tmp_path: Path) -> None:
    path = folder(tmp_path, "a.csv", "b.csv", part1={**part(4), "a": [1.0, "oh", 2.0, 3.0]})
    with pytest.raises(DataError, match=r"found 'oh' in line 3"):
        seen(path)
    gaps = folder(tmp_path / "rows", "a.csv", "b.csv", part1={**part(4), "a": [1.0, "", 2.0, 3.0]})
    table = open_table(gaps)
    rows = [batch for batch in read_batches(table, Columns(("a",)), 9) if not batch.finite.all()]
    assert [place for place, finite in zip(rows[0].places, rows[0].finite, strict=True) if not finite] == ["b.csv:3"]


@pytest.mark.parametrize(
    ("files", "parts", "message"),
    [
        ((), {}, r"expected files of one kind, \.csv, .* in the folder .*rows; found none"),
        (("a.csv", "b.parquet"), {}, r"expected files of one kind, .*; found a\.csv, b\.parquet"),
        (("a.csv", "b.csv"), {"part1": {"id": ["r"], "a": [1.0], "z": [1.0]}}, r"b\.csv and a\.csv differ in 'y', 'z'"),
    ],
    ids=["empty", "two kinds", "other columns"],
)
def test_what_is_no_table(tmp_path: Path, files: tuple[str, ...], parts: dict[str, Any], message: str) -> None:
    path = folder(tmp_path, *files, **parts)
    with pytest.raises(DataError, match=message):
        open_table(path)


def test_folders_inside_are_not_left_out_unseen(tmp_path: Path) -> None:
    path = folder(tmp_path, "a.csv")
    (Path(path) / "year=2020").mkdir()
    with pytest.raises(DataError, match=r"expected files side by side .* found folders in it: year=2020\. Name one"):
        open_table(path)


def test_a_thousand_files_are_not_open_at_once(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="limits of POSIX")
    path = folder(tmp_path, *(f"{i:04d}.csv" for i in range(80)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        assert len(seen(path)[0]) == 320
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_kept_columns_whose_types_differ_between_files(tmp_path: Path) -> None:
    path = str(tmp_path / "out.parquet")
    with write_rows(path) as append:
        append({"id": pyarrow.array([1, 2], pyarrow.int64())})
        append({"id": pyarrow.array([3], pyarrow.int32())})
    assert parquet.read_table(path)["id"].to_pylist() == [1, 2, 3]
    with write_rows(path) as append:
        append({"id": pyarrow.array([1])})
        with pytest.raises(DataError, match=r"expected values of one kind in every column; found others: .*int64"):
            append({"id": pyarrow.array(["x"])})
