"""Draw docs/images/diamonds.png, the first picture of the README: `python docs/make_diamonds.py`, from the root.

Prices of diamonds by their weight (53,940 of 2008; in the package `plotnine`). A network is trained on 1,000 of those
below 1.6 carat, and calibrated on 1,000 others; heavier diamonds are in neither.
"""

import csv
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

import latedrop
from latedrop.files import write_aside
from latedrop.plots import png
from latedrop.plots.canvas import COLOURS, GREY, new_figure

IMAGE = Path(__file__).parent / "images" / "diamonds.png"
KNOWN = 1.6
"""Carat: diamonds above are not shown to the network."""
ROWS, SHOWN = 1000, 400
LEVEL = 0.9


def diamonds() -> tuple[Tensor, Tensor]:
    """Weight in carat and price in thousands of dollars, `(N, 1)` each, in random order."""
    package = find_spec("plotnine")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("expected the package plotnine, which holds the data; it is not installed. Install it.")
    with (Path(package.submodule_search_locations[0]) / "data" / "diamonds.csv").open(encoding="utf-8") as stream:
        rows = [(float(row["carat"]), float(row["price"]) / 1000) for row in csv.DictReader(stream)]
    table = torch.tensor(rows)[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return table[:, :1], table[:, 1:]


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """Train a network as anybody would; smooth, as the kinks of ReLUs show as steps of the band."""
    torch.manual_seed(0)
    hidden = [nn.Linear(1, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU()]
    model = nn.Sequential(*hidden, nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(500):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def draw() -> bytes:
    """Left: what the network says. Right: the same with its interval."""
    x, y = diamonds()
    known = x[:, 0] < KNOWN
    (x_train, x_val, x_more), (y_train, y_val, y_more) = (part[known][: 3 * ROWS].split(ROWS) for part in (x, y))
    model = trained(x_train, y_train)
    with warnings.catch_warnings():
        # Weights have two decimals: most validation rows look like some training row.
        warnings.filterwarnings("ignore", ".* among the reference rows")
        uq = latedrop.calibrate(model, (x_val, y_val), reference=x_train, progress=False)
    grid = torch.linspace(0.2, 2.6, 400)[:, None]
    p = uq.predict(grid)
    low, high = p.interval(LEVEL)
    print(uq.calibration)
    for name, rows, prices in (("other", x_more, y_more), ("heavier", x[~known], y[~known])):
        ends = uq.predict(rows).interval(LEVEL)
        inside = float(((prices >= ends[0]) & (prices <= ends[1])).float().mean())
        print(f"{name} diamonds inside their {LEVEL:.0%} interval: {inside:.0%} of {len(rows)}")
    figure = new_figure(12, 4.6)
    axes = figure.subplots(1, 2, sharey=True)
    heavy = x[~known][: SHOWN // 4, 0], y[~known][: SHOWN // 4, 0]
    for ax, title in zip(axes, ("Your network", "Your network with latedrop"), strict=True):
        ax.scatter(x_more[:SHOWN, 0], y_more[:SHOWN, 0], s=9, color=GREY, label="diamonds like those it learned from")
        ax.scatter(*heavy, s=14, color=COLOURS[1], marker="^", label="heavier ones, never seen")
        ax.plot(grid[:, 0], p.mean[:, 0], color=COLOURS[0], linewidth=2, label="prediction")
        ax.axvline(KNOWN, color="0.6", linestyle=":", linewidth=1)
        ax.set(title=title, xlabel="weight [carat]", xlim=(0.2, 2.6), ylim=(0, 32))
    axes[0].set_ylabel("price [$1000]")
    band = axes[1].fill_between(grid[:, 0], low[:, 0], high[:, 0], color=COLOURS[0], alpha=0.22, linewidth=0)
    band.set_label("90 % interval")
    axes[1].legend(frameon=False, fontsize=9, loc="upper left")
    return png(figure)


if __name__ == "__main__":
    write_aside(IMAGE, draw())
