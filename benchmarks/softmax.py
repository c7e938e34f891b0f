"""How close the mean softmax without draws is to draws: `python -m benchmarks.softmax`

Networks trained here on scikit-learn's sets; two and three digits side by side are 100 and 1000 classes. With `D` the
mean softmax of many draws, `G` that of Gaussian logits with the first-order covariance, integrated by quasi-random
points, and `C` the closed form, NLL(G) - NLL(D) is what first order costs and NLL(C) - NLL(G) what the closed form
does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import Residual, ViT, image_task, table_task
from benchmarks.timing import machine, write
from latedrop import find_sites, sample
from latedrop.calibration.fit_classes import Measured, fitted, losses
from latedrop.calibration.measure_classes import spread_of
from latedrop.calibration.softmax import log_mean_softmax
from latedrop.dropout.first_order import differences
from latedrop.network.sites import Sites

RATES = (0.02, 0.05, 0.1)
BLOCKS, DRAWS, POINTS = 20, 100, 1024
Data = tuple[Tensor, Tensor]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.softmax", description="The mean softmax without draws.")
    parser.add_argument("--rows", type=int, default=300, help="test rows at most; fewer of many classes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record: dict[str, Any] = {"machine": machine(torch.device("cpu")), "draws": BLOCKS * DRAWS, "error": {}}
    for name, make in NETS.items():
        net, validation, (x, y) = make()
        rows = min(options.rows, 100_000 // net(x[:1]).shape[1])
        record["error"][name] = errors(net, validation, (x[:rows], y[:rows]))
        print(name, record["error"][name], flush=True)
    write("softmax", record)


def errors(net: nn.Module, validation: Data, test: Data) -> dict[str, Any]:
    """Differences in NLL by temperature and rate."""
    (x, y), sites = test, Sites(find_sites(net, test[0]))
    with torch.no_grad():
        z, held = net(x).double(), net(validation[0]).double()
    spread = spread_of(net, x, sites, None).double().sum(1)
    every = differences(deepcopy(net).double(), x.double(), sites).sum(1)
    temperature = fitted(Measured(held, validation[1]), sloped=None).temperature
    found: dict[str, Any] = {"classes": z.shape[1], "rows": len(x), "temperature": temperature, "by": {}}
    for rate in RATES:
        blocks = drawn(net, x, sites, rate, (1.0, temperature))
        for name, (t, logs) in zip(("none", "fitted"), blocks.items(), strict=True):
            one = torch.full((len(x),), t, dtype=torch.float64)
            odds = rate / (1 - rate)
            gauss = integrated(z / t, odds * every / t**2)
            closed = log_mean_softmax(z, odds * spread, one)
            many = logs.logsumexp(0) - math.log(len(logs))
            away = torch.stack([losses(part, y).mean() for part in logs]) - losses(many, y).mean()
            found["by"][f"{name} {rate}"] = {
                "nll": float(losses(many, y).mean()),
                "draws": float(away.square().mean().sqrt()),
                "first_order": float((losses(gauss, y) - losses(many, y)).mean()),
                "closed": float((losses(closed, y) - losses(gauss, y)).mean()),
                "together": float((losses(closed, y) - losses(many, y)).mean()),
                "kl_first_order": float((many.exp() * (many - gauss)).sum(1).mean()),
                "kl_closed": float((gauss.exp() * (gauss - closed)).sum(1).mean()),
            }
    return found


def drawn(net: nn.Module, x: Tensor, sites: Sites, rate: float, temperatures: tuple[float, ...]) -> dict[float, Tensor]:
    """Log mean softmax of each block of draws, `(blocks, N, K)`, at each temperature."""
    found: dict[float, list[Tensor]] = {t: [] for t in temperatures}
    for seed in range(BLOCKS):
        outputs = sample(net, x, rate, DRAWS, sites=sites, seed=seed, keep_draws=True).outputs
        assert outputs is not None
        for t, parts in found.items():
            parts.append((torch.log_softmax(outputs / t, 2).logsumexp(0) - math.log(DRAWS)).double())
    return {t: torch.stack(parts) for t, parts in found.items()}


def integrated(logits: Tensor, spread: Tensor) -> Tensor:
    """Log mean softmax of Gaussian logits whose differences have these variances, row by row."""
    k = logits.shape[1]
    points = torch.quasirandom.SobolEngine(k - 1, scramble=True, seed=0).draw(POINTS, dtype=torch.float64)
    normal = torch.special.ndtri(points.clamp(1e-12, 1 - 1e-12))
    found = []
    for z, d in zip(logits, spread, strict=True):
        covariance = (d[:-1, -1:] + d[-1:, :-1] - d[:-1, :-1]) / 2  # of the differences from the last one
        ridge = 1e-8 * covariance.diagonal().mean().clamp_min(1e-12) * torch.eye(k - 1, dtype=torch.float64)
        moved = nn.functional.pad(normal @ torch.linalg.cholesky(covariance + ridge).T, (0, 1))
        found.append(torch.log_softmax(z + moved, 1).logsumexp(0) - math.log(POINTS))
    return torch.stack(found)


def timed_nets(classes: int) -> list[tuple[str, nn.Module, Tensor]]:
    """With random weights, on which time does not depend."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    residual, transformer = Residual(32, 3), ViT(64, 8, 128, 4, 4)
    residual.head, transformer.head = nn.Linear(32, classes), nn.Linear(128, classes)
    made: list[tuple[str, nn.Module, Tensor]] = [
        ("MLP", _mlp(64, 512, classes), table_task(512, generator)[0]),
        ("residual CNN", residual, image_task(32)(8, generator)[0]),
        ("transformer", transformer, image_task(64)(8, generator)[0]),
    ]
    return [(name, net.eval().requires_grad_(False), x) for name, net, x in made]


def _mlp(inputs: int, width: int, classes: int) -> nn.Module:
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


def _cnn(classes: int) -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, classes))


def _trained(net: nn.Module, data: Data, steps: int, lr: float = 3e-3) -> nn.Module:
    optimiser, generator = torch.optim.Adam(net.parameters(), lr), torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (64,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(data[0][rows]), data[1][rows]).backward()
        optimiser.step()
    return net.eval().requires_grad_(False)


def _digits(side_by_side: int, build: Callable[[], nn.Module], steps: int) -> tuple[nn.Module, Data, Data]:
    """A network, validation rows and test rows; several digits are drawn from those of the same part."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    parts = []
    for rows in torch.randperm(len(images), generator=generator).split([800, 500, 497]):
        count = len(rows) if side_by_side == 1 else 20_000 if not parts else 1500
        places = rows[:, None] if side_by_side == 1 else rows[torch.randint(len(rows), (count, side_by_side))]
        x = torch.cat([images[p].float().reshape(-1, 1, 8, 8) / 16 for p in places.unbind(1)], 3)
        parts.append((x, sum(labels[p].long() * 10**i for i, p in enumerate(places.unbind(1)))))
    return _trained(build(), parts[0], steps), parts[1], parts[2]


def _tumours() -> tuple[nn.Module, Data, Data]:
    from sklearn.datasets import load_breast_cancer

    torch.manual_seed(0)
    x, y = (torch.tensor(part) for part in load_breast_cancer(return_X_y=True))
    x = ((x - x.mean(0)) / x.std(0)).float()
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split([200, 169, 200])
    train, validation, test = ((x[part], y[part].long()) for part in rows)
    return _trained(_mlp(30, 32, 2), train, 200), validation, test


NETS: dict[str, Callable[[], tuple[nn.Module, Data, Data]]] = {
    "tumours, MLP": _tumours,
    "digits, MLP": lambda: _digits(1, lambda: _mlp(64, 64, 10), 800),
    "digits, CNN": lambda: _digits(1, lambda: _cnn(10), 500),
    "two digits, MLP": lambda: _digits(2, lambda: _mlp(128, 128, 100), 1500),
    "three digits, MLP": lambda: _digits(3, lambda: _mlp(192, 256, 1000), 2000),
}


def error_table(record: dict[str, Any]) -> str:
    """Differences in NLL, with the temperature of the validation rows."""
    lines = [
        "| network | classes | rate | 100 draws | first order | closed form | together | without a temperature |",
        "| --- " + "| ---: " * 7 + "|",
    ]
    for name, found in record["error"].items():
        for rate in RATES:
            row, plain = found["by"][f"fitted {rate}"], found["by"][f"none {rate}"]
            values = [*(row[key] for key in ("first_order", "closed", "together")), plain["together"]]
            cells = " | ".join(f"{round(value, 4) + 0.0:+.4f}" for value in values)  # no -0.0000
            lines.append(f"| {name} | {found['classes']} | {rate} | {row['draws']:.4f} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
