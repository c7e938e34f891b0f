"""Shifts, networks, and the Laplace approximation, against what they must be."""

import math

import pytest
import torch
from torch import nn

from latedrop import find_sites
from rounding import assert_same_up_to_rounding, rounding
from studies.classification.data import SETS, as_shape, blurred, noisy, shifted, turned
from studies.classification.methods import (
    LastLayer,
    drawn_logits,
    features,
    network,
    plain_logits,
    scores,
    told_apart,
    trained,
)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_shifts_grow_with_their_strength() -> None:
    x = torch.zeros(4, 1, 28, 28)
    x[:, :, 8:20, 12:16] = 1
    images = shifted(x, 0)
    assert len(images) == 15
    for name in ("rotation", "noise", "blur"):
        moved = [float((images[f"{name}-{s}"] - x).square().mean()) for s in range(1, 6)]
        assert moved == sorted(moved)
        assert moved[0] > 0
        assert all(0 <= float(images[f"{name}-{s}"].min()) <= float(images[f"{name}-{s}"].max()) <= 1 for s in (1, 5))


def test_six_turns_of_fifteen_degrees_are_a_quarter() -> None:
    x = torch.rand(6, 2, 9, 9, generator=generator())
    images = turned(x, 6, generator())
    for image, own in zip(images, x, strict=True):
        ways = [torch.rot90(own, k, (1, 2)) for k in (1, 3)]
        assert min(float((image - way).abs().max()) for way in ways) < 1e-5


def test_blur_keeps_the_mean_and_noise_has_its_size() -> None:
    x = torch.zeros(1, 1, 28, 28)
    x[0, 0, 14, 14] = 1
    soft = blurred(x, 2, generator())
    assert float(soft.sum()) == pytest.approx(1, abs=rounding())
    at = torch.arange(28.0) - 14
    assert float((soft[0, 0].sum(0) * at.square()).sum()) == pytest.approx(1, rel=0.02)  # a variance of 1 pixel
    grey = torch.full((50, 1, 28, 28), 0.5)
    assert float((noisy(grey, 1, generator()) - grey).std()) == pytest.approx(0.1, rel=0.02)


def test_images_in_the_shape_of_others() -> None:
    x = torch.rand(3, 1, 8, 8, generator=generator())
    assert as_shape(x, torch.Size((3, 32, 32))).shape == (3, 3, 32, 32)
    back = as_shape(torch.rand(3, 3, 32, 32, generator=generator()), torch.Size((1, 28, 28)))
    assert back.shape == (3, 1, 28, 28)
    assert torch.equal(as_shape(x, x.shape[1:]), x)


@pytest.mark.parametrize(("name", "shape"), [("digits-mlp", (1, 8, 8)), ("mnist-cnn", (1, 28, 28))])
def test_embedded_dropout_is_where_dropout_is_injected(name: str, shape: tuple[int, ...]) -> None:
    item, size = SETS[name], torch.Size(shape)
    net, twin = network(item, size), network(item, size, rate=0.3)
    x = torch.rand(4, *shape, generator=generator())
    sites = find_sites(net, x)
    weights = [i for i, layer in enumerate(twin) if isinstance(layer, (nn.Linear, nn.Conv2d))]
    assert all(isinstance(twin[i - 1], (nn.Dropout, nn.Dropout2d)) for i in weights[1:])
    plain = [i for i, layer in enumerate(net) if isinstance(layer, (nn.Linear, nn.Conv2d))]
    assert [site.name for site in sites] == [str(i) for i in plain[1:]]
    assert net(x).shape == (4, 10)


def test_training_and_draws_leave_the_random_state_alone() -> None:
    item, x = SETS["digits-mlp"], torch.rand(40, 1, 8, 8, generator=generator())
    y = (x.mean((1, 2, 3)) > 0.5).long()
    before = torch.get_rng_state()
    net, again, other = (trained(item, x, y, seed, epochs=3, rate=0.2) for seed in (0, 0, 1))
    logits = drawn_logits(net, x, 4, seed=0)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(plain_logits(net, x), plain_logits(again, x))  # the same seed, the same batches
    assert not torch.equal(plain_logits(net, x), plain_logits(other, x))
    assert not torch.equal(logits[0], logits[1])
    assert not any(layer.training for layer in net.modules())


def test_laplace_is_the_inverse_of_the_curvature() -> None:
    """Against the Hessian of the loss by autograd, on a last layer of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, precision = torch.randn(12, 1, 2, 2, dtype=torch.float64), 0.7
    h, logits = features(net, x), plain_logits(net, x)
    last = net[-1]
    weights = torch.cat([last.weight, last.bias[:, None]], 1).detach()

    def loss(flat: torch.Tensor) -> torch.Tensor:
        z = h @ flat.reshape(2, 4).T
        return nn.functional.cross_entropy(z, logits.argmax(1), reduction="sum") + precision / 2 * flat.square().sum()

    hessian = torch.autograd.functional.hessian(loss, weights.flatten())
    jacobian = torch.stack([torch.kron(torch.eye(2, dtype=torch.float64), row[None]) for row in h])
    covariance = jacobian @ hessian.inverse() @ jacobian.transpose(1, 2)
    wanted = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    fit = LastLayer.fit(h, logits).spread(h, precision)
    assert_same_up_to_rounding(fit[:, 0, 1], wanted)
    assert not fit.diagonal(dim1=1, dim2=2).any()


def test_scores_of_known_probabilities() -> None:
    logs = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64).log()
    measures = scores(logs, torch.tensor([0, 1]))
    assert measures["nll"] == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2)
    assert measures["accuracy"] == 0.5
    assert measures["brier"] == pytest.approx((2 * 0.04 + 2 * 0.36) / 2)
    assert measures["aurc"] == pytest.approx((0 + 0.5) / 2)
    sure = scores(torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]], dtype=torch.float64), torch.tensor([0, 0]))
    assert math.isfinite(sure["nll"])
    assert told_apart(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0])) == (0.75, 0.5)
