"""Whether the UCI study says the same on a CPU as on the GPU of the committed run, at both depths.

    latedrop study uci --device cpu --data DIR --sets boston-housing,yacht --out FOLDER
    python -m benchmarks.uci_devices FOLDER     # writes benchmarks/results/uci_devices.json

Networks differ between the two, as masks and batches are rounded and drawn in another way; splits are the same. The
difference is the mean over splits, with the standard error of Nadeau and Bengio for overlapping splits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import write
from studies.significance import split_error
from studies.uci.tables import overlap

COMMITTED = Path(__file__).parents[1] / "docs" / "results" / "uci"
METHODS = (
    "constant",
    "injected, scaled",
    "injected, floor",
    "embedded, floor",
    "concrete, floor",
    "laplace, floor",
    "ensemble, floor",
    "gaussian ensemble, floor",
    "swag, floor",
    "default",
)
DEPTHS = {"one": lambda record: record["methods"], "three": lambda record: record["deep"]["methods"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="The UCI study on a CPU beside that on a GPU.")
    parser.add_argument("folder", type=Path, help="results of the study on a CPU")
    folder = parser.parse_args().folder
    record: dict[str, Any] = {"sets": {}}
    for path in sorted(folder.glob("*.json")):
        committed = COMMITTED / path.name
        if committed.exists():
            record["sets"][path.stem] = compared(*(json.loads(p.read_text()) for p in (path, committed)))
    write("uci_devices", record)
    print(markdown(record))


def compared(own: dict[str, Any], committed: dict[str, Any]) -> dict[str, Any]:
    """Test metrics on both machines, and their difference, by method and number of hidden layers."""
    both = (own, committed)
    found: dict[str, Any] = {
        "devices": [part["machine"]["device"] for part in both],
        "seconds": [part["seconds"]["total"] for part in both],
        "methods": {depth: {} for depth in DEPTHS},
    }
    for depth, methods in DEPTHS.items():
        for method in METHODS:
            for metric in ("rmse", "nll"):
                values = [np.array(methods(part)[method][metric]) for part in both]
                difference = values[0] - values[1]
                means = [float(value.mean()) for value in (*values, difference)]
                row = [*means, split_error(difference, overlap(own))]
                found["methods"][depth].setdefault(method, {})[metric] = row
    return found


def markdown(record: dict[str, Any]) -> str:
    """A row for each set, depth and method; below how far apart the two are at most, and how long they took."""
    lines = ["| set | hidden layers | method | RMSE CPU | GPU | difference | NLL CPU | GPU | difference |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    apart = []
    for name, found in record["sets"].items():
        for depth, methods in found["methods"].items():
            for method, metrics in methods.items():
                numbers = (metrics["rmse"], metrics["nll"])
                apart += [abs(d) / e for _, _, d, e in numbers if e]
                cells = [f"{a:.3f} | {b:.3f} | {d:+.3f} ± {e:.3f}" for a, b, d, e in numbers]
                lines.append(f"| {name} | {depth} | {method} | {' | '.join(cells)} |")
    lines += ["", f"The largest of these {len(apart)} differences is {max(apart, default=0.0):.1f} standard errors."]
    for name, found in record["sets"].items():
        own, committed = (f"{s:.0f} s ({d})" for s, d in zip(found["seconds"], found["devices"], strict=True))
        lines[-1] += f" {name} took {own} and {committed}."
    return "\n".join(lines)


if __name__ == "__main__":
    main()
