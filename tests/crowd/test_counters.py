"""Counters of others: any network as a counter, foreign state dicts, and weights that can be read again."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError
from latedrop_crowd.calibration import calibrate_counter
from latedrop_crowd.counters import as_counter, mcnn_from_state
from latedrop_crowd.counting import count_people
from latedrop_crowd.mcnn import MCNN, Counter, Trained, load_weights, save_weights, shipped
from latedrop_crowd.scenes import make_scenes
from rounding import assert_same_up_to_rounding


class Theirs(nn.Module):
    """An MCNN as public code writes it: a ReLU behind every convolution, the last one too; grey bytes."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.branch1 = self._branch(channels, 9, 7, (16, 32, 16, 8))
        self.branch2 = self._branch(channels, 7, 5, (20, 40, 20, 10))
        self.branch3 = self._branch(channels, 5, 3, (24, 48, 24, 12))
        self.fuse = nn.Sequential(_Block(30, 1, 1))

    @staticmethod
    def _branch(channels: int, first: int, size: int, widths: tuple[int, ...]) -> nn.Sequential:
        a, b, c, d = widths
        return nn.Sequential(
            _Block(channels, a, first), nn.MaxPool2d(2), _Block(a, b, size), nn.MaxPool2d(2), _Block(b, c, size),
            _Block(c, d, size),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fuse(torch.cat([self.branch1(x), self.branch2(x), self.branch3(x)], 1))
        return found


class _Block(nn.Module):
    def __init__(self, wide: int, narrow: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, narrow, size, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.DME = Theirs()


@pytest.fixture
def theirs() -> Outer:
    torch.manual_seed(3)
    model = Outer()
    for name, value in model.named_parameters():
        nn.init.normal_(value, 0.02 if "bias" in name else 0.0, 0.02)
    return model.eval()


@pytest.mark.parametrize("order", ["as they come", "backwards"])
def test_the_state_dict_of_a_public_mcnn(theirs: Outer, order: str, tmp_path: Path) -> None:
    state = theirs.state_dict()
    assert "DME.branch1.0.conv.weight" in state
    state = dict(reversed(state.items())) if order == "backwards" else dict(state)
    x = torch.rand(2, 1, 73, 90)
    with torch.inference_mode():
        expected = 0.5 * theirs.DME(255 * x)
        trained = mcnn_from_state(state, density_scale=0.5, about={"set": "shanghaitech-b", "sigma": 15.0})
        assert_same_up_to_rounding(trained.model(x), expected)
        assert float(expected.max()) > 0
        assert float(expected.min()) == 0
        path = tmp_path / "theirs.safetensors"
        save_weights(path, trained)
        again = load_weights(path)
        # A file keeps every bit of the weights, and the image is the same.
        assert torch.equal(again.model(x), trained.model(x))
    assert again.about["set"] == "shanghaitech-b"
    assert again.channels == 1
    assert again.stride == 4


def test_state_dicts_of_something_else(theirs: Outer) -> None:
    state = dict(theirs.state_dict())
    with pytest.raises(DataError, match=r"left over: DME.fuse.0.bn.weight"):
        mcnn_from_state({**state, "DME.fuse.0.bn.weight": torch.ones(1)})
    del state["DME.branch2.4.conv.bias"]
    with pytest.raises(DataError, match=r"missing: columns.1.6.weight .*left over: DME.branch2.4.conv.weight"):
        mcnn_from_state(state)
    with pytest.raises(DataError, match="expected the 13 convolutions of an MCNN"):
        mcnn_from_state({"weight": torch.zeros(3)})


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


@pytest.mark.parametrize(
    "about",
    [{"sigma": "adaptive", "set": "shanghaitech-a"}, {"channels": 3, "network": "other"}, {}, {"note": [1, "two"]}],
    ids=["adaptive", "contradiction", "nothing", "more"],
)
def test_what_is_saved_can_be_loaded(about: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    model = MCNN().half() if not about else MCNN()
    save_weights(path, Trained(model, torch.ones(4, 4, dtype=torch.bool), about))
    again = load_weights(path)
    assert again.channels == 1
    assert {name: again.about[name] for name in about if name not in ("channels", "network")} == {
        name: value for name, value in about.items() if name not in ("channels", "network")
    }
    x = torch.rand(1, 1, 16, 16)
    assert_same_up_to_rounding(again.model(x), model.float()(x))


@pytest.mark.parametrize("about", [{"sigma": -1.0}, {"sigma": float("nan")}, {"set": 3}, {"where": Path()}])
def test_what_could_not_be_loaded_is_not_saved(about: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(ArgumentError, match="expected plain JSON about the weights that can be read again"):
        save_weights(path, Trained(MCNN(), None, about))
    with pytest.raises(ArgumentError, match=r"expected an MCNN, .*found Conv2d"):
        save_weights(path, as_counter(nn.Conv2d(1, 1, 4, stride=4)))
    assert not path.exists()


def test_other_scaling_is_another_counter() -> None:
    from latedrop.calibration.weights import fingerprint

    net = nn.Conv2d(1, 1, 4, stride=4)
    marks = {fingerprint(Counter(net, **changed)) for changed in ({}, {"input_scale": 255.0}, {"relu": True})}  # type: ignore[arg-type]
    assert len(marks) == 3


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
        found = calibrate_counter(sharp, scenes, progress=False)
    assert found.pixels is not None
    assert found.pixels.scales[0] > 0
    (row,) = count_people(sharp, found, [("frame", scenes.image(0, 1))])
    assert row.std > 0
    assert np.isfinite(row.std_map).all()
