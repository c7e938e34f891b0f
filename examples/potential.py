# %% [markdown]
"""A potential with forces, as it is: energies and forces with intervals, and molecular dynamics that stops by itself.

Five atoms are held together by a Morse potential. A network learns energies and forces near rest; its `forward`
differentiates itself, as those of interatomic potentials do. Then the cluster is heated in ASE.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from ase import Atoms, units
from ase.md.verlet import VelocityVerlet
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import latedrop
from latedrop.adapters.ase import NoveltyError, calculator

# %%
torch.manual_seed(0)
REST = torch.tensor([[0, 0, 0.82], [0, 0, -0.82], [0.58, 0, 0], [-0.29, 0.5, 0], [-0.29, -0.5, 0]])


# %%
def cluster(places: Tensor) -> Data:
    """A cluster with its exact energy and forces."""
    places = places.detach().requires_grad_()
    energy = ((1 - torch.exp(-3 * (torch.pdist(places) - 1))) ** 2 - 1).sum()
    forces = -torch.autograd.grad(energy, places)[0]
    return Data(pos=places.detach(), energy=energy.detach().reshape(1, 1), forces=forces)


# %%
def shaken(count: int, size: float) -> list[Data]:
    return [cluster(REST + size * (0.3 + 0.7 * torch.rand(())) * torch.randn(5, 3)) for _ in range(count)]


# %%
class Potential(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(12, width), nn.SiLU(), nn.Linear(width, width))
        self.atom = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, data: Data) -> dict[str, Tensor]:
        with torch.enable_grad():
            places = data.pos.detach().requires_grad_()
            i, j = (data.batch[:, None] == data.batch).fill_diagonal_(False).nonzero().T
            distance = (places[i] - places[j]).norm(dim=1, keepdim=True)
            near = self.pair(torch.exp(-20 * (distance - torch.linspace(0.5, 2.2, 12)) ** 2))
            each = self.atom(near.new_zeros(len(places), near.shape[1]).index_add(0, i, near))
            energy = each.new_zeros(data.num_graphs, 1).index_add(0, data.batch, each)
            (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)  # keeps the graph, also in eval
        return {"energy": energy, "forces": -slope}


# %%
train, model = shaken(600, 0.1), Potential()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(25):
    for batch in DataLoader(train, 50, shuffle=True):
        found = model(batch)
        loss = sum((found[name] - batch[name]).square().mean() for name in ("energy", "forces"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()


# %%
def calibrated(name: str) -> latedrop.Predictor:
    """Of one energy for each structure, or of three forces for each atom."""
    data = {"reference": DataLoader(train, 50), "batches": latedrop.Batches(unpack=name)}
    return latedrop.calibrate(model, DataLoader(shaken(200, 0.1), 50), readout=name, progress=False, **data)


# %%
energy, forces = calibrated("energy"), calibrated("forces")
for size in (0.05, 0.1, 0.15, 0.2):
    batch = next(iter(DataLoader([cluster(REST + size * torch.randn(5, 3)) for _ in range(100)], 100)))
    p, q = energy.predict(batch), forces.predict(batch)
    off = [(one.mean - batch[name]).square().mean().sqrt() for one, name in ((p, "energy"), (q, "forces"))]
    means = [one.std.square().mean().sqrt() for one in (p, q)]
    print(f"shaken by {size}: energy off by {off[0]:.2f}, std {means[0]:.2f}; forces {off[1]:.2f}, {means[1]:.2f}")

# %% [markdown]
# Molecular dynamics at a temperature at which the cluster leaves what the network knows.

# %%
atoms = Atoms("Ar5", positions=REST.numpy())
atoms.calc = calculator(
    energy, forces, graph=lambda a: Data(pos=torch.tensor(a.positions, dtype=torch.float32)), most_novel=3
)
heat = torch.from_numpy(atoms.get_masses() * units.kB * 3000).sqrt()[:, None]
atoms.set_momenta((heat * torch.randn(5, 3)).numpy())
dynamics, seen = VelocityVerlet(atoms, 1 * units.fs), []
dynamics.attach(lambda: seen.append([atoms.calc.results[name] for name in ("energy", "energy_std", "novelty")]))
try:
    dynamics.run(300)
    print("the dynamics ran to its end")
except NoveltyError as error:
    print(f"the dynamics stopped after {len(seen)} steps: {str(error).partition(':')[0]}")

# %% [markdown]
# What to see: novelty rises above 1, and the interval of the energy widens, before the dynamics stop.

# %%
values, std, novelty = torch.tensor(seen).T
figure, axes = plt.subplots(2, sharex=True, figsize=(7, 5), layout="constrained")
axes[0].plot(values, color="#0072B2")
axes[0].fill_between(range(len(values)), values - 1.64 * std, values + 1.64 * std, color="#0072B2", alpha=0.3)
axes[0].set(ylabel="energy")
axes[1].plot(novelty, color="#D55E00")
axes[1].axhline(1, color="black", linewidth=1, linestyle="--")
axes[1].set(xlabel="step", ylabel="novelty")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/potential.png", dpi=160)
