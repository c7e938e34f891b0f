"""MCNN: shapes, where dropout goes, and weights on disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from latedrop import find_sites, sample
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop_crowd.mcnn import MCNN, STRIDE, Trained, load_weights, save_weights, shipped
from rounding import assert_same_up_to_rounding


@pytest.fixture
def model() -> MCNN:
    torch.manual_seed(0)
    return MCNN().eval()


@pytest.mark.parametrize("shape", [(64, 96), (63, 97), (65, 66), (30, 31), (8, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_maps_have_a_quarter_of_the_resolution(shape: tuple[int, int], channels: int) -> None:
    density = MCNN(channels)(torch.rand(2, channels, *shape))
    assert density.shape == (2, 1, shape[0] // STRIDE, shape[1] // STRIDE)


def test_the_published_widths() -> None:
    model = MCNN()
    weights = [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")]
    kernels = [(9, 7, 7, 7), (7, 5, 5, 5), (5, 3, 3, 3)]
    widths = [(1, 16, 32, 16, 8), (1, 20, 40, 20, 10), (1, 24, 48, 24, 12)]
    expected = [
        (wide[i + 1], wide[i], kernel[i], kernel[i])
        for kernel, wide in zip(kernels, widths, strict=True)
        for i in range(4)
    ]
    assert weights == [*expected, (1, 30, 1, 1)]


def test_sites_are_all_convolutions_but_the_first_of_each_column(model: MCNN) -> None:
    sites = {site.name for site in find_sites(model, torch.rand(1, 1, 32, 32))}
    convolutions = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Conv2d)}
    assert len(sites) == 10
    assert convolutions - sites == {"columns.0.0", "columns.1.0", "columns.2.0"}


def test_embedded_dropout_is_on_in_train_mode_only_and_spares_the_first_convolutions() -> None:
    torch.manual_seed(0)
    x, model, plain, seen = torch.rand(1, 1, 32, 32), MCNN(rate=0.5), MCNN(), {}
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(model.train()(x), model.train()(x))
    assert torch.equal(model.eval()(x), plain(x))  # dropout that is off does nothing, on the same batch
    assert torch.equal(plain.train()(x), plain.eval()(x))  # the same call on the same batch
    model.train()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_pre_hook(lambda _, inputs, name=name: seen.__setitem__(name, inputs[0]))
    model(x)
    for column in range(3):
        assert_same_up_to_rounding(seen[f"columns.{column}.0"], 2 * x - 1)
    halved = [name for name, value in seen.items() if not name.endswith(".0") and (value == 0).float().mean() > 0.4]
    assert len(halved) == 10


def test_embedded_draws_have_the_moments_of_injected_ones() -> None:
    torch.manual_seed(0)
    x, model, rate, draws = torch.rand(1, 1, 16, 16), MCNN(rate=0.05), 0.05, 300
    with torch.no_grad():
        own = torch.stack([model.train()(x).sum() for _ in range(draws)])
    injected = sample(model.eval(), x, rate, draws, readout=lambda y: y.sum((1, 2, 3)))
    # Two means of 300 draws differ by sqrt(2 / 300) of a deviation, and log variances by twice that.
    assert abs(own.mean() - injected.mean.item()) < 4 * (2 / draws) ** 0.5 * own.std()
    assert abs(torch.log(own.var() / injected.variance.item())) < 4 * 2 / draws**0.5


def test_readouts(model: MCNN) -> None:
    density = torch.rand(3, 1, 4, 6)
    roi = torch.zeros(4, 6, dtype=torch.bool)
    roi[1:3, 2:] = True
    trained = Trained(model, roi)
    counts = density[:, 0, 1:3, 2:].sum((1, 2))
    assert_same_up_to_rounding(trained.count_of(density), counts)
    both = trained.both(density)
    assert both.shape == (3, 25)
    assert_same_up_to_rounding(both[:, -1], counts)
    assert_same_up_to_rounding(both[:, :-1].reshape(3, 1, 4, 6), density * roi)
    assert_same_up_to_rounding(Trained(model).count_of(density), density.sum((1, 2, 3)))


def test_a_region_of_interest_of_another_size_is_refused(model: MCNN) -> None:
    trained = Trained(model, torch.ones(4, 6, dtype=torch.bool))
    with pytest.raises(DataError, match=r"4 x 6 cells .* about 16 x 24 pixels; found 8 x 8 cells\. Resize"):
        trained.count_of(model(torch.rand(1, 1, 32, 32)))


@pytest.mark.parametrize("roi", [None, torch.eye(8) > 0], ids=["no-roi", "roi"])
@pytest.mark.parametrize("channels", [1, 3])
def test_weights_round_trip(tmp_path: Path, roi: torch.Tensor | None, channels: int) -> None:
    x, path = torch.rand(2, channels, 32, 32), tmp_path / "net.safetensors"
    model = MCNN(channels).eval().to(memory_format=torch.channels_last)
    save_weights(path, Trained(model, roi, {"set": "scenes", "seed": 3}))
    actual = load_weights(path)
    assert actual.about == {"network": "mcnn", "channels": channels, "set": "scenes", "seed": 3}
    assert not actual.model.training
    assert (actual.roi is None) if roi is None else torch.equal(actual.roi, roi)
    assert_same_up_to_rounding(actual.model(x), model(x))
    assert [file.name for file in tmp_path.iterdir()] == ["net.safetensors"]


def test_bad_weights(tmp_path: Path, model: MCNN) -> None:
    with pytest.raises(FileError, match=r"expected weights at .*no such file\. Shipped names"):
        load_weights(tmp_path / "none.safetensors")
    pickle = tmp_path / "pickle.safetensors"
    torch.save({"weights": torch.ones(2)}, pickle)
    with pytest.raises(FileError, match="expected a safetensors file"):
        load_weights(pickle)
    text = tmp_path / "text.safetensors"
    text.write_text("not weights")
    with pytest.raises(FileError, match=r"expected a safetensors file at .*Use what `crowd train` wrote"):
        load_weights(text)
    whole = tmp_path / "whole.safetensors"
    save_weights(whole, Trained(model))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(FileError, match="expected a safetensors file"):
        load_weights(cut)
    other = tmp_path / "other.safetensors"
    save_file(torch.nn.Linear(2, 3).state_dict(), other)
    with pytest.raises(FileError, match=r"another architecture.*Missing key"):
        load_weights(other)
    wide = {name: torch.cat([p, p]) if name == "fuse.bias" else p for name, p in model.state_dict().items()}
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(FileError, match=r"another architecture.*size mismatch for fuse\.bias"):
        load_weights(tmp_path / "wide.safetensors")


def test_shipped_weights_by_name() -> None:
    assert load_weights(shipped("scenes")).about["set"] == "scenes"
    with pytest.raises(ArgumentError, match=r"expected the name of shipped weights, one of .*scenes.*; found 'moon'"):
        shipped("moon")
