"""All methods on parts of any name: what they see, what they give, and how a rate is chosen."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rounding import assert_same_doubles, assert_same_up_to_rounding
from studies.regression.methods import (
    MEMBERS,
    Networks,
    Rows,
    best_rates,
    by_rate,
    conformal,
    least_variance,
    plain,
    predictions,
    train_all,
)
from studies.regression.scores import Predicted, scores
from studies.regression.training import Plan, train

RATES, SEEDS, HIDDEN = (0.05, 0.3), [3, 4], {"one": (8,), "three": (6, 6, 6)}
SIZES = {"train": 60, "validation": 25, "inside": 12, "test": 9}


def rows() -> Rows:
    g = torch.Generator().manual_seed(0)
    x = {part: torch.randn(2, n, 3, generator=g, dtype=torch.float64) for part, n in SIZES.items()}
    y = {part: v[..., 0] + 0.3 * torch.randn(v.shape[:2], generator=g, dtype=torch.float64) for part, v in x.items()}
    return Rows(x, y, torch.tensor([2.0, 5.0], dtype=torch.float64))


def trained(hidden: tuple[int, ...], epochs: int = 8) -> Networks:
    data = rows()
    plan = Plan(hidden, (0.0,), 1e-2, 16, epochs)
    return train_all(data.x["train"].float(), data.y["train"].float(), plan, SEEDS, RATES)


@pytest.fixture(scope="module", params=HIDDEN)
def case(request: pytest.FixtureRequest) -> tuple[Networks, int | None]:
    hidden = HIDDEN[request.param]
    return trained(hidden), 20 if len(hidden) > 1 else None


def changed(data: Rows, part: str) -> Rows:
    return replace(data, y={**data.y, part: data.y[part] + 1.0})


def variances(case: tuple[Networks, int | None], data: Rows) -> dict[str, dict[str, Tensor]]:
    nets = plain(case[0], data)
    by_method = predictions(case[0], nets, data, case[1], by_rate(case[0], nets, data, case[1]))
    return {name: {part: predicted.variance for part, predicted in parts.items()} for name, parts in by_method.items()}


def test_every_part_but_the_training_rows_is_predicted(case: tuple[Networks, int | None]) -> None:
    data = rows()
    nets = plain(case[0], data)
    by_method = predictions(case[0], nets, data, case[1], by_rate(case[0], nets, data, case[1]))
    least = least_variance(nets, data)
    for name, parts in by_method.items():
        assert list(parts) == ["validation", "inside", "test"], name
        for part, predicted in parts.items():
            torch.testing.assert_close(predicted.target, data.y[part] * data.units[:, None])
            assert bool((predicted.variance >= least[:, None]).all()), name
            assert all(bool(torch.isfinite(value).all()) for value in scores(predicted).values()), name
    assert ("injected per site, floor" in by_method) == (len(case[0].plain.layers) > 2)
    assert set(conformal(nets, data, "inside")) == {"conformal", "conformal, injected"}


def test_test_labels_are_not_seen_and_validation_labels_are(case: tuple[Networks, int | None]) -> None:
    before = variances(case, rows())
    after = variances(case, changed(rows(), "test"))
    for name, parts in before.items():
        for part, variance in parts.items():
            assert torch.equal(variance, after[name][part]), name  # the same call on the same batch
    after = variances(case, changed(rows(), "validation"))
    same = {name for name, parts in before.items() if torch.equal(parts["test"], after[name]["test"])}
    fitted = {name for name in before if name.endswith((", scaled", ", floor", ", relaxed"))}
    assert not same & (fitted | {"constant", "default", "default + reference"})


def test_a_case_alone_is_as_among_others(case: tuple[Networks, int | None]) -> None:
    data = rows()
    alone = Rows({k: v[:1] for k, v in data.x.items()}, {k: v[:1] for k, v in data.y.items()}, data.units[:1])
    together = variances(case, data)
    for name, parts in variances(case, alone).items():
        assert_same_doubles(parts["test"], together[name]["test"][:1])


def test_the_network_is_the_first_of_its_ensemble_and_the_others_differ() -> None:
    data, networks = rows(), trained((8,))
    plan = Plan((8,), (0.0,), 1e-2, 16, 8)
    single = train(data.x["train"].float(), data.y["train"].float(), plan, SEEDS)
    for split in range(2):
        first, *others = networks.ensemble(split)
        assert_same_up_to_rounding(first[0][0], single.member(split, 0)[0][0].double())
        assert len(others) == MEMBERS - 1
        assert all(float((other[0][0] - first[0][0]).abs().max()) > 1e-2 for other in others)


def test_the_rate_of_each_treatment_is_its_own_best_and_the_first_of_equals() -> None:
    curves = {
        "nll_unscaled": torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0, 5.0]),
        "nll_scaled": torch.tensor([1.0, 1.0, 1.0, 2.0, 1.0, 0.0]),
        "nll_floor": torch.tensor([2.0, 1.0, 0.5, 0.0, 1.0, 2.0]),
    }
    places = {how: index.tolist() for how, index in best_rates(curves, 3).items()}
    assert places == {"raw": [1, 0], "scaled": [0, 2], "relaxed": [0, 2], "floor": [2, 0]}


def test_parts_are_in_the_unit_of_each_target() -> None:
    data = rows()
    moments = [{"test": (data.y["test"][split], torch.ones(9, dtype=torch.float64))} for split in range(2)]
    joined = data.joined(moments)["test"]
    assert isinstance(joined, Predicted)
    assert torch.equal(joined.mean, joined.target)
    assert joined.variance[:, 0].tolist() == [4.0, 25.0]
