"""Whether intervals hold for targets without labels that are drawn otherwise: `python -m benchmarks.population`

`uq.adapted(x_target, rows)` beside `uq.conformal(rows)`, where target rows are drawn with a chance that grows as
`exp(tilt · position)` along an input, one of those that the target follows most, in either direction; and where they
lie beyond all labelled rows (cut), which has to be refused. The target's inputs are the test rows', without labels.
"""

import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.nets import Rows, divided, fitted, interval_measures, mlp, scaled
from benchmarks.sets import in_and_out, ranking
from benchmarks.sets import table as rows_of
from benchmarks.timing import by_sets, interval, markdown_table
from latedrop import FirstOrder, Prediction, Predictor, calibrate
from latedrop.errors import DataError

LEVEL = 0.9
SETS = ("concrete", "kin8nm", "power-plant", "wine-quality-red", "airfoil", "protein-tertiary-structure", "synthetic")
MOST_ROWS = 10_000
TILTS = {"none": 0.0, "mild": 1.0, "strong": 2.0}
BASES: dict[str, Any] = {"the default": "terms", "first order and a floor": FirstOrder(floor=True)}


def compared(name: str, seed: int) -> dict[str, Any]:
    """Return both kinds of intervals by variance and shift."""
    dice = torch.Generator().manual_seed(seed)
    if name == "synthetic":  # noise that grows tenfold along an input
        x = torch.randn(3000, 4, generator=dice)
        noise = (0.8 * x[:, :1]).exp() * 0.3 * torch.randn(3000, 1, generator=dice)
        rows, order = (x, x[:, 1:2].sin() + noise), [0]
    else:
        array = rows_of(name, MOST_ROWS)
        rows, order = in_and_out(array), ranking(array)
    train, validation, other, rest = scaled(divided(rows, seed, (0.3, 0.15, 0.25, 0.3)))
    torch.manual_seed(seed)
    net = fitted(mlp(train[0].shape[1]), train, seed)
    column = order[seed // 2 % len(order)]
    along, position = [(-1) ** seed * part[0][:, column] for part in (other, rest)]
    runs: dict[str, Any] = {}
    for base, method in BASES.items():
        reference = train[0] if method == "terms" else None
        uq = calibrate(net, validation, reference=reference, method=method, progress=False)
        for kind, tilt in TILTS.items():
            weights = (tilt * position.clamp(-3, 3)).exp()
            drawn = torch.multinomial(weights, len(weights) // 3, generator=dice)
            runs[f"{base}, {kind}"] = both(uq, rest, drawn, other)
        edge = float(position.quantile(0.7))  # targets lie where no labelled row does
        below = (along <= edge).nonzero()[:, 0]
        runs[f"{base}, cut"] = both(uq, rest, (position > edge).nonzero()[:, 0], (other[0][below], other[1][below]))
    return runs


def both(uq: Predictor, rest: Rows, chosen: Tensor, labelled: Rows) -> dict[str, Any]:
    """Judge plain and adapted intervals on the chosen rows; None where there are none, or where it is refused."""
    x, y = rest[0][chosen], rest[1][chosen].double()
    if not len(chosen):
        return {"plain": None, "adapted": None}
    plain = judged(uq.conformal(labelled).predict(x), y)
    try:
        adapted = uq.adapted(x, labelled)
    except DataError:
        return {"plain": plain, "adapted": None}
    counts = {"effective": adapted.effective_rows, "rows": len(labelled[0])}
    return {"plain": plain, "adapted": judged(adapted.predict(x), y) | counts}


def judged(p: Prediction, y: Tensor) -> dict[str, float]:
    """Return the share of rows inside, and the interval score of those whose interval has an end."""
    low, high = (end.double() for end in p.interval(LEVEL))
    finite = (high - low < 1e30)[:, 0]
    measures = interval_measures(low[finite], high[finite], y[finite], LEVEL)
    held = measures["coverage"] * int(finite.sum()) + int((~finite).sum())
    return {"coverage": held / len(y), "score": measures["score"]}


def table(record: dict[str, Any]) -> str:
    rows = []
    for name in next(iter(record["sets"].values()))[0]:
        runs = [run[name] for runs in record["sets"].values() for run in runs if run[name]["plain"] is not None]
        ran = [run for run in runs if run["adapted"] is not None]
        refused = f"{len(runs) - len(ran)} of {len(runs)}"
        if len(ran) < len(runs) / 2:
            rows.append([name, refused, *["-"] * 6])
            continue
        shares = [[run[kind]["coverage"] for run in ran] for kind in ("plain", "adapted")]
        inside = [f"{statistics.mean(each):.1%}" for each in shares]
        off = [f"{statistics.mean(abs(share - LEVEL) for share in each):.1%}" for each in shares]
        low, middle, high = interval([run["adapted"]["score"] / run["plain"]["score"] for run in ran])
        effective = statistics.median(run["adapted"]["effective"] / run["adapted"]["rows"] for run in ran)
        ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        rows.append([name, refused, f"{effective:.0%}", *inside, *off, ratio])
    head = ["variance, shift", "refused", "effective rows", "plain holds", "adapted holds", "plain is off by"]
    return markdown_table([*head, "adapted", "score, adapted / plain"], rows)


if __name__ == "__main__":
    by_sets("population", compared, SETS, seeds=4, level=LEVEL)
