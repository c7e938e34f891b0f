"""The methods of the crowd study side by side on test frames, each at the rate that the validation frames choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from studies.crowd.controls import SIZE

__all__ = [
    "KINDS",
    "NAMES",
    "OURS",
    "PAPER",
    "Results",
    "coverage_table",
    "intervals",
    "method_table",
    "methods",
    "network_table",
    "number",
    "paper_rates",
    "verdict",
]

Results: TypeAlias = Mapping[str, Mapping[str, Any]]
Methods: TypeAlias = dict[str, dict[str, Any]]

KINDS = ("unscaled", "scaled", "relaxed", "floor")
NAMES = {"mall": "Mall", "ucsd": "UCSD", "pets": "PETS2009", "own": "own frames", "scenes": "scenes"}
OURS = ("injected", "propagated", "linear")
"""First words of what this library does."""
PAPER = 0.01
"""The largest of the paper's rates."""
_FREE = {"pixel": "propagated", "count": "linear"}


def methods(record: Mapping[str, Any], target: str) -> Methods:
    """What each method reaches on the test frames, by name: `rmse`, `mae`, `nll`, `ma`, `rate`, `blocks`, ..."""
    found: Methods = {}
    for name, columns, chosen in (
        ("injected", record["injected"][target], record["chosen"][target]),
        (_FREE[target], record["sampling_free"][target], record["sampling_free_chosen"][target]),
    ):
        for kind in KINDS:
            index = chosen["scaled" if kind == "relaxed" else kind]
            found[f"{name}, {kind}"] = _picked(columns, kind, index) | {"rate": record["rates"][index]}
    if target == "count":
        found["linear per site, floor"] = dict(record["per_site"]["test"])
    found["constant"] = dict(record["constant"][target]["test"])
    if target == "count" and "size_control" in record:  # which results of earlier versions have not
        found[SIZE] = dict(record["size_control"]["test"])
    for stage in record["embedded"].values():
        for kind in KINDS:
            found[f"embedded {stage['rate']:g}, {kind}"] = _own(stage[target]["test"], kind) | {"rate": stage["rate"]}
    return found


def paper_rates(record: Mapping[str, Any]) -> list[int]:
    """The places of the paper's rates; of all where none of them was measured."""
    places = range(len(record["rates"]))
    return [place for place in places if record["rates"][place] <= PAPER] or list(places)


def method_table(record: Mapping[str, Any], target: str) -> list[str]:
    """Markdown: the methods of one set by rising NLL; the best of a column in bold."""
    rows = methods(record, target)
    names = ["rmse", "mae", "nll", "ma"]
    best = {name: min(row[name] for row in rows.values()) for name in names}
    lines = [f"| {target} | rate | RMSE | MAE | NLL | MA |", "| --- |" + " ---: |" * 5]
    for method in sorted(rows, key=lambda method: float(rows[method]["nll"])):
        row = rows[method]
        cells = [f"**{number(row[n])}**" if row[n] == best[n] else number(row[n]) for n in names]
        rate = f"{row['rate']:g}" if "rate" in row else ""
        lines.append(f"| {method} | {rate} | {' | '.join(cells)} |")
    return lines


def verdict(record: Mapping[str, Any], target: str) -> str:
    """Who wins by NLL and by MA, and whether what this library does beats a constant variance."""
    rows = methods(record, target)
    first = {measure: min(rows, key=lambda method: float(rows[method][measure])) for measure in ("nll", "ma")}
    own = [name for name in rows if name.startswith(OURS)]
    said = f"{target}: lowest NLL `{first['nll']}`, lowest MA `{first['ma']}`."
    for control, words in (("constant", "A constant variance"), (SIZE, f"A variance of `{SIZE}`")):
        if control not in rows:
            continue
        beaten = [name for name in own if rows[name]["nll"] >= rows[control]["nll"]]
        listed = ", ".join(f"`{name}`" for name in beaten) or "no injected or sampling-free variance"
        said += f" {words} has a lower NLL than {listed}."
    return said


def coverage_table(record: Mapping[str, Any]) -> list[str]:
    """Markdown: how many test counts lie in their intervals, and how wide these are."""
    levels = record["coverages"]
    lines = ["| count intervals | " + " | ".join(f"{100 * level:g} %: inside, width" for level in levels) + " |"]
    lines += ["| --- |" + " ---: |" * len(levels)]
    for name, row in intervals(record).items():
        cells = (
            "" if inside is None else f"{100 * inside:.1f} %, {number(width)}"
            for inside, width in zip(row["coverage"], row["width"], strict=True)
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def intervals(record: Mapping[str, Any]) -> Methods:
    """The methods that have intervals of counts, conformal ones too."""
    found = {name: row for name, row in methods(record, "count").items() if "coverage" in row}
    conformal = record["conformal"]
    return found | {"conformal": conformal["constant"], "conformal, injected": conformal["injected"]}


def network_table(results: Results) -> list[str]:
    """Markdown: the networks without draws, and how the frames are split."""
    lines = ["| set | network | validation frames | test frames | count MAE | count RMSE | pixel RMSE |"]
    lines += ["| --- | --- |" + " ---: |" * 5]
    for name, record in results.items():
        plain = record["constant"]
        frames = f"{record['frames']['validation']} | {record['frames']['test']}"
        errors = [plain["count"]["test"]["mae"], plain["count"]["test"]["rmse"], plain["pixel"]["test"]["rmse"]]
        lines.append(f"| {NAMES[name]} | without dropout | {frames} | {' | '.join(map(number, errors))} |")
        for stage in record["embedded"].values():
            rows = stage["count"]["test"], stage["pixel"]["test"]
            errors = [rows[0]["mae"], rows[0]["rmse"], rows[1]["rmse"]]
            network = f"embedded at {stage['rate']:g}, mean of draws"
            lines.append(f"| {NAMES[name]} | {network} | {frames} | {' | '.join(map(number, errors))} |")
    return lines


def number(value: float) -> str:
    """Four digits; large ones without a point, huge ones with an exponent."""
    if abs(value) >= 1e7:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _picked(columns: Mapping[str, Any], kind: str, index: int) -> dict[str, Any]:
    """One rate out of the lists over the rates."""
    test = columns["test"]
    flat = {name: values[index] for name, values in test.items() if isinstance(values, list)}
    for name in ("coverage", "width"):
        if name in test:
            flat[name] = {kind: values[index] for kind, values in test[name].items()}
    flat["blocks"] = {name: values[index] for name, values in columns["blocks"].items()}
    return _own(flat, kind)


def _own(test: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The measures of one kind."""
    found = {"rmse": test["rmse"], "mae": test["mae"], "nll": test[f"nll_{kind}"], "ma": test[f"ma_{kind}"]}
    found |= {name: test[name][kind] for name in ("coverage", "width") if name in test}
    return found | {"blocks": {"mae": test["blocks"]["mae"], "nll": test["blocks"][f"nll_{kind}"]}}
