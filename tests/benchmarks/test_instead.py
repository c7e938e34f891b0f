"""The comparison of latedrop with what one would use instead: its parts, resuming and tables, on tiny data."""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from benchmarks import instead, instead_methods, instead_sets, timing
from benchmarks.instead import by_set, figures
from benchmarks.instead_methods import METHODS, PEERS, Bounds, Case, Predicted, measures
from benchmarks.instead_sets import APART, CHOSEN_ON, Kind, Situation, TextNet
from benchmarks.nets import members, trained
from latedrop.metrics import crps, nll
from latedrop.metrics.tails import Tail

LIBRARIES = {"MAPIE": "mapie", "crepes": "crepes", "NGBoost": "ngboost", "DEUP": "deup", "Laplace": "laplace"}


def table_of(count: int = 150, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return np.column_stack([x, x @ [1.0, 0.3, 0.1] + 0.1 * rng.normal(size=count)])


@pytest.fixture(scope="module")
def case() -> Case:
    data = torch.tensor(table_of(), dtype=torch.float32)
    x, y = data[:, :-1], data[:, -1]
    fit, stop = (x[:60], y[:60]), (x[60:70], y[60:70])
    untrained = members(3, [60] * 5, seed=0, steps=100)
    nets: list[Any] = [trained(net, fit, stop, batches=batches) for net, batches in untrained]
    return Case(nets, x[:70], y[:70], x[70:], y[70:].double())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_finite_predictions(name: str, case: Case) -> None:
    actual = METHODS[name](case)(case.x_val[:9])
    assert isinstance(actual, Predicted)
    assert actual.mean.shape == actual.variance.shape == (9,)
    assert bool((actual.variance > 0).all())
    scores = measures(actual, case.y_val[:9])
    assert scores["score"] < 100
    assert scores["nll"] < 100


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", PEERS)
def test_every_library_gives_intervals(name: str, case: Case) -> None:
    library = LIBRARIES[name.split(",")[0]]
    if find_spec(library) is None:
        pytest.skip("not installed; `make bench` makes an environment that has it")
    scores = measures(PEERS[name](case)(case.x_val[:9]), case.y_val[:9])
    assert scores["score"] < 100
    assert scores["coverage"] == sorted(scores["coverage"])


def test_measures_are_those_of_the_library() -> None:
    torch.manual_seed(0)
    mean, variance, y = torch.randn(50).double(), torch.rand(50).double() + 0.1, torch.randn(50).double()
    actual = measures(Predicted(mean, variance), y)
    assert actual["nll"] == pytest.approx(float(nll(mean, variance, y)))
    assert actual["crps"] == pytest.approx(float(crps(mean, variance, y)))
    half = 1.6448536 * variance.sqrt()
    score = (2 * half + 20 * ((y - mean).abs() - half).clamp_min(0)).mean()  # Gneiting and Raftery 2007
    assert actual["score"] == pytest.approx(float(score), rel=1e-5)
    wide = measures(Predicted(mean, variance, Tail(3.0)), y)
    assert wide["width"] > actual["width"]
    assert wide["coverage"][4] >= actual["coverage"][4]


@pytest.mark.parametrize("nu", [3.0, 4.0, 50.0, math.inf])
@pytest.mark.parametrize("error", [-4.0, 0.3, 11.0])
def test_crps_is_the_integral_of_the_squared_difference(nu: float, error: float) -> None:
    width, cdf = 0.8 * math.sqrt(2.5), (stats.norm if math.isinf(nu) else stats.t(nu)).cdf
    below = integrate.quad(lambda y: cdf(y / width) ** 2, -math.inf, error, epsabs=1e-12, limit=200)[0]
    above = integrate.quad(lambda y: (1 - cdf(y / width)) ** 2, error, math.inf, epsabs=1e-12, limit=200)[0]
    mean, variance, y = torch.tensor([[0.0], [2.5], [error]]).double()
    assert Predicted(mean, variance, Tail(nu, 0.8)).crps(y) == pytest.approx(below + above, rel=1e-6)


def test_intervals_alone_have_no_density_and_points_have_a_crps() -> None:
    mean, y = torch.zeros(4).double(), torch.tensor([-1.0, 0.0, 0.5, 3.0]).double()
    ends = torch.ones(5, 4).double()
    actual = measures(Bounds(mean, -ends, ends), y)
    assert math.isnan(actual["nll"])
    assert math.isnan(actual["crps"])
    assert actual["coverage"] == [0.75] * 5
    points = torch.randn(4, 4000, generator=torch.Generator().manual_seed(0)).double()
    actual = measures(Bounds(mean, -ends, ends, points), y)
    assert actual["crps"] == pytest.approx(float(crps(mean, torch.ones(4).double(), y)), abs=0.02)


def test_widths_tell_shifted_rows_apart() -> None:
    mean, narrow = torch.zeros(3).double(), torch.ones(3).double()
    actual = measures(Predicted(mean, 4 * narrow), mean, Predicted(mean, narrow))
    assert actual["auroc"] == 1
    assert measures(Predicted(mean, narrow), mean, Predicted(mean, narrow))["auroc"] == 0.5


def test_halves_do_not_overlap_and_name_all_sets() -> None:
    assert not set(CHOSEN_ON) & set(APART)
    assert len({*CHOSEN_ON, *APART}) == 17
    assert len(instead_sets.OTHERS) == 6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instead, "HALVES", {"chosen": ("boston-housing",), "apart": ("yacht",)})
    monkeypatch.setattr(instead, "ALL", {name: METHODS[name] for name in ("constant", "latedrop", "ensemble")})
    monkeypatch.setattr(instead, "METHODS", instead.ALL)
    monkeypatch.setattr(instead_sets, "SIZES", (10,))
    monkeypatch.setattr(instead_sets, "STEPS", 60)
    monkeypatch.setattr(instead_sets, "table", lambda name, most: table_of(200, len(name)))


@pytest.mark.usefixtures("small")
def test_a_run_writes_each_unit_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    for only in ("yacht", "boston-housing"):
        instead.main(["--seeds", "1", "--only", only])
    record = timing.stored("instead")
    assert set(record["units"]) == {"yacht", "boston-housing"}
    assert set(record["units"]["yacht"]["0"]) == {"in", "above", "below"}
    monkeypatch.setitem(instead.ALL, "constant + t", METHODS["constant + t"])
    instead.main(["--seeds", "1"])
    more = timing.stored("instead")["units"]["yacht"]["0"]["in"]["10"]
    assert set(more) == {"constant", "constant + t", "latedrop", "ensemble"}
    assert more["ensemble"] == record["units"]["yacht"]["0"]["in"]["10"]["ensemble"]  # seconds too: not measured again
    monkeypatch.setattr(instead, "unit", None)  # nothing is left to measure
    instead.main(["--seeds", "1"])
    assert "| latedrop | " in instead.table(timing.stored("instead"), "apart", "10")


def test_a_library_that_fails_is_told_and_the_others_go_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case) -> Any:
        raise ValueError("too few.")

    situation = Situation("in", "all", case, (case.x_val, case.y_val), None)
    monkeypatch.setattr(instead_sets, "situations", lambda name, seed: iter([situation]))
    monkeypatch.setattr(instead, "ALL", {"broken": broken, "constant": METHODS["constant"]})
    actual = instead.unit("yacht", 0, {})["in"]["all"]
    assert actual["broken"] == {"error": "ValueError: too few."}
    assert actual["constant"]["score"] > 0


def test_images_and_texts_share_networks_between_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(seed: int) -> Kind:
        x = torch.randint(1, 5, (80, 6), generator=torch.Generator().manual_seed(seed))
        shifts = {"reversed": (x[:20].flip(1), x[:20].float().mean(1))}
        return Kind((x, x.float().mean(1)), lambda test, dice: shifts, lambda: TextNet(4))

    monkeypatch.setitem(instead_sets.OTHERS, "letters", kind)
    monkeypatch.setattr(instead_sets, "trained", lambda net, *rows, batches: net.eval().requires_grad_(False))
    actual: Iterator[Situation] = instead_sets.situations("letters", 0)
    within, beyond = actual
    assert (within.name, beyond.name) == ("in", "reversed")
    assert within.case is beyond.case
    assert within.inside is None
    assert beyond.inside is not None
    rows = len(within.case.x_train) + len(within.case.x_val) + len(within.test[0])
    assert rows == 80
    assert within.case.table(within.test[0]).shape == (len(within.test[0]), 32)


def test_methods_that_need_more_rows_or_fewer_weights_are_left_out(case: Case) -> None:
    few = Case(case.nets, case.x_train, case.y_train, case.x_val[:20], case.y_val[:20])
    assert instead_methods.suits("DEUP", case)
    assert not instead_methods.suits("DEUP", few)
    wide = Case([torch.nn.Linear(3, 5000)], case.x_train, case.y_train, case.x_val, case.y_val)
    assert not instead_methods.suits("Laplace, all weights, tuned", wide)


BASE = {"nll": 1.0, "crps": 2.0, "score": 4.0, "width": 1.0, "ranking": 0.0, "coverage": [0.5] * 5, "seconds": 0.0}


def test_figures_are_medians_over_sets_of_means_over_units() -> None:
    def part(gain: float) -> dict[str, object]:
        return {"in": {"all": {"constant": BASE, "m": {**BASE, "nll": 1 - gain, "score": 2.0}}}}

    record = {"units": {"a": {"0": part(0.1), "1": part(0.3)}, "b": {"0": part(-0.4)}, "c": {"0": part(1.0)}}}
    actual = figures(record, ["a", "b", "c", "d"], False, "all", "m")
    assert actual is not None
    assert (actual.sets, actual.worst_set, actual.score) == (3, "b", 0.5)
    assert actual.gain == pytest.approx(0.2)
    assert figures(record, ["a"], True, "all", "m") is None
    assert by_set(record, ["a"], False, "all", "m")["a"]["gain"] == pytest.approx(0.2)


def test_a_method_that_needs_more_rows_counts_as_the_one_that_it_falls_back_to() -> None:
    parts = {"constant": BASE, "latedrop": {**BASE, "nll": 0.5}}
    more = {**parts, "latedrop, corrected mean": {**BASE, "nll": 0.2}}
    record = {"units": {"a": {"0": {"in": {"all": parts}}}, "b": {"0": {"in": {"all": more}}}}}
    actual = figures(record, ["a", "b"], False, "all", "latedrop, corrected mean")
    assert actual is not None
    assert (actual.sets, actual.worst_set) == (2, "a")
    assert actual.gain == pytest.approx(0.65)
