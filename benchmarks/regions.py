"""How much smaller regions of several outputs are than a box by Bonferroni: `python -m benchmarks.regions`

`uq.joint(rows)` beside conformal intervals at `1 - (1 - level) / K` for each of K outputs, from the same rows, which
need not be divided. Volumes are compared at equal coverage: both are blown up or shrunk until they hold 90 % of the
test rows.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import Rows, divided, fitted, mlp, scaled
from benchmarks.sets import columns_of, in_and_out, shipped
from benchmarks.timing import by_sets, interval, markdown_table
from latedrop import LatedropError, calibrate

LEVEL = 0.9


def compared(name: str, seed: int) -> dict[str, Any]:
    """Return what each region holds, and the logarithm of its volume at equal coverage."""
    train, validation, other, (x, y) = scaled(divided(SETS[name](seed), seed, (0.4, 0.2, 0.2, 0.2)))
    torch.manual_seed(seed)
    uq = calibrate(fitted(mlp(x.shape[1], y.shape[1]), train, seed), validation, reference=train[0], progress=False)
    outputs = y.shape[1]
    p, alone = uq.joint(other).predict(x), uq.conformal(other).predict(x)
    region, bands = p.region(LEVEL), p.bands(LEVEL)
    z = (y - p.mean).double() / p.std
    ball = float(region.log_volume.mean() - region.root.diagonal(dim1=1, dim2=2).log().sum(1).mean())
    log_std = float(p.std.double().log().sum(1).mean())
    root = torch.linalg.cholesky(p.correlation)
    reach = torch.linalg.solve_triangular(root, z[..., None], upper=False)[..., 0].norm(dim=1)
    size = float(root.diagonal(dim1=1, dim2=2).log().sum(1).mean())
    ellipsoid = ball + outputs * math.log(_quantile(reach)) + size + log_std
    try:
        low, high = alone.interval(1 - (1 - LEVEL) / outputs)
        width = (high - low).double() / 2
        reach = ((y - p.mean).double().abs() / width).amax(1)
        size = outputs * math.log(2 * _quantile(reach)) + float(width.log().sum(1).mean())
        bonferroni = {"coverage": float((reach <= 1).double().mean()), "equal": size}
    except LatedropError:  # too few rows for the level
        bonferroni = {}
    inside = ((bands[0] <= y) & (y <= bands[1])).all(1)
    band = outputs * math.log(2 * _quantile(z.abs().amax(1))) + log_std
    return {
        "outputs": outputs,
        "ellipsoid": {"coverage": float(region.contains(y).double().mean()), "equal": ellipsoid},
        "bands": {"coverage": float(inside.double().mean()), "equal": band},
        "bonferroni": bonferroni,
    }


def _quantile(values: Tensor) -> float:
    return float(values.quantile(LEVEL, interpolation="higher"))


def _buildings(seed: int) -> Rows:
    return in_and_out(columns_of("residential_building", drop=()), outputs=2)


def _serum(seed: int) -> Rows:
    x, y = shipped("load_diabetes")  # whose targets are whole numbers
    # Outputs: total, low- and high-density cholesterol, their ratio.
    return torch.cat([x[:, :4], x[:, 8:], y[:, None]], 1), x[:, 4:8]


def _digits(seed: int) -> Rows:
    images = shipped("load_digits")[0].reshape(-1, 8, 8)
    hidden = nn.functional.avg_pool2d(images[:, None, 2:6, 2:6], 2)[:, 0].flatten(1)
    seen = torch.ones(8, 8, dtype=torch.bool)
    seen[2:6, 2:6] = False
    return images[:, seen], hidden


def _waves(seed: int) -> Rows:
    dice = torch.Generator().manual_seed(seed)
    count, past, ahead = 2000, 24, 12
    t = torch.arange(past + ahead)
    phase = 6.28 * torch.rand(2, count, 1, generator=dice)
    noise = [0.15 * torch.randn(count, generator=dice)]
    for _ in t[1:]:
        noise.append(0.9 * noise[-1] + 0.15 * torch.randn(count, generator=dice))
    series = torch.sin(6.28 * t / 24 + phase[0]) + 0.4 * torch.sin(6.28 * t / 7 + phase[1]) + torch.stack(noise, 1)
    return series[:, :past], series[:, past:]


SETS: dict[str, Callable[[int], Rows]] = {
    "buildings: price, cost": _buildings,
    "diabetes: four of serum": _serum,
    "digits: four hidden parts": _digits,
    "waves: twelve steps (synthetic)": _waves,
}


def table(record: dict[str, Any]) -> str:
    """Return coverage, and the side of a cube of the same volume in units of that of the Bonferroni box."""
    rows = []
    for name, runs in record["sets"].items():
        runs = [run for run in runs if run["bonferroni"]]
        kinds = ("bonferroni", "bands", "ellipsoid")
        shares = [f"{statistics.mean(run[kind]['coverage'] for run in runs):.1%}" for kind in kinds]
        sides = []
        for kind in kinds[1:]:
            logs = [(run[kind]["equal"] - run["bonferroni"]["equal"]) / run["outputs"] for run in runs]
            low, middle, high = interval([math.exp(log) for log in logs])
            sides.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append([name, *shares, *sides])
    head = ["outputs", "box holds", "bands hold", "ellipsoid holds", "bands", "ellipsoid"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    by_sets("regions", compared, SETS, seeds=10, level=LEVEL)
