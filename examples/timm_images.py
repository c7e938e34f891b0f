# %% [markdown]
"""An image regressor from timm, as it is: dropout goes on its convolutions while it predicts, and nothing is replaced.

Each image shows a disc under noise; the network estimates the radius in pixels. timm's smallest ResNet keeps this
short; any model with `num_classes=1` is taken the same way.
"""

# %%
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import latedrop
from latedrop import plots

# %%
torch.manual_seed(0)


def discs(count: int) -> tuple[Tensor, Tensor]:
    radius, at = 2 + 6 * torch.rand(count, 1), torch.arange(20.0) - 9.5
    distance = (at[:, None] ** 2 + at**2).sqrt()
    image = torch.sigmoid(radius[..., None] - distance)[:, None]
    return image + 0.5 * torch.randn(count, 1, 20, 20), radius


# %%
net, (image, radius) = timm.create_model("test_resnet", num_classes=1, in_chans=1), discs(128)
optimiser = torch.optim.Adam(net.parameters(), lr=2e-2)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(image), radius).backward()
    optimiser.step()

# %%
validation = discs(300)
sites = latedrop.find_sites(net, validation[0], kind="channel")
uq = latedrop.calibrate(net, validation, sites=sites, method=latedrop.FirstOrder(floor=True))
print(uq.calibration.sites)
x, y = discs(500)
p = uq.predict(x)
held = latedrop.metrics.coverage(p.mean, p.variance, y, level=0.9)
rmse = latedrop.metrics.rmse(p.mean, None, y)
print(f"the 90 % interval holds {held:.1%} of {len(p)} fresh images")
print(f"RMSE {rmse:.2f} px, mean std {p.std.mean():.2f} px, spread of the radius {y.std():.2f} px")

# %% [markdown]
# What to see: each dot is an image at the true radius of its disc; about nine of ten lie inside the band.

# %%
low, high = p.interval(0.9)
ax = plots.intervals(
    p.mean, p.mean, {0.9: (low, high)}, target=y, xlabel="predicted radius [px]", ylabel="true radius [px]"
)
Path("output").mkdir(exist_ok=True)
ax.figure.savefig("output/timm_images.png", dpi=160)
