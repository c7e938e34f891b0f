"""How sampling grows: time and peak memory against draws, rows, width, sites and outputs.

    python -m benchmarks.growth                 # the CPU, or the GPU where there is one; JSON to benchmarks/results
    python -m benchmarks.growth --figures       # draw from the JSON alone

One multilayer perceptron, of which one number at a time is varied; on a GPU a larger one, which fills it. The slope is
that of the logarithms over the upper half of the range: 1 is linear, 0 is flat. Width is counted in parameters, as the
network itself grows by them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.timing import RESULTS, machine, medians, peak_bytes, turns_within, write
from latedrop import find_sites, sample
from latedrop.devices import chosen_device

RATE = 0.05
IMAGES = Path(__file__).parents[1] / "docs" / "images"
LABELS = {
    "draws": "draws",
    "rows": "rows of a batch",
    "parameters": "parameters (by width)",
    "sites": "sites (by depth)",
    "outputs": "outputs of a row",
}


@dataclass(frozen=True)
class Shape:
    """The network and its use, before one number is varied."""

    draws: int = 50
    rows: int = 64
    width: int = 128
    sites: int = 3
    outputs: int = 1

    def network(self) -> nn.Module:
        """`sites` layers after the first."""
        layers: list[nn.Module] = [nn.Linear(16, self.width), nn.ReLU()]
        for _ in range(self.sites - 1):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.outputs)).eval().requires_grad_(False)


SHAPES = {"cpu": Shape(), "gpu": Shape(rows=4096, width=1024)}
_ON_CPU: dict[str, tuple[str, Sequence[int]]] = {
    "draws": ("draws", (10, 20, 50, 100, 200, 400, 800)),
    "rows": ("rows", (16, 64, 256, 1024, 4096)),
    "parameters": ("width", (64, 128, 256, 512, 1024)),
    "sites": ("sites", (1, 2, 4, 8, 16, 32)),
    "outputs": ("outputs", (1, 16, 64, 256, 1024, 4096)),
}
_ON_GPU: dict[str, tuple[str, Sequence[int]]] = {
    "rows": ("rows", (256, 1024, 4096, 16384, 65536)),
    "parameters": ("width", (256, 512, 1024, 2048, 4096)),
}
RANGES = {"cpu": _ON_CPU, "gpu": _ON_CPU | _ON_GPU}


def main() -> None:
    parser = argparse.ArgumentParser(description="How time and memory of sampling grow.")
    parser.add_argument("--figures", action="store_true", help="draw from the JSON that is there; measure nothing")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each axis, at most")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--budget", type=float, help="seconds after which no round of an axis starts; 20, on a GPU 4")
    options = parser.parse_args()
    if options.figures:
        for path in sorted(RESULTS.glob("growth_*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            print(markdown(record))
            print(figure(record, IMAGES / f"{path.stem}.png"))
        return
    device = chosen_device(options.device)
    kind = "gpu" if device.type == "cuda" else "cpu"
    budget = (4.0 if kind == "gpu" else 20.0) if options.budget is None else options.budget
    base = SHAPES[kind]
    record: dict[str, Any] = {"machine": machine(device), "base": vars(base), "axes": {}}
    for axis, (field, values) in RANGES[kind].items():
        shapes = [replace(base, **{field: value}) for value in values]
        record["axes"][axis] = measure(axis, shapes, device, options.repeats, budget)
        write(f"growth_{kind}", record)
    print(markdown(record))


def measure(axis: str, shapes: Sequence[Shape], device: torch.device, repeats: int, budget: float) -> dict[str, Any]:
    """Seconds, bytes and slopes along one axis; all sizes take turns, after the call that memory is measured by."""
    runs, values, memory = {}, [], []
    for shape in shapes:
        torch.manual_seed(0)
        model = shape.network().to(device)
        x = torch.randn(shape.rows, 16, device=device)
        sites = find_sites(model, x[:3])

        def run(model: nn.Module = model, x: Any = x, sites: Any = sites, draws: int = shape.draws) -> Any:
            return sample(model, x, RATE, draws, sites=sites)

        parameters = sum(parameter.numel() for parameter in model.parameters())
        values.append(parameters if axis == "parameters" else getattr(shape, axis))
        memory.append(peak_bytes(run, device)[1])
        runs[str(values[-1])] = run
    times, rounds, failed = turns_within(runs, repeats=repeats, seconds=budget, device=device)
    if failed:
        raise SystemExit(f"expected every size to run; failed: {failed}.")
    seconds = list(medians(times).values())
    return {
        "values": values,
        "rounds": rounds,
        "seconds": seconds,
        "bytes": memory,
        "time_slope": slope(values, seconds),
        "memory_slope": slope(values, memory),
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of `log y` against `log x`, by least squares over the upper half.

    >>> slope([1, 2, 4, 8], [5, 5, 3, 6])
    1.0
    """
    half = len(x) // 2
    a, b = ([math.log(value) for value in values[half:]] for values in (x, y))
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    return round(top / sum((p - mean_a) ** 2 for p in a), 2)


def markdown(record: dict[str, Any]) -> str:
    lines = [
        "| against | from | to | time | slope | peak memory | slope |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for axis, row in record["axes"].items():
        times = " to ".join(f"{1e3 * row['seconds'][end]:.1f}" for end in (0, -1))
        sizes = " to ".join(f"{row['bytes'][end] / 2**20:.2g}" for end in (0, -1))
        lines.append(
            f"| {LABELS[axis]} | {row['values'][0]} | {row['values'][-1]} | {times} ms | {row['time_slope']:.2f} | "
            f"{sizes} MiB | {row['memory_slope']:.2f} |"
        )
    return "\n".join(lines)


def figure(record: dict[str, Any], path: Path) -> Path:
    """Time and memory along each axis, with the slopes."""
    import matplotlib.pyplot as plt

    plot, axes = plt.subplots(2, len(LABELS), figsize=(13, 5.2), sharex="col", sharey="row", layout="constrained")
    for column, (axis, row) in enumerate(record["axes"].items()):
        for line, (key, label, unit, colour) in enumerate(
            (("seconds", "time", 1e-3, "#0072B2"), ("bytes", "memory", 2**20, "#D55E00"))
        ):
            panel = axes[line, column]
            panel.plot(row["values"], [value / unit for value in row[key]], color=colour, marker="o", markersize=4)
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.3, which="major")
            panel.text(0.05, 0.9, f"slope {row[f'{label}_slope']:.2f}", transform=panel.transAxes, fontsize=9, va="top")
        axes[1, column].set_xlabel(LABELS[axis])
    axes[0, 0].set_ylabel("time [ms]")
    axes[1, 0].set_ylabel("peak memory [MiB]")
    plot.suptitle(
        f"Sampling an MLP: how it grows ({record['machine']['device'].replace('1 CPU threads', 'one CPU thread')})",
        fontsize=11,
    )
    IMAGES.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, dpi=150)
    plt.close(plot)
    return path


if __name__ == "__main__":
    main()
