"""How soon alarms come, and how often for nothing: on counts, and on UCI sets whose rows leave the training range.

Alarms are set to a chance of at most 1 % to be false over a stream.

Counts: the order of the test frames is drawn by chance, the first of them stand for the validation frames, so that
nothing changes by construction; then the second half gets an error of 2 standard deviations more, or twice its errors.
In the order of time frames are alike, and an alarm says that frames do not look as if drawn by chance.

UCI: a network and its calibration see rows on one side of a cut through an input (`default_data`); a stream is held-out
rows of that side by chance and then, with a change, rows of the other side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import latedrop
from benchmarks.default_data import PARTS, cuts, pair, standardised, table
from benchmarks.default_nets import trained
from benchmarks.stream_data import SETS, Given, Series, crowd
from latedrop.streams import Stream
from latedrop.streams.bag import ERRORS, counted
from latedrop.streams.monitor import Monitor
from latedrop.streams.usual import Usual

ALARM = 0.01
ORDERS, UCI_ORDERS = 200, 20
BEFORE, AFTER = 200, 100
"""Rows of a UCI stream, at most, on both sides of the change."""
KINDS = ("errors", "strangeness", "shares")


def alarms(seeds: int) -> dict[str, Any]:
    """Everything."""
    return {"alarm": ALARM, "crowd": {name: of_counts(crowd(name)) for name in SETS}, "uci": of_uci(seeds)}


def of_counts(series: Series) -> dict[str, Any]:
    """Shares of false alarms and delays, in labels."""
    count = len(series.mean)
    known, change = count // 4, count // 4 + (count - count // 4) // 2
    found: dict[str, Any] = {"labels before": change - known}
    for name in ("nothing", "2 standard deviations more", "twice the errors"):
        delays = []
        for seed in range(ORDERS):
            order = np.random.default_rng(seed).permutation(count)
            mean, std, truth = (part[order] for part in (series.mean, series.std, series.truth))
            error = truth - mean
            changed = error + np.sign(error) * 2 * std if name.startswith("2") else 2 * error
            error[change:] = error[change:] if name == "nothing" else changed[change:]
            scores = (np.abs(error) / std).tolist()
            usual = counted(ERRORS, scores[:known])
            monitor = Monitor("errors", ERRORS, [usual], ALARM, seed=seed)
            for i, score in enumerate(scores[known:]):
                monitor.add([score], i)
            delays.append(None if monitor.alarm is None else monitor.alarm.number - (change - known))
        found[name] = _summary(delays)
    for every in (10, 25):
        for label, known_rows in (("validation frames", series.usual), ("nothing", Usual())):
            in_time = Series(series.mean, series.std, series.truth, known_rows)
            found[f"in time, every {every}, {label} known"] = _first(in_time, range(every - 1, count, every))
    return found


def _first(series: Series, labelled: Sequence[int]) -> int | None:
    """The label at which an alarm came; None where there was none."""
    stream = Stream(usual=series.usual, alarm=ALARM)
    for i in labelled:
        stream.follow(Given.of(series, [i]))
        stream.update(series.truth[i])
        if stream.alarms:
            return stream.labels
    return None


def of_uci(seeds: int) -> dict[str, Any]:
    """By set and kind of alarm: shares of false alarms without a change, and delays after one, in rows."""
    found: dict[str, Any] = {}
    for name in tqdm(PARTS["uci"], unit="set"):
        delays: dict[str, dict[str, list[int | None]]] = {
            change: {kind: [] for kind in KINDS} for change in ("nothing", "shift")
        }
        for seed in range(seeds):
            _add_unit(name, seed, delays)
        found[name] = {
            change: {kind: _summary(each) for kind, each in kinds.items() if each} for change, kinds in delays.items()
        }
    return found


def units(name: str, seed: int) -> Iterator[tuple[latedrop.Predictor, list[tuple[Any, torch.Tensor]]]]:
    """For each side of a cut: a predictor, and predictions and truths of held-out rows of both sides."""
    data = table(name)
    rows = {side: each for side, each in cuts(data, seed).items() if side in ("above", "below")}
    scaled = {side: standardised(data, each) for side, each in rows.items()}
    jobs = [(pair(scaled[side], each.fit), pair(scaled[side], each.stop)) for side, each in rows.items()]
    for net, (side, each) in zip(trained(jobs, seed), rows.items(), strict=True):
        reference = pair(scaled[side], np.concatenate([each.fit, each.stop]))[0]
        x, y = pair(scaled[side], each.validation)
        uq = latedrop.calibrate(net, (x, y[:, None]), reference=reference, progress=False)
        yield uq, [(uq.predict(x), y) for x, y in (pair(scaled[side], part) for part in (each.inside, each.test))]


def _add_unit(name: str, seed: int, delays: dict[str, dict[str, list[int | None]]]) -> None:
    for uq, parts in units(name, seed):
        for order in range(UCI_ORDERS):
            rng = np.random.default_rng([seed, order])
            inside, beyond = (rng.permutation(len(y)) for _, y in parts)
            before = min(BEFORE, len(inside))
            for change in delays:
                stream = Stream(usual=uq.calibration.usual(), alarm=ALARM)
                _run(stream, *parts[0], inside[:before])
                if change == "shift":
                    _run(stream, *parts[1], beyond[:AFTER])
                found = {alarm.kind: alarm.number - before for alarm in stream.alarms}
                for kind in stream.evidence:
                    delays[change][kind].append(found.get(kind))


def _run(stream: Stream, prediction: Any, y: torch.Tensor, order: np.ndarray) -> None:
    """Rows of a prediction in some order, each with its label, in pieces that are watched row by row."""
    for places in np.array_split(order, -(-len(order) // 100)):
        low, high = (end[places] for end in prediction.interval(stream.level))
        part = SimpleNamespace(
            mean=prediction.mean[places],
            interval=lambda level, ends=(low, high): ends,
            strangeness=prediction.strangeness[places],
            shares={name: share[places] for name, share in prediction.shares.items()},
        )
        stream.follow(part)
        stream.update(y[places])


def _summary(delays: list[int | None]) -> dict[str, Any]:
    """Shares of streams with a false alarm and with a true one, and the median delay, None where most have none."""
    true = [delay for delay in delays if delay is None or delay > 0]
    late = sorted(np.inf if delay is None else delay for delay in true)
    middle = late[len(late) // 2] if late else np.inf
    return {
        "streams": len(delays),
        "false": sum(delay is not None and delay <= 0 for delay in delays) / len(delays),
        "found": sum(delay is not None for delay in true) / max(1, len(true)),
        "delay": None if np.isinf(middle) else int(middle),
    }
