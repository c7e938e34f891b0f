"""Rules of the console: alarms by probability against a plain threshold, and labels picked or at random.

    python -m benchmarks.console --parts speed  # of rows, elsewhere (another camera), speed (CPU and memory); or all

The shipped counters count each k-th test frame of their sets, whole and in five zones, as the console does. Limits are
quantiles of the true counts. A *miss* is a frame with more people than the limit for which nothing is said; a *false
alarm* one with fewer, or as many, for which there is an alarm.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import by_parts, markdown_table
from latedrop.terminal import shown_on
from latedrop_crowd.calibration import load_calibration
from latedrop_crowd.calibration.recalibration import fit_recalibration, t_quantile
from latedrop_crowd.console.notices import Notices
from latedrop_crowd.console.sources import Shot, Source
from latedrop_crowd.console.store import Store
from latedrop_crowd.console.watch import Settings, Watch
from latedrop_crowd.console.zones import Amount, Rule, Shares, cells_of, probability_above
from latedrop_crowd.layouts import open_as_trained
from latedrop_crowd.mcnn import faster, load_weights, shipped
from latedrop_crowd.regions import to_cells
from latedrop_crowd.scenes import make_scenes

SETS = {"mall": "mall", "ucsd": "ucsd", "pets": "pets2009"}
DATA = Path(__file__).parents[2] / "shared" / "data"
EVERY = 5
Z90 = 1.6448536269514722


BOXES = {  # left, top, right and bottom
    "left half": (0, 0, 0.5, 1),
    "right half": (0.5, 0, 1, 1),
    "lower left": (0, 0.5, 0.5, 1),
    "middle": (1 / 3, 1 / 3, 2 / 3, 2 / 3),
    "small": (1 / 8, 3 / 8, 3 / 8, 5 / 8),
}
ZONES = {"whole": ()} | {name: ((a, b), (c, b), (c, d), (a, d)) for name, (a, b, c, d) in BOXES.items()}
QUANTILES = (0.5, 0.7, 0.9)
ELSEWHERE = (("mall", "pets"), ("pets", "mall"))
"""Counters that come to another camera: the frames of both sets are counted whole."""
NUMBER = 20  # labelled frames of the first half of a set
PARTS = {"whole picture": [0], "zones": list(range(1, len(ZONES)))}


def measured(counter: str, name: str) -> list[dict[str, Any]]:
    """Return counts, variances and true counts of the test frames of a set, whole and by zone."""
    trained, calibration = counter_of(counter)
    crowd_set = open_as_trained(name, DATA / SETS[name], trained)
    rows, shares = [], None
    for number, index in enumerate(shown_on(crowd_set.test[::EVERY], f"{counter} on {name}", unit="frames", show=True)):
        image = crowd_set.image(index, trained.channels)
        reading = calibration.read(trained, image, deviations=False)
        if number % 10 == 0:
            shares = Shares.measured(trained, calibration, image, reading.density, list(ZONES.values()))
        amounts = shares.amounts(Amount(reading.mean, reading.variance, reading.dof), reading.density)
        shape = reading.density.shape
        heads = np.clip(np.rint(to_cells(crowd_set.heads(index), trained.stride)), 0, (shape[1] - 1, shape[0] - 1))
        at = heads.astype(int)
        truth = [int(cells_of(points, shape)[at[:, 1], at[:, 0]].sum()) for points in ZONES.values()]
        row = {"mean": [round(a.mean, 4) for a in amounts], "variance": [round(a.variance, 5) for a in amounts]}
        row |= {"fitted": [round(reading.fitted_variance, 5)], "truth": truth}
        rows.append({"frame": crowd_set.frames[index].name, **row})
    return rows


def alarms(rows: list[dict[str, Any]], zones: list[int], constant: bool = False) -> dict[str, float]:
    """Shares of frames, over zones and limits; `constant` gives every frame the mean variance of its zone."""
    rule, shares = Rule(), []
    for zone in zones:
        mean, variance, truth = _columns(rows, zone)
        variance = np.full_like(variance, variance.mean()) if constant else variance
        for limit in sorted({int(np.quantile(truth, q)) for q in QUANTILES}):
            above, plain = truth > limit, mean > limit + 0.5
            p = [probability_above(Amount(m, v), limit) for m, v in zip(mean, variance, strict=True)]
            colour = np.array([rule.wanted(value, None) for value in p])
            amber = colour == "amber"
            counted = {"plain_missed": above & ~plain, "plain_false": ~above & plain}
            counted |= {"missed": above & (colour == "green"), "false": ~above & (colour == "red")}
            counted |= {"amber": amber, "plain_wrong_in_amber": (above != plain) & amber}
            shares.append({key: frames.mean() for key, frames in counted.items()})
    return {key: float(np.mean([one[key] for one in shares])) for key in shares[0]}


def labels(rows: list[dict[str, Any]], number: int = NUMBER, seeds: int = 20) -> dict[str, tuple[float, float]]:
    """Return MAE and coverage of 90 % intervals on the second half, by how frames of the first one are labelled."""
    half = len(rows) // 2
    c, v, y = _columns(rows, 0)
    fitted = np.array([row.get("fitted", row["variance"])[0] for row in rows], dtype=float)  # before the guard

    def judged(variance: Any, chosen: list[int]) -> tuple[float, float]:
        mean, variance, reach, scored = c[half:], variance[half:], Z90, variance[chosen]
        if chosen:
            fit = fit_recalibration(c[chosen], scored, y[chosen])
            mean, variance = np.array([fit.apply(*pair) for pair in zip(mean, variance, strict=True)]).T
            reach = t_quantile(0.9, fit.dof)
        error = np.abs(y[half:] - mean)
        return float(error.mean()), float((error <= reach * np.sqrt(variance)).mean())

    rng = np.random.default_rng(0)
    spread = [int(part[len(part) // 2]) for part in np.array_split(np.arange(half), number)]
    random = [judged(fitted, sorted(rng.choice(half, number, replace=False).tolist())) for _ in range(seeds)]
    mae, covered = np.mean(random, 0)
    return {"without": judged(v, []), "evenly spread": judged(fitted, spread), "random": (float(mae), float(covered))}


def _columns(rows: list[dict[str, Any]], zone: int) -> tuple[Any, Any, Any]:
    """Return counts, variances and true counts of a zone, `(frames,)` each."""
    return tuple(np.array([row[part][zone] for row in rows], float) for part in ("mean", "variance", "truth"))


def counter_of(name: str) -> tuple[Any, Any]:
    """Return a shipped counter and its calibration."""
    trained = faster(load_weights(shipped(name)))
    return trained, load_calibration(shipped(name, ".calibration.json"), trained)


def watched(zones: Sequence[str], frames: int = 600) -> dict[str, float]:
    """Return CPU seconds for a frame of 640 x 480, and memory after a tenth of the frames and at their end."""
    from PIL import Image

    trained, calibration = counter_of("mall")
    scenes = (frame.pixels for frame in make_scenes(0, 12, 0).frames if frame.pixels is not None)
    pictures = [np.asarray(Image.fromarray(scene).convert("L").resize((640, 480))) for scene in scenes]
    source = Source("square", True, lambda: iter(pictures))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "console.sqlite")
        for zone in zones:
            store.add_zone(source.name, zone, ZONES[zone], 20)
        watch = Watch([source], trained, calibration, store, Settings(), Notices([]))
        begun, memory = time.process_time(), [resident()]
        for number in range(frames):
            watch._look(watch.views[0], Shot(number, time.time(), pictures[number % 12], time.monotonic()))
            memory.append(resident())
        seconds = (time.process_time() - begun) / frames
        store.close()
    return {"seconds": seconds, "frames": frames, "early_mb": memory[frames // 10], "late_mb": memory[-1]}


def resident(process: int | str = "self") -> float:
    """Return the resident memory of a process in MB."""
    text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def speed_table(record: dict[str, Any]) -> str:
    rows = []
    for name, row in record["speed"].items():
        rows.append(
            [name, row["frames"], f"{row['seconds']:.2f}", f"{row['early_mb']:.0f} MB", f"{row['late_mb']:.0f} MB"]
        )
    heads = ["console", "frames", "CPU seconds a frame", "memory after a tenth", "at the end"]
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


def alarms_table(record: dict[str, Any]) -> str:
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


def zones_table(record: dict[str, Any]) -> str:
    """Return people and coverage of 90 % intervals, by zone."""
    heads, cells = ["zone"], {zone: [zone] for zone in ZONES}
    for name, rows in record["rows"].items():
        heads += [f"{name}: people", f"{name}: coverage of 90 %"]
        for place, row in enumerate(cells.values()):
            mean, variance, truth = _columns(rows, place)
            inside = np.abs(truth - mean) <= Z90 * np.sqrt(variance)
            row += [f"{truth.mean():.1f}", f"{100 * inside.mean():.0f} %"]
    return markdown_table(heads, cells.values())


if __name__ == "__main__":
    parts = {
        "rows": lambda: {name: measured(name, name) for name in SETS},
        "elsewhere": lambda: {f"{counter} on {name}": measured(counter, name) for counter, name in ELSEWHERE},
        "speed": lambda: {"without zones": watched(()), "with three zones": watched(list(ZONES)[1:4])},
    }
    by_parts("console", parts)
