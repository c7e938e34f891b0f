# %% [markdown]
"""Tabular regression with numpy arrays: a 90 % interval for every row, and how many test rows it holds.

The data are scikit-learn's bundled diabetes set: 442 patients, 10 measurements, disease progression after a year.
The network learns a standardised target; a readout brings its output back to the target's own unit.
"""

# %%
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import latedrop
from latedrop import plots

# %%
torch.manual_seed(0)
x, y = load_diabetes(return_X_y=True)
order = torch.randperm(len(x)).numpy()
train, val, test = order[:222], order[222:332], order[332:]

# %%
# Standardise with the training rows alone; the test rows must not leak into it.
x = (x - x[train].mean(0)) / x[train].std(0)
y_mean, y_std = float(y[train].mean()), float(y[train].std())

# %%
net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
x_train = torch.tensor(x[train], dtype=torch.float32)
y_train = torch.tensor((y[train] - y_mean) / y_std, dtype=torch.float32)[:, None]
optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x_train), y_train).backward()
    optimiser.step()


# %%
def progression(output: torch.Tensor) -> torch.Tensor:
    """From the network's standardised output to the unit of the target."""
    return output[:, 0] * y_std + y_mean


# %%
uq = latedrop.calibrate(net, (x[val], y[val]), readout=progression, progress=False)
p = uq.predict(x[test])
low, high = p.interval(0.9)

# %%
print(p.to_pandas(level=0.9).head(5).round(0).assign(true=y[test][:5]).to_string(index=False))
inside = (low.numpy() <= y[test]) & (y[test] <= high.numpy())
width, rmse = (high - low).mean(), latedrop.metrics.rmse(p.mean, None, y[test])
print(f"the 90 % interval holds {inside.mean():.1%} of {len(test)} test rows; its mean width is {width:.0f}")
print(f"RMSE of the network {rmse:.1f}, spread of the target {y[test].std():.1f}")

# %% [markdown]
# What to see: each dot is a patient at the true value; about nine of ten lie inside the band. The band is wide, since
# the network knows little more than the average does.

# %%
name = "progression after a year [score]"
ax = plots.intervals(p.mean, p.mean, {0.9: (low, high)}, target=y[test], xlabel=f"predicted {name}", ylabel=name)
Path("output").mkdir(exist_ok=True)
ax.figure.savefig("output/tabular.png", dpi=160)
