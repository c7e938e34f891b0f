"""A potential under graded shift: the default beside leverage of the last layer and a committee of five.

    python -m benchmarks.potentials            # trains five networks, measures, writes results/potentials.json

Clusters of 8 to 13 atoms held by a Morse potential are shaken; the networks learn energies and forces of small
displacements and are asked about larger ones. Every method has its variance scaled on the same validation clusters. All
of it is done for several seeds, of data and networks.
With `f` the sum over atoms of what enters the last layer, `F` that of the training clusters, the leverage of the last
layer (LLPR) is `f' (F'F + r I)^-1 f`, and of a force `g' (F'F + r I)^-1 g` with `g` the derivative of `f` by a place.

Reference: Bigi, Chong, Ceriotti and Grasselli (2024), "A prediction rigidity formalism for low-cost uncertainties in
trained neural networks".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import latedrop
from benchmarks.timing import machine, markdown_table, write

HOME, LEVELS = 0.06, (0.03, 0.06, 0.09, 0.12, 0.15, 0.18)
"""Displacements are up to `HOME` in training, and as large as a level in a test; the distance of a bond is 1."""
STIFF, CUTOFF, WIDTH = 3.0, 2.5, 32
TRAIN, VALID, TEST, EPOCHS, COMMITTEE, SEEDS = 500, 250, 150, 60, 5, 3
Z90 = 1.6448536
Predict = Callable[[Any], tuple[Tensor, Tensor]]


if find_spec("torch_geometric") is not None:  # the table is drawn without it
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader


def main() -> None:
    record = measured()
    write("potentials", record)
    print(markdown(record))


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
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
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
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return net.eval().requires_grad_(False)


def features(net: Potential, batch: Any) -> tuple[Tensor, Tensor]:
    """The features of each cluster, `(N, D)`, and their derivatives by places, `(3 · atoms, D)`."""
    answer = net(batch)
    columns = [torch.autograd.grad(column.sum(), answer["places"], retain_graph=True)[0] for column in answer["sums"].T]
    return answer["sums"].detach(), torch.stack([column.flatten() for column in columns], 1)


def last_layer(net: Potential, train: Any) -> Predict:
    sums, _ = features(net, train)
    gram = sums.double().T @ sums.double()
    root = torch.linalg.inv(torch.linalg.cholesky(gram + 1e-6 * gram.diagonal().mean() * torch.eye(WIDTH)))

    def predict(batch: Any) -> tuple[Tensor, Tensor]:
        return tuple((part.double() @ root.T).square().sum(1) for part in features(net, batch))  # type: ignore[return-value]

    return predict


def committee(nets: list[Potential]) -> Predict:
    def predict(batch: Any) -> tuple[Tensor, Tensor]:
        answers = [net(batch) for net in nets]
        parts = (torch.stack([one[name].detach().flatten() for one in answers]) for name in ("energy", "forces"))
        return tuple(part.var(0) for part in parts)  # type: ignore[return-value]

    return predict


def judged(mean: Tensor, std: Tensor, true: Tensor, half: Tensor) -> dict[str, float]:
    error = (mean - true).abs()
    return {
        "rmse": float(error.square().mean().sqrt()),
        "std": float(std.square().mean().sqrt()),
        "error90": float(error.quantile(0.9)),
        "half90": float(half.median()),
        "coverage": float((error <= half).double().mean()),
    }


def measured() -> dict[str, Any]:
    start = time.process_time()
    runs = [run(seed) for seed in range(SEEDS)]
    record = {"machine": machine(torch.device("cpu")), "levels": list(LEVELS), "home": HOME, "runs": runs}
    return record | {"cpu_seconds": time.process_time() - start}


def run(seed: int) -> dict[str, Any]:
    """Measure with data and networks of one seed."""
    train, valid = (clusters(count, 0.02, HOME, 100 * seed + i) for count, i in ((TRAIN, 1), (VALID, 2)))
    nets = [trained(COMMITTEE * seed + member, train) for member in range(COMMITTEE)]
    net, batches = nets[0], [next(iter(DataLoader(part, len(part)))) for part in (train, valid)]
    others = {"last layer": last_layer(net, batches[0]), "committee": committee(nets)}
    output, scales = net(batches[1]), {}
    for method, predict in others.items():
        pairs = zip(("energy", "forces"), predict(batches[1]), strict=True)
        scales[method] = {
            name: float(((output[name].detach() - batches[1][name]).flatten() ** 2 / v.clamp_min(1e-300)).mean())
            for name, v in pairs
        }
    uq = {
        name: latedrop.calibrate(
            net,
            DataLoader(valid, 50),
            reference=DataLoader(train, 50),
            readout=name,
            batches=latedrop.Batches(unpack=name),
            progress=False,
        )
        for name in ("energy", "forces")
    }
    levels: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in uq}
    pooled: dict[str, dict[str, list[Tensor]]] = {name: {} for name in uq}
    for number, level in enumerate(LEVELS):
        batch = next(iter(DataLoader(clusters(TEST, level, level, 100 * seed + 10 + number), TEST)))
        output, drawn = net(batch), {method: predict(batch) for method, predict in others.items()}
        for k, name in enumerate(uq):
            p, true, mean = uq[name].predict(batch), batch[name].flatten(), output[name].detach().flatten()
            low, high = p.interval(0.9)
            spreads = {"default": (p.std.flatten(), 0.5 * (high - low).flatten())}
            for method in others:
                std = (scales[method][name] * drawn[method][k]).sqrt().float()
                spreads[method] = std, Z90 * std
            for method, (std, half) in spreads.items():
                numbers = judged(mean, std, true, half)
                numbers |= {"novelty": float(p.novelty.median())} if method == "default" else {}
                levels[name].setdefault(method, []).append(numbers)
                pooled[name].setdefault(method, []).append(torch.stack([std, (mean - true).abs()]))
    ranks = {
        name: {method: _rank(*torch.cat(parts, 1)) for method, parts in methods.items()}
        for name, methods in pooled.items()
    }
    made_of = {name: one.calibration.terms.choice for name, one in uq.items()}
    return {"seed": seed, "made_of": made_of, "found": levels, "ranks": ranks}


def _rank(std: Tensor, error: Tensor) -> float:
    """Return how well standard deviations rank the sizes of errors."""
    return float(spearmanr(std, error).statistic)


def markdown(record: dict[str, Any]) -> str:
    """The table of docs/potentials.md: means over seeds; of ranks also the smallest and the largest."""
    runs = record["runs"]

    def mean(name: str, method: str, level: int, key: str) -> float:
        return sum(one["found"][name][method][level][key] for one in runs) / len(runs)

    places = range(len(record["levels"]))
    rows: list[list[str]] = []
    titles = {"default": "the default", "last layer": "last layer (LLPR)", "committee": "committee of five"}
    for name in runs[0]["found"]:
        errors = [f"{mean(name, 'default', i, 'error90'):.2f}" for i in places]
        rows.append([f"{name}: 90 % of errors are below", *errors, ""])
        for method, title in titles.items():
            pairs = [(mean(name, method, i, "half90"), mean(name, method, i, "coverage")) for i in places]
            cells = [f"{half:.2f} ({inside:.0%})" for half, inside in pairs]
            ranks = sorted(one["ranks"][name][method] for one in runs)
            middle = sum(ranks) / len(ranks)
            rows.append([f"{name}: {title}", *cells, f"{middle:.2f} ({ranks[0]:.2f} to {ranks[-1]:.2f})"])
        novelty = [f"{mean(name, 'default', i, 'novelty'):.2g}" for i in places]
        rows.append([f"{name}: novelty", *novelty, ""])
    return markdown_table(["displacement", *(f"{level:g}" for level in record["levels"]), "ranks"], rows)


if __name__ == "__main__":
    main()
