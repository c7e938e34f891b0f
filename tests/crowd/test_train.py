"""Training in small: it learns, it is seeded, it goes on where it was, and it says what is wrong."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from docs.make_counters import FOLDERS, read_logs, replaced
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop_crowd import mcnn
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import MCNN, Trained, load_weights
from latedrop_crowd.scenes import make_scenes
from latedrop_crowd.training import Settings, evaluate_counts, loop, network, predict_counts, train
from rounding import assert_same_up_to_rounding

PAGE = Path(__file__).parents[2] / "docs" / "crowd_training.md"
WEIGHTS = Path(mcnn.__file__).parent / "weights"
LOGS = read_logs()
TINY = Settings(epochs=4, batch=4, crop=32)


@pytest.fixture(scope="module")
def scenes() -> CrowdSet:
    return make_scenes(8, 3, 3, shape=(64, 64))


def quietly(crowd_set: CrowdSet, settings: Settings = TINY, out: Path | None = None, **options: Any) -> Trained:
    return train(crowd_set, settings, out, progress=False, **{"checked": False} | options)


def weights(trained: Trained) -> list[torch.Tensor]:
    return [*trained.model.state_dict().values()]


def same(first: Trained, second: Trained) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


def stopping_after(monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
    """As if Ctrl-C was pressed in the next epoch; every epoch is saved."""
    epoch, done = loop._epoch, 0

    def counted(*arguments: Any) -> Any:
        nonlocal done
        if done == epochs:
            raise KeyboardInterrupt
        done += 1
        return epoch(*arguments)

    monkeypatch.setattr(loop, "_SAVE_EVERY", 0.0)
    monkeypatch.setattr(loop, "_epoch", counted)


def test_it_learns(tmp_path: Path) -> None:
    made = make_scenes(8, 0, 0, shape=(64, 64))
    crowd_set = replace(made, validation=made.train)
    settings = Settings(epochs=30, batch=2, lr=3e-3)
    trained = quietly(crowd_set, settings, tmp_path / "net.safetensors", checked=True)
    log = json.loads((tmp_path / "net.log.json").read_text())
    assert log["validation"]["mae"] < 0.85 * log["mean_predictor"]["validation"]["mae"]
    assert log["history"]["loss"][-1] < 0.5 * log["history"]["loss"][0]
    assert not trained.model.training
    assert trained.about["set"] == "scenes"
    assert trained.about["sigma"] == 3.0
    assert trained.about["enlarge"] == 1


@pytest.mark.parametrize("errors", [[0.1, 5.0, 4.0, 5.0], [9.0, 8.0, 7.0, 6.0]])
def test_validation_frames_choose_no_epoch(
    scenes: CrowdSet, monkeypatch: pytest.MonkeyPatch, errors: list[float]
) -> None:
    plain = quietly(scenes)
    following = iter(errors)
    monkeypatch.setattr(loop, "_validate", lambda *_: (torch.tensor(next(following)), torch.tensor(1.0)))
    assert same(quietly(scenes), plain)


def test_seeded(scenes: CrowdSet) -> None:
    settings = replace(TINY, epochs=2, rate=0.1)
    first = quietly(scenes, settings)
    torch.manual_seed(77)
    assert same(first, quietly(scenes, settings))
    assert not same(first, quietly(scenes, replace(settings, seed=1)))


def test_the_callers_state_is_left_alone(scenes: CrowdSet) -> None:
    before = torch.random.get_rng_state()
    quietly(scenes, replace(TINY, epochs=1, rate=0.1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("stop", [1, 3])
def test_a_stopped_run_ends_with_the_same_weights(
    scenes: CrowdSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    settings = replace(TINY, rate=0.05)
    whole = quietly(scenes, settings)
    out = tmp_path / "net.safetensors"
    with monkeypatch.context() as patch:
        stopping_after(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            quietly(scenes, settings, out)
    assert [path.name for path in tmp_path.iterdir()] == ["net.checkpoint.pt"]
    epochs: list[int] = []
    epoch = loop._epoch
    monkeypatch.setattr(loop, "_epoch", lambda state, *rest: (epochs.append(state.epoch), epoch(state, *rest))[1])
    assert same(whole, quietly(scenes, settings, out))
    assert epochs == list(range(stop, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.log.json", "net.safetensors"]
    assert len(json.loads((tmp_path / "net.log.json").read_text())["history"]["loss"]) == 4


def test_a_finished_run_is_kept(scenes: CrowdSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "net.safetensors"
    settings = replace(TINY, epochs=1)
    first = quietly(scenes, settings, out)
    with monkeypatch.context() as patch:
        patch.setattr(network, "fit", lambda *_, **__: pytest.fail("trained again"))
        assert same(first, quietly(scenes, settings, out))
        with pytest.raises(
            FileError, match=r"found others in .*: seed 0 instead of 5\. Pass another --out, or --fresh"
        ):
            quietly(scenes, replace(settings, seed=5), out)
    assert not same(first, quietly(scenes, replace(settings, seed=5), out, fresh=True))


def test_a_checkpoint_of_other_settings_or_frames_is_refused(
    scenes: CrowdSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "net.safetensors"
    with monkeypatch.context() as patch:
        stopping_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            quietly(scenes, TINY, out)
    with pytest.raises(FileError, match=r"found another: lr 0\.001 instead of 0\.002\. .*pass --fresh"):
        quietly(scenes, replace(TINY, lr=2e-3), out)
    with pytest.raises(FileError, match="Use the same settings and frames to go on"):
        quietly(make_scenes(8, 3, 3, shape=(64, 64), seed=1), TINY, out)
    quietly(scenes, replace(TINY, epochs=1), out, fresh=True)


def test_a_dead_network(scenes: CrowdSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_validate", lambda *_: (torch.tensor(1.0), torch.tensor(0.0)))
    with pytest.raises(OutputError, match=r"all its maps are alike after epoch 1\. Lower --lr, or change --seed"):
        quietly(scenes)


def test_frames_of_several_sizes_or_smaller_than_a_crop(scenes: CrowdSet) -> None:
    with pytest.raises(ArgumentError, match=r"expected frames of one size to train on.* found several sizes"):
        quietly(replace(scenes, size=None))
    with pytest.raises(ArgumentError, match=r"found 64 x 64 pixels in scenes and a crop of 80"):
        quietly(scenes, replace(TINY, crop=80))


def test_a_loss_that_is_not_finite(scenes: CrowdSet) -> None:
    with pytest.raises(OutputError, match=r"expected a finite loss; found .* in epoch \d\. Lower --lr"):
        quietly(scenes, replace(TINY, lr=1e20))


def test_no_better_than_the_mean(scenes: CrowdSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "predict_counts", lambda *_: torch.full((3,), 1e3))
    with pytest.raises(OutputError, match=r"better than the mean of the training frames.*Train longer, or change --lr"):
        quietly(scenes, replace(TINY, epochs=1), tmp_path / "net.safetensors", checked=True)
    assert not (tmp_path / "net.safetensors").exists()


def bright() -> MCNN:
    torch.manual_seed(0)
    model = MCNN().eval()
    nn.init.constant_(model.fuse.bias, 1e3)
    return model


def test_crops_flips_and_masks_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that is its own target, made of the number of each cell, tells whether both were cut alike."""
    monkeypatch.setattr(loop, "_JITTER", 0.0)
    cells = torch.arange(16 * 16).reshape(1, 16, 16)
    image = cells.repeat_interleave(4, -1).repeat_interleave(4, -2).to(torch.uint8)
    roi = (cells[0] % 3) > 0
    frames = loop.Frames(image[None].repeat(6, 1, 1, 1), cells[None].repeat(6, 1, 1, 1).float(), torch.zeros(6))
    for crop in (32, None):
        for mask in (roi, torch.ones_like(roi)):
            data = loop.Data(frames, frames, mask[None].float(), 0.01)
            plan = loop.plan_epoch(frames, crop, 5)
            got, target, counted = loop.cut_batch(data, plan, slice(0, 6))
            assert_same_up_to_rounding((got * 255)[..., ::4, ::4].round(), target)
            assert got.shape[-1] == (crop or 64)
            assert torch.equal(counted, torch.ones_like(target) if mask.all() else (target % 3 > 0).float())
            assert 0 < plan.flip.sum() < 6


def test_jitter_moves_the_light_and_nothing_else(scenes: CrowdSet) -> None:
    frames = loop.Frames(torch.full((50, 1, 16, 16), 128, dtype=torch.uint8), torch.ones(50, 1, 4, 4), torch.ones(50))
    plan = loop.plan_epoch(frames, None, 3)
    image, target, _ = loop.cut_batch(loop.Data(frames, frames, torch.ones(1, 4, 4), 0.01), plan, slice(0, 50))
    assert torch.equal(target, frames.targets)
    assert (image - 0.5).abs().max() <= 0.101 + 1e-6
    assert image[:, 0, 0, 0].std() > 0.03


def test_frames_are_read_in_order_and_not_too_far_ahead() -> None:
    started: list[int] = []

    def read(index: int) -> int:
        started.append(index)
        return index

    results = in_order(read, range(40), ahead=4)
    assert [next(results) for _ in range(10)] == list(range(10))
    assert max(started) <= 10 + 4
    assert list(results) == list(range(10, 40))
    assert list(in_order(read, [], ahead=4)) == []


def test_errors_of_counts(scenes: CrowdSet) -> None:
    measures = evaluate_counts(Trained(bright()), scenes, scenes.test)
    predicted = predict_counts(Trained(bright()), scenes, scenes.test).double().numpy()
    error = predicted - [scenes.count(i) for i in scenes.test]
    # Stored with four decimals.
    assert measures["mae"] == pytest.approx(np.abs(error).mean(), abs=1e-4)
    assert measures["rmse"] == pytest.approx(np.sqrt((error**2).mean()), abs=1e-4)
    assert measures["bias"] == pytest.approx(error.mean(), abs=1e-4)
    assert measures["frames"] == 3
    with pytest.raises(DataError, match="expected frames of scenes to evaluate; found none"):
        evaluate_counts(Trained(bright()), scenes, ())


def test_only_what_is_inside_the_region_of_interest_counts(tmp_path: Path) -> None:
    roi = np.zeros((64, 64), bool)
    roi[:, 32:] = True
    crowd_set = replace(make_scenes(8, 3, 3, shape=(64, 64)), roi=roi)
    trained = quietly(crowd_set, replace(TINY, epochs=1), tmp_path / "net.safetensors")
    assert trained.roi is not None
    assert trained.roi[:, 8:].all()
    assert not trained.roi[:, :8].any()
    actual = load_weights(tmp_path / "net.safetensors")
    density = actual.model(crowd_set.image(9)[None])
    assert_same_up_to_rounding(predict_counts(actual, crowd_set, [9]), density[..., 8:].sum()[None].detach())


def test_the_log(scenes: CrowdSet, tmp_path: Path) -> None:
    trained = quietly(scenes, replace(TINY, epochs=2), tmp_path / "net.safetensors", command="said so")
    log = json.loads((tmp_path / "net.log.json").read_text())
    assert log["command"] == "said so"
    assert log["settings"]["epochs"] == 2
    assert log["data"]["frames"] == {"train": 8, "validation": 3, "test": 3}
    assert log["validation"] == evaluate_counts(trained, scenes, scenes.validation)
    assert log["test"] == evaluate_counts(trained, scenes, scenes.test)
    counts = [scenes.count(i) for i in scenes.train]
    # Stored with four decimals.
    assert log["mean_predictor"]["count"] == pytest.approx(np.mean(counts), abs=1e-4)
    assert log["mean_predictor"]["test"]["bias"] == pytest.approx(
        np.mean(counts) - np.mean([scenes.count(i) for i in scenes.test]), abs=1e-4
    )
    assert len(log["history"]["validation_mae"]) == log["epochs"] == 2
    assert log["validation"]["mae"] == pytest.approx(log["history"]["validation_mae"][-1], abs=2e-4)
    assert {"torch", "python", "latedrop", "numpy"} <= set(log["versions"])
    only = replace(scenes, frames=scenes.frames[:11], test=())
    quietly(only, replace(TINY, epochs=1), tmp_path / "only.safetensors")
    assert "test" not in json.loads((tmp_path / "only.log.json").read_text())


def test_missing_parts_and_places(scenes: CrowdSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected validation frames in scenes, to check the network with; found none"):
        quietly(replace(scenes, validation=()), checked=True)
    with pytest.raises(ArgumentError, match=r"expected a name like mall\.safetensors.*found 'net\.pt'"):
        quietly(scenes, TINY, tmp_path / "net.pt")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"expected a folder at .*found a file.*Pass another --out"):
        quietly(scenes, TINY, tmp_path / "file" / "net.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 0}, "expected at least 1 epoch as epochs; found 0. Change --epochs"),
        ({"batch": 0}, "at least 1 frame in a batch"),
        ({"lr": 0.0}, "a learning rate above 0"),
        ({"crop": 30}, "a multiple of 4 from 16 on as crop; found 30"),
        ({"rate": 1.0}, "a rate from 0 to below 1"),
        ({"seed": -1}, "a seed from 0"),
    ],
)
def test_wrong_settings(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Settings(**change)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(scenes: CrowdSet, tmp_path: Path) -> None:
    state, out = torch.cuda.get_rng_state(), tmp_path / "net.safetensors"
    trained = train(scenes, replace(TINY, rate=0.1), out, "cuda", False, checked=False)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert next(trained.model.parameters()).is_cuda
    own, moved = (predict_counts(load_weights(out, device), scenes, scenes.test) for device in ("cpu", "cuda"))
    torch.testing.assert_close(own, moved, rtol=1e-2, atol=1e-2)
    assert torch.isfinite(own).all()


def test_the_table_of_the_page_is_made_from_the_logs() -> None:
    """The page says how to make it again."""
    page = PAGE.read_text(encoding="utf-8")
    assert replaced(page, LOGS) == page


def test_shipped_logs_belong_to_shipped_weights() -> None:
    for name, log in LOGS.items():
        folder, _, stem = name.rpartition("/")
        weights = FOLDERS[f"{folder}/" if folder else ""] / f"{stem}.safetensors"
        assert hashlib.sha256(weights.read_bytes()).hexdigest() == log["weights_sha256"]


def test_shipped_scenes_count_as_the_log_says() -> None:
    """The first of the scenes that the log was made of: their mean error is within four standard errors of its own."""
    log, trained = LOGS["scenes"], load_weights(WEIGHTS / "scenes.safetensors")
    made = make_scenes(0, 0, 12)
    actual = evaluate_counts(trained, made, made.test)["mae"]
    spread = np.sqrt(log["test"]["rmse"] ** 2 - log["test"]["mae"] ** 2)
    assert abs(actual - log["test"]["mae"]) < 4 * spread / np.sqrt(12)
