"""Counters of others: any network as a counter, and weights that can be read again."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, LatedropWarning, OutputError
from latedrop_crowd.calibration import calibrate_counter
from latedrop_crowd.counting import count_people
from latedrop_crowd.mcnn import MCNN, Trained, as_counter, load_weights, save_weights, shipped
from latedrop_crowd.scenes import make_scenes
from rounding import assert_same_up_to_rounding


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_any_network_is_a_counter() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Tanh(), nn.AvgPool2d(8), nn.Conv2d(2, 1, 1), nn.Flatten(1, 2))
    trained = as_counter(net, channels=3, stride=8, input_scale=255, density_scale=0.01, relu=True)
    x = torch.rand(2, 3, 64, 80)
    assert_same_up_to_rounding(trained.model(x), 0.01 * net(255 * x).clamp_min(0)[:, None])
    assert (trained.channels, trained.stride, trained.least_side) == (3, 8, 8)
    with pytest.raises(OutputError, match=r"expected density maps \(2, 1, 16, 20\) .* found \(2, 1, 8, 10\)"):
        as_counter(net, channels=3).model(x)
    with pytest.raises(OutputError, match="found tuple"):
        as_counter(Pair()).model(x)


@pytest.mark.parametrize("wrong", [{"input_scale": 0.0}, {"density_scale": -1.0}, {"channels": 2}, {"stride": 0}])
def test_wrong_settings_of_a_counter(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=r"expected .*found"):
        as_counter(nn.Conv2d(1, 1, 1), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="found an MCNN of this package"):
        as_counter(MCNN())


@pytest.mark.parametrize("about", [{"sigma": "adaptive"}, {"sigma": float("nan")}, {"set": 3}, {"where": Path()}])
def test_what_could_not_be_loaded_is_not_saved(about: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(ArgumentError, match="expected plain JSON about the weights that can be read again"):
        save_weights(path, Trained(MCNN(), None, about))
    with pytest.raises(ArgumentError, match=r"expected an MCNN, .*found Counter"):
        save_weights(path, as_counter(nn.Conv2d(1, 1, 4, stride=4)))
    assert not path.exists()


class Sharp(nn.Module):
    """A counter whose map is 0 but for the peaks of heads, once a ReLU has cut it off."""

    def __init__(self) -> None:
        super().__init__()
        self.model = load_weights(shipped("scenes")).model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        density: torch.Tensor = self.model(x) - 0.05
        return density


def test_a_sparse_map_can_be_calibrated() -> None:
    """Most cells are exactly 0, and so are their errors, up to the tails of the true kernels."""
    scenes = make_scenes(4, 8, 0, shape=(192, 256))
    sharp = as_counter(Sharp(), relu=True, about={"set": "scenes", "sigma": 3.0})
    assert (sharp.model(scenes.image(0, 1)[None]) == 0).float().mean() > 0.9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)  # so few frames
        actual = calibrate_counter(sharp, scenes, progress=False)
    assert actual.pixels is not None
    assert actual.pixels.scales[0] > 0
    (row,) = count_people(sharp, actual, [("frame", scenes.image(0, 1))])
    assert row.std > 0
    assert np.isfinite(row.std_map).all()
