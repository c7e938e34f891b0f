# %% [markdown]
"""Classes with a rule that rejects: a small CNN on scanned digits, and which of them people should look at.

The data are scikit-learn's bundled digits, 8 x 8 pixels. The network is trained on 500 of them. Held-out digits give a
rule with a promise: of the digits that it keeps, fewer than 2 % are wrong.
"""

# %%
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import latedrop
from latedrop import plots

# %%
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
train, val, held, new = torch.randperm(len(x)).split([500, 400, 600, 297])

# %%
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(128, 10)),
)
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(120):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(x[train]), y[train]).backward()
    optimiser.step()

# %%
uq = latedrop.calibrate(net, (x[val], y[val]), reference=x[train], progress=False)
uq = uq.reject((x[held], y[held]), risk=0.02, confidence=0.95)
print(uq.calibration.rule)

# %%
p = uq.conformal((x[held], y[held])).predict(x[new])
kept, wrong = p.kept(), p.label != y[new]
sizes = p.prediction_set(0.95).sum(1)
shares = wrong.float().mean(), wrong[kept].float().mean()
print(f"of {len(new)} new digits {shares[0]:.1%} are wrong; of the {kept.sum()} that the rule keeps, {shares[1]:.1%}")
print(f"the 95 % prediction set has one class for {(sizes == 1).float().mean():.0%} of the digits")

# %% [markdown]
# What to see: the least sure digits, with the network's answer, its confidence and the truth. Most are hard for
# people too.

# %%
figure = plots.new_figure(6.4, 3)
for ax, row in zip(figure.subplots(2, 6).flat, p.confidence.argsort(), strict=False):
    ax.imshow(x[new][row, 0].numpy(), cmap="gray")
    ax.set_title(f"says {p.label[row]} ({p.confidence[row]:.0%}), is {y[new][row]}", size=7)
    ax.axis("off")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/digits.png", dpi=160)
