"""The heat map: sums of density maps over a chosen time, from the store and from the step under way."""

from pathlib import Path

import numpy as np
import pytest

from latedrop_crowd.console.store import STEP, Heat, Store


def test_the_mean_over_a_chosen_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    heat, begin = Heat(store, "Door"), 1_000_000 * STEP
    for frame in range(10):  # two steps of five frames, 2 and 6 people per cell; the second is under way
        heat.add(np.full((3, 4), 2.0 if frame < 5 else 6.0), begin + frame * STEP / 5)
    for times, people, frames in (
        ((begin, begin + 2 * STEP), 4.0, 10),
        ((begin, begin + STEP - 1), 2.0, 5),
        ((begin + STEP, begin + STEP), 6.0, 5),
    ):
        mean, number = heat.mean(*times)
        np.testing.assert_allclose(mean, np.full((3, 4), people))
        assert number == frames
    assert heat.mean(0.0, begin - 1)[1] == 0
    heat.flush()
    again = Heat(store, "Door")
    assert again.mean(begin, begin + 2 * STEP)[1] == 10
    assert Heat(store, "Gate").mean(begin, begin + 2 * STEP)[1] == 0
    store.close()


def test_large_maps_are_kept_coarse_and_other_sizes_apart(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    heat = Heat(store, "Door")
    density = np.random.default_rng(0).uniform(0, 0.1, (120, 160))
    heat.add(density, 10.0)
    mean, _ = heat.mean(0.0, 10.0)
    assert mean.shape == (40, 54)
    assert mean.sum() == pytest.approx(density.sum())
    heat.add(np.ones((8, 8)), 20.0)  # another camera under the same name
    assert heat.mean(0.0, 20.0)[0].shape == (8, 8)
    assert [row["frames"] for row in store.maps("Door", -1.0, 30.0)] == [1]
    store.close()
