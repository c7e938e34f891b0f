"""Rules of the console: alarms by probability against a plain threshold, and labels picked or at random.

    python -m benchmarks.console
    python -m benchmarks.console --parts processes  # of rows, elsewhere (another camera), processes (CPU and memory)

The shipped counters count each k-th test frame of their sets, whole and in five zones, as the console does: in one
pass, with the zones' shares measured on each tenth frame. Limits are quantiles of the true counts. A *miss* is a frame
with more people than the limit for which nothing is said; a *false alarm* one with fewer, or as many, for which there
is an alarm.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import by_parts, markdown_table
from latedrop.progress import shown_on
from latedrop_crowd.calibration import load_calibration
from latedrop_crowd.calibration.recalibration import fit_recalibration, t_quantile
from latedrop_crowd.console.zones import Amount, Rule, Shares, cells_of, probability_above
from latedrop_crowd.layouts import open_as_trained
from latedrop_crowd.mcnn import faster, load_weights, shipped
from latedrop_crowd.regions import to_cells
from latedrop_crowd.scenes import make_scenes

SETS = {"mall": "mall", "ucsd": "ucsd", "pets": "pets2009"}
DATA = Path(__file__).parents[2] / "shared" / "data"
EVERY = 5
Z90 = 1.6448536269514722


def box(left: float, top: float, right: float, bottom: float) -> tuple[tuple[float, float], ...]:
    return ((left, top), (right, top), (right, bottom), (left, bottom))


ZONES = {
    "whole": (),
    "left half": box(0, 0, 0.5, 1),
    "right half": box(0.5, 0, 1, 1),
    "lower left": box(0, 0.5, 0.5, 1),
    "middle": box(1 / 3, 1 / 3, 2 / 3, 2 / 3),
    "small": box(1 / 8, 3 / 8, 3 / 8, 5 / 8),
}
QUANTILES = (0.5, 0.7, 0.9)
ELSEWHERE = (("mall", "pets"), ("pets", "mall"))
"""Counters that come to another camera: the frames of both sets are counted whole."""
NUMBER = 20
"""Labelled frames of the first half of a set."""
PARTS = {"whole picture": [0], "zones": list(range(1, len(ZONES)))}


def measured(counter: str, name: str) -> list[dict[str, Any]]:
    """Return counts, variances and true counts of the test frames of a set, whole and by zone."""
    trained = faster(load_weights(shipped(counter)))
    calibration = load_calibration(shipped(counter, ".calibration.json"), trained)
    crowd_set = open_as_trained(name, DATA / SETS[name], trained)
    rows, shares = [], None
    for number, index in enumerate(shown_on(crowd_set.test[::EVERY], f"{counter} on {name}", unit="frames", show=True)):
        image = crowd_set.image(index, trained.channels)
        reading = calibration.read(trained, image, deviations=False)
        if number % 10 == 0:
            shares = Shares.measured(trained, calibration, image, reading.density, list(ZONES.values()))
        assert shares is not None
        amounts = shares.amounts(Amount(reading.mean, reading.variance, reading.dof), reading.density)
        shape = reading.density.shape
        heads = np.clip(np.rint(to_cells(crowd_set.heads(index), trained.stride)), 0, (shape[1] - 1, shape[0] - 1))
        at = heads.astype(int)
        truth = [int(cells_of(points, shape)[at[:, 1], at[:, 0]].sum()) for points in ZONES.values()]
        rows.append(
            {
                "frame": crowd_set.frames[index].name,
                "mean": [round(a.mean, 4) for a in amounts],
                "variance": [round(a.variance, 5) for a in amounts],
                "fitted": [round(reading.fitted_variance, 5)],
                "truth": truth,
            }
        )
    return rows


def alarms(rows: list[dict[str, Any]], zones: list[int], sure: float = 0.9, constant: bool = False) -> dict[str, float]:
    """Shares of frames, over zones and limits; `constant` gives every frame the mean variance of its zone."""
    rule, shares = Rule(sure=sure), []
    for zone in zones:
        mean, variance, truth = (np.array([row[part][zone] for row in rows]) for part in ("mean", "variance", "truth"))
        variance = np.full_like(variance, variance.mean()) if constant else variance
        for limit in sorted({int(np.quantile(truth, q)) for q in QUANTILES}):
            above = truth > limit
            plain = mean > limit + 0.5
            p = [probability_above(Amount(m, v), limit) for m, v in zip(mean, variance, strict=True)]
            colour = np.array([rule.wanted(value, None) for value in p])
            shares.append(
                {
                    "above": above.mean(),
                    "plain_missed": (above & ~plain).mean(),
                    "plain_false": (~above & plain).mean(),
                    "missed": (above & (colour == "green")).mean(),
                    "false": (~above & (colour == "red")).mean(),
                    "amber": (colour == "amber").mean(),
                    "plain_wrong_in_amber": ((above != plain) & (colour == "amber")).mean(),
                }
            )
    return {key: float(np.mean([one[key] for one in shares])) for key in shares[0]}


def coverage(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of 90 % intervals, by zone."""
    zones = {}
    for zone, name in enumerate(ZONES):
        mean, variance, truth = (np.array([row[part][zone] for row in rows]) for part in ("mean", "variance", "truth"))
        inside = np.abs(truth - mean) <= Z90 * np.sqrt(variance)
        zones[name] = {
            "people": float(truth.mean()),
            "coverage": float(inside.mean()),
            "mae": float(np.abs(truth - mean).mean()),
            "std": float(np.sqrt(variance).mean()),
        }
    return zones


def labels(rows: list[dict[str, Any]], number: int = NUMBER, seeds: int = 20) -> dict[str, tuple[float, float]]:
    """Return MAE and coverage of 90 % intervals on the second half, by how frames of the first one are labelled."""
    half = len(rows) // 2
    c, v, y = (np.array([row[part][0] for row in rows], dtype=float) for part in ("mean", "variance", "truth"))
    fitted = np.array([row.get("fitted", row["variance"])[0] for row in rows], dtype=float)  # before the guard
    rng = np.random.default_rng(0)
    chosen = [sorted(rng.choice(half, number, replace=False).tolist()) for _ in range(seeds)]
    spread = [int(part[len(part) // 2]) for part in np.array_split(np.arange(half), number)]
    mae, covered = np.mean([_judged(c, fitted, y, frames, half) for frames in chosen], 0)
    without, evenly = _judged(c, v, y, [], half), _judged(c, fitted, y, spread, half)
    return {"without": without, "evenly spread": evenly, "random": (float(mae), float(covered))}


def _judged(c: Any, v: Any, y: Any, chosen: list[int], half: int) -> tuple[float, float]:
    mean, variance, reach = c[half:], v[half:], Z90
    if chosen:
        fitted = fit_recalibration(c[chosen], v[chosen], y[chosen])
        mean, variance = np.array([fitted.apply(*pair) for pair in zip(mean, variance, strict=True)]).T
        reach = t_quantile(0.9, fitted.dof)
    error = np.abs(y[half:] - mean)
    return float(error.mean()), float((error <= reach * np.sqrt(variance)).mean())


def processes(frames: int = 20) -> dict[str, dict[str, float]]:
    """CPU seconds for a frame of 640 x 480, and peak memory, of the commands themselves, each as a process of its own.

    A frame comes every two seconds, so that a busy machine skips none: the console then measures the shares of its
    zones on each fifth frame; at five frames a second it is on each fiftieth. Seconds for a frame are those of three
    times as many frames less those of so many, so that the start is left out; `with_start` are those of the longer run.
    """
    from PIL import Image

    from latedrop_crowd.console.store import Store

    usage = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in (frames, 3 * frames):
            (folder / str(count)).mkdir()
            for number, scene in enumerate(make_scenes(0, count, 0).frames):
                assert scene.pixels is not None
                picture = Image.fromarray(scene.pixels).convert("L").resize((640, 480))
                picture.save(folder / str(count) / f"{number:03d}.jpg")
        kinds = ("`crowd watch`, no zones", "`crowd watch`, three zones", "`crowd count`")
        runs: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
        for count in (frames, 3 * frames):
            source = str(folder / str(count))
            for kind, zones in ((kinds[0], []), (kinds[1], list(ZONES)[1:4])):
                memory = folder / f"{count} {len(zones)}.sqlite"
                store = Store(memory)
                for zone in zones:
                    store.add_zone(str(count), zone, ZONES[zone], 20)
                store.close()
                watch = ["watch", source, "--fps", "0.5", "--port", "0", "--memory", str(memory)]
                runs[kind].append(_watched(watch, count))
            counting = _started(["count", source, "--out", str(folder / f"out{count}")])
            runs["`crowd count`"].append((*_used(counting), count))
    for name, ((few, _, first), (many, peak, last)) in runs.items():
        seconds = (many - few) / (last - first)
        usage[name] = {"seconds": seconds, "with_start": many / last, "peak_mb": peak, "frames": last}
    return usage


def _started(words: list[str]) -> subprocess.Popen[str]:
    code = "import sys; from latedrop.cli import main; main(sys.argv[1:])"
    line = [sys.executable, "-c", code, "crowd", *words, "--weights", "mall", "--device", "cpu"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=one_thread)


def _used(process: subprocess.Popen[str]) -> tuple[float, float]:
    """CPU seconds and peak megabytes of a process that ends."""
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def _watched(words: list[str], frames: int) -> tuple[float, float, int]:
    """Return use of a console that is stopped at the last frame; and how many it counted, as it may skip some."""
    import urllib.request

    process = _started(words)
    assert process.stderr is not None
    address = next(match[0] for line in process.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
    while True:
        with urllib.request.urlopen(f"{address}/api/state") as answer:
            camera = json.load(answer)["sources"][0]
        if camera["message"].get("frame", 0) >= frames:
            break
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    return (*_used(process), frames - camera["camera"]["skipped"])


def process_table(record: dict[str, Any]) -> str:
    """CPU time and memory of the commands."""
    rows = [
        [name, *(f"{row[key]:.2f}" for key in ("seconds", "with_start")), row["frames"], f"{row['peak_mb']:.0f} MB"]
        for name, row in record["processes"].items()
    ]
    heads = ["command", "CPU seconds a frame", "with the start", "frames", "peak memory"]
    return markdown_table(heads, rows)


def recalibration_table(record: dict[str, Any]) -> str:
    """Say what labels of the first half do on the second half of each set."""
    counters = {(name, name): rows for name, rows in record["rows"].items()}
    counters |= {tuple(name.split(" on ")): rows for name, rows in record["elsewhere"].items()}
    lines = []
    for names, rows in counters.items():
        judged = labels(rows).values()
        shares = [f"{100 * covered:.0f} %" for _, covered in judged]
        lines.append([*names, *shares, ", ".join(f"{mae:.2f}" for mae, _ in judged)])
    heads = ["90 % intervals hold, without labels", f"{NUMBER} labels, evenly spread", f"{NUMBER} at random, mean"]
    heads.append("count MAE without, evenly spread, at random")
    return markdown_table(["counter", "frames of", *heads], lines, 2)


def alarm_table(record: dict[str, Any]) -> str:
    rows = []
    for name, frames in record["rows"].items():
        for part, zones in PARTS.items():
            row = alarms(frames, zones)
            wrong = row["plain_missed"] + row["plain_false"]
            cells = [f"{100 * row[key]:.1f} %" for key in ("plain_missed", "plain_false", "missed", "false", "amber")]
            caught = f"{100 * row['plain_wrong_in_amber'] / wrong:.0f} %" if wrong else "none"
            rows.append([f"{name}, {part}", len(frames), *cells, caught])
    heads = ["set, where", "frames", "plain: missed", "plain: false", "rule: missed (green)", "rule: false (red)"]
    return markdown_table([*heads, "cannot tell (amber)", "of plain's errors, amber"], rows)


def zone_table(record: dict[str, Any]) -> str:
    heads, rows = ["zone"], {zone: [zone] for zone in ZONES}
    for name, frames in record["rows"].items():
        heads += [f"{name}: people", f"{name}: coverage of 90 %"]
        for zone, row in coverage(frames).items():
            rows[zone] += [f"{row['people']:.1f}", f"{100 * row['coverage']:.0f} %"]
    return markdown_table(heads, rows.values())


def sets() -> dict[str, list[dict[str, Any]]]:
    """Count the frames of every set by its own counter."""
    return {name: measured(name, name) for name in SETS}


def elsewhere() -> dict[str, list[dict[str, Any]]]:
    """Count the frames of another camera."""
    return {f"{counter} on {name}": measured(counter, name) for counter, name in ELSEWHERE}


if __name__ == "__main__":
    by_parts("console", {"rows": sets, "elsewhere": elsewhere, "processes": processes})
