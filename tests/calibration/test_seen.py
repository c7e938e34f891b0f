"""Warnings about rows that were seen before, which few marks tell, and about weights that are others."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import latedrop
from latedrop import LatedropWarning, Sampling, calibrate, load
from latedrop.calibration.seen import feature_marks, marks_of, share_seen, sketch
from latedrop.evaluation.evaluation import compare
from latedrop.evaluation.judgement import judge_classes
from networks import mlp, noisy

OWN = "of the test rows are rows that the calibration was fitted to"
TRAINED = "of the validation rows are among the reference rows"
METHODS: list[dict[str, Any]] = [{}, {"method": "linear"}, {"method": latedrop.Sampling([0.1, 0.3], draws=10)}]


network = partial(mlp, 3, 16, 1)


def rows(seed: int, count: int = 60) -> tuple[Tensor, Tensor]:
    return noisy(network(), count, seed, 0.1)


@settings(deadline=None)
@given(known=st.integers(5, 2000), new=st.integers(5, 500), old=st.integers(5, 500), seed=st.integers(0, 100))
def test_the_share_is_estimated_from_few_marks(known: int, new: int, old: int, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    values = torch.randn(known + new, 2, generator=dice)
    marks = sketch(marks_of(values[:known, :1], values[:known, 1:]))
    assert len(marks) <= 256 * 16
    tried = torch.cat([values[:known][:old], values[known:]])
    share = share_seen(marks, marks_of(tried[:, :1], tried[:, 1:]))
    if share:
        expected_marks = min(1.0, 256 / known) * len(tried)
        exact = min(old, known) / len(tried)
        assert abs(share - exact) < 5 * (0.25 / expected_marks) ** 0.5 + 1e-9


def test_rounding_in_the_last_digits_does_not_matter() -> None:
    x, y = torch.randn(2, 1000, 4, generator=torch.Generator().manual_seed(0))
    noisy = x * (1 + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    assert np.mean(marks_of(x, y) == marks_of(noisy, y)) > 0.97
    assert np.mean(feature_marks(x) == feature_marks(noisy)) > 0.95
    assert not np.isin(marks_of(x, y), marks_of(x + 0.1, y)).any()


@pytest.mark.parametrize("options", METHODS, ids=lambda o: str(o.get("method", "terms")))
def test_the_calibrations_own_rows_are_noticed(options: dict[str, Any], tmp_path: Path) -> None:
    x, y = rows(0)
    uq = latedrop.calibrate(network(), (x, y), progress=False, **options)
    uq.save(tmp_path / "cal.json")
    uq = latedrop.load(tmp_path / "cal.json", network())
    uq.batch_size = 7
    with pytest.warns(LatedropWarning, match=f"100% {OWN}"):
        compare(uq.predict(x), y)
    mixed = [torch.cat([a[:40], b[:20]]) for a, b in zip((x, y), rows(1), strict=True)]
    with pytest.warns(LatedropWarning, match=f"67% {OWN}"):
        compare(uq.predict(mixed[0]), mixed[1])
    compare(uq.predict(rows(1)[0]), rows(1)[1])  # other rows: no warning, which would be an error


def test_training_rows_as_validation_rows_are_noticed() -> None:
    trained, (x, y) = rows(0, 200)[0], rows(1)
    latedrop.calibrate(network(), (x, y), reference=trained, progress=False)
    both = torch.cat([trained, x])
    with pytest.warns(LatedropWarning, match=f"100% {TRAINED}"):
        latedrop.calibrate(network(), (x, y), reference=list(both.split(50)), progress=False)
    with pytest.warns(LatedropWarning, match=f"{TRAINED}, or so close to one that their features"):
        latedrop.calibrate(network(), (x, y), reference=x + 1e-6, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        latedrop.calibrate(network(), (x, y), reference=both[:220], progress=False)  # a third: duplicates may be


HELD = "of these rows are rows that the calibration was fitted to"


@pytest.mark.parametrize("options", METHODS[:2], ids=["terms", "linear"])
def test_conformal_rows_of_the_calibration_itself(options: dict[str, Any]) -> None:
    uq = latedrop.calibrate(network(), rows(1), task="regression", progress=False, **options)
    with pytest.warns(LatedropWarning, match=HELD) as seen:
        uq.conformal(rows(1))
    assert seen[0].filename == __file__
    fresh = uq.conformal(rows(2))
    fresh.conformal(rows(2))  # once more, which changes nothing


def test_a_classifiers_own_rows_are_noticed(tmp_path: Path) -> None:
    model = nn.Sequential(network(), nn.Linear(1, 3))
    x, new = torch.randn(2, 90, 3)
    y, labels = torch.randint(3, (2, 90))
    latedrop.calibrate(model, (x, y), task="classification", progress=False).save(tmp_path / "c.json")
    uq = latedrop.load(tmp_path / "c.json", model)
    with pytest.warns(LatedropWarning, match=OWN):
        own = judge_classes(uq.predict(x), y)
    assert "90 rows that the calibration was fitted to" in str(own.verdict)
    assert "90 rows not used for fitting" in str(judge_classes(uq.predict(new), labels).verdict)
    for use in (uq.reject, uq.conformal):
        with pytest.warns(LatedropWarning, match=HELD):
            use((x, y))
        use((new, labels))


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
    "layer": lambda model, x: setattr(model, "0", mlp(3, 20, seed=1)[0]),
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
