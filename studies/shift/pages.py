"""The pages of the shift study, from its JSON alone: `index.md` with tables and figures, and `claims.md`."""

from __future__ import annotations

from pathlib import Path

from studies.pages import drawn, written
from studies.shift import claims
from studies.shift.figures import CAPTIONS, figures
from studies.shift.tables import Results, method_tables, overshoot_table, set_tables
from studies.uci.tables import SHORT, counted

__all__ = ["index", "write"]

_MEASURES = (
    "Targets are standardised with a cut's training rows, so errors of different sets can be compared. *Ranking* is "
    "Spearman's correlation of standard deviation and size of the error over the shifted rows; *AUROC* says how well "
    "the standard deviation tells shifted rows from rows inside. *Error growth* and *variance growth* are logarithms: "
    "mean squared error, or mean variance, of the shifted rows over that of the rows inside. *Slope* is variance "
    "growth per unit of error growth over the cuts of a set: 1 is a variance that follows the error, 0 one that does "
    "not notice. NLLs leave out log(2 pi)/2."
)
_NUMBERS = (
    "A cell is the median over the sets and, with five sets or more, the narrowest interval between order statistics "
    "that holds the median with at least 90 % whatever the distribution (of eight sets: from the second smallest to "
    "the second largest, 93 %). The number of a set is the mean over its cuts for coverage, AUROC, ranking and growth, "
    "and the median over its cuts for NLL, CRPS, width and RMSE. The cuts of a set share rows and count as one."
)
_LIKE = (
    "Compare like with like: *raw* is a variance as it is, *scaled* times one number, *floor* times one number plus "
    "another, all fitted on the validation rows. `ensemble` and `gaussian ensemble` have a better mean, that of five "
    "networks; `ensemble variance` puts the ensemble's variance on one network's mean."
)

_OVERSHOOT = (
    "The cuts where the mean variance of the default with reference rows grows by more than a hundred times what the "
    "mean squared error does. Numbers are factors, shifted over inside; inputs are counted from 0; mean widths of 90 % "
    "intervals are in standard deviations of the training targets."
)


def write(results: Results, folder: Path) -> list[Path]:
    """Write the pages, and the figures where matplotlib is installed; their paths."""
    pages = {"index.md": index(results).encode(), "claims.md": claims.page(results).encode()}
    return written(folder, drawn(lambda: figures(results)) | pages)


def index(results: Results) -> str:
    """Markdown: how it was run, the tables and the figures."""
    seconds = sum(record["seconds"]["total"] for record in results.values())
    machines = sorted({record["machine"]["device"] for record in results.values()})
    cuts = sum(len(record["cuts"]) for record in results.values())
    torch = next(iter(results.values()))["versions"]["torch"]
    lines = [
        "# The shift study",
        "",
        f"{counted(results)}, {cuts} cuts: networks see the rows on one side of a quantile of one input and are "
        f"tested on the rows beyond it. {seconds / 60:.1f} minutes in all on {' and '.join(machines)} (torch {torch}). "
        "[What is claimed of shift, and what we found](claims.md) decides claims.",
        "",
        "| set | cuts | left out | train | validation | inside | shifted | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, record in results.items():
        rows, shifted = record["rows"], [cut["shifted"] for cut in record["cuts"]]
        cells = (
            len(record["cuts"]), len(record["left_out"]), rows["train"], rows["validation"], rows["inside"],
            _range(min(shifted), max(shifted)), round(record["seconds"]["total"]),
        )  # fmt: skip
        lines.append(f"| {SHORT.get(name, name)} | {' | '.join(map(str, cells))} |")
    lines += ["", "## All sets", "", _MEASURES, "", _NUMBERS, "", _LIKE, "", *method_tables(results), "## Figures", ""]
    for name, caption in CAPTIONS.items():
        lines += [f"![{caption}]({name}.png)", "", f"*{caption}*", ""]
    lines += ["## Where the default overshoots", "", _OVERSHOOT, "", *overshoot_table(results), ""]
    lines += ["## Set by set", "", *set_tables(results), "## Left out", "", "Inputs are counted from 0.", ""]
    left_out = [
        f"- {SHORT.get(name, name)}, input {one['input']} {one['direction']}: {one['reason']}."
        for name, record in results.items()
        for one in record["left_out"]
    ]
    return "\n".join([*lines, *(left_out or ["Nothing."])]) + "\n"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
