# %% [markdown]
"""Twelve steps of a forecast at once: bands for the whole path, and ellipses for two steps together.

An interval for each step holds that step; the whole path leaves one of twelve intervals far more often. Other labelled
rows tell how the errors of the steps go together.
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
PAST, AHEAD = 24, 12


def windows(count: int) -> tuple[Tensor, Tensor]:
    t = torch.arange(PAST + AHEAD)
    phase = 6.28 * torch.rand(count, 1)
    noise = [0.15 * torch.randn(count)]
    for _ in t[1:]:
        noise.append(0.9 * noise[-1] + 0.15 * torch.randn(count))
    series = torch.sin(6.28 * t / 24 + phase) + torch.stack(noise, 1)
    return series[:, :PAST], series[:, PAST:]


# %%
net = nn.Sequential(nn.Linear(PAST, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, AHEAD))
x_train, y_train = windows(1000)
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(200):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x_train), y_train).backward()
    optimiser.step()

# %%
uq = latedrop.calibrate(net, windows(300), reference=x_train, progress=False)
together = uq.joint(windows(400))
x, y = windows(2000)
p = together.predict(x)
single, bands, region = p.interval(0.9), p.bands(0.9), p.region(0.9)


def share(inside: Tensor) -> str:
    return f"{inside.float().mean():.1%}"


print("share of 2000 fresh paths that lie inside as a whole")
print("twelve 90 % intervals ", share(((single[0] <= y) & (y <= single[1])).all(1)))
print("bands for the path    ", share(((bands[0] <= y) & (y <= bands[1])).all(1)))
print("ellipsoid             ", share(region.contains(y)))
side = ((region.log_volume - (bands[1] - bands[0]).double().log().sum(1)) / AHEAD).exp().mean()
print(f"volume of the ellipsoid: that of a box whose sides are {side:.0%} of the bands' widths")

# %% [markdown]
# What to see: bands for the whole path are wider than intervals for single steps. Errors of neighbouring steps go
# together, so the ellipse of two steps is narrow where the box of their bands has room for paths that do not happen.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", width_ratios=(2, 1))
steps = torch.arange(1, AHEAD + 1)
shown = {0.9: tuple(end[0] for end in single)}
plots.intervals(steps, p.mean[0], shown, ax=left, target=y[0], xlabel="step ahead", ylabel="value")
for end, label in zip(bands, ("bands for the path", None), strict=True):
    left.plot(steps, end[0], color="#D55E00", linewidth=1, label=label)
left.legend(frameon=False)
right.plot(*region.outline(10, 11)[0].T, color="#0072B2", label="ellipse of both steps")
low, high = bands[0][0, [10, 11]], bands[1][0, [10, 11]]
right.add_patch(plt.Rectangle(low.tolist(), *(high - low).tolist(), fill=False, edgecolor="#D55E00", label="bands"))
right.plot(*(p.mean[0] + y - p.mean)[:300, [10, 11]].T, ".", color="0.6", markersize=2, zorder=0)
right.set(xlabel="step 11", ylabel="step 12")
right.legend(frameon=False, loc="upper left", fontsize="small")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/regions.png", dpi=160)
