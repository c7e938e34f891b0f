"""A potential under graded shift: the default beside leverage of the last layer and a committee of five.

Clusters of 8 to 13 atoms held by a Morse potential are shaken; the networks learn energies and forces of small
displacements and are asked about larger ones. Every method has its variance scaled on the same validation clusters.
With `f` the sum over atoms of what enters the last layer, `F` that of the training clusters, the leverage of the last
layer (LLPR) is `f' (F'F + r I)^-1 f`, and of a force `g' (F'F + r I)^-1 g` with `g` the derivative of `f` by a place.

Reference: Bigi, Chong, Ceriotti and Grasselli (2024), "A prediction rigidity formalism for low-cost uncertainties in
trained neural networks".
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import latedrop
from benchmarks.nets import step
from benchmarks.timing import by_seeds, markdown_table

HOME, LEVELS = 0.06, (0.03, 0.06, 0.09, 0.12, 0.15, 0.18)
"""Displacements are up to `HOME` in training, and as large as a level in a test; the distance of a bond is 1."""
STIFF, CUTOFF, WIDTH = 3.0, 2.5, 32
TRAIN, VALID, TEST, EPOCHS, COMMITTEE = 500, 250, 150, 60, 5
Z90 = 1.6448536
OUTPUTS = ("energy", "forces")
Variances = Callable[[Any], dict[str, Tensor]]  # from a batch to a variance of each output


if find_spec("torch_geometric") is not None:  # the table is drawn without it
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader


def ground_states() -> list[Tensor]:
    """Clusters of 8 to 13 atoms: an icosahedron with its centre, of which atoms are taken, relaxed."""
    golden, clusters = (1 + 5**0.5) / 2, []
    for size in range(8, 14):
        corners = [(0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
        points = [(0.0, 0.0, 0.0), *(p[i:] + p[:i] for p in corners for i in range(3))]
        places = (0.5 * torch.tensor(points[:size])).requires_grad_()
        optimizer = torch.optim.LBFGS([places], max_iter=200, line_search_fn="strong_wolfe")

        def closure(places: Tensor = places, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            energy = morse(places)
            energy.backward()
            return energy

        optimizer.step(closure)
        clusters.append(places.detach())
    return clusters


def morse(places: Tensor) -> Tensor:
    """The energy of one cluster, with bonds of length and depth 1."""
    return ((1 - torch.exp(-STIFF * (torch.pdist(places) - 1))) ** 2 - 1).sum()


def clusters(count: int, low: float, high: float, seed: int) -> list[Any]:
    """Shaken clusters with energy `(1, 1)` and forces `(atoms, 3)`; displacements have a size between two."""
    g, shapes, made = torch.Generator().manual_seed(seed), ground_states(), []
    for i in range(count):
        size = low + (high - low) * float(torch.rand((), generator=g))
        shape = shapes[i % len(shapes)]
        places = (shape + size * torch.randn(shape.shape, generator=g)).requires_grad_()
        energy = morse(places)
        (slope,) = torch.autograd.grad(energy, places)
        made.append(Data(pos=places.detach(), energy=energy.detach().reshape(1, 1), forces=-slope))
    return made


class Potential(nn.Module):
    """Two rounds of messages between near atoms, an energy for each, and forces by differentiating inside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.atom = nn.Parameter(torch.randn(WIDTH))
        self.filters, self.updates = (
            nn.ModuleList(nn.Sequential(nn.Linear(size, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
            for size in (16, WIDTH)
        )
        self.hidden, self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()), nn.Linear(WIDTH, 1)
        self.register_buffer("centres", torch.linspace(0.4, CUTOFF, 16))

    def forward(self, data: Any) -> dict[str, Tensor]:
        with torch.enable_grad():
            places = data.pos.detach().requires_grad_()
            same = data.batch[:, None] == data.batch
            i, j = (same & (torch.cdist(places.detach(), places.detach()) < CUTOFF)).fill_diagonal_(False).nonzero().T
            distance = (places[i] - places[j]).norm(dim=1, keepdim=True)
            smooth = 0.5 * (1 + (torch.pi * distance / CUTOFF).cos())
            basis = torch.exp(-((distance - self.centres) ** 2) / 0.08)
            h = self.atom.expand(len(places), -1)
            for filters, update in zip(self.filters, self.updates, strict=True):
                sent = smooth * filters(basis) * h[j]
                h = h + update(torch.zeros_like(h).index_add(0, i, sent))
            last = self.hidden(h)
            sums = last.new_zeros(data.num_graphs, WIDTH).index_add(0, data.batch, last)
            energy = last.new_zeros(data.num_graphs, 1).index_add(0, data.batch, self.out(last))
            (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return {"energy": energy, "forces": -slope, "sums": sums, "places": places}


def trained(seed: int, data: list[Any]) -> Potential:
    torch.manual_seed(seed)
    net = Potential()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for batch in DataLoader(data, 50, shuffle=True):
            answer = net(batch)
            loss = (answer["energy"] - batch.energy).square().mean() + (answer["forces"] - batch.forces).square().mean()
            step(optimizer, loss)
        schedule.step()
    return net.eval().requires_grad_(False)


def features(net: Potential, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the features of each cluster, `(N, D)`, and their derivatives by places, `(3 · atoms, D)`."""
    answer = net(batch)
    columns = [torch.autograd.grad(column.sum(), answer["places"], retain_graph=True)[0] for column in answer["sums"].T]
    return answer["sums"].detach(), torch.stack([column.flatten() for column in columns], 1)


def last_layer(net: Potential, train: Any) -> Variances:
    """Return the leverage of the last layer, of energies and of forces."""
    sums = features(net, train)[0].double()
    gram = sums.T @ sums
    root = torch.linalg.inv(torch.linalg.cholesky(gram + 1e-6 * gram.diagonal().mean() * torch.eye(WIDTH)))

    def variances(batch: Any) -> dict[str, Tensor]:
        parts = zip(OUTPUTS, features(net, batch), strict=True)
        return {name: (part.double() @ root.T).square().sum(1) for name, part in parts}

    return variances


def committee(nets: list[Potential], batch: Any) -> dict[str, Tensor]:
    """Return the variance over networks, of energies and of forces."""
    answers = [net(batch) for net in nets]
    return {name: torch.stack([one[name].detach().flatten() for one in answers]).var(0) for name in OUTPUTS}


def run(seed: int) -> dict[str, Any]:
    """Measure with data and networks of one seed."""
    train, valid = (clusters(count, 0.02, HOME, 100 * seed + i) for count, i in ((TRAIN, 1), (VALID, 2)))
    shaken = [clusters(TEST, level, level, 100 * seed + 10 + i) for i, level in enumerate(LEVELS)]
    nets = [trained(COMMITTEE * seed + member, train) for member in range(COMMITTEE)]
    net, (first, second, *tests) = nets[0], [next(iter(DataLoader(a, len(a)))) for a in (train, valid, *shaken)]
    others = {"last layer": last_layer(net, first), "committee": partial(committee, nets)}
    record = {"seed": seed, "made_of": {}, "found": {}, "ranks": {}}
    for name in OUTPUTS:
        options = {"readout": name, "batches": latedrop.Batches(unpack=name), "progress": False}
        uq = latedrop.calibrate(net, DataLoader(valid, 50), reference=DataLoader(train, 50), **options)
        error = (net(second)[name].detach() - second[name]).flatten()
        scales = {method: (error**2 / v(second)[name].clamp_min(1e-300)).mean() for method, v in others.items()}
        levels, pooled = ({method: [] for method in ("default", *others)} for _ in range(2))
        for batch in tests:
            p, off = uq.predict(batch), (net(batch)[name].detach() - batch[name]).flatten().abs()
            low, high = p.interval(0.9)
            stds = {method: (scales[method] * v(batch)[name]).sqrt().float() for method, v in others.items()}
            spreads = {"default": (p.std.flatten(), 0.5 * (high - low).flatten())}
            spreads |= {method: (std, Z90 * std) for method, std in stds.items()}
            for method, (std, half) in spreads.items():
                shares = {"half90": float(half.median()), "coverage": float((off <= half).double().mean())}
                levels[method].append({"error90": float(off.quantile(0.9)), **shares})
                pooled[method].append(torch.stack([std, off]))
            levels["default"][-1]["novelty"] = float(p.novelty.median())
        record["made_of"][name], record["found"][name] = uq.calibration.terms.choice, levels
        record["ranks"][name] = {kind: float(spearmanr(*torch.cat(all_, 1)).statistic) for kind, all_ in pooled.items()}
    return record


def table(record: dict[str, Any]) -> str:
    """Return means over seeds; of ranks also the smallest and the largest."""
    runs, rows = record["runs"], []

    def means(name: str, method: str, key: str) -> list[float]:
        each = [[level[key] for level in one["found"][name][method]] for one in runs]
        return [sum(values) / len(runs) for values in zip(*each, strict=True)]

    titles = {"default": "the default", "last layer": "last layer (LLPR)", "committee": "committee of five"}
    for name in OUTPUTS:
        errors = [f"{error:.2f}" for error in means(name, "default", "error90")]
        rows.append([f"{name}: 90 % of errors are below", *errors, ""])
        for method, title in titles.items():
            pairs = zip(means(name, method, "half90"), means(name, method, "coverage"), strict=True)
            cells = [f"{half:.2f} ({inside:.0%})" for half, inside in pairs]
            ranks = sorted(one["ranks"][name][method] for one in runs)
            rank = f"{sum(ranks) / len(ranks):.2f} ({ranks[0]:.2f} to {ranks[-1]:.2f})"
            rows.append([f"{name}: {title}", *cells, rank])
        rows.append([f"{name}: novelty", *(f"{value:.2g}" for value in means(name, "default", "novelty")), ""])
    return markdown_table(["displacement", *(f"{level:g}" for level in record["levels"]), "ranks"], rows)


if __name__ == "__main__":
    by_seeds("potentials", lambda seeds: {"levels": LEVELS, "home": HOME, "runs": [run(i) for i in range(seeds)]}, 3)
