# %% [markdown]
"""One-dimensional regression with a band, and what happens where there are no data.

Training and validation inputs leave a gap in the middle. Injected dropout asks how much the output leans on single
hidden units, not how far away the data are: alone (`method="linear"`) its band stays narrow in the gap, although the
network is off there. The default also compares each input with those it has seen, and widens the band.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import latedrop
from latedrop import metrics, plots

# %%
torch.manual_seed(0)


def truth(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(2 * x) + 0.3 * x


def observed(low: float, high: float, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = low + (high - low) * torch.rand(rows, 1)
    return x, truth(x) + 0.15 * torch.randn(rows, 1)


def outside_gap(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    (x1, y1), (x2, y2) = observed(-3, -0.8, rows // 2), observed(0.8, 3, rows // 2)
    return torch.cat([x1, x2]), torch.cat([y1, y2])


# %%
(x_train, y_train), validation = outside_gap(120), outside_gap(100)
net = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
for _ in range(600):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x_train), y_train).backward()
    optimiser.step()

# %%
predictors = {
    "injected dropout alone": latedrop.calibrate(
        net, validation, method=latedrop.FirstOrder(floor=True), progress=False
    ),
    "the default": latedrop.calibrate(net, validation, reference=x_train, progress=False),
}
fresh = {"near the data": outside_gap(2000), "in the gap": observed(-0.8, 0.8, 2000), "beyond": observed(3, 4, 2000)}
for title, uq in predictors.items():
    print(title)
    for name, (x, y) in fresh.items():
        p = uq.predict(x)
        held, rmse = metrics.coverage(p.mean, p.variance, y, level=0.9), metrics.rmse(p.mean, None, y)
        print(f"{name:14} the 90 % interval holds {held:5.1%}; mean std {p.std.mean():.2f}, RMSE {rmse:.2f}")

# %% [markdown]
# What to see: near the data both bands are the same. In the gap and beyond the data the band of dropout alone leaves
# out the truth; that of the default widens and holds it.

# %%
grid = torch.linspace(-4, 4, 400)[:, None]
figure, axes = plt.subplots(1, 2, figsize=(12, 4), sharey=True, layout="constrained")
for ax, (title, uq) in zip(axes, predictors.items(), strict=True):
    p = uq.predict(grid)
    ax.axvspan(-0.8, 0.8, color="0.93", zorder=0, label="no data")
    plots.intervals(grid, p.mean, {level: p.interval(level) for level in (0.5, 0.9)}, ax=ax, ylabel="y")
    ax.plot(grid, truth(grid), color="black", linestyle="--", linewidth=1, label="truth")
    ax.scatter(x_train, y_train, s=6, color="0.3", label="training rows")
    ax.set(title=title, ylim=(-4, 4))
axes[0].legend(ncols=2, fontsize="small")
axes[1].get_legend().remove()
Path("output").mkdir(exist_ok=True)
figure.savefig("output/band.png", dpi=110)
