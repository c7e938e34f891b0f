"""The pages of the UCI study, from its JSON alone: `index.md` with tables and figures, and `claims.md`."""

from __future__ import annotations

from pathlib import Path

from latedrop.studies.pages import drawn, written
from latedrop.studies.uci import claims
from latedrop.studies.uci.figures import CAPTIONS, figures
from latedrop.studies.uci.tables import SHORT, Results, method_tables, verdicts

__all__ = ["index", "write"]


def write(results: Results, folder: Path) -> list[Path]:
    """Write the pages, and the figures where matplotlib is installed; their paths."""
    pages = {"index.md": index(results).encode(), "claims.md": claims.page(results).encode()}
    return written(folder, drawn(lambda: figures(results)) | pages)


def index(results: Results) -> str:
    """Markdown: how it was run, who wins, the tables and the figures."""
    first = next(iter(results.values()))
    variance = f"{draws} draws" if (draws := first["settings"]["draws"]) else "exact, without draws"
    seconds = sum(record["seconds"]["total"] for record in results.values())
    torch = first["versions"]["torch"]
    machines = sorted({record["machine"]["device"] for record in results.values()})
    lines = [
        "# The UCI study",
        "",
        f"{len(results)} sets, networks without dropout and with dropout embedded at {len(first['rates'])} rates, "
        f"trained in {seconds / 60:.1f} minutes in all on {' and '.join(machines)} (torch {torch}). "
        f"The variance of one hidden layer is {variance}. Every number is of the test rows, in the target's own unit. "
        "[What the paper claims, and what we found](claims.md) decides its claims.",
        "",
        "| set | train | validation | test | splits | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, record in results.items():
        rows, splits = record["rows"], len(record["methods"]["constant"]["nll"])
        counts = (
            f"{rows['train']} | {rows['validation']} | {rows['test']} | {splits} | {record['seconds']['total']:.0f}"
        )
        lines.append(f"| {SHORT.get(name, name)} | {counts} |")
    lines += ["", "## Who wins, and where we lose", "", *verdicts(results), "", "## One hidden layer", ""]
    lines += [
        "raw, scaled, relaxed: injected or embedded dropout at the rate that the validation rows choose, with the "
        "variance as it is, scaled, or scaled to a balanced calibration curve. floor: scale and floor. "
        "concrete: rate and noise learned. laplace: last layer, tuned by its evidence. constant: the validation rows' "
        "mean squared error. conformal: split conformal intervals, which have no density, so neither NLL nor CRPS.",
        "",
        *method_tables(results, deep=False),
        "## Three hidden layers of 50",
        "",
        f"Injected dropout is sampled here, with {first['settings']['deep_draws']} draws, at one rate for all sites.",
        "",
        *method_tables(results, deep=True),
        "## Figures",
        "",
    ]
    for name, caption in CAPTIONS.items():
        lines += [f"![{caption}]({name}.png)", "", f"*Figure {name[-1]}. {caption}*", ""]
    return "\n".join(lines).rstrip() + "\n"
