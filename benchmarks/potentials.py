"""A potential under graded shift: the default beside leverage of the last layer and a committee of five.

    python -m benchmarks.potentials            # trains five networks, measures, writes results/potentials.json

Clusters of 8 to 13 atoms held by a Morse potential are shaken; the networks learn energies and forces of small
displacements and are asked about larger ones. Every method has its variance scaled on the same validation clusters.
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
TRAIN, VALID, TEST, EPOCHS, COMMITTEE = 500, 250, 150, 60, 5
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
        "coverage": float((error <= half).double().mean()),
    }


def measured() -> dict[str, Any]:
    start = time.time()
    train, valid = clusters(TRAIN, 0.02, HOME, 1), clusters(VALID, 0.02, HOME, 2)
    nets = [trained(seed, train) for seed in range(COMMITTEE)]
    net, batches = nets[0], [next(iter(DataLoader(part, len(part)))) for part in (train, valid)]
    others = {"last layer": last_layer(net, batches[0]), "committee": committee(nets)}
    own, scales = net(batches[1]), {}
    for name, predict in others.items():
        pairs = zip(("energy", "forces"), predict(batches[1]), strict=True)
        scales[name] = [
            float(((own[k].detach() - batches[1][k]).flatten() ** 2 / v.clamp_min(1e-300)).mean()) for k, v in pairs
        ]
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
    record: dict[str, Any] = {"machine": machine(torch.device("cpu")), "levels": list(LEVELS), "home": HOME}
    record |= {"made_of": {name: one.calibration.terms.choice for name, one in uq.items()}, "found": {}, "ranks": {}}
    pooled: dict[tuple[str, str], list[Tensor]] = {}
    for number, level in enumerate(LEVELS):
        batch = next(iter(DataLoader(clusters(TEST, level, level, 10 + number), TEST)))
        mean = {name: net(batch)[name].detach().flatten() for name in uq}
        drawn = {name: predict(batch) for name, predict in others.items()}
        for k, name in enumerate(uq):
            p, true = uq[name].predict(batch), batch[name].flatten()
            low, high = p.interval(0.9)
            spreads = {"default": (p.std.flatten(), 0.5 * (high - low).flatten())}
            for other in others:
                std = (scales[other][k] * drawn[other][k]).sqrt().float()
                spreads[other] = std, Z90 * std
            for method, (std, half) in spreads.items():
                made = judged(mean[name], std, true, half)
                made |= {"novelty": float(p.novelty.median())} if method == "default" else {}
                record["found"].setdefault(name, {}).setdefault(method, []).append(made)
                pooled.setdefault((name, method), []).append(torch.stack([std, (mean[name] - true).abs()]))
    for (name, method), parts in pooled.items():
        std, error = torch.cat(parts, 1)
        ranks = [_rank(*part) for part in parts]
        record["ranks"].setdefault(name, {})[method] = {"all": _rank(std, error), "within": sum(ranks) / len(ranks)}
    return record | {"seconds": time.time() - start}


def _rank(std: Tensor, error: Tensor) -> float:
    """Return how well standard deviations rank the sizes of errors."""
    return float(spearmanr(std, error).statistic)


def markdown(record: dict[str, Any]) -> str:
    """The table of docs/potentials.md."""
    rows: list[list[str]] = []
    titles = {"default": "the default", "last layer": "last layer (LLPR)", "committee": "committee of five"}
    for name, methods in record["found"].items():
        rows.append([f"{name}: RMSE", *(f"{one['rmse']:.3f}" for one in methods["default"]), ""])
        for method, levels in methods.items():
            cells = [f"{one['std']:.3f} ({one['coverage']:.0%})" for one in levels]
            rows.append([f"{name}: {titles[method]}", *cells, f"{record['ranks'][name][method]['all']:.2f}"])
        rows.append([f"{name}: novelty", *(f"{one['novelty']:.2g}" for one in methods["default"]), ""])
    return markdown_table(["displacement", *(f"{level:g}" for level in record["levels"]), "ranks"], rows)


if __name__ == "__main__":
    main()
