"""The pages of the crowd study, from its JSON alone: `index.md` with tables and figures, and `claims.md`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from latedrop.errors import FileError
from studies.crowd import claims
from studies.crowd.figures import CAPTIONS, figures
from studies.crowd.tables import NAMES, Results, coverage_table, method_table, network_table, number, verdict
from studies.pages import drawn, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["index", "write"]


def write(results: Results, folder: Path) -> list[Path]:
    """Write the pages, and the figures where matplotlib is installed; their paths."""

    def pictures() -> Mapping[str, Figure]:
        examples = {name: maps for name in results if (maps := _maps(folder / f"{name}.npz"))}
        return figures(results, examples)

    found = drawn(pictures)
    shown = [name for name in CAPTIONS if f"{name}.png" in found or (folder / f"{name}.png").exists()]
    pages = {"index.md": index(results, shown).encode(), "claims.md": claims.page(results).encode()}
    return written(folder, found | pages)


def index(results: Results, shown: list[str]) -> str:
    """Markdown: how it was run, who wins, the tables and the figures."""
    first = next(iter(results.values()))
    machines = sorted({place["machine"]["device"] for record in results.values() for place in _places(record)})
    seconds = sum(_seconds(record) for record in results.values())
    lines = [
        "# The crowd counting study",
        "",
        f"{', '.join(NAMES[name] for name in results)}: MCNN trained without dropout, dropout injected before "
        f"{len(first['sites'])} of its convolutions at {len(first['rates'])} rates, {first['settings']['draws']} draws "
        f"each; {seconds / 60:.1f} minutes in all on {' and '.join(machines)} (torch {first['versions']['torch']}). "
        "Rates, scales and thresholds were chosen on validation frames, none of which is a test frame; every number is "
        "of the test frames. NLLs are without log(2 pi)/2. "
        "[What the paper claims, and what we found](claims.md) decides its claims.",
        "",
        *network_table(results),
        "",
        "## Who wins",
        "",
    ]
    for name, record in results.items():
        lines += [f"- {NAMES[name]}, {verdict(record, target)}" for target in ("pixel", "count")]
    lines += [
        "",
        "injected: over draws. propagated: one pass that carries mean and variance. linear: first order, one backward "
        "pass. unscaled, scaled, relaxed: the variance as it is, times the scale of least NLL, times the scale of a "
        "balanced calibration curve. floor: scale and floor of least NLL. embedded: trained with dropout, its own "
        "rate. constant: the validation frames' mean squared error for all. Each at the rate of least NLL on the "
        "validation frames.",
        "",
    ]
    for name, record in results.items():
        lines += [f"## {NAMES[name]}", "", *_set(record)]
    lines += ["## Figures", ""]
    for place, name in enumerate(shown, 1):
        lines += [f"![{CAPTIONS[name]}]({name}.png)", "", f"*Figure {place}. {CAPTIONS[name]}*", ""]
    return "\n".join(lines).rstrip() + "\n"


def _set(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for target in ("pixel", "count"):
        lines += [*method_table(record, target), ""]
    lines += [*coverage_table(record), ""]
    lines += [*_notes(record), ""]
    return [*lines, *_rejection(record["rejection"]), ""]


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Variances of 0, and how the variances with and without draws go together."""
    test = record["injected"]["pixel"]["test"]
    worst = max(test["zero_variances"])
    lines = [
        f"Of {test['entries']} test pixels at most {worst} had a variance of 0 at a rate; they count with the smallest "
        "variance of the validation frames that is not.",
    ]
    for target, free in (("pixel", "propagated"), ("count", "linear")):
        place = record["chosen"][target]["scaled"]
        found = {name: values[place] for name, values in record["sampling_free"][target]["agreement"].items()}
        lines.append(
            f"At rate {record['rates'][place]:g} the {free} variance of the {target} has a rank correlation of "
            f"{number(found['rank_correlation'])} with the drawn one; its mean is "
            f"{number(found['ratio_of_means'])} times as large."
        )
    return [" ".join(lines)]


def _rejection(found: Mapping[str, Any]) -> list[str]:
    """A sentence and a table."""
    controls = found["controls"]
    rows = {
        "before": found["before"],
        "with uncertainty": found["after"],
        "control: low density, tuned alike": controls["low_density"],
        "control: as many of lowest mass": controls["lowest_mass"],
        "tuned for regions: with uncertainty": found["for_regions"]["policy"],
        "tuned for regions: low density": found["for_regions"]["low_density"],
    }
    lines = [
        f"Rejection: **{found['verdict']}**; {found['why']}. Of {found['regions']['all']} regions of the test frames "
        f"{found['regions']['false']} are false: no annotated head lies within {found['near_cells']:g} cells. "
        f"{_separation(found['separation'])}{_measured_on(found)}",
        "",
        "| rejection | count MAE | count RMSE | bias | regions rejected | false ones kept | true ones rejected |",
        "| --- |" + " ---: |" * 6,
    ]
    for name, row in rows.items():
        errors = " | ".join(number(row[measure]) for measure in ("mae", "rmse", "bias"))
        lines.append(f"| {name} | {errors} | {row['rejected']} | {row['false_kept']} | {row['true_rejected']} |")
    random = controls["random"]
    errors = " | ".join(number(random[measure]["mean"]) for measure in ("mae", "rmse", "bias", "rejected"))
    kept = f"{random['false_kept']['mean']:.0f} | {random['true_rejected']['mean']:.0f}"
    shift = " | ".join(number(controls["shift"][measure]) for measure in ("mae", "rmse", "bias"))
    lines.append(f"| control: as many at random, mean of {random['repeats']} | {errors} | {kept} |")
    return [*lines, f"| control: validation bias taken off | {shift} | | | |"]


def _separation(areas: Mapping[str, float | None]) -> str:
    """How well features tell false regions from true ones; results of before may lack the linear scores."""
    single = {"low_mass": "low mass", "ratio": "uncertainty/density ratio", "isolation": "isolation"}
    linear = {"without_ratio": "mass and isolation", "all": "these and the ratio"}
    said = [
        f"{words}: {', '.join(f'{name} {_area(areas[key])}' for key, name in names.items())}."
        for words, names in (
            ("How well one feature alone tells false from true (area under the ROC curve, 0.5 is chance)", single),
            ("A linear score that was fitted to the validation regions", linear),
        )
        if set(names) <= set(areas)
    ]
    return " ".join(said)


def _area(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"


def _measured_on(found: Mapping[str, Any]) -> str:
    if "measured_on" not in found:
        return ""
    place = found["measured_on"]
    draws = "" if place["same_draws"] else ", with other draws than the tables above"
    return f" The rejection was measured on {place['machine']['device']} (torch {place['versions']['torch']}){draws}."


def _places(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where a set was measured, and where its rejection was, if elsewhere."""
    return [record, *([record["rejection"]["measured_on"]] if "measured_on" in record["rejection"] else [])]


def _seconds(record: Mapping[str, Any]) -> float:
    return float(sum(value for name, value in record["seconds"].items() if name != "this_run"))


def _maps(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The example maps of a set; none where the file is not there."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in ("mean", "std", "target", "frame")}
    except (OSError, ValueError, KeyError) as error:
        raise FileError(f"expected the example maps of this study in {path}; {error}. Run the set again.") from error
