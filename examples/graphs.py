# %% [markdown]
"""A network of PyTorch Geometric as it is: a loader of graphs goes in, and every graph gets an interval.

The molecules are synthetic: random trees of atoms of four kinds, whose value is a sum over atoms and bonds, with noise.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

import latedrop

# %%
torch.manual_seed(0)
KINDS = 4
WORTH, PAIR = torch.randn(KINDS), 0.5 * torch.randn(KINDS, KINDS)


# %%
def molecule(atoms: int) -> Data:
    ends = torch.tensor([(i, int(torch.randint(max(0, i - 2), i, ()))) for i in range(1, atoms)]).T
    kinds, bonds = torch.randint(KINDS, (atoms,)), torch.cat([ends, ends.flip(0)], 1)
    value = WORTH[kinds].sum() + PAIR[kinds[bonds[0]], kinds[bonds[1]]].sum() + 0.2 * torch.randn(())
    return Data(x=nn.functional.one_hot(kinds, KINDS).float(), edge_index=bonds, y=value.reshape(1, 1))


# %%
def molecules(count: int, fewest: int = 3, most: int = 12) -> list[Data]:
    return [molecule(int(torch.randint(fewest, most + 1, ()))) for _ in range(count)]


# %%
class Network(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(i, width), nn.ReLU(), nn.Linear(width, width)) for i in (KINDS, width)]
        self.convolutions = nn.ModuleList(map(GINConv, layers))
        self.read = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, data: Data) -> torch.Tensor:
        h = data.x
        for convolution in self.convolutions:
            h = convolution(h, data.edge_index).relu()
        return self.read(global_add_pool(h, data.batch))


# %%
train, model = molecules(1500), Network()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(12):
    for batch in DataLoader(train, 100, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch.y).backward()
        optimizer.step()

# %%
uq = latedrop.calibrate(model, DataLoader(molecules(300), 100), reference=DataLoader(train, 100), progress=False)
print(uq.calibration.verdict)
print(uq.calibration.sites)

# %%
test, large = molecules(300), molecules(100, 20, 25)
p, beyond = uq.predict(DataLoader(test, 100)), uq.predict(large)
y = torch.cat([graph.y for graph in test])
low, high = p.interval(0.9)
inside = ((low <= y) & (y <= high)).float().mean()
print(f"the 90 % interval holds {inside:.1%} of {len(y)} fresh molecules")
print(f"mean std {p.std.mean():.2f}; {beyond.std.mean():.2f} for molecules twice as large as any in training")
shares = [float((q.novelty > 1).float().mean()) for q in (p, beyond)]
print(f"novelty above 1: {shares[0]:.0%}; of the large ones {shares[1]:.0%}")

# %% [markdown]
# What to see: the standard deviation grows with the molecule, and novelty tells those larger than any in training.

# %%
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for graphs, q, color, label in ((test, p, "#0072B2", "sizes as in training"), (large, beyond, "#D55E00", "larger")):
    ax.scatter([graph.num_nodes for graph in graphs], q.std, s=14, color=color, label=label)
ax.set(xlabel="atoms of a molecule", ylabel="predicted standard deviation")
ax.legend()
Path("output").mkdir(exist_ok=True)
figure.savefig("output/graphs.png", dpi=160)
