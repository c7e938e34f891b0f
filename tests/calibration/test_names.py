"""Names are kept: of the columns of data frames, their order, their index, and what outputs are called."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import latedrop
from latedrop.errors import DataError
from latedrop.evaluation.evaluation import compare, verdict
from latedrop.evaluation.judgement import judge
from networks import mlp
from rounding import assert_same_up_to_rounding

pandas = pytest.importorskip("pandas")
NAMES = ["a", "b", "c"]
OPTIONS: list[dict[str, Any]] = [{}, {"method": latedrop.Sampling(rates=[0.1], draws=10)}]


network = partial(mlp, 3, 16)


def frames(outputs: int = 2) -> tuple[nn.Module, Any, Any]:
    model, dice = network(outputs), np.random.default_rng(0)
    x = pandas.DataFrame(dice.normal(size=(60, 3)), columns=NAMES, index=[f"row {i}" for i in range(60)])
    y = model(torch.tensor(x.to_numpy()).float()).detach().numpy() + 0.2 * dice.normal(size=(60, outputs))
    return model, x, pandas.DataFrame(y, columns=["height", "width"][:outputs], index=x.index)


@pytest.mark.parametrize("options", OPTIONS, ids=["terms", "sample"])
def test_frames_in_frames_out(options: dict[str, Any]) -> None:
    model, x, y = frames()
    uq = latedrop.calibrate(model, (x, y), progress=False, **options)
    assert uq.calibration.columns == {"inputs": tuple(NAMES), "targets": ("height", "width")}
    assert uq.calibration.output_names == ("height", "width")
    p = uq.predict(x[5:15])
    frame = p.to_pandas(0.8)
    assert list(frame.index) == list(x.index[5:15])
    assert list(frame.columns)[:8] == [f"{n}_{o}" for n in ("mean", "std", "low", "high") for o in ("height", "width")]
    np.testing.assert_array_equal(frame["std_width"], p.std[:, 1])  # moved, not computed
    np.testing.assert_array_equal(frame["high_height"], p.interval(0.8)[1][:, 0])
    one = latedrop.calibrate(network(1), (x, y["height"]), progress=False, **options).predict(x).to_pandas()
    assert list(one.columns)[:4] == ["mean", "std", "low", "high"]
    whole = np.concatenate([part.mean for part in uq.predict_batches([x[:20], x[20:]])])
    assert_same_up_to_rounding(whole, uq.predict(x).mean)


@pytest.mark.filterwarnings("ignore:.* of these rows are rows that the calibration was fitted to")
@pytest.mark.parametrize("options", OPTIONS, ids=["terms", "sample"])
def test_another_order_is_put_right(options: dict[str, Any], tmp_path: Path) -> None:
    model, x, y = frames()
    turned, straight = (x[["c", "a", "b"]], y[["width", "height"]]), (x, y)
    calibrated = latedrop.calibrate(model, straight, progress=False, **options)
    uq, again = calibrated.conformal(straight), calibrated.conformal(turned)
    assert uq.calibration.intervals == again.calibration.intervals
    uq.save(tmp_path / "cal.json")
    for predictor in (uq, latedrop.load(tmp_path / "cal.json", model)):
        assert_same_up_to_rounding(predictor.predict(turned[0]).mean, predictor.predict(x).mean)
        assert predictor.explain(turned[0][:1]).mean == predictor.explain(x[:1]).mean
    (labelled, target), (expected, truth) = uq.predict_labelled(turned), uq.predict_labelled(straight)
    assert_same_up_to_rounding(labelled.mean, expected.mean)
    assert torch.equal(target, truth)
    if not options:
        by_order = [
            latedrop.calibrate(model, straight, reference=reference, progress=False).predict(x).std
            for reference in (x + 1, turned[0] + 1, [turned[0][:30] + 1, turned[0][30:] + 1])
        ]
        assert_same_up_to_rounding(by_order[0], by_order[1])
        assert_same_up_to_rounding(by_order[0], by_order[2])


def test_missing_and_surplus_columns_are_refused_by_name() -> None:
    model, x, y = frames()
    uq = latedrop.calibrate(model, (x, y), progress=False)
    with pytest.raises(DataError, match=r"expected the inputs in the columns .* found a table without 'b'"):
        uq.predict(x[["a", "c"]])
    with pytest.raises(DataError, match="found a table with 'height', 'width' besides"):
        uq.predict(pandas.concat([x, y], axis=1))
    with pytest.raises(DataError, match="found a table without 'a' and with 'A' besides"):
        uq.predict(x.rename(columns={"a": "A"}))
    assert_same_up_to_rounding(uq.predict(x.to_numpy()).mean, uq.predict(x).mean)  # arrays have no names


@pytest.mark.parametrize("target", [None, latedrop.Standardized([0.0, 1.0], [2.0, 3.0])], ids=["plain", "standardized"])
def test_targets_in_tables_are_judged_in_any_order(target: Any) -> None:
    model, x, y = frames()
    if target is not None:
        y = y * [2.0, 3.0] + [0.0, 1.0]
    uq = latedrop.calibrate(model, (x[:30], y[:30]), target=target, progress=False).conformal((x[30:50], y[30:50]))
    p, turned = uq.predict(x[50:]), y[50:][["width", "height"]]
    assert compare(p, turned) == compare(p, torch.tensor(y[50:].to_numpy()))
    assert verdict(p, turned) == verdict(p, torch.tensor(y[50:].to_numpy()))
    judgement, expected = judge(p, turned).outputs, judge(p, torch.tensor(y[50:].to_numpy())).outputs
    assert [(output.name, output.worst) for output in judgement] == [(output.name, output.worst) for output in expected]


def test_names_that_stand_twice_are_no_names() -> None:
    model, x, y = frames()
    x.columns, y.columns = ["a", "a", "b"], ["h", "h"]
    uq = latedrop.calibrate(model, (x, y), progress=False)
    assert uq.calibration.columns is None
    frame = uq.predict(x).to_pandas()
    assert {"mean_0", "mean_1", "high_0", "high_1"} <= set(frame.columns)
