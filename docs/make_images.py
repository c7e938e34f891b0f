"""Make the picture and the numbers of the README again: `python docs/make_images.py`, from the repository's root.

The demo runs on several seeds. The first one gives docs/images/demo.png and docs/results/demo.json; the mean and the
standard deviation over all of them go to docs/results/demo_seeds.json. Both tables are printed as Markdown.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

from latedrop.demo import UNIT, Demo, picture, run
from latedrop.report import png, table, write_aside

DOCS = Path(__file__).parent
METRICS = {"rmse": f"RMSE [{UNIT}]", "nll": "NLL", "ma": "MA", "coverage": "coverage at 90 %", "width": "width at 90 %"}


def over_seeds(results: list[Demo]) -> dict[str, dict[str, list[float] | None]]:
    """By label and metric, the mean and the standard deviation over the seeds."""
    found: dict[str, dict[str, list[float] | None]] = {}
    for rows in zip(*(result.evaluations for result in results), strict=True):
        found[rows[0].label] = {}
        for name in METRICS:
            values = [getattr(row, name) for row in rows]
            found[rows[0].label][name] = None if None in values else [round(f(values), 4) for f in (mean, stdev)]
    return found


def seeds_table(found: dict[str, dict[str, list[float] | None]]) -> list[list[str]]:
    """The same as text, header first."""
    lines = [["", *METRICS.values()]]
    for label, by_name in found.items():
        cells = []
        for name, pair in by_name.items():
            if pair is None:
                cells.append("-")
            elif name == "coverage":
                cells.append(f"{100 * pair[0]:.1f} ± {100 * pair[1]:.1f} %")
            else:
                cells.append(f"{pair[0]:.2f} ± {pair[1]:.2f}")
        lines.append([label, *cells])
    return lines


def markdown(lines: list[list[str]]) -> str:
    """A Markdown table; the first column is left-aligned."""
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 0 on; at least 2")
    results = [run(seed=seed) for seed in range(parser.parse_args().seeds)]
    found = over_seeds(results)
    seeds = {"seeds": len(results), "rows": found}
    write_aside(DOCS / "images" / "demo.png", png(picture(results[0])))
    write_aside(DOCS / "results" / "demo.json", results[0].to_json().encode())
    write_aside(DOCS / "results" / "demo_seeds.json", json.dumps(seeds, indent=1).encode())
    print(markdown(table(results[0].evaluations, UNIT)), markdown(seeds_table(found)), sep="\n\n")


if __name__ == "__main__":
    main()
