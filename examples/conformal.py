# %% [markdown]
"""Conformal intervals: coverage that is guaranteed, measured on fresh data.

The noise has heavy tails and grows with the input, so that Gaussian intervals are off. The default fits a Student t to
the validation errors. Split-conformal intervals need a third set of rows used for nothing else; a new row then lies
inside with at least the stated probability. Isotonic intervals need no rows of their own, follow skewed errors too, and
guarantee nothing.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop
from latedrop import plots

# %%
torch.manual_seed(0)


def rows(count: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 5)
    noise = torch.distributions.StudentT(2.5).sample((count,)) * (0.05 + 0.3 * x[:, 0])
    return x, torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + noise


# %%
x_train, y_train = rows(500)
net = nn.Sequential(nn.Linear(5, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1), nn.Flatten(0))
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(100):
    optimiser.zero_grad()
    nn.functional.l1_loss(net(x_train), y_train).backward()
    optimiser.step()

# %%
validation, held_out, (x, y) = rows(300), rows(300), rows(5000)
gaussian = latedrop.calibrate(net, validation, intervals="gaussian", progress=False)
predictors = {
    "Gaussian": gaussian,
    "Gaussian, relaxed scale": gaussian.scaled("relaxed"),
    "Student t, the default": latedrop.calibrate(net, validation, progress=False),
    "isotonic": latedrop.calibrate(net, validation, intervals="isotonic", progress=False),
    "conformal": gaussian.conformal(held_out),
}
levels = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
curves = {}
print(f"share of {len(y)} fresh rows inside the interval{'50 %':>10}{'90 %':>8}{'99 %':>8}   width at 90 %")
for name, uq in predictors.items():
    p = uq.predict(x)
    ends = {level: p.interval(level) for level in levels}
    inside = {level: float(((low <= y) & (y <= high)).float().mean()) for level, (low, high) in ends.items()}
    width = float((ends[0.9][1] - ends[0.9][0]).mean())
    print(f"{name:44}{inside[0.5]:9.1%}{inside[0.9]:8.1%}{inside[0.99]:8.1%}{width:12.2f}")
    curves[name] = (levels, list(inside.values()))

# %% [markdown]
# What to see: on the diagonal an interval holds what it promises. The Gaussian curve lies above it, as heavy tails make
# its intervals too wide for most rows; those of the default, isotonic and conformal ones follow the diagonal.

# %%
figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
plots.calibration_curves(curves, ax)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/conformal.png", dpi=160)
