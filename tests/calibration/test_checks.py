"""Warnings about a calibration: a rate at the edge, new weights."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import LatedropWarning, Sampling, calibrate, load


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).eval()


def noisy(model: nn.Module, x: Tensor, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = model(x)
    return x, y + noise * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))


WAYS = ["in place", "step", "replaced", "state_dict", "data", "through data", "one layer", "layer", "other model"]


class TestWeights:
    def made(self) -> tuple[nn.Sequential, Any, Tensor]:
        model = mlp(3, 20, 1)
        x, y = noisy(model, torch.randn(50, 3))
        return model, calibrate(model, (x, y), method=Sampling(rates=[0.2], draws=20), progress=False), x

    @pytest.mark.parametrize("change", WAYS)
    def test_new_weights_are_told_once(self, change: str) -> None:
        model, uq, x = self.made()
        uq.predict(x)
        new = copy.deepcopy(model)
        with torch.no_grad():
            new[0].weight.mul_(2)  # type: ignore[operator]
        if change == "in place":
            model[0].weight.data.mul_(1)
            with torch.no_grad():
                model[0].weight.mul_(2)  # type: ignore[operator]
        elif change == "step":
            model(x).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        elif change == "replaced":
            model[0].weight = nn.Parameter(2 * model[0].weight.detach())  # type: ignore[arg-type,operator]
        elif change == "state_dict":
            model.load_state_dict(new.state_dict())
        elif change == "data":
            model[0].weight.data = 2 * model[0].weight.data  # type: ignore[operator]
        elif change == "through data":
            for parameter in model.parameters():
                parameter.data.mul_(1.01)
        elif change == "one layer":
            model[2].weight.data.copy_(new[0].weight[:1, :1].detach() * torch.ones(1, 20))  # type: ignore[union-attr,index,operator]
        elif change == "layer":
            model[0] = new[0]
        else:
            uq.model = new
        with pytest.warns(LatedropWarning, match="weights were changed after the calibration"):
            uq.predict(x)
        uq.predict(x)
        uq.scaled("relaxed").predict(x)

    def test_the_same_values_elsewhere_are_no_change(self) -> None:
        model, uq, x = self.made()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.double().float()
            uq.predict(x)
            with torch.no_grad():
                model[0].weight.mul_(1.0)  # type: ignore[operator]
            uq.predict(x)
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            model.train()
            uq.predict(x)
            model.requires_grad_(False)
            uq.predict(x)
            model[0].weight.data.mul_(1.0)  # type: ignore[operator]
            uq.predict(x)

    def test_when_loading(self, tmp_path: Path) -> None:
        model, uq, x = self.made()
        uq.save(tmp_path / "uq.json")
        load(tmp_path / "uq.json", model).predict(x)
        with torch.no_grad():
            model[0].weight.mul_(2)  # type: ignore[operator]
        with pytest.warns(LatedropWarning, match="weights are not those that"):
            other = load(tmp_path / "uq.json", model)
        other.predict(x)  # said once
