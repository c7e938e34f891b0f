"""Coverage of the intervals of streams, and how soon alarms come.

    python -m benchmarks.stream --parts uci  # or crowd; both without

Counts are those of `python -m studies crowd` (studies/results/crowd) with the scaled variance that the study chose on
validation frames, a label every tenth or every 25th frame; all frames are judged.

Alarms are set to a chance of at most 1 % to be false over a stream. On UCI sets a network and its calibration see rows
on one side of a cut through an input (`benchmarks.sets`); a stream has held-out rows of that side, then of the other.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import latedrop
from benchmarks.nets import Rows, interval_measures, members, trained
from benchmarks.sets import cuts, pair, standardised, table
from benchmarks.timing import by_parts, markdown_table
from latedrop.metrics.levels import normal_quantile
from latedrop.streams import Stream
from latedrop.streams.monitor import Usual, from_curve
from studies.regression.data import SETS as UCI

LEVEL, ALARM = 0.9, 0.01
Z = normal_quantile((1 + LEVEL) / 2)
EVERY, PHASES = (10, 25), 5
ORDERS = 20
BEFORE, AFTER = 200, 100  # rows of a UCI stream, at most, on both sides of the change
LABEL_EVERY, COMPARED = 5, 2  # rows to a label, and orders in which the intervals of UCI streams are compared
TITLES = {"mall": "Mall", "ucsd": "UCSD", "pets": "PETS2009"}
KINDS = ("errors", "strangeness", "shares")
CROWD = Path(__file__).parents[1] / "studies" / "results" / "crowd"


class Series(NamedTuple):
    """Predictions and truths in the order of time; `usual` is how validation rows were spread."""

    mean: np.ndarray
    std: np.ndarray
    truth: np.ndarray
    usual: Usual


def crowd(name: str) -> Series:
    """Return the counts of the test frames of a set."""
    record = json.loads((CROWD / f"{name}.json").read_text(encoding="utf-8"))
    columns = {key: np.array(value, float) for key, value in record["series"].items() if key != "level"}
    std = (columns["high"] - columns["low"]) / 2 / normal_quantile((1 + record["series"]["level"]) / 2)
    curve = record["curves"]["count"]["validation"]["scaled"]
    usual = Usual(errors=from_curve(record["levels"], curve, record["frames"]["validation"]))
    return Series(columns["mean"], std, columns["truth"], usual)


def judged(truth: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, float]:
    """Measure intervals: the share held, their width and score, and the error of their centre."""
    measures = interval_measures(low, high, truth, LEVEL)
    return {"held": measures.pop("coverage"), **measures, "mae": float(np.abs(truth - (low + high) / 2).mean())}


def streams() -> dict[str, Any]:
    """Run the library's streams on counts."""
    sets = {}
    for name in TITLES:
        series = crowd(name)
        half = Z * series.std
        sets[name] = {"own": judged(series.truth, series.mean - half, series.mean + half), "every": {}}
        for every in EVERY:
            regular = [streamed(series, phase(len(half), every, k)) for k in range(PHASES)]
            phases = [run["held"] for run in regular]
            sets[name]["every"][str(every)] = {"regular": averaged(regular), "phases": phases}
    return sets


def streamed(series: Series, labelled: list[int]) -> dict[str, float]:
    """Follow a series row by row."""
    stream = Stream(level=LEVEL, usual=series.usual, alarm=ALARM)
    rows, covered = [], []
    for i in range(len(series.mean)):
        mean, std = (torch.as_tensor(part[[i]]) for part in (series.mean, series.std))
        ends = mean - Z * std, mean + Z * std
        p = stream.follow(SimpleNamespace(mean=mean, interval=lambda level, ends=ends: ends))
        rows.append([float(p.low), float(p.high)])
        if i in labelled:
            covered.append(bool(stream.update(series.truth[i])))
    return judged(series.truth, *np.array(rows).T) | {"held_labelled": float(np.mean(covered))}


def phase(count: int, every: int, k: int) -> list[int]:
    """Return the frames with labels, at even distances; k shifts the first of them."""
    return list(range(round((k + 1) * every / PHASES) - 1, count, every))


def averaged(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def summary(delays: list[int | None]) -> dict[str, Any]:
    """Return shares of streams with a false and with a true alarm, and the median delay, None where most have none."""
    late = sorted(np.inf if delay is None else delay for delay in delays if delay is None or delay > 0)
    middle = late[len(late) // 2] if late else np.inf
    return {
        "streams": len(delays),
        "false": 1 - len(late) / len(delays),
        "found": sum(delay < np.inf for delay in late) / max(1, len(late)),
        "delay": None if np.isinf(middle) else int(middle),
    }


def uci(seeds: int = 3) -> dict[str, Any]:
    """Measure, by set, alarms without a change and after one, and intervals before and after it."""
    sets = {}
    for name in tqdm(UCI, unit="set"):
        delays = {part: defaultdict(list) for part in ("nothing", "shift")}
        sides = {"before": [], "after": []}
        for seed, order in product(range(seeds), range(ORDERS)):
            for predictor, *both in units(name, seed):
                rng = np.random.default_rng([seed, order])
                chosen = [rng.permutation(len(x))[:most] for (x, _), most in zip(both, (BEFORE, AFTER), strict=True)]
                parts = [(x[rows], y[rows]) for (x, y), rows in zip(both, chosen, strict=True)]
                for part, shown in (("nothing", parts[:1]), ("shift", parts)):
                    for kind, delay in alarms(predictor, shown).items():
                        delays[part][kind].append(delay)
                if order < COMPARED:
                    for side, measures in zip(sides, compared(predictor, parts), strict=True):
                        sides[side].append(measures)
        sets[name] = {part: {kind: summary(each) for kind, each in kinds.items()} for part, kinds in delays.items()}
        sets[name]["held"] = {side: averaged(runs) for side, runs in sides.items()}
    return sets


@lru_cache(maxsize=1)
def units(name: str, seed: int) -> list[tuple[latedrop.Predictor, Rows, Rows]]:
    """Return, for each side of a cut, a predictor and held-out rows of both sides."""
    data = table(name)
    sides = {side: rows for side, rows in cuts(data, seed).items() if side != "in"}
    untrained, made = members(data.shape[1] - 1, [len(rows.fit) for rows in sides.values()], seed, steps=3000), []
    for rows, (net, batches) in zip(sides.values(), untrained, strict=True):
        scaled = standardised(data, rows)
        fit, stop = pair(scaled, rows.fit), pair(scaled, rows.stop)
        trained(net, fit, stop, batches=batches)
        x, y = pair(scaled, rows.validation)
        reference = torch.cat([fit[0], stop[0]])
        predictor = latedrop.calibrate(net, (x, y[:, None]), reference=reference, progress=False)
        made.append((predictor, pair(scaled, rows.inside), pair(scaled, rows.test)))
    return made


def alarms(predictor: latedrop.Predictor, parts: list[Rows]) -> dict[str, int | None]:
    """Return, by kind, how many rows after the first part its alarm was raised; None without one."""
    stream = predictor.stream(level=LEVEL, alarm=ALARM)
    for x, y in parts:
        for start in range(0, len(x), 100):
            stream.predict(x[start : start + 100])
            stream.update(y[start : start + 100])
    raised = {alarm.kind: alarm.number - len(parts[0][0]) for alarm in stream.alarms}
    return {kind: raised.get(kind) for kind in stream.evidence}


def compared(predictor: latedrop.Predictor, parts: list[Rows]) -> list[dict[str, float]]:
    """Measure the predictor's own intervals and those of a stream, before and after the change."""
    stream, number, sides = predictor.stream(level=LEVEL), 0, []
    for x, y in parts:
        rows = []
        for i in range(len(x)):
            p = stream.predict(x[i : i + 1])
            rows.append([float(end) for end in (p.low, p.high, *p.prediction.interval(LEVEL))])
            number += 1
            if number % LABEL_EVERY == 0:
                stream.update(y[i : i + 1])
        ends = np.array(rows).T
        ways = {"stream": ends[:2], "own": ends[2:]}
        measures = {way: judged(y.numpy(), low, high) for way, (low, high) in ways.items()}
        sides.append({f"{way} {key}": measures[way][key] for way in ways for key in ("held", "score")})
    return sides


def crowd_table(record: dict[str, Any]) -> str:
    """Return the library's streams on counts, beside the predictor's own intervals."""
    rows = []
    for name, counted in record["crowd"].items():
        own = counted["own"]
        rows.append([TITLES[name], "none", f"{own['held']:.1%}", *[""] * 2, f"{own['width']:.1f}", f"{own['mae']:.2f}"])
        for every, runs in counted["every"].items():
            each, phases = runs["regular"], runs["phases"]
            spread = f"{min(phases):.0%} to {max(phases):.0%}"
            shares = [f"{each['held']:.1%}", spread, f"{each['held_labelled']:.1%}"]
            rows.append([TITLES[name], f"every {every}", *shares, f"{each['width']:.1f}", f"{each['mae']:.2f}"])
    head = ["set", "labels", "held", "by first label", "frames with labels", "mean width", "MAE"]
    return markdown_table(head, rows)


def uci_alarms_table(record: dict[str, Any]) -> str:
    rows = []
    for name, each in record["uci"].items():
        usual, shift = ([each[part][kind] for kind in KINDS] for part in ("nothing", "shift"))
        false = [f"{one['found'] * (1 - one['false']) + one['false']:.1%}" for one in usual]
        rows.append([name, *false, *(f"{one['found']:.0%}, {one['delay'] or 'none'}" for one in shift)])
    return markdown_table(["set", *(f"{what}: {k}" for what in ("false", "found, delay") for k in KINDS)], rows)


def uci_table(record: dict[str, Any]) -> str:
    """Return what intervals hold on UCI sets, before and after a shift."""
    ways = [(side, way) for side in ("before", "after") for way in ("own", "stream")]
    rows = [
        [name, *(f"{each['held'][s][f'{way} held']:.1%} / {each['held'][s][f'{way} score']:.2f}" for s, way in ways)]
        for name, each in record["uci"].items()
    ]
    return markdown_table(["set", *(f"{way}, {side}" for side, way in ways)], rows)


if __name__ == "__main__":
    by_parts("stream", {"crowd": streams, "uci": uci})
