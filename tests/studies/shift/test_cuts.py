"""Cuts are by rank: the same number of rows inside, no value on both sides, no row in two parts."""

import numpy as np
import pytest

from studies.shift.study import Cut, at_most, cuts, parts


def table(rows: int = 200, seed: int = 0) -> np.ndarray:
    """Inputs: distinct numbers, six values, three values of which one has most rows, 0 and 1; a target."""
    random = np.random.default_rng(seed)
    columns = [
        random.normal(size=rows),
        random.integers(0, 6, rows),
        random.choice([0.0, 1.0, 2.0], rows, p=[0.8, 0.1, 0.1]),
        random.integers(0, 2, rows),
        random.normal(size=rows),
    ]
    return np.stack(columns, 1).astype(np.float64)


def sides(cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([cut.train, cut.validation, cut.inside]), cut.shifted


def test_no_row_is_in_two_parts_and_no_value_on_both_sides() -> None:
    data = table()
    actual, _ = cuts(data)
    assert {(cut.column, cut.direction) for cut in actual} == {(0, "above"), (0, "below"), (1, "above"), (1, "below")}
    for cut in actual:
        inside, shifted = sides(cut)
        assert len(np.unique(np.concatenate([inside, shifted]))) == len(inside) + len(shifted)
        here, there = data[inside, cut.column], data[shifted, cut.column]
        if cut.direction == "above":
            assert here.max() == cut.edge < there.min()
        else:
            assert here.min() == cut.edge > there.max()


@pytest.mark.parametrize("rows", [97, 200, 308])
def test_every_cut_has_the_same_number_of_rows_inside(rows: int) -> None:
    actual, _ = cuts(table(rows))
    inside = round(0.7 * rows)
    for cut in actual:
        assert len(sides(cut)[0]) == inside
    assert len({(len(cut.train), len(cut.validation), len(cut.inside)) for cut in actual}) == 1
    one = actual[0]
    assert len(one.inside) == round(0.2 * inside)
    assert len(one.validation) == round(0.2 * (inside - len(one.inside)))


def test_all_rows_beyond_the_edge_are_shifted_and_ties_are_by_chance() -> None:
    data = table()
    for cut in cuts(data)[0]:
        values = data[:, cut.column]
        beyond = values > cut.edge if cut.direction == "above" else values < cut.edge
        assert set(cut.shifted) == set(np.flatnonzero(beyond))
    by_seed = [next(cut for cut in cuts(data, seed)[0] if cut.column == 1) for seed in (0, 1)]
    assert set(sides(by_seed[0])[0]) != set(sides(by_seed[1])[0])
    again = next(cut for cut in cuts(data, 0)[0] if cut.column == 1)
    np.testing.assert_array_equal(again.train, by_seed[0].train)


def test_what_cannot_be_cut_is_said() -> None:
    data = table()
    _, left_out = cuts(data)
    said = {(one["input"], one["direction"]): one["reason"] for one in left_out}
    assert set(said) == {(2, "above"), (2, "below"), (3, "above"), (3, "below")}
    assert said[2, "above"] == "one value in all rows inside; it has 3 values"
    assert said[2, "below"] == "0 % of the rows lie beyond the cut; it has 3 values"


def test_parts_are_standardised_by_training_rows_and_padded() -> None:
    data = table()
    actual, _ = cuts(data)
    rows = parts(data, actual)
    assert rows["train"].shape == (len(actual), len(actual[0].train), 5)
    assert rows["shifted"].shape[:2] == (len(actual), max(len(cut.shifted) for cut in actual))
    np.testing.assert_allclose(rows["train"][..., :-1].mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(rows["train"][..., -1].std(1), 1)
    for index, cut in enumerate(actual):
        train = data[cut.train]
        wanted = (data[cut.shifted] - train.mean(0)) / train.std(0)
        np.testing.assert_allclose(rows["shifted"][index, : len(wanted)], wanted)


def test_a_column_that_is_constant_in_training_rows_is_only_centred() -> None:
    data = table()
    data[:, 2] = 0.1
    rows = parts(data, cuts(data)[0])
    np.testing.assert_allclose(rows["shifted"][..., 2], 0, atol=1e-12)


def test_large_tables_are_reduced_in_their_order() -> None:
    data = np.arange(50.0)[:, None]
    fewer = at_most(data, 20)[:, 0]
    assert len(fewer) == 20
    assert (np.diff(fewer) > 0).all()
    assert (at_most(data, 20, seed=1)[:, 0] != fewer).any()
    assert at_most(data, 50) is data
