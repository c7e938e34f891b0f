"""Calibrated classifiers, end to end: real digits, binary, many classes, files, bad input."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError
from latedrop.metrics import classes as metrics
from latedrop.prediction.predictor import ClassPredictor
from networks import Net, mlp, trained
from rounding import assert_same_up_to_rounding

Parts = dict[str, tuple[Tensor, Tensor]]


def _trained(net: nn.Module, x: Tensor, y: Tensor, steps: int = 300) -> nn.Module:
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
    return net.eval()


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Parts]:
    """A network that knows scikit-learn's digits a little too well."""
    load = pytest.importorskip("sklearn.datasets").load_digits
    x, y = (torch.tensor(part) for part in load(return_X_y=True))
    x, y = x.float() / 16, y.long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cut = {"train": order[:500], "val": order[500:1000], "held": order[1000:1400], "test": order[1400:]}
    parts = {name: (x[rows], y[rows]) for name, rows in cut.items()}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))
    return _trained(net, *parts["train"], steps=1500), parts


@pytest.fixture(scope="module")
def uq(digits: tuple[nn.Module, Parts]) -> ClassPredictor:
    net, parts = digits
    uq = latedrop.calibrate(net, parts["val"], reference=parts["train"][0], progress=False)
    return uq


class TestDigits:
    def test_probabilities_are_better_than_the_models_own(self, uq: ClassPredictor, digits: Any) -> None:
        x, y = digits[1]["test"]
        p = uq.predict(x)
        assert p.probabilities.shape == (len(x), 10)
        assert_same_up_to_rounding(p.probabilities.sum(1), torch.ones(len(x), dtype=torch.float64))
        own = torch.softmax(p.logits, 1)
        assert metrics.cross_entropy(p.probabilities, y) < metrics.cross_entropy(own, y)
        assert torch.equal(p.label, digits[0](x).argmax(1))

    def test_strange_rows_are_told_and_trusted_less(self, uq: ClassPredictor, digits: Any) -> None:
        x, _ = digits[1]["test"]
        usual, strange = uq.predict(x), uq.predict(torch.rand(100, 64, generator=torch.Generator().manual_seed(0)))
        assert float((usual.novelty < 1).double().mean()) > 0.8
        assert float((strange.novelty > 1).double().mean()) > 0.95
        assert float(strange.entropy.mean()) > 1.5 * float(usual.entropy.mean())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_binary_classifier_with_one_logit(shape: tuple[int, ...]) -> None:
    x = torch.randn(400, 3)
    y = torch.bernoulli(torch.sigmoid(2 * x[:, 0])).long()

    net = Net(lambda net, x: net.body(x).reshape(-1, *shape), body=mlp(3, 16, 1, act=nn.ReLU))
    loss = nn.functional.binary_cross_entropy_with_logits
    trained(net, x[:200], y[:200].float().reshape(-1, *shape), 200, 0.02, loss)
    uq = latedrop.calibrate(net, (x[200:], y[200:].float()), task="classification", progress=False)
    p = uq.predict(x[:50])
    assert p.probabilities.shape == (50, 2)
    assert float((p.label == y[:50]).double().mean()) > 0.7
    with pytest.warns(LatedropWarning, match="all 0 or 1"):
        latedrop.calibrate(net, (x[200:], y[200:].reshape(-1, *shape)), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LatedropWarning)
        warnings.filterwarnings("ignore", "the model predicts")
        latedrop.calibrate(net, (x[200:], y[200:].reshape(-1, *shape)), task="regression", progress=False)


class TestBadInput:
    @pytest.fixture
    def net(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            (torch.full((20,), 3), "labels from 0 to 2"),
            (torch.full((20,), -1), "labels from 0 to 2"),
            (torch.linspace(0, 1, 20), "whole numbers from 0 to 2"),
            (torch.zeros(20, dtype=torch.long), "at least two classes"),
        ],
        ids=["beyond", "below", "floats", "one class"],
    )
    def test_labels(self, net: nn.Module, labels: Tensor, message: str) -> None:
        with pytest.raises(DataError, match=message):
            latedrop.calibrate(net, (torch.randn(20, 4), labels), task="classification", progress=False)

    def test_more_classes_than_rows_are_refused_at_the_first_batch(self) -> None:
        net, x, y = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 90)), torch.randn(80, 4), torch.arange(80)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        with pytest.raises(DataError, match=r"at least as many validation rows as classes, 90.*found 80"):
            latedrop.calibrate(net, loader, progress=False)

    def test_maps_and_options_of_regressions(self, net: nn.Module) -> None:
        x, y = torch.randn(30, 4), torch.arange(30) % 3
        maps, images = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 3, 1)), torch.randn(30, 1, 2, 2)
        with pytest.raises(OutputError, match=r"logits \(N, K\)"):
            latedrop.calibrate(maps, (images, y), task="classification", progress=False)
        with pytest.raises(DataError, match="expected one label for each row"):
            latedrop.calibrate(net, (x, torch.randn(30, 3)), task=latedrop.Classification(names=["a", "b", "c"]))
        with pytest.raises(ArgumentError, match="expected different names of classes"):
            latedrop.Classification(["a", "a"])
        for options, match in (
            ({"method": latedrop.Sampling(floor=True)}, r"for classes; found Sampling\(floor=\)"),
            ({"method": "propagate"}, "method"),
            ({"method": latedrop.Terms(["size"])}, "'leverage' and 'gradients' for classes"),
            ({"task": latedrop.Classification(names=["a", "b"])}, "names of 3 classes, as the model has; found 2"),
            ({"task": "classes"}, "expected task to be 'auto'"),
        ):
            with pytest.raises(ArgumentError, match=match):
                latedrop.calibrate(net, (x, y), progress=False, **options)
