"""Streams of predictors: predict now, learn later; nothing is lost, and nothing depends on how labels come in."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError
from latedrop.streams import Stream
from networks import trained
from rounding import assert_same_up_to_rounding

Z = 1.6448536269514722


@dataclass
class Plain:
    """A prediction with one standard deviation for all rows."""

    mean: Tensor
    std: float = 1.0
    novelty: Tensor | None = None
    shares: dict[str, Tensor] | None = None

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        half = float(torch.distributions.Normal(0, 1).icdf(torch.tensor((1 + level) / 2, dtype=torch.float64)))
        return self.mean - half * self.std, self.mean + half * self.std


def zeros(*shape: int) -> Plain:
    return Plain(torch.zeros(*shape, dtype=torch.float64))


@pytest.fixture(scope="module")
def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(900, 4)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2] - x[:, 3]], 1) + 0.3 * torch.randn(900, 2)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
    return trained(model, x[:300], y[:300], 200, 1e-2), x[300:], y[300:]


@pytest.fixture(scope="module")
def predictor(data: tuple[nn.Module, Tensor, Tensor]) -> latedrop.Predictor:
    model, x, y = data
    return latedrop.calibrate(model, (x[:200], y[:200]), progress=False)


def test_before_any_label_it_is_the_predictor(predictor: latedrop.Predictor, data: Any) -> None:
    _, x, _ = data
    stream = predictor.stream(level=0.8)
    prediction, own = stream.predict(x[200:210]), predictor.predict(x[200:210])
    assert (len(prediction), prediction.ids, prediction.mean.dtype) == (10, list(range(10)), own.mean.dtype)
    assert_same_up_to_rounding(prediction.mean, own.mean)
    for end, other in zip(prediction.interval(), own.interval(0.8), strict=True):
        assert_same_up_to_rounding(end, other)
    assert stream.predict(x[210:211]).ids == [10]
    assert (stream.rows, stream.labels, stream.coverage, stream.waiting[-1]) == (11, 0, (), 10)
    mean = torch.tensor([1.0, 2.0])  # any object with an interval will do
    stream = Stream(lambda x: SimpleNamespace(mean=mean, interval=lambda level: (mean - 1, mean + 1)))
    assert stream.predict(None).low.tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "linear"},
        {"method": latedrop.Sampling(rates=[0.1], draws=20)},
        {"method": latedrop.FirstOrder(scale="relaxed")},
        {"method": latedrop.FirstOrder(scale=2.0)},
        "conformal",
    ],
    ids=["terms", "linear", "sample", "relaxed", "number", "conformal"],
)
def test_every_kind_of_calibration_has_a_stream(data: Any, options: Any) -> None:
    model, x, y = data
    conformal = options == "conformal"
    uq = latedrop.calibrate(model, (x[:200], y[:200]), progress=False, **({} if conformal else options))
    if conformal:
        uq = uq.conformal((x[500:600], y[500:600]))
    stream = uq.stream()
    assert_same_up_to_rounding(stream.predict(x[180:200], range(-20, 0)).low, uq.predict(x[180:200]).interval(0.9)[0])
    for start in range(200, 600, 20):
        stream.predict(x[start : start + 20])
        assert stream.update(y[start : start + 20]).shape == (20, 2)
    assert stream.labels == 400
    assert all(0.8 < share < 0.97 for share in stream.coverage)
    assert "errors" in stream.evidence


def test_transformed_targets_are_followed_in_the_models_unit(data: Any) -> None:
    model, x, y = data
    positive = y.exp()
    uq = latedrop.calibrate(model, (x[:200], positive[:200]), target=latedrop.Log(), progress=False)
    logs = latedrop.calibrate(model, (x[:200], y[:200]), progress=False).stream()
    stream = uq.stream()
    for rows in torch.arange(200, 500).split(10):
        stream.predict(x[rows])
        logs.predict(x[rows])
        assert torch.equal(stream.update(positive[rows]), logs.update(y[rows]))
    prediction, other = stream.predict(x[500:510]), logs.predict(x[500:510])
    for end, log in zip((prediction.mean, *prediction.interval()), (other.mean, *other.interval()), strict=True):
        assert_same_up_to_rounding(end, log.exp())
    with pytest.raises(LatedropError):
        stream.update(torch.full((10, 2), -1.0))


def test_a_vector_of_outputs_is_as_many_streams() -> None:
    rng = np.random.default_rng(0)
    labels = np.stack([rng.standard_normal(100), 5 + rng.standard_normal(100)], 1)
    both, alone = Stream(), [Stream(), Stream()]
    for row in labels:
        prediction = both.follow(zeros(1, 2))
        both.update(row[None])
        for k, stream in enumerate(alone):
            single = stream.follow(zeros(1))
            assert float(single.low[0]) == float(prediction.low[0, k])
            stream.update(row[k])
    assert both.coverage == tuple(stream.coverage[0] for stream in alone)
    assert both.bias[1] == pytest.approx(5, abs=1)


def test_labels_come_late_out_of_order_and_for_some_rows_alone() -> None:
    rng = np.random.default_rng(1)
    stream, known, widths, inside = Stream(), {}, [], []
    for start in range(0, 2000, 20):
        prediction = stream.follow(zeros(20))
        widths.append(float(prediction.high[0] - prediction.low[0]))
        known |= dict(zip(prediction.ids, 4 + 2 * rng.standard_normal(20), strict=True))
        if start >= 100:  # a third of the rows, five calls later, shuffled
            late = rng.permutation(np.arange(start - 100, start - 80))[:7].tolist()
            inside += stream.update([known[i] for i in late], late).flatten().tolist()
    assert stream.labels == 7 * 95
    assert stream.bias[0] == pytest.approx(4, abs=0.6)
    assert np.mean(widths[40:]) == pytest.approx(2 * 2 * Z, rel=0.15)
    assert stream.coverage == (np.mean(inside),)
    assert np.mean(inside[100:]) == pytest.approx(0.9, abs=0.04)  # 565 labels: a standard error of 0.013


def test_a_thousand_labels_at_once_do_not_throw_it_off() -> None:
    """All of them were predicted before the first was known, and all were missed."""
    stream = Stream()
    stream.follow(zeros(1000))
    inside = stream.update(10 + np.random.default_rng(0).standard_normal(1000))
    assert not bool(inside.any())
    prediction = stream.follow(zeros(1))
    assert float(prediction.mean) == pytest.approx(10, abs=0.5)
    assert float(prediction.high - prediction.low) == pytest.approx(2 * Z, rel=0.35)


def test_own_names() -> None:
    stream = Stream()
    assert stream.follow(zeros(2), ["a", "b"]).ids == ["a", "b"]
    stream.update(0.5, "b")
    assert stream.waiting == ("a",)
    stream.follow(zeros(1), ["a"])  # predicted again: one row waits
    assert stream.waiting == ("a",)
    stream.follow(zeros(1), ids=[3])  # numbers do not take the place of rows that wait
    for _ in range(3):
        stream.follow(zeros(2))
    assert stream.waiting == ("a", 3, *range(4, 10))
    for wrong in (["a"], ["a", "a"], ["a", 1.5], [True, "a"]):
        with pytest.raises(ArgumentError, match="expected 2 different ids"):
            stream.follow(zeros(2), wrong)  # type: ignore[arg-type]


def test_only_so_many_rows_wait() -> None:
    stream = Stream(waiting=3)
    stream.follow(zeros(2))
    stream.follow(zeros(2))
    assert stream.waiting == (1, 2, 3)
    stream.update(1.0, 1)
    for attempt, match in (
        (lambda: stream.update(1.0, 0), r"rows that wait for a label.*found \[0\].*3 rows wait at most"),
        (lambda: stream.update(1.0, 1), "They have had their label"),
        (lambda: stream.update([1.0, 1.0], [2, 2]), "each once"),
        (lambda: Stream().update(1.0), "rows that wait"),
    ):
        with pytest.raises(DataError, match=match):
            attempt()


def test_wrong_labels_are_refused_and_change_nothing() -> None:
    stream = Stream()
    stream.follow(zeros(3, 2))
    for wrong in (torch.zeros(2, 2), torch.zeros(2, 3), torch.full((3, 2), torch.nan)):
        with pytest.raises(DataError, match="expected 3 finite labels, of 2 values each"):
            stream.update(wrong)
    with pytest.raises(DataError, match="expected labels as numbers; found str"):
        stream.update("many")
    assert stream.update(torch.zeros(0, 2), []).shape == (0, 2)  # no labels change nothing, too
    assert (stream.labels, len(stream.waiting)) == (0, 3)
    stream.update(torch.zeros(3, 2))


def test_wrong_arguments() -> None:
    stream = Stream()
    stream.follow(zeros(1, 2))
    for attempt, match in (
        (lambda: Stream(level=1.0), "level"),
        (lambda: Stream(alarm=0), "expected alarm between 0 and 1"),
        (lambda: Stream(step=-1.0), "expected step between 0 and 10"),
        (lambda: Stream(waiting=0), "expected waiting to be a whole number of rows"),
        (lambda: Stream().predict(1), r"has none\. Pass predictions to follow"),
        (lambda: Stream().follow(zeros(2, 4, 5)), r"found outputs of shape \(4, 5\)"),
        (lambda: Stream().follow(Plain(torch.zeros(2), std=0.0)), "wider than 0"),
        (lambda: stream.follow(zeros(1, 3)), "expected 2 outputs, as in rows before; found 3"),
    ):
        with pytest.raises((ArgumentError, DataError), match=match):
            attempt()


class TestAlarms:
    def test_errors(self, predictor: latedrop.Predictor, data: Any) -> None:
        _, x, y = data
        stream = predictor.stream()
        for i in range(200, 400):
            stream.predict(x[i : i + 1])
            stream.update(y[i : i + 1])
        assert stream.alarms == ()
        for i in range(400, 440):
            stream.predict(x[i : i + 1])
            stream.update(y[i : i + 1] + 3)
        (alarm,) = stream.alarms
        assert alarm.kind == "errors"
        assert 200 <= int(alarm.row) < 240
        assert "alarms: errors" in repr(stream)
        assert stream.predict(x[:1]).alarms == (alarm,)
        stream.silence()
        assert stream.alarms == ()

    def test_strangeness_needs_no_label(self, predictor: latedrop.Predictor, data: Any) -> None:
        _, x, _ = data
        stream = predictor.stream()
        stream.predict(x[200:500])
        assert stream.alarms == ()
        stream.predict(3 * x[500:560])
        assert [alarm.kind for alarm in stream.alarms if alarm.kind == "strangeness"] == ["strangeness"]

    def test_shares_need_no_label(self) -> None:
        rng = np.random.default_rng(0)

        def rows(floor: np.ndarray) -> Plain:
            part = torch.from_numpy(floor)
            return Plain(torch.zeros(len(floor)), shares={"floor": part, "leverage": 1 - part})

        stream = Stream()
        stream.follow(rows(rng.beta(8, 3, 150)))
        assert stream.alarms == ()
        stream.follow(rows(rng.beta(2, 8, 60)))
        (alarm,) = stream.alarms
        assert alarm.kind == "shares"
        assert int(alarm.row) >= 150

    def test_many_rows_of_one_call_are_thinned(self) -> None:
        stream = Stream()
        stream.follow(Plain(torch.zeros(600), novelty=torch.ones(600)))
        assert stream._state.monitors["strangeness"].number == 200  # each third

    def test_what_is_usual_is_saved(self, predictor: latedrop.Predictor, data: Any, tmp_path: Path) -> None:
        model, x, _ = data
        predictor.save(tmp_path / "c.json")
        loaded = latedrop.load(tmp_path / "c.json", model)
        for uq in (predictor, loaded):
            stream = uq.stream()
            stream.predict(5 * x[:30])
            assert "strangeness" in [alarm.kind for alarm in stream.alarms]
        usual = loaded.calibration.terms.usual  # type: ignore[union-attr]
        assert usual == predictor.calibration.terms.usual  # type: ignore[union-attr]
        assert sum(usual.strangeness) == 200  # type: ignore[union-attr, arg-type]


class TestState:
    def test_it_goes_on_where_it_was(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        labels = 2 * rng.standard_normal(60)
        whole = Stream(path=tmp_path / "whole.json")
        for label in labels:
            whole.follow(zeros(1))
            whole.update(label)
        for part in np.split(labels, 6):
            stream = Stream(path=tmp_path / "parts.json")
            for label in part:
                stream.follow(zeros(1))
                stream.update(label)
        assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()

    def test_rows_wait_over_a_restart(self, tmp_path: Path) -> None:
        Stream(path=tmp_path / "s.json").follow(zeros(3))
        stream = Stream(path=tmp_path / "s.json")
        stream.update([1.0, 2.0], [0, 2])
        assert (stream.waiting, stream.labels) == ((1,), 2)
        assert Stream(path=tmp_path / "s.json").bias == stream.bias

    def test_a_kill_loses_at_most_the_last_label(self, tmp_path: Path) -> None:
        """A process that learns as fast as it can says after each label how many it has; then it is killed."""
        code = """
import sys, torch
from test_stream import zeros
from latedrop.streams import Stream
stream = Stream(path=sys.argv[1])
while True:
    stream.follow(zeros(1))
    stream.update(0.5)
    print(stream.labels, flush=True)
"""
        path = tmp_path / "s.json"
        before = waiting = 0
        for wanted in (3, 17):
            folder = str(Path(__file__).parent)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env=environment
            )
            said = before
            for line in process.stdout:
                said = int(line)
                if said >= before + wanted:
                    break
            process.kill()
            left = process.stdout.read().split()  # what it said before the kill reached it; the last may be cut
            process.wait()
            process.stdout.close()
            said = max([said, *(int(word) for word in left[:-1])])
            stream = Stream(path=path)
            assert stream.labels >= said
            unlabelled = stream.rows - stream.labels  # each kill may come between a row and its label
            assert unlabelled in (waiting, waiting + 1)
            before, waiting = stream.labels, unlabelled
        assert not [name for name in os.listdir(tmp_path) if name != "s.json" and not name.endswith(".part")]

    def test_another_level_or_model_is_refused(self, tmp_path: Path) -> None:
        Stream(path=tmp_path / "s.json", made_with="a").follow(zeros(1))
        with pytest.raises(FileError, match=r"level 0.8 of this model.*found level 0.9, of this model"):
            Stream(level=0.8, path=tmp_path / "s.json", made_with="a")
        with pytest.raises(FileError, match="of another model"):
            Stream(path=tmp_path / "s.json", made_with="b")
        (tmp_path / "s.json").write_text("{}")
        with pytest.raises(FileError, match=r"s\.json: expected"):
            Stream(path=tmp_path / "s.json")

    def test_two_streams_do_not_write_over_each_other(self, tmp_path: Path) -> None:
        one, other = Stream(path=tmp_path / "s.json"), Stream(path=tmp_path / "s.json")
        one.follow(zeros(1))
        again = Stream(path=tmp_path / "s.json")
        one.follow(zeros(1))
        with pytest.raises(FileError, match="another one has written to it"):
            again.follow(zeros(1))
        with pytest.raises(FileError, match="another one has written to it"):
            other.follow(zeros(1))


def test_threads_share_a_stream() -> None:
    stream, errors = Stream(waiting=10_000), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(50):
                prediction = stream.follow(zeros(3))
                stream.update(rng.standard_normal(3), prediction.ids)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (stream.rows, stream.labels, stream.waiting) == (600, 600, ())


def test_shares_of_rows_are_those_of_the_record(predictor: latedrop.Predictor, data: Any) -> None:
    _, x, _ = data
    prediction = predictor.predict(x[:200])
    terms = predictor.calibration.terms
    total = sum(prediction.shares.values())
    assert_same_up_to_rounding(total, torch.ones(200))
    for name, share in prediction.shares.items():
        record = sum(value for column, value in terms.shares.items() if column.partition(":")[0] == name)
        assert float(share.mean()) == pytest.approx(record, abs=0.05)


def test_ids_and_labels_of_numpy_and_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    stream = Stream(path=tmp_path / "state.json")
    stream.follow(zeros(60, 1), ids=np.arange(10, 70))
    stream.update(pandas.Series([0.1, 0.2], index=["x", "y"]), np.array([12, 11]))
    stream.update(pandas.DataFrame({"y": [0.1] * 27}, index=range(5, 32)), pandas.Index(range(13, 40)))
    stream.update(np.full(29, 90.0), np.arange(40, 69))
    stream.update(90.0, np.int64(10))
    assert stream.waiting == (69,)
    assert [type(alarm.row) for alarm in stream.alarms] == [int]
    assert Stream(path=tmp_path / "state.json").waiting == (69,)


def test_a_state_in_another_unit_is_refused(data: tuple[nn.Module, Tensor, Tensor], tmp_path: Path) -> None:
    model, x, y = data
    units = (None, latedrop.Standardized(0.0, 2.0), latedrop.Standardized(0.0, 3.0))
    one, two, three = (
        latedrop.calibrate(model, (x[300:500], y[300:500] * scale), target=unit, progress=False)
        for unit, scale in zip(units, (1.0, 2.0, 3.0), strict=True)
    )
    two.stream(path=tmp_path / "state.json").predict(x[:2])
    assert two.stream(path=tmp_path / "state.json").waiting == (0, 1)
    for other in (one, three):
        with pytest.raises(FileError, match="another"):
            other.stream(path=tmp_path / "state.json")
