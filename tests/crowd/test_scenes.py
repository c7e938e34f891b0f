"""Synthetic scenes: the same arguments give the same pixels, and heads are where the points say."""

import numpy as np
import pytest
import torch

from latedrop.errors import ArgumentError
from latedrop_crowd import scenes
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.scenes import make_scenes
from rounding import assert_same_up_to_rounding


@pytest.fixture(scope="module")
def some() -> CrowdSet:
    return make_scenes(12, 4, 6)


def test_seeded(some: CrowdSet) -> None:
    again, other = make_scenes(12, 4, 6), make_scenes(12, 4, 6, seed=1)
    for i in range(22):
        assert torch.equal(some.image(i), again.image(i))  # pixels of eight bits, from the same seed
        np.testing.assert_array_equal(some.frames[i].points, again.frames[i].points)
    assert not any(torch.equal(some.image(i), other.image(i)) for i in range(22))
    few = make_scenes(2, 1, 2)  # a smaller set is the beginning of a larger one
    for part in ("train", "validation", "test"):
        for mine, expected_rows in zip(getattr(few, part), getattr(some, part), strict=False):
            assert torch.equal(few.image(mine), some.image(expected_rows))  # pixels of eight bits, from the same seed


def test_images_and_maps(some: CrowdSet) -> None:
    image = some.image(3)
    assert image.shape == (1, 144, 192)
    assert image.dtype == torch.float32
    assert 0 <= image.min() < 0.3 < 0.7 < image.max() <= 1
    assert torch.equal(some.image(3, channels=3), image.expand(3, -1, -1))
    for i in range(22):
        assert some.count(i) == len(some.frames[i].points)
        assert some.density(i).shape == (1, 36, 48)
        assert_same_up_to_rounding(some.density(i).sum(), some.count(i))


def test_counts_vary_from_empty_to_crowded() -> None:
    counts = [len(frame.points) for frame in make_scenes(60, 0, 0).frames]
    assert min(counts) <= 5
    assert max(counts) >= 40
    assert 15 < np.mean(counts) < 30


def test_people_are_where_the_points_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scene without its people differs around the points, and hardly elsewhere."""
    full = make_scenes(8, 0, 0)
    people = scenes._people

    def drawn_but_left_out(rng: np.random.Generator, shape: tuple[int, int]) -> list[scenes.Figure]:
        people(rng, shape)
        return []

    monkeypatch.setattr(scenes, "_people", drawn_but_left_out)
    empty = make_scenes(8, 0, 0)
    for i in range(8):
        assert len(empty.frames[i].points) == 0
        changed = ((full.image(i) - empty.image(i)).abs() > 0.05)[0].numpy()
        for x, y in full.frames[i].points:
            assert changed[max(0, round(y) - 2) : round(y) + 3, max(0, round(x) - 2) : round(x) + 3].any()
        near = np.zeros_like(changed)
        for x, y in full.frames[i].points:
            height = scenes.height_at(y, 144) * 1.4
            near[max(0, int(y - height)) : int(y + 2 * height), max(0, int(x - height)) : int(x + height)] = True
        # Left over: the bodies of people whose head is outside the frame or hidden, and loud pixels.
        assert changed[~near].mean() < 0.03


def test_heads_hidden_behind_others_do_not_count() -> None:
    behind = scenes.person(np.random.default_rng(0), 60, 100, 20)
    before = scenes.person(np.random.default_rng(0), 60, 101, 20)
    beside = before._replace(x=80.0)
    for other, left in ((before, 0), (beside, 1)):
        canvas, owner = np.zeros((144, 192), np.float32), np.zeros((144, 192), np.int32)
        areas = [scenes._paint(canvas, owner, one, number, 0.0) for number, one in enumerate((behind, other))]
        seen = np.bincount(owner.ravel(), minlength=3)[1:]
        assert (seen[0] >= 0.5 * areas[0]) == left
        assert seen[1] >= 0.5 * areas[1]


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"expected numbers of frames, not all 0; found \(0, 0, 0\)"):
        make_scenes(0, 0, 0)
    with pytest.raises(ArgumentError, match=r"expected frames of at least 64 x 64 pixels; found \(32, 192\)"):
        make_scenes(1, 0, 0, shape=(32, 192))
