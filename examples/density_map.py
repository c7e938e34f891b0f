# %% [markdown]
"""A density map from a U-Net: a map of uncertainty, and an interval on the count through a readout.

Objects are bright blobs; the target map holds a bump of mass 1 for each, so that its sum is the count. The variance of
the count is not the sum of the pixels' variances: a dropped channel moves many pixels the same way, so that their
deviations add up. The script prints both. Map and count are therefore calibrated apart.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop

# %%
torch.manual_seed(0)


def scenes(number: int) -> tuple[Tensor, Tensor]:
    at, centres = torch.arange(24.0), 3 + 18 * torch.rand(2, number, 12, 1)
    rows, columns = torch.softmax(-((at - centres) ** 2) / 3, dim=-1)
    present = (torch.rand(number, 12) < torch.rand(number, 1)).float()
    brightness = present * (5 + 10 * torch.rand(number, 12))
    density, image = (torch.einsum("nk,nkr,nkc->nrc", w, rows, columns)[:, None] for w in (present, brightness))
    return image + 0.3 * torch.randn_like(image), density


# %%
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.deep, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge, self.leave = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x).relu()
        coarse = self.deep(self.down(fine).relu()).relu()
        return self.leave(self.merge(torch.cat([fine, self.up(coarse)], 1)).relu())


# %%
def count(density: Tensor) -> Tensor:
    return density.sum((1, 2, 3))


# %%
net, (image, density) = UNet(), scenes(256)
optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
for rows in 20 * torch.arange(256).split(32):
    optimiser.zero_grad()
    (1000 * nn.functional.mse_loss(net(image[rows]), density[rows])).backward()
    optimiser.step()

# %%
(x_val, map_val), (x, true) = scenes(200), scenes(300)
sites = latedrop.find_sites(net, x_val, kind="channel")
counts = latedrop.calibrate(net, (x_val, count(map_val)), readout=count, sites=sites, method="linear")
maps = latedrop.calibrate(net, scenes(40), method=latedrop.Sampling(rates=[0.02, 0.05, 0.1, 0.2, 0.3], draws=50))
p = counts.predict(x)
held = latedrop.metrics.coverage(p.mean, p.variance, count(true), level=0.9)
print(f"the 90 % interval on the count holds {held:.1%} of {len(p)} fresh scenes; mean std {p.std.mean():.2f} objects")
drawn = latedrop.sample(net, x[:10], 0.005, draws=1000, sites=counts.calibration.sites, keep_draws=True)
together, apart = drawn.outputs.sum((2, 3, 4)).std(0), count(drawn.variance).sqrt()
print(f"over draws the count has std {together.mean():.2f}; the sum of pixel variances would say {apart.mean():.2f}")

# %% [markdown]
# What to see: the standard deviation is largest on the objects, where a count can go wrong, and most of all where they
# overlap.

# %%
scene = int(count(true).argmax())
one, (low, high) = maps.predict(x[scene : scene + 1]), (float(end[scene]) for end in p.interval(0.9))
figure, axes = plt.subplots(1, 3, figsize=(9, 2.9), layout="constrained")
panels = {f"image, {count(true)[scene]:.0f} objects": x[scene, 0], f"density, count {low:.1f} to {high:.1f}": one.mean}
for ax, (title, values) in zip(axes, (panels | {"standard deviation": one.std}).items(), strict=True):
    figure.colorbar(ax.imshow(values.squeeze().numpy(), cmap="cividis"), ax=ax, shrink=0.9)
    ax.set(title=title, xticks=[], yticks=[])
Path("output").mkdir(exist_ok=True)
figure.savefig("output/density_map.png", dpi=120)
