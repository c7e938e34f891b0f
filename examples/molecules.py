# %% [markdown]
"""A message-passing network on molecules of several sizes: a list of graphs, a collate function, an interval for each.

The molecules are synthetic: random trees of four kinds of atoms, some with a ring. What is predicted is a sum over
atoms and bonds, with noise. A batch is all atoms of its molecules in one tensor, as graph libraries have it; `collate`
makes it, and `latedrop` takes the list of molecules itself.
"""

# %%
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop

# %%
torch.manual_seed(0)
KINDS = 4
WORTH, PAIR = torch.randn(KINDS), 0.5 * torch.randn(KINDS, KINDS)


# %%
@dataclass
class Molecule:
    kinds: Tensor  # (atoms,)
    bonds: Tensor  # (2, bonds), each in both directions


# %%
def molecule(atoms: int) -> Molecule:
    """A random tree, and for every second one a bond that closes a ring."""
    ends = [(i, int(torch.randint(max(0, i - 2), i, ()))) for i in range(1, atoms)]
    if atoms > 3 and torch.rand(()) < 0.5:
        ends.append((0, atoms - 1))
    bonds = torch.tensor(ends).T
    return Molecule(torch.randint(KINDS, (atoms,)), torch.cat([bonds, bonds.flip(0)], 1))


# %%
def molecules(count: int, fewest: int = 3, most: int = 12) -> tuple[list[Molecule], Tensor]:
    made = [molecule(int(torch.randint(fewest, most + 1, ()))) for _ in range(count)]
    exact = [WORTH[m.kinds].sum() + PAIR[m.kinds[m.bonds[0]], m.kinds[m.bonds[1]]].sum() for m in made]
    return made, torch.stack(exact)[:, None] + 0.2 * torch.randn(count, 1)


# %%
def collate(batch: list[Molecule]) -> tuple[Tensor, Tensor, Tensor, int]:
    """All atoms, all bonds, the molecule of each atom, and how many molecules there are."""
    sizes = torch.tensor([len(m.kinds) for m in batch])
    first = sizes.cumsum(0) - sizes
    bonds = torch.cat([m.bonds + start for m, start in zip(batch, first, strict=True)], 1)
    owner = torch.repeat_interleave(torch.arange(len(batch)), sizes)
    return torch.cat([m.kinds for m in batch]), bonds, owner, len(batch)


# %%
class MessagePassing(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.read = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, kinds: Tensor, bonds: Tensor, owner: Tensor, count: int) -> Tensor:
        source, target = bonds
        h = self.embed(kinds)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([h[source], h[target]], 1)).relu()
            received = torch.zeros_like(h).index_add(0, target, sent)
            h = h + update(torch.cat([h, received], 1)).relu()
        return self.read(h.new_zeros(count, h.shape[1]).index_add(0, owner, h))


# %%
net, (train, y_train) = MessagePassing(), molecules(1500)
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for rows in 12 * torch.arange(1500).split(100):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(*collate([train[i] for i in rows])), y_train[rows]).backward()
    optimiser.step()

# %%
graphs, energies = molecules(200)
uq = latedrop.calibrate(
    net,
    (graphs, energies),
    method=latedrop.Sampling(rates=[0.01, 0.05, 0.1], draws=30),
    sites=latedrop.find_sites(net, graphs, kind="channel", collate=collate),
    batches=latedrop.Batches(collate=collate),
    progress=False,
)
print(uq.calibration.sites)
x, y = molecules(300)
p = uq.predict(x)
held = latedrop.metrics.coverage(p.mean, p.variance, y, level=0.9)
print(f"the 90 % interval holds {held:.1%} of {len(y)} fresh molecules")
print(f"RMSE {latedrop.metrics.rmse(p.mean, None, y):.2f}, spread of the values {y.std():.2f}")
alone = uq.predict(x[7:8]).std.item()
print(f"std of one molecule {p.std[7].item():.4f} among 300, {alone:.4f} alone")
large = molecules(100, 20, 25)[0]
larger = uq.predict(large)
print(f"mean std {p.std.mean():.2f}; {larger.std.mean():.2f} for molecules twice as large as any in training")

# %% [markdown]
# What to see: the standard deviation grows with the molecule, most of all beyond the sizes of the training set.

# %%
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
ax.scatter([len(m.kinds) for m in x], p.std, s=14, color="#0072B2", label="sizes as in training")
ax.scatter([len(m.kinds) for m in large], larger.std, s=14, color="#D55E00", marker="^", label="larger")
ax.set(xlabel="atoms of a molecule", ylabel="predicted standard deviation")
ax.legend()
Path("output").mkdir(exist_ok=True)
figure.savefig("output/molecules.png", dpi=160)
