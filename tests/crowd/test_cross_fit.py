"""Cross-fitting in blocks of time: who sees which frames, what is kept, and the calibration that follows from it."""

import json
from pathlib import Path

import pytest
import torch

from latedrop.errors import ArgumentError, DataError
from latedrop_crowd.calibration import calibrate_counter
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import load_weights
from latedrop_crowd.scenes import make_scenes
from latedrop_crowd.training import Settings, cross_fit
from latedrop_crowd.training.network import fold_path, fold_sets
from rounding import rounding

SETTINGS = Settings(epochs=3, batch=4, lr=3e-3)


@pytest.fixture(scope="module")
def scenes() -> CrowdSet:
    return make_scenes(10, 5, 2, shape=(72, 80))


def test_each_block_is_left_out_once(scenes: CrowdSet) -> None:
    actual = fold_sets(scenes, 5)
    every = set(scenes.train) | set(scenes.validation)
    assert sorted(index for part in actual for index in part.test) == sorted(every)
    for part in actual:
        assert list(part.test) == list(range(min(part.test), max(part.test) + 1))  # a run of neighbours
        assert set(part.train) == every - set(part.test)
        assert part.validation == ()
    with pytest.raises(ArgumentError, match=r"expected 2 folds or more .*; found 1 folds of 15 frames"):
        fold_sets(scenes, 1)


@pytest.mark.slow
def test_the_final_network_has_seen_all_and_the_variance_none(scenes: CrowdSet, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    trained = cross_fit(scenes, SETTINGS, out, progress=False, folds=3, checked=False)
    log = json.loads((tmp_path / "net.log.json").read_text())
    assert log["data"]["frames"] == {"train": 15, "validation": 0, "test": 2}
    assert [part["frames"] for part in log["folds"]] == [5, 5, 5]
    assert log["held_out"]["mae"] == pytest.approx(sum(part["mae"] for part in log["folds"]) / 3)
    networks = [load_weights(fold_path(out, number)) for number in range(3)]
    with pytest.raises(DataError, match="expected 3 networks of folds, as this one was cross-fitted; found 0"):
        calibrate_counter(trained, scenes, progress=False)
    actual = calibrate_counter(trained, scenes, progress=False, folds=networks)
    assert actual.count.rows == 15
    # The errors are those of the networks that left the frames out.
    errors = []
    for network, part in zip(networks, fold_sets(scenes, 3), strict=True):
        with torch.inference_mode():
            counts = [float(network.count_of(network.model(scenes.image(i)[None]))) for i in part.test]
        errors += [count - scenes.count(i) for count, i in zip(counts, part.test, strict=True)]
    assert actual.count.table[0].rmse == pytest.approx(
        float(torch.tensor(errors).square().mean().sqrt()), rel=rounding()
    )
    reading = actual.read(trained, scenes.image(scenes.test[0]))
    assert reading.interval(0.9)[0] < reading.mean < reading.interval(0.9)[1]
    with pytest.raises(DataError, match="expected no networks of folds, as this one was not cross-fitted; found 1"):
        calibrate_counter(networks[0], scenes, progress=False, folds=networks[:1])
