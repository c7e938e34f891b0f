"""The page of the classification study, from its JSON alone: how it was run, claims, tables and figures."""

from __future__ import annotations

from pathlib import Path

from studies.classification import claims
from studies.classification.figures import CAPTIONS, figures
from studies.classification.tables import Results, cell, score_tables, set_tables, values
from studies.pages import drawn, written

__all__ = ["index", "write"]

_METHODS = (
    "*softmax* is the network as it is; all others have a temperature, fitted to the validation rows. *guard* and "
    "*leverage* make it grow with the leverage of a row's features, *dropout* adds injected dropout to first order, "
    "*draws* averages the softmax of thinned networks. *default* is `latedrop.calibrate` with the training images as "
    "`reference`. *embedded* networks were trained with dropout, *ensemble* is five networks, *laplace* the Laplace "
    "approximation of the last layer. Cells are means over repeats with the half width of a 95 % interval; the best "
    "mean of each set is bold."
)


def write(results: Results, folder: Path) -> list[Path]:
    """Write the page, and the figures where matplotlib is installed; their paths."""
    return written(folder, drawn(lambda: figures(results)) | {"index.md": index(results).encode()})


def index(results: Results) -> str:
    """Markdown: how it was run, the claims, the tables and the figures."""
    units = [unit for record in results.values() for unit in record["units"]]
    seconds = sum(unit["seconds"]["total"] for unit in units)
    machines = sorted({unit["machine"]["device"] for unit in units})
    lines = [
        "# The classification study",
        "",
        f"{len(results)} sets, {len(units)} repeats in all, {seconds / 60:.0f} minutes on {' and '.join(machines)} "
        f"(torch {units[0]['versions']['torch']}). Every repeat trains its own networks on its own rows.",
        "",
    ]
    if any(unit["settings"]["epochs"] != 1.0 for unit in units):
        lines += ["**Networks were trained for a part of the epochs: these numbers decide nothing.**", ""]
    lines += ["| set | repeats | train | validation | test | epochs | accuracy | the default is |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for name, record in results.items():
        unit, rows = record["units"][0], record["units"][0]["rows"]
        chosen = [each["notes"]["choice"] for each in record["units"]]
        said = ", ".join(f"{word} ({chosen.count(word)})" for word in dict.fromkeys(chosen))
        accuracy = cell(values(record, "softmax", "accuracy"), record, 3)
        cells = (len(record["units"]), rows["train"], rows["validation"], rows["test"], unit["epochs"], accuracy, said)
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    lines += ["", "## What is claimed, and what we found", "", *claims.summary(results), "", "## Figures", ""]
    for name, caption in CAPTIONS.items():
        lines += [f"![{caption}]({name}.png)", "", f"*{caption}*", ""]
    lines += ["## Tables", "", _METHODS, "", *set_tables(results), "### Strange rows", "", *score_tables(results)]
    return "\n".join([*lines, "## Every effect", *claims.effects(results)]) + "\n"
