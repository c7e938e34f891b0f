"""A model to try the command line with. Run it in an empty folder: it trains, and writes net.pt and four csv files.

Then, in the same folder, `latedrop calibrate my_model:Net --weights net.pt --data val.csv --target price ...` finds the
class here and its weights there. The csv files hold areas in square metres and prices in thousands. The means and
spreads that the network needs are buffers, so that they are saved with its weights.
"""

import csv

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))
        self.register_buffer("unit", torch.tensor([0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.unit[0] + self.unit[1] * self.layers((x - self.centre) / self.spread)


def flats(count: int) -> tuple[Tensor, Tensor]:
    """Area, rooms, age and distance to the centre; and the price, which is less certain for large and old flats."""
    area = 25 + 150 * torch.rand(count) ** 2
    rooms = (area / 30 + torch.rand(count)).floor() + 1
    age, distance = 100 * torch.rand(count), 15 * torch.rand(count)
    price = area * (4 - 0.15 * distance) * (1 - 0.3 * torch.sin(age / 32)) + 8 * rooms
    noise = 0.05 * area * (0.5 + age / 60)
    return torch.stack([area, rooms, age, distance], 1), (price + noise * torch.randn(count))[:, None]


def trained(x: Tensor, y: Tensor) -> Net:
    net = Net()
    net.centre, net.spread, net.unit = x.mean(0), x.std(0), torch.stack([y.mean(), y.std()])
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(300):
        optimiser.zero_grad()
        (nn.functional.mse_loss(net(x), y) / net.unit[1] ** 2).backward()
        optimiser.step()
    return net


def write(path: str, x: Tensor, y: Tensor | None, start: int) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "area", "rooms", "age", "distance", *([] if y is None else ["price"])])
        for i, row in enumerate(x.tolist()):
            price = [] if y is None else [f"{y[i].item():.1f}"]
            writer.writerow([f"flat{start + i}", *(f"{value:.1f}" for value in row), *price])


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = flats(1500)
    torch.save(trained(x[:700], y[:700]).state_dict(), "net.pt")
    write("train.csv", x[:700], None, 0)
    write("val.csv", x[700:1000], y[700:1000], 700)
    write("test.csv", x[1000:1300], y[1000:1300], 1000)
    write("new.csv", x[1300:], None, 1300)
    print("written: net.pt, train.csv, val.csv, test.csv, new.csv")
