# %% [markdown]
"""Image regression: a small CNN with BatchNorm, data from a DataLoader, an interval for every image.

Each image shows a blurred disc under noise of varying strength; the network estimates the disc's radius in pixels.
BatchNorm stays in eval mode while dropout is injected: its running statistics are the same after as before.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import latedrop

# %%
torch.manual_seed(0)


def discs(count: int) -> TensorDataset:
    radius = 3 + 5 * torch.rand(count, 1)
    centre = 8 + 8 * torch.rand(count, 2, 1, 1)
    rows, columns = torch.arange(24.0)[:, None], torch.arange(24.0)
    distance = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2).sqrt()
    image = torch.sigmoid(radius[..., None] - distance)
    noise = torch.rand(count, 1, 1) * torch.randn(count, 24, 24)
    return TensorDataset((image + noise)[:, None], radius)


# %%
net = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 1)),
)
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
train = DataLoader(discs(1500), batch_size=64, shuffle=True)
for _ in range(6):
    for image, radius in train:
        optimiser.zero_grad()
        nn.functional.mse_loss(net(image), radius).backward()
        optimiser.step()

# %%
before = {name: value.clone() for name, value in net.state_dict().items()}
uq = latedrop.calibrate(
    net, DataLoader(discs(400), batch_size=100), method=latedrop.Sampling(rates=[0.001, 0.003, 0.01, 0.05], draws=50)
)
same = all(torch.equal(before[name], value) for name, value in net.state_dict().items())
print(f"weights and BatchNorm statistics unchanged: {same}")

# %%
image, radius = discs(500).tensors
p = uq.predict(image)
held = latedrop.metrics.coverage(p.mean, p.variance, radius, level=0.9)
print(f"the 90 % interval holds {held:.1%} of {len(p)} fresh images")
error, order = (p.mean - radius).abs()[:, 0], p.std[:, 0].argsort()
sure, unsure = order[:100], order[-100:]
print(f"mean error {error[sure].mean():.2f} px in the surest fifth, {error[unsure].mean():.2f} px in the least sure")

# %% [markdown]
# What to see: the three surest images, then the three least sure. The least sure discs are large ones.

# %%
low, high = p.interval(0.9)
figure, panels = plt.subplots(1, 6, figsize=(9, 1.9), layout="constrained")
for ax, i in zip(panels, [*order[:3], *order[-3:]], strict=True):
    ax.imshow(image[i, 0].numpy(), cmap="gray")
    ax.set_title(f"{low[i, 0]:.1f} to {high[i, 0]:.1f}\ntrue {radius[i, 0]:.1f} px", fontsize="small")
    ax.axis("off")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/images.png", dpi=120)
