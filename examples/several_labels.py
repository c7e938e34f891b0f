# %% [markdown]
"""Which digits are in the picture? Any number of labels may be true, and few may be missed.

Each picture has one or two digits with noise. Labels above one half miss many; sets may miss a tenth on average.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import latedrop

# %%
torch.manual_seed(0)
digits = load_digits()
images, targets = torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)
order = torch.randperm(len(images))


def pictures(count: int, among: Tensor) -> tuple[Tensor, Tensor]:
    pairs = among[torch.randint(len(among), (count, 2))]
    alone = torch.rand(count) < 0.3
    labels = torch.zeros(count, 10).scatter_(1, targets[pairs], 1.0)
    labels[alone] = nn.functional.one_hot(targets[pairs[alone, 0]], 10).float()
    second = torch.where(alone[:, None, None], 0.0, images[pairs[:, 1]])
    both = torch.cat([images[pairs[:, 0]], second], 2)
    return (both + 0.15 * torch.randn(both.shape))[:, None], labels


train, validation, control, test = order.split([800, 300, 300, 397])

# %%
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(512, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
x_train, y_train = pictures(1500, train)
for rows in (part for _ in range(12) for part in torch.randperm(1500).split(64)):
    optimiser.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(net(x_train[rows]), y_train[rows]).backward()
    optimiser.step()

# %%
uq = latedrop.calibrate_multilabel(net.eval(), pictures(600, validation), names=list("0123456789"))
uq = uq.control(pictures(600, control))
print(uq)
x, y = pictures(2000, test)
p = uq.predict(x)
sets = {"above one half": torch.sigmoid(p.logits) > 0.5, "missing a tenth": p.label_set(missed=0.1)}
for name, inside in sets.items():
    lost = ((y.bool() & ~inside).sum(1) / y.sum(1)).mean()
    print(f"labels {name}: {lost:.1%} of a picture's labels missed, {inside.sum(1).float().mean():.1f} labels in a set")

# %% [markdown]
# What to see: a set is short where the picture is clear, and lists what else it could be where it is not.

# %%
figure, axes = plt.subplots(2, 4, figsize=(9, 3.6), layout="constrained")
for ax, row in zip(axes.flat, range(8), strict=True):
    ax.imshow(x[row, 0].numpy(), cmap="gray_r")
    true = ", ".join(str(k) for k in y[row].nonzero()[:, 0].tolist())
    ax.set(title=f"set {{{', '.join(p.named(row))}}}", xticks=[], yticks=[], xlabel=f"true: {true}")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/several_labels.png", dpi=160)
