"""Warnings about a calibration: a rate at the edge, new weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import LatedropWarning, Sampling, calibrate, load
from networks import mlp, noisy


def _step(model: nn.Sequential, x: Tensor) -> None:
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def _in_place(model: nn.Sequential, x: Tensor) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


CHANGES: dict[str, Callable[[nn.Sequential, Tensor], Any]] = {
    "in place": _in_place,
    "step": _step,
    "replaced": lambda model, x: setattr(model[0], "weight", nn.Parameter(2 * model[0].weight.detach())),
    "loaded": lambda model, x: model.load_state_dict({name: 2 * v for name, v in model.state_dict().items()}),
    "through data": lambda model, x: [parameter.data.mul_(1.01) for parameter in model.parameters()],
    "layer": lambda model, x: setattr(model, "0", nn.Linear(3, 20)),
}


class TestWeights:
    def made(self) -> tuple[nn.Sequential, Any, Tensor]:
        model = mlp(3, 20, 1)
        x, y = noisy(model, 50)
        return model, calibrate(model, (x, y), method=Sampling(rates=[0.2], draws=20), progress=False), x

    @pytest.mark.parametrize("change", [*CHANGES, "another model"])
    def test_new_weights_are_told_once(self, change: str) -> None:
        model, uq, x = self.made()
        uq.predict(x)
        if change == "another model":
            uq.model = model = copy.deepcopy(model)
        CHANGES.get(change, CHANGES["replaced"])(model, x)
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
