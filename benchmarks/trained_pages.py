"""Pages of `benchmarks.trained`, from its JSON alone: blocks of `docs/trained.md`, and figures.

Blocks stand between `<!-- trained: NAME -->` and `<!-- end -->`; all else on that page is written by hand, and no
number of a result is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from latedrop.files import write_aside
from latedrop.report import png

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "trained"
BLOCK = re.compile(r"(<!-- trained: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WON = 5e-4
"""Nats; who is lower by more has won."""
METRICS = {"rmse": "RMSE", "nll": "NLL", "ma": "MA", "coverage": "coverage at 90 %", "width": "width at 90 %"}
KINDS = {"Sinusoidal": "MLPs for sine waves", "Trapezoidal": "MLPs for triangles and trapezoids", "LSTM": "LSTMs"}
SETS = {
    "home": "as calibrated on, other rows",
    "frequency": "above 300 kHz; calibrated on what is below",
    "waveform": "trapezoids; calibrated on triangles",
    "sine": "sine waves; calibrated on triangles",
    "data sheet": "the manufacturer's curves, 25 °C",
    "hot": "the manufacturer's curves, 100 °C",
}

Record = dict[str, Any]
Lines = list[list[str]]


def write() -> list[Path]:
    """Write the blocks and the figures of what was measured; their paths."""
    from benchmarks.trained_figures import figures

    records = read()
    if len(records) < 2:
        print(f"no pages: only {', '.join(records) or 'nothing'} has been measured")
        return []
    written = {RESULTS / f"{name}.png": png(figure) for name, figure in figures(records).items()}
    page = DOCS / "trained.md"
    if page.exists():
        written[page] = filled(page.read_text(encoding="utf-8"), records).encode()
    for path, content in written.items():
        write_aside(path, content)
    return list(written)


def read() -> dict[str, Record]:
    """The records by package."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def filled(page: str, records: dict[str, Record]) -> str:
    """The page with every block made again."""
    made = blocks(records)
    return BLOCK.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n\n{match[3]}", page)


def blocks(records: dict[str, Record]) -> dict[str, str]:
    """The blocks of `docs/trained.md`, by name."""
    loss, pitch = records["magnet"]["networks"], records["torchcrepe"]["networks"]
    return {
        "loss-home": markdown(home_table(list(loss.values()))),
        "loss-facts": listed(loss_facts(loss)),
        "loss-sets": markdown(loss_sets(loss), words=2),
        "pitch-home": "\n\n".join(f"{name}:\n\n{markdown(home_table([net]))}" for name, net in pitch.items()),
        "pitch-sets": "\n\n".join(f"{name}:\n\n{markdown(pitch_sets(net))}" for name, net in pitch.items()),
        "pitch-facts": listed(pitch_facts(pitch)),
    }


def home_table(nets: list[Record]) -> Lines:
    """Methods against metrics on the test rows of the home."""
    unit = nets[0]["unit"]
    lines = [["", *(f"{text} [{unit}]" if key in ("rmse", "width") else text for key, text in METRICS.items())]]
    lines[0].insert(3, "NLL - constant's")
    for method in _methods(nets):
        cells = [spread(_values(nets, "home", method, key), _percent if key == "coverage" else None) for key in METRICS]
        pairs = zip(_values(nets, "home", method, "nll"), _values(nets, "home", "constant", "nll"), strict=False)
        cells.insert(2, spread([own - other for own, other in pairs], "{:+.3f}".format))
        lines.append([method, *cells])
    return lines


def loss_sets(networks: dict[str, Record]) -> Lines:
    """By kind of networks and rows: the errors, the coverage of three intervals, and whether the doubt rises."""
    methods = ("constant", "scaled", "floor", "scaled, conformal")
    head = ["networks", "rows", "RMSE of the network [%]"]
    lines = [[*head, *(f"{method}: coverage at 90 %" for method in methods), "AUROC: sample", "AUROC: linear"]]
    for kind, title in KINDS.items():
        nets = [net for name, net in networks.items() if name.endswith(kind)]
        for name in _sets(nets):
            found = [net["sets"][name]["shift_auroc"] for net in nets if name in net["sets"]]
            cells = [spread(_values(nets, name, "constant", "rmse"), "{:.1f}".format)]
            cells += [spread(_values(nets, name, method, "coverage"), _percent) for method in methods]
            ranks = [spread([one[key] for one in found], "{:.2f}".format) for key in ("sample", "linear")]
            lines.append([title, SETS[name], *cells, *(["-", "-"] if name == "home" else ranks)])
    return lines


def pitch_sets(net: Record) -> Lines:
    """By kind of tones: the errors, the coverage, and whether the doubt rises."""
    methods = ("constant", "scaled", "floor", "scaled, conformal")
    head = ["tones", "median error [cents]", "other notes", *(f"{method}: coverage at 90 %" for method in methods)]
    lines = [[*head, *(f"AUROC: {key}" for key in ("sample", "linear", "confidence"))]]
    for name, found in net["sets"].items():
        cells = [name, f"{found['median_error']:.1f}", _percent(found["gross_share"])]
        cells += [_percent(found["methods"][method]["coverage"]) for method in methods]
        ranks = [f"{value:.2f}" for value in found["shift_auroc"].values()]
        lines.append(cells + (["-"] * len(ranks) if name == "home" else ranks))
    return lines


def loss_facts(networks: dict[str, Record]) -> list[str]:
    """What came out for mag-net, in sentences."""
    nets, count = list(networks.values()), len(networks)
    wins = {
        method: sum(
            a < b - WON
            for a, b in zip(_values(nets, "home", method, "nll"), _values(nets, "home", "constant", "nll"), strict=True)
        )
        for method in ("raw", "scaled", "relaxed", "floor", "linear, floor")
    }
    zero = {key: sum(net["chosen"][key]["scale"] == 0 for net in nets) for key in ("floor", "linear, floor")}
    gains = {name: net["floor_gains"] for name, net in networks.items() if "floor_gains" in net}
    best = max(gains, key=lambda name: gains[name][0])
    steady = [name for name, values in gains.items() if min(values) > WON]
    rank = [net["sets"]["home"]["rank_correlation"]["sample"] for net in nets]
    level = [
        net["sets"]["home"]["rank_correlation_with_prediction"]
        for name, net in networks.items()
        if not name.endswith("LSTM")
    ]
    wide, narrow = (fmean(_values(nets, "home", key, "width")) for key in ("raw", "constant"))
    wider = fmean(_values(nets, "home", "scaled, conformal", "width"))
    wider = wider / fmean(_values(nets, "home", "constant, conformal", "width")) - 1
    lowest = sum(net["chosen"]["raw"]["rate"] == min(net["rates"]) for net in nets)
    cover = {key: _values(nets, "home", key, "coverage") for key in ("raw", "scaled", "floor", "scaled, conformal")}
    sheet, hot = ([net["sets"][key] for net in nets if key in net["sets"]] for key in ("data sheet", "hot"))
    inside = [_percent(fmean(one["methods"]["floor"]["coverage"] for one in found)) for found in (sheet, hot)]
    seen = [fmean(one["shift_auroc"]["sample"] for one in found) for found in (sheet, hot)]
    return [
        f"Before calibration the 90 % intervals hold {_percent(fmean(cover['raw']))} and are {wide / narrow:.1f} times "
        f"as wide as constant ones: on {lowest} of {count} networks even the smallest rate of the list is too large.",
        f"After it they hold {_range(cover['scaled'])} (`scaled`), {_range(cover['floor'])} (`floor`), "
        f"{_range(cover['scaled, conformal'])} (`scaled, conformal`) on the {count} networks.",
        f"**The variance says little about the error.** Its rank correlation with the error is below 0 on "
        f"{sum(r < 0 for r in rank)} of {count} networks, {fmean(rank):+.2f} on average. In the MLPs it is almost a "
        f"function of the prediction itself (rank correlation {fmean(one['linear'] for one in level):+.2f} to first "
        "order): every hidden unit counts for more where the loss is large. The relative errors are larger where it is "
        f"small ({fmean(one['error'] for one in level):+.2f}).",
        f"So a constant variance is hard to beat. Lower NLL than `constant`, by more than {WON:g}: `raw` on "
        f"{wins['raw']} of {count} networks, `scaled` on {wins['scaled']}, `relaxed` on {wins['relaxed']}, `floor` on "
        f"{wins['floor']}, `linear, floor` on {wins['linear, floor']}.",
        "Some of that is luck: at a rate of 0.001, 300 draws of an MLP's 72 units drop about 20 in all. `floor` gains "
        f"most on {best}: {gains[best][0]:.2f} nats, and {', '.join(f'{value:.2f}' for value in gains[best][1:])} with "
        f"four other seeds of the masks. With all five it gains on: {_named(steady)}.",
        f"With a floor the fit finds out by itself: it sets the scale to 0 on {zero['floor']} of {count} networks with "
        f"draws and on {zero['linear, floor']} to first order, and the record says that the floor alone is left.",
        f"Conformal intervals in proportion to the sampled std are {wider:.0%} wider than those of one width, for the "
        "same coverage.".replace("%", " %"),
        f"Against the manufacturers' curves the calibrated intervals are worthless: `floor` holds {inside[0]} at 25 °C "
        f"and {inside[1]} at 100 °C. The variance cannot know: the networks have no input for temperature or core. "
        f"It tells these rows from those of the home about equally at both temperatures (AUROC {seen[0]:.2f} and "
        f"{seen[1]:.2f}), by their frequency and flux, which is all it sees.",
    ]


def pitch_facts(networks: dict[str, Record]) -> list[str]:
    """What came out for torchcrepe, in sentences."""
    facts = []
    for name, net in networks.items():
        home, others = net["sets"]["home"], {key: found for key, found in net["sets"].items() if key != "home"}
        clear, small = home["methods"], home["nll_without_gross"]
        cover = {key: found["methods"]["scaled"]["coverage"] for key, found in others.items()}
        least, most = min(cover, key=cover.__getitem__), max(cover, key=cover.__getitem__)
        wrong, rates = net["gross_auroc"], net["auroc_by_rate"]
        shift = {kind: fmean(found["shift_auroc"][kind] for found in others.values()) for kind in wrong}
        best = max(rates, key=lambda rate: rates[rate]["gross"])
        labels = ("raw", "scaled", "floor", "linear, floor", "constant")
        facts += [
            f"**{name}**, clear tones: the 90 % interval holds {_percent(clear['raw']['coverage'])} before and "
            f"{_percent(clear['scaled']['coverage'])} after scaling, {_percent(clear['floor']['coverage'])} with a "
            f"floor, {_percent(clear['scaled, conformal']['coverage'])} made conformal, on {home['rows']} tones.",
            f"{name}, clear tones: it hears another note in {home['gross_share'] * home['rows']:.0f} of them. NLL with "
            f"them: {_each({label: clear[label]['nll'] for label in labels})}; without them: "
            f"{_each({label: small[label] for label in labels})}.",
            f"{name}, other tones: `scaled` holds from {_percent(cover[least])} ({least}) to {_percent(cover[most])} "
            f"({most}).",
            f"{name}, another note heard, all tones together: the sampled variance ranks such a tone above one that is "
            f"heard right in {_percent(wrong['sample'])} of pairs, the first-order variance in "
            f"{_percent(wrong['linear'])}, the network's own confidence in {_percent(wrong['confidence'])}. Tones of "
            f"another kind are told from clear ones with an AUROC of {shift['sample']:.2f}, {shift['linear']:.2f} and "
            f"{shift['confidence']:.2f} on average. The best rate for the first task is {best}, with "
            f"{_percent(rates[best]['gross'])} of pairs.",
        ]
    return facts


def spread(values: Iterable[float], text: Callable[[float], str] | None = None) -> str:
    """Mean ± standard error, or the one value."""
    found, text = list(values), text or "{:.3f}".format
    if not found:
        return "-"
    error = stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
    return text(fmean(found)) if error is None else f"{text(fmean(found))} ± {text(error).lstrip('+')}"


def markdown(lines: Lines, words: int = 1) -> str:
    """A Markdown table; all columns but the first `words` are right-aligned."""
    rule = ["---"] * words + ["---:"] * (len(lines[0]) - words)
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def listed(sentences: list[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _methods(nets: list[Record]) -> list[str]:
    return list(nets[0]["sets"]["home"]["methods"])


def _sets(nets: list[Record]) -> list[str]:
    return list(max((net["sets"] for net in nets), key=len))


def _values(nets: list[Record], name: str, method: str, metric: str) -> list[float]:
    found = [net["sets"][name]["methods"][method][metric] for net in nets if name in net["sets"]]
    return [value for value in found if value is not None]


def _named(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _each(values: dict[str, float]) -> str:
    return ", ".join(f"`{label}` {value:.2f}" for label, value in values.items())


def _range(shares: list[float]) -> str:
    return f"{_percent(fmean(shares))} on average, {_percent(min(shares))} to {_percent(max(shares))}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
