# %% [markdown]
"""Which rows to label next? A loop of training, choosing and labelling, beside a choice by chance.

Digits begin with 40 labels. Each round 20 more are bought: those that `uq.acquire` names, or any. It names uncertain
rows that differ from each other, so that a batch does not ask the same question twenty times.
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
order = torch.randperm(1797)
x, y = torch.tensor(digits.data).float()[order] / 16, torch.tensor(digits.target)[order]
(x_pool, x_test), (y_pool, y_test) = x.split([1200, 597]), y.split([1200, 597])


def trained(rows: Tensor) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=1e-4)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x_pool[rows]), y_pool[rows]).backward()
        optimiser.step()
    return net.eval()


# %%
def accuracies(clever: bool) -> list[float]:
    labelled, reached = torch.arange(40), []
    for _ in range(8):
        held, fit = labelled[::4], labelled[torch.arange(len(labelled)) % 4 > 0]  # a quarter for validation
        net = trained(fit)
        reached.append(float((net(x_test).argmax(1) == y_test).float().mean()))
        rest = torch.tensor([row for row in range(1200) if row not in set(labelled.tolist())])
        if clever:
            uq = latedrop.calibrate(net, (x_pool[held], y_pool[held]), reference=x_pool[fit], progress=False)
            chosen = uq.acquire(x_pool[rest], 20)
        else:
            chosen = torch.randperm(len(rest))[:20]
        labelled = torch.cat([labelled, rest[chosen]])  # here a person would label them
    return reached


curves = {"uq.acquire": accuracies(clever=True), "by chance": accuracies(clever=False)}
counts = [40 + 20 * k for k in range(8)]
for name, reached in curves.items():
    print(f"{name:11}" + "".join(f"{share:7.1%}" for share in reached) + f" of digits right with {counts} labels")

# %% [markdown]
# What to see: the first batches are worth no more than as many rows by chance, later ones are. A single run is noisy.

# %%
figure, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, reached in curves.items():
    ax.plot(counts, reached, marker="o", label=name)
ax.set(xlabel="labels", ylabel="digits that are right")
ax.legend(frameon=False)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/labelling.png", dpi=160)
