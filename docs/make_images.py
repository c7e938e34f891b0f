"""Make the picture and the numbers of the README again: `python docs/make_images.py`, from the repository's root.

The demo runs on several seeds. The first one gives docs/images/demo.png and docs/results/demo.json; the metrics of
all of them go to docs/results/demo_seeds.json. Both tables of docs/demo.md are printed, as Markdown.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from latedrop import plots
from latedrop.cli.demo import UNIT, Demo, run
from latedrop.devices import versions
from latedrop.evaluation.evaluation import Evaluation
from latedrop.evaluation.judgement import Values, judge
from latedrop.files import write_aside
from latedrop.quantiles import student_quantile
from latedrop.records import checked
from latedrop.report import table

DOCS = Path(__file__).parent
METRICS = ("rmse", "nll", "ma", "coverage", "width")
BARS = 40
CONSTANT, DEFAULT = "#0072B2", "#D55E00"

BySeed = dict[str, dict[str, list[float | None]]]


def by_seed(results: Sequence[Demo]) -> BySeed:
    """By label and metric, the values of the seeds."""
    rows = zip(*(result.evaluations for result in results), strict=True)
    return {row[0].label: {name: [getattr(one, name) for one in row] for name in METRICS} for row in rows}


def seeds_table(found: BySeed) -> list[list[str]]:
    """Mean and standard deviation over the seeds as text, header first; NLL also against the constant, seed by seed."""
    lines = [["", f"RMSE [{UNIT}]", "NLL", "NLL - constant's", "MA", "coverage at 90 %", f"width at 90 % [{UNIT}]"]]
    for label, values in found.items():
        gap = [
            None if own is None or other is None else own - other
            for own, other in zip(values["nll"], found["constant"]["nll"], strict=True)
        ]
        percent = [None if share is None else 100 * share for share in values["coverage"]]
        scores = [_spread(column, digits=3) for column in (values["nll"], gap, values["ma"])]
        lines.append(
            [label, _spread(values["rmse"]), *scores, f"{_spread(percent, digits=1)} %", _spread(values["width"])]
        )
    return lines


def markdown(lines: list[list[str]]) -> str:
    """A Markdown table; numbers are right-aligned."""
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def picture(result: Demo) -> None:
    """Draw calibration curves, and some test rows with the intervals of the default and of a constant."""
    figure = plots.new_figure(11, 4.5)
    curves, bars = figure.subplots(1, 2, width_ratios=[1.2, 1])
    rows = [row for row in result.evaluations if row.label in ("terms", "scaled", "constant")]
    plots.calibration_curves({row.label: (row.levels, row.observed) for row in rows}, curves)
    intervals(judge(result.prediction, result.target).together.values, result.prediction.calibration, bars)
    write_aside(DOCS / "images" / "demo.png", plots.png(figure))


def intervals(values: Values, calibration: Any, ax: Any) -> None:
    """Draw 90 % intervals of the default over those of the constant, for rows evenly spaced by prediction."""
    assert values.constant is not None
    some = np.argsort(values.mean, kind="stable")[np.linspace(0, len(values.mean) - 1, BARS).round().astype(int)]
    reach = student_quantile(0.95, calibration.constant_degrees) * values.constant[some]
    low, high, middle, truth = (part[some] for part in (values.low, values.high, values.mean, values.target))
    x, missed = np.arange(BARS), (truth < low) | (truth > high)
    ax.vlines(x, low, high, color=DEFAULT, linewidth=5, alpha=0.4, label="terms, 90 %")
    ax.vlines(x, middle - reach, middle + reach, color=CONSTANT, linewidth=2.5, label="constant, 90 %")
    ax.scatter(x[~missed], truth[~missed], s=12, color="black", zorder=3, label="target")
    ax.scatter(x[missed], truth[missed], s=32, color="black", marker="x", zorder=3, label="target, missed by terms")
    ax.set(xlabel="test rows, in order of their prediction", ylabel=f"target [{UNIT}]", xticks=[])
    bottom, top = ax.get_ylim()
    ax.set_ylim(top=top + 0.16 * (top - bottom))
    ax.legend(loc="upper left", fontsize="small", ncols=2)


def main() -> None:
    """Run, write, print; or only print what is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 0 on; at least 2")
    parser.add_argument("--tables", action="store_true", help="print the tables of the JSON files; nothing is computed")
    arguments = parser.parse_args()
    single, several = DOCS / "results" / "demo.json", DOCS / "results" / "demo_seeds.json"
    if not arguments.tables:
        results = [run(seed=seed) for seed in range(arguments.seeds)]
        record = {"seeds": len(results), "versions": versions(), "rows": by_seed(results)}
        write_aside(single, json.dumps(results[0].record()).encode())
        picture(results[0])
        write_aside(several, json.dumps(record, indent=1).encode())
    rows = json.loads(single.read_text(encoding="utf-8"))["evaluations"]
    print(markdown(table(checked(tuple[Evaluation, ...], rows, "evaluations", "Run it again."), UNIT)), end="\n\n")
    print(markdown(seeds_table(json.loads(several.read_text(encoding="utf-8"))["rows"])))


def _spread(values: Sequence[float | None], digits: int = 2) -> str:
    numbers = [value for value in values if value is not None]
    return f"{mean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}" if numbers else "-"


if __name__ == "__main__":
    main()
