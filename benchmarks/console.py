"""What the console's rules are worth: alarms by probability against a plain threshold, and labels picked or at random.

    python -m benchmarks.console --data ../shared/data        # measures, then writes results/console.json
    python -m benchmarks.console --data ../shared/data --elsewhere    # counters that come to another camera
    python -m benchmarks.console --tables                     # from the JSON alone

The shipped counters count each k-th test frame of their sets, whole and in five zones, as the console does: in one
pass, with the zones' shares measured on each tenth frame. Limits are quantiles of the true counts. A *miss* is a frame
with more people than the limit for which nothing is said; a *false alarm* one with fewer, or as many, for which there
is an alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import RESULTS, machine, write
from latedrop.dropout.first_order import linearize
from latedrop.progress import shown_on
from latedrop_crowd.calibration import load_calibration
from latedrop_crowd.calibration.recalibration import fit_recalibration, t_quantile
from latedrop_crowd.console.alarms import Rule
from latedrop_crowd.console.counter import LiveCounter
from latedrop_crowd.console.zones import Amount, Shares, cells_of, probability_above
from latedrop_crowd.layouts import open_as_trained
from latedrop_crowd.mcnn import faster, load_weights, shipped
from latedrop_crowd.regions import to_cells
from latedrop_crowd.scenes import make_scenes

SETS = {"mall": "mall", "ucsd": "ucsd", "pets": "pets2009"}
Z90 = 1.6448536269514722


def box(left: float, top: float, right: float, bottom: float) -> tuple[tuple[float, float], ...]:
    return ((left, top), (right, top), (right, bottom), (left, bottom))


SIZES = {"mall": (480, 640), "ucsd": (158, 238)}
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
LABELS = (0, 5, 10, 20, 40)


def measured(name: str, data: Path, every: int) -> list[dict[str, Any]]:
    """Counts, variances and true counts of the test frames of a set, whole and by zone."""
    trained = faster(load_weights(shipped(name)))
    counter = LiveCounter(trained, load_calibration(shipped(name, ".calibration.json"), trained))
    crowd_set = open_as_trained(name, data / SETS[name], trained)
    rows, shares = [], None
    for number, index in enumerate(shown_on(crowd_set.test[::every], name, unit="frames", show=True)):
        image = crowd_set.image(index, trained.channels)
        reading = counter.calibration.read(trained, image, deviations=False)
        if number % 10 == 0:
            shares = Shares.measured(trained, counter.calibration, image, reading.density, list(ZONES.values()))
        assert shares is not None
        amounts = shares.amounts(Amount(reading.mean, reading.variance, reading.dof), reading.density)
        shape = reading.density.shape
        heads = np.clip(np.rint(to_cells(crowd_set.heads(index), trained.stride)), 0, (shape[1] - 1, shape[0] - 1))
        at = heads.astype(int)
        truth = [int(cells_of(points, shape)[at[:, 1], at[:, 0]].sum()) for points in ZONES.values()]
        rows.append(
            {
                "frame": crowd_set.frames[index].name,
                "strangeness": round(reading.strangeness, 4),
                "mean": [round(a.mean, 4) for a in amounts],
                "variance": [round(a.variance, 5) for a in amounts],
                "truth": truth,
            }
        )
    return rows


def elsewhere(counter: str, name: str, data: Path, every: int) -> list[dict[str, Any]]:
    """The same for the whole picture, by the counter of another scene."""
    trained = faster(load_weights(shipped(counter)))
    calibration = load_calibration(shipped(counter, ".calibration.json"), trained)
    crowd_set, rows = open_as_trained(name, data / SETS[name], trained), []
    for index in shown_on(crowd_set.test[::every], f"{counter} on {name}", unit="frames", show=True):
        reading = calibration.read(trained, crowd_set.image(index, trained.channels), deviations=False)
        rows.append(
            {
                "frame": crowd_set.frames[index].name,
                "strangeness": round(reading.strangeness, 4),
                "mean": [round(reading.mean, 4)],
                "variance": [round(reading.variance, 5)],
                "fitted": [round(reading.fitted_variance, 5)],
                "truth": [len(crowd_set.heads(index))],
            }
        )
    return rows


def alarms(rows: list[dict[str, Any]], zones: list[int], sure: float = 0.9, constant: bool = False) -> dict[str, float]:
    """Shares of frames, over zones and limits; `constant` gives every frame the mean variance of its zone."""
    rule, found = Rule(sure=sure), []
    for zone in zones:
        mean, variance, truth = (np.array([row[part][zone] for row in rows]) for part in ("mean", "variance", "truth"))
        variance = np.full_like(variance, variance.mean()) if constant else variance
        for limit in sorted({int(np.quantile(truth, q)) for q in QUANTILES}):
            above = truth > limit
            plain = mean > limit + 0.5
            p = [probability_above(Amount(m, v), limit) for m, v in zip(mean, variance, strict=True)]
            colour = np.array([rule.wanted(value, None) for value in p])
            found.append(
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
    return {key: float(np.mean([one[key] for one in found])) for key in found[0]}


def coverage(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of 90 % intervals, by zone."""
    found = {}
    for zone, name in enumerate(ZONES):
        mean, variance, truth = (np.array([row[part][zone] for row in rows]) for part in ("mean", "variance", "truth"))
        inside = np.abs(truth - mean) <= Z90 * np.sqrt(variance)
        found[name] = {
            "people": float(truth.mean()),
            "coverage": float(inside.mean()),
            "mae": float(np.abs(truth - mean).mean()),
            "std": float(np.sqrt(variance).mean()),
        }
    return found


def labels(rows: list[dict[str, Any]], seeds: int = 20) -> list[dict[str, Any]]:
    """Labels of the first half, judged on the second: MAE and coverage of 90 % intervals."""
    half = len(rows) // 2
    c, v, y = (np.array([row[part][0] for row in rows], dtype=float) for part in ("mean", "variance", "truth"))
    fitted = np.array([row.get("fitted", row["variance"])[0] for row in rows], dtype=float)  # before the guard
    strange = np.array([row["strangeness"] for row in rows])
    width = np.sqrt(v) / (np.maximum(c, 0) + 1)
    score = width / np.median(width[:half]) + np.maximum(0, strange - 0.5)
    found = []
    for number in LABELS:
        if number > half:
            continue
        picks = {"picked": [[int(s[np.argmax(score[s])]) for s in np.array_split(np.arange(half), max(number, 1))]]}
        picks["evenly spread"] = [[int(s[len(s) // 2]) for s in np.array_split(np.arange(half), max(number, 1))]]
        rng = np.random.default_rng(0)
        picks["random"] = [sorted(rng.choice(half, max(number, 1), replace=False).tolist()) for _ in range(seeds)]
        for how, sets in picks.items():
            scores = [
                _judged(c, fitted if number else v, y, chosen if number else [], half)
                for chosen in (sets if number else [[]])
            ]
            mae, held = np.mean(scores, 0)
            found.append({"labels": number, "how": how, "mae": float(mae), "coverage": float(held)})
    return found


def _judged(c: Any, v: Any, y: Any, chosen: list[int], half: int) -> tuple[float, float]:
    mean, variance, reach = c[half:], v[half:], Z90
    if chosen:
        fitted = fit_recalibration(c[chosen], v[chosen], y[chosen])
        mean, variance = np.array([fitted.apply(*pair) for pair in zip(mean, variance, strict=True)]).T
        reach = t_quantile(0.9, fitted.dof)
    error = np.abs(y[half:] - mean)
    return float(error.mean()), float((error <= reach * np.sqrt(variance)).mean())


def speed(repeats: int = 7) -> dict[str, float]:
    """CPU seconds on one thread for a frame of 640 x 480, by the shipped counter for Mall; medians."""
    trained = load_weights(shipped("mall"))
    calibration = load_calibration(shipped("mall", ".calibration.json"), trained)
    torch.set_num_threads(1)
    pixels = _frame((480, 640))
    image = torch.from_numpy(pixels[None] / np.float32(255))

    def seconds(run: Callable[[], Any]) -> float:
        run()
        found = []
        for _ in range(repeats):
            begun = time.process_time()
            run()
            found.append(time.process_time() - begun)
        return float(np.median(found))

    with torch.inference_mode():
        times = {"plain pass": seconds(lambda: trained.model(image[None]))}
    times["one pass and a map of deviations, as `crowd count --panels`"] = seconds(
        lambda: calibration.read(trained, image)
    )
    times["one pass"] = seconds(lambda: calibration.read(trained, image, deviations=False))
    counter = LiveCounter(faster(trained), calibration)
    zones = list(ZONES.values())[:4]
    times["one pass, weights laid out for it, as `crowd count`"] = seconds(
        lambda: calibration.read(trained, image, deviations=False)
    )
    times["a frame of the console: three zones"] = seconds(lambda: counter.count("frame", pixels, zones))
    count = counter.count("frame", pixels, zones)
    times["shares of three zones, measured again"] = seconds(
        lambda: Shares.measured(trained, calibration, image, count.density, zones)
    )
    times["map of doubt, while it is shown"] = seconds(lambda: counter.deviations(count))
    sites = calibration.count.sites
    times["first order of the count, where dropout has a share in it"] = seconds(
        lambda: linearize(trained.model, image[None], sites, lambda density: trained.masked(density).flatten(1).sum(1))
    )
    return times


def _frame(size: tuple[int, int]) -> Any:
    """A synthetic scene, as large as asked for."""
    from PIL import Image

    pixels = make_scenes(0, 1, 0).frames[0].pixels
    return np.asarray(Image.fromarray(pixels).convert("L").resize(size[::-1]))


def frame_rates(device: str, repeats: int = 50) -> dict[str, float]:
    """Frames per second by wall clock on a device, with three zones, by the shipped counters."""
    zones, rates = list(ZONES.values())[:4], {}
    for name, size in SIZES.items():
        pixels = _frame(size)
        trained = load_weights(shipped(name), device=torch.device(device))
        counter = LiveCounter(trained, load_calibration(shipped(name, ".calibration.json"), trained))
        for _ in range(3):
            counter.count("frame", pixels, zones)
        begun = time.perf_counter()
        for _ in range(repeats):
            counter.count("frame", pixels, zones)
        rates[name] = repeats / (time.perf_counter() - begun)
    return rates


def processes(frames: int = 12) -> dict[str, dict[str, float]]:
    """CPU seconds for a frame of 640 x 480, and peak memory, of the commands themselves, each as a process of its own.

    Seconds for a frame are those of three times as many frames less those of so many: the start is left out.
    """
    from PIL import Image

    from latedrop_crowd.console.store import Store

    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in (frames, 3 * frames):
            (folder / str(count)).mkdir()
            for number, scene in enumerate(make_scenes(0, count, 0).frames):
                assert scene.pixels is not None
                picture = Image.fromarray(scene.pixels).convert("L").resize((640, 480))
                picture.save(folder / str(count) / f"{number:03d}.jpg")
        runs: dict[str, list[tuple[float, float, int]]] = {"`crowd watch`, three zones": [], "`crowd count`": []}
        for count in (frames, 3 * frames):
            memory, source = folder / f"{count}.sqlite", str(folder / str(count))
            store = Store(memory)
            for zone in list(ZONES)[1:4]:
                store.add_zone(str(count), zone, ZONES[zone], 20)
            store.close()
            watch = ["watch", source, "--fps", "0.25", "--port", "0", "--memory", str(memory), "--threads", "1"]
            runs["`crowd watch`, three zones"].append(_watched(watch, count))
            counting = _started(["count", source, "--out", str(folder / f"out{count}")])
            runs["`crowd count`"].append((*_used(counting), count))
    for name, ((few, _, first), (many, peak, last)) in runs.items():
        found[name] = {"seconds": (many - few) / (last - first), "peak_mb": peak, "frames": last}
    return found


def _started(words: list[str]) -> subprocess.Popen[str]:
    code = "import sys; from latedrop.cli import main; main(sys.argv[1:])"
    line = [sys.executable, "-c", code, "crowd", *words, "--weights", "mall", "--device", "cpu"]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _used(process: subprocess.Popen[str]) -> tuple[float, float]:
    """CPU seconds and peak megabytes of a process that ends."""
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def _watched(words: list[str], frames: int) -> tuple[float, float, int]:
    """The same of a console, stopped at the last of so many frames; and how many it counted, as it may skip some."""
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
    lines = ["| command | CPU seconds a frame | frames per second on two cores | peak memory |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, row in record["processes"].items():
        cells = f"{row['seconds']:.2f} | {2 / row['seconds']:.0f} | {row['peak_mb']:.0f} MB"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def speed_table(record: dict[str, Any]) -> str:
    times = record["speed"]
    lines = ["| step | in plain passes | frames per second and core |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {t / times['plain pass']:.2f} | {1 / t:.1f} |" for name, t in times.items()]
    return "\n".join(lines)


def gpu_table(record: dict[str, Any]) -> str:
    """Frames per second on a GPU."""
    device, rates = record["gpu"]["machine"]["device"], record["gpu"]["frames_per_second"]
    lines = [f"| counter, frame | frames per second, {device} |", "| --- | ---: |"]
    return "\n".join(
        [*lines, *(f"| `{name}`, {SIZES[name][1]} x {SIZES[name][0]} | {rate:.0f} |" for name, rate in rates.items())]
    )


def recalibration_table(record: dict[str, Any], number: int = 20) -> str:
    """What so many labels of the first half do on the second half of each set."""
    lines = [
        f"| counter | frames of | 90 % intervals hold, without labels | {number} labels, evenly spread | {number} at "
        "random, mean | count MAE without, evenly spread, at random |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    own = {(name, name): found["labels"] for name, found in record["summary"].items()}
    for (counter, name), found in (
        own | {tuple(k.split(" on ")): labels(v) for k, v in record["elsewhere"].items()}
    ).items():
        rows = {(row["labels"], row["how"]): row for row in found}
        three = rows[0, "picked"], rows[number, "evenly spread"], rows[number, "random"]
        held = " | ".join(f"{100 * row['coverage']:.0f} %" for row in three)
        lines.append(f"| {counter} | {name} | {held} | {', '.join(format(row['mae'], '.2f') for row in three)} |")
    return "\n".join(lines)


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    parts = {"whole picture": [0], "zones": list(range(1, len(ZONES)))}
    return {
        name: {
            "frames": len(found),
            "alarms": {part: alarms(found, zones) for part, zones in parts.items()},
            "constant": {part: alarms(found, zones, constant=True) for part, zones in parts.items()},
            "coverage": coverage(found),
            "labels": labels(found),
        }
        for name, found in rows.items()
    }


def alarm_table(record: dict[str, Any]) -> str:
    lines = [
        "| set, where | frames | plain: missed | plain: false | rule: missed (green) | rule: false (red) | "
        "cannot tell (amber) | of plain's errors, amber |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in record["summary"].items():
        for part, row in found["alarms"].items():
            wrong = row["plain_missed"] + row["plain_false"]
            cells = [f"{100 * row[key]:.1f} %" for key in ("plain_missed", "plain_false", "missed", "false", "amber")]
            caught = f"{100 * row['plain_wrong_in_amber'] / wrong:.0f} %" if wrong else "none"
            lines.append(f"| {name}, {part} | {found['frames']} | {' | '.join(cells)} | {caught} |")
    return "\n".join(lines)


def zone_table(record: dict[str, Any]) -> str:
    names = list(record["summary"])
    lines = ["| zone | " + " | ".join(f"{n}: people | {n}: coverage of 90 %" for n in names) + " |"]
    lines.append("| --- |" + " ---: | ---: |" * len(names))
    for zone in ZONES:
        rows = [record["summary"][name]["coverage"][zone] for name in names]
        lines.append(
            f"| {zone} | " + " | ".join(f"{r['people']:.1f} | {100 * r['coverage']:.0f} %" for r in rows) + " |"
        )
    return "\n".join(lines)


def label_table(record: dict[str, Any]) -> str:
    names = list(record["summary"])
    lines = ["| labels | how | " + " | ".join(f"{n}: MAE | {n}: coverage of 90 %" for n in names) + " |"]
    lines.append("| ---: | --- |" + " ---: | ---: |" * len(names))
    for key in ((number, how) for number in LABELS for how in ("picked", "evenly spread", "random")):
        if key[0] == 0 and key[1] != "picked":
            continue
        cells = []
        for name in names:
            row = next((r for r in record["summary"][name]["labels"] if (r["labels"], r["how"]) == key), None)
            cells.append("- | -" if row is None else f"{row['mae']:.2f} | {100 * row['coverage']:.0f} %")
        lines.append(f"| {key[0]} | {key[1] if key[0] else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--tables", action="store_true")
    parser.add_argument(
        "--elsewhere", action="store_true", help="counters on frames of other scenes alone, and add them"
    )
    parser.add_argument("--speed", action="store_true", help="measure the speed alone, and add it to the result")
    parser.add_argument("--processes", action="store_true", help="measure the commands as processes, and add them")
    parser.add_argument("--gpu", action="store_true", help="measure frames per second on a GPU, and add them")
    parser.add_argument("--out", default="console", help="name of the result")
    words = parser.parse_args()
    path = RESULTS / f"{words.out}.json"
    if words.speed:
        write(words.out, {**json.loads(path.read_text(encoding="utf-8")), "speed": speed()})
    elif words.processes:
        write(words.out, {**json.loads(path.read_text(encoding="utf-8")), "processes": processes()})
    elif words.gpu:
        rates = {"frames_per_second": frame_rates("cuda"), "machine": machine(torch.device("cuda"))}
        write(words.out, {**json.loads(path.read_text(encoding="utf-8")), "gpu": rates})
    elif words.elsewhere:
        found = {f"{one} on {name}": elsewhere(one, name, words.data, words.every) for one, name in ELSEWHERE}
        write(words.out, {**json.loads(path.read_text(encoding="utf-8")), "elsewhere": found})
    elif not words.tables:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        rows: dict[str, list[dict[str, Any]]] = dict(known.get("rows", {}))  # of sets that are not measured now
        for name in words.sets:
            rows[name] = measured(name, words.data, words.every)
            about = {"every": words.every, "machine": machine(torch.device("cpu"))}
            write(words.out, {**known, **about, "summary": summary(rows), "rows": rows})
    record = json.loads(path.read_text(encoding="utf-8"))
    record["summary"] = summary(record["rows"])
    write(words.out, record)
    for table in (alarm_table, zone_table, label_table, *([speed_table] if "speed" in record else [])):
        print(table(record), end="\n\n")


if __name__ == "__main__":
    main()
