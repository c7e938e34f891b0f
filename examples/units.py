# %% [markdown]
"""Several outputs with different units: a scale and a check for each.

One network predicts the temperature (kelvin), the pressure (kilopascal) and the flow (litres per second) of a synthetic
boiler. Each output has its own scale, so that the largest unit does not decide for the others.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop
from latedrop import metrics, plots

# %%
torch.manual_seed(0)
NAMES = ("temperature [K]", "pressure [kPa]", "flow [l/s]")


# %%
def boiler(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, 4)
    heat, valve, load, age = x.unbind(1)
    temperature = 350 + 60 * heat - 20 * valve * load + 4 * torch.randn(rows)
    pressure = 2000 + 900 * heat**2 + 300 * load + 80 * torch.randn(rows)
    flow = 0.2 + 0.5 * valve * (1 - 0.3 * age) + 0.05 * load + 0.02 * torch.randn(rows)
    return x, torch.stack([temperature, pressure, flow], 1)


# %%
x_train, y_train = boiler(600)
centre, spread = y_train.mean(0), y_train.std(0)
net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(300):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x_train), (y_train - centre) / spread).backward()
    optimiser.step()


# %%
def in_units(output: Tensor) -> Tensor:
    return output * spread + centre


# %%
x_val, y_val = boiler(300)
uq = latedrop.calibrate(net, (x_val, y_val), readout=in_units, progress=False)
x, y = boiler(1000)
p = uq.predict(x)
held = metrics.coverage(p.mean, p.variance, y, level=0.9, per_output=True)
rmse = metrics.rmse(p.mean, None, y, per_output=True)
low, high = p.interval(0.9)
for k, name in enumerate(NAMES):
    print(
        f"{name:16} first row {low[0, k]:8.2f} to {high[0, k]:8.2f}, true {y[0, k]:8.2f};  RMSE {rmse[k]:6.2f}, "
        f"scale {uq.calibration.scales[k]:.3g}, the 90 % interval holds {held[k]:.1%}"
    )

# %%
one = latedrop.calibrate(net, (x_val, y_val), readout=in_units, per_output=False, progress=False)
p = one.predict(x)
held = metrics.coverage(p.mean, p.variance, y, level=0.9, per_output=True)
print("with one scale for all: " + ", ".join(f"{name} {value:.1%}" for name, value in zip(NAMES, held, strict=True)))

# %% [markdown]
# What to see: three outputs in three units, each with a band of its own width that holds about nine of ten rows.

# %%
p, shown = uq.predict(x), slice(0, 150)
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
for k, (ax, name) in enumerate(zip(axes, NAMES, strict=True)):
    mean, ends = p.mean[shown, k], {0.9: (low[shown, k], high[shown, k])}
    plots.intervals(mean, mean, ends, ax=ax, target=y[shown, k], xlabel=f"predicted {name}", ylabel=name)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/units.png", dpi=100)
