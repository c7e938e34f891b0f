"""Calibrate networks that somebody else trained: the thirty of `mag-net`.

    python -m benchmarks.trained                      # all; JSON to benchmarks/results
    python -m benchmarks.trained --parts "N87 LSTM"   # some of them; the others are kept as they are

The package carries float64 networks for the power that is lost in the core of a transformer, three for each of ten
ferrites, measured losses, and curves from data sheets. Loss is in hundredths of its natural logarithm, so that an
error of 1 is an error of about one percent. `pip install --no-deps mag-net==0.1.0 h5py` adds what is needed.

The rows that a network is calibrated on (`home`) are cut in three: validation rows, rows for conformal intervals, and
test rows. The other rows are of kinds that no fit has seen.
"""

import math
import warnings
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import interval_measures
from benchmarks.sets import packaged
from benchmarks.timing import by_parts, markdown_table
from latedrop import metrics
from latedrop.data.rows import take_rows
from latedrop.evaluation.evaluation import likelihood

MATERIALS = ("3C90", "3C94", "3E6", "3F4", "77", "78", "N27", "N30", "N49", "N87")
KINDS = {"Sinusoidal": "MLPs for sine waves", "Trapezoidal": "MLPs for triangles and trapezoids", "LSTM": "LSTMs"}
SETS = {
    "home": "as calibrated on, other rows",
    "frequency": "above 300 kHz; calibrated on what is below",
    "waveform": "trapezoids; calibrated on triangles",
    "sine": "sine waves; calibrated on triangles",
    "data sheet": "the manufacturer's curves, 25 °C",
    "hot": "the manufacturer's curves, 100 °C",
}
MEASURES = {"rmse": "RMSE [%]", "gain": "gain", "coverage": "held by 90 %", "width": "width [%]", "score": "score"}
HIGHEST = 300e3  # Hz; the rows of `home` lie at or below it, the `frequency` rows above
LEVEL, DRAWS = 0.9, 100

Rows = tuple[Any, Tensor]
Columns = dict[str, np.ndarray]


class Task(NamedTuple):
    """A trained network, rows of the kind that it is calibrated on, and rows of other kinds."""

    model: nn.Module
    home: Rows
    shifted: dict[str, Rows]


def measure(task: Task) -> dict[str, Any]:
    """Return, for each kind of rows, the measures of every method and how well novelty tells these rows from `home`."""
    third = len(task.home[1]) // 3
    cuts = [slice(k * third, (k + 1) * third) for k in range(3)]
    fit, conformal, test = ((take_rows(task.home[0], cut), task.home[1][cut]) for cut in cuts)
    options: dict[str, Any] = {"readout": percent, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", latedrop.LatedropWarning)
        default = latedrop.calibrate(task.model, fit, **options)
        paper = latedrop.calibrate(task.model, fit, method=latedrop.Sampling(draws=DRAWS), **options)
    exact = default.conformal(conformal)
    error, other = (y - default.predict(x).mean for x, y in (fit, conformal))
    level = error.square().mean()
    reach = other.abs().sort().values[math.ceil((third + 1) * LEVEL) - 1]
    half = metrics.levels.central_quantile(LEVEL) * level.sqrt()
    usual, kinds = default.predict(test[0]).novelty, {}
    for name, (x, y) in {"home": test, **task.shifted}.items():
        p, drawn = default.predict(x), paper.predict(x)
        base = float(metrics.nll(p.mean, level.expand_as(y), y))
        methods = {
            "constant": scored(p.mean, (p.mean - half, p.mean + half), y, 0.0),
            "constant, conformal": scored(p.mean, (p.mean - reach, p.mean + reach), y, None),
            "paper": scored(drawn.mean, drawn.interval(LEVEL), y, base - likelihood(drawn, y)),
            "default": scored(p.mean, p.interval(LEVEL), y, base - likelihood(p, y)),
            "default, conformal": scored(p.mean, exact.predict(x).interval(LEVEL), y, None),
        }
        kinds[name] = {"rows": len(y), "methods": methods}
        if p.novelty is not None and usual is not None:
            beyond = torch.arange(len(y) + len(usual)) < len(y)
            kinds[name]["auroc"] = float(metrics.auroc(torch.cat([p.novelty, usual]), beyond))
    return kinds


def scored(mean: Tensor, ends: tuple[Tensor, Tensor], y: Tensor, gain: float | None) -> dict[str, float | None]:
    """Return the measures of intervals; `gain` is in nats over a constant, None where there is no density."""
    rmse = float((y - mean).square().mean().sqrt())
    return {"rmse": rmse, "gain": gain, **interval_measures(*ends, y, LEVEL)}


def percent(output: Tensor) -> Tensor:
    """Return hundredths of the natural logarithm of the loss, `(N,)`, from its decimal logarithm `(N, 1)`."""
    return 100 * math.log(10) * output[:, 0]


def task(material: str, kind: str, rows: int = 1200) -> Task:
    """Return one network, with at most `rows` rows of its home and as many of each other kind."""
    measured, generator = table(material), np.random.default_rng(0)
    sine, slow = measured["Duty_1"] < 0, measured["Frequency"] <= HIGHEST
    own = sine if kind == "Sinusoidal" else measured["Duty_2"] == 0  # triangles
    parts = {"home": (measured, own & slow), "frequency": (measured, own & ~slow)}
    if kind == "Sinusoidal":
        sheet = table(material, "datasheet")
        flux = measured["Flux_Density"][sine]
        inside = (sheet["Flux_Density"] >= flux.min()) & (sheet["Flux_Density"] <= flux.max())
        inside &= sheet["Frequency"] <= HIGHEST
        if len(inside) > 100:  # two materials have no data sheet
            parts["data sheet"] = (sheet, inside & (sheet["Temperature"] == 25))
            parts["hot"] = (sheet, inside & (sheet["Temperature"] == 100))
    else:
        parts["waveform"] = (measured, (measured["Duty_2"] > 0) & slow)
    if kind == "LSTM":
        parts["sine"] = (measured, sine & slow)
    pairs = {}
    for name, (columns, chosen) in parts.items():
        index = generator.permutation(np.flatnonzero(chosen))[:rows]
        some = {column: values[index] for column, values in columns.items()}
        pairs[name] = (inputs(kind, some), torch.tensor(100 * np.log(some["Power_Loss"])))
    return Task(network(material, kind), pairs.pop("home"), pairs)


def network(material: str, kind: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it opens its files as Python 3.11 no longer likes
        from magnet.net import model, model_lstm

        return model_lstm(material) if kind == "LSTM" else model(material, kind)


def table(material: str, name: str = "database") -> Columns:
    """Return the columns of a table of `mag-net`, one row for each set of inputs.

    Read with h5py: the package's own reader wants streamlit and pytables, and unpickles what is beside the numbers.
    """
    import h5py

    with h5py.File(packaged("magnet") / "data" / f"{material}_{name}.h5") as file:
        frame = file["dataframe"]
        names, values = [name.decode() for name in frame["block0_items"]], frame["block0_values"][:]
    given = [i for i, name in enumerate(names) if name not in ("Power_Loss", "Outlier_Factor")]
    first = np.sort(np.unique(values[:, given], axis=0, return_index=True)[1])
    return dict(zip(names, values[first].T, strict=True))


def inputs(kind: str, rows: Columns) -> Any:
    """Return what a network takes: decimal logarithms and duty ratios, or one period of the flux."""
    frequency, flux = (torch.tensor(np.log10(rows[name])) for name in ("Frequency", "Flux_Density"))
    if kind == "LSTM":
        return torch.tensor(waves(rows))[:, :, None], frequency[:, None]
    duty = [torch.tensor(rows[f"Duty_{k}"]) for k in (1, 2, 3, 4) if kind != "Sinusoidal"]
    return torch.stack([frequency, flux, *duty], 1)


def waves(rows: Columns, steps: int = 100) -> np.ndarray:
    """Return one period of the flux density, `(N, steps)`, of mean 0; a triangle is a trapezoid without flat parts."""
    at = np.linspace(0, 1, steps)
    periods = []
    for peak, up, flat, down in zip(*(rows[k] for k in ("Flux_Density", "Duty_1", "Duty_2", "Duty_3")), strict=True):
        if up < 0:
            periods.append(peak * np.sin(2 * np.pi * at))
            continue
        # The voltages of the two ramps make the flux come back to where it started.
        ratio = (1 - up + down) * up / ((1 + up - down) * down)
        first, second = (1.0, 1 / ratio) if up > down else (ratio, 1.0)
        corners = peak * np.array([-first, first, second, -second, -first])
        periods.append(np.interp(at, [0, up, up + flat, 1 - flat, 1], corners))
    return np.stack([period - period.mean() for period in periods])


def home_table(record: dict[str, Any]) -> str:
    """Return methods against measures on the test rows of `home`: means and standard errors over the networks."""
    each = [net["home"]["methods"] for net in record["networks"].values()]
    rows = [[name, *(_spread([one[name][key] for one in each], key) for key in MEASURES)] for name in each[0]]
    return markdown_table(["method", *MEASURES.values()], rows)


def sets_table(record: dict[str, Any]) -> str:
    """Return, by kind of networks and rows, the error, what intervals hold, their score, and the AUROC of novelty."""
    rows = []
    for kind, title in KINDS.items():
        nets = [net for name, net in record["networks"].items() if name.endswith(kind)]
        for name in SETS:
            records = [net[name] for net in nets if name in net]
            if records:
                methods = [one["methods"] for one in records]
                cells = [_spread([one["constant"]["rmse"] for one in methods], "rmse")]
                for method in ("constant", "paper", "default"):
                    cells.append(_spread([one[method]["coverage"] for one in methods], "coverage"))
                cells.append(f"{fmean(one['default']['score'] / one['constant']['score'] for one in methods):.2f}")
                cells.append("-" if name == "home" else f"{fmean(one['auroc'] for one in records):.2f}")
                rows.append([title, SETS[name], *cells])
    heads = ["networks", "rows", "RMSE [%]", "constant holds", "paper holds", "default holds"]
    return markdown_table([*heads, "score, default / constant", "novelty, AUROC"], rows, 2)


def _spread(values: list[float | None], measure: str) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    middle, error = fmean(numbers), stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else math.nan
    if measure == "coverage":
        return f"{100 * middle:.1f} ± {100 * error:.1f} %"
    return f"{middle:+.3f} ± {error:.3f}" if measure == "gain" else f"{middle:.1f} ± {error:.1f}"


if __name__ == "__main__":
    pairs = {f"{material} {kind}": (material, kind) for kind in KINDS for material in MATERIALS}
    by_parts("trained", {name: lambda pair=pair: measure(task(*pair)) for name, pair in pairs.items()}, "networks")
