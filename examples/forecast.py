# %% [markdown]
"""An LSTM forecaster: intervals for each of the next twelve steps of a series.

The series is a slow and a fast wave with noise that carries over from step to step, so that later steps are harder.
Each step is one output with a scale of its own (`per_output`, the default), and the intervals widen along the horizon.
A layer that reads the data directly never takes dropout: the linear layer before the LSTM makes the LSTM a site.
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
PAST, AHEAD = 48, 12


# %%
def windows(count: int) -> tuple[Tensor, Tensor]:
    t = torch.arange(PAST + AHEAD)
    phase = 6.28 * torch.rand(2, count, 1)
    noise = [0.15 * torch.randn(count)]
    for _ in t[1:]:
        noise.append(0.9 * noise[-1] + 0.15 * torch.randn(count))
    series = torch.sin(6.28 * t / 24 + phase[0]) + 0.4 * torch.sin(6.28 * t / 7 + phase[1]) + torch.stack(noise, 1)
    return series[:, :PAST, None], series[:, PAST:]


# %%
class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.lstm, self.head = nn.Linear(1, 16), nn.LSTM(16, 48, batch_first=True), nn.Linear(48, AHEAD)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.enter(x))
        return self.head(states[:, -1])


# %%
net, (x_train, y_train) = Forecaster(), windows(1024)
optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
for rows in 20 * torch.arange(1024).split(128):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x_train[rows]), y_train[rows]).backward()
    optimiser.step()

# %%
uq = latedrop.calibrate(net, windows(200), method=latedrop.Sampling(rates=[0.01, 0.05, 0.1], draws=30), progress=False)
print(uq.calibration.sites)
x, y = windows(500)
p = uq.predict(x)
held = metrics.coverage(p.mean, p.variance, y, level=0.9, per_output=True)
width = metrics.interval_width(p.mean, p.variance, y, level=0.9, per_output=True)
print("step   " + "".join(f"{k:6d}" for k in range(1, AHEAD + 1)))
print("covered" + "".join(f"{100 * c:5.0f}%" for c in held))
print("width  " + "".join(f"{w:6.2f}" for w in width))
overall = metrics.coverage(p.mean, p.variance, y, level=0.9)
print(f"the 90 % interval holds {overall:.1%} of {y.numel()} fresh values")

# %% [markdown]
# What to see: the bands widen along the horizon, as the network knows less about later steps.

# %%
figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ahead = torch.arange(PAST, PAST + AHEAD)
bands = {level: tuple(end[0] for end in p.interval(level)) for level in (0.5, 0.9)}
plots.intervals(ahead, p.mean[0], bands, ax=ax, target=y[0], xlabel="time step", ylabel="value")
ax.plot(range(24, PAST), x[0, 24:, 0], color="0.5", linewidth=1, label="past")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/forecast.png", dpi=160)
