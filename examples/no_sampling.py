# %% [markdown]
"""Without sampling: the first-order variance, a floor, and where the doubt comes from.

With `method="linear"` one backward pass per output replaces all draws. `floor=True` also fits the noise that no unit
explains. `explain` splits one prediction's variance by site and unit.
"""

# %%
import time
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

import latedrop
from latedrop import plots

# %%
torch.manual_seed(0)


def rows(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 8)
    y = torch.tanh(x[:, 0] * x[:, 1]) + 0.5 * x[:, 2].abs()
    return x, (y + (0.05 + 0.25 * x[:, 3].sigmoid()) * torch.randn(count))[:, None]


# %%
x_train, y_train = rows(800)
net = nn.Sequential(
    OrderedDict(
        enter=nn.Linear(8, 40),
        bend1=nn.ReLU(),
        hidden1=nn.Linear(40, 40),
        bend2=nn.ReLU(),
        hidden2=nn.Linear(40, 40),
        bend3=nn.ReLU(),
        head=nn.Linear(40, 1),
    )
)
optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.1)
for _ in range(250):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x_train), y_train).backward()
    optimiser.step()

# %%
validation, (x, y) = rows(400), rows(2000)
options = {
    "100 draws": {},
    "linear": {"method": "linear"},
    "linear, floor": {"method": latedrop.FirstOrder(floor=True)},
}
for name, chosen in options.items():
    start = time.perf_counter()
    uq = latedrop.calibrate(net, validation, progress=False, **chosen)
    p, seconds = uq.predict(x), time.perf_counter() - start
    nll = latedrop.metrics.nll(p.mean, p.variance, y)
    held = latedrop.metrics.coverage(p.mean, p.variance, y, level=0.9)
    print(f"{name:24} NLL {nll:6.3f}, the 90 % interval holds {held:.1%}; calibrated and predicted in {seconds:.2f} s")

# %%
print(uq.calibration)
least_sure = int(p.std.argmax())
print(uq.explain(x[least_sure : least_sure + 1], most=5))

# %% [markdown]
# What to see: how much of the variance dropout at each layer brings in. No draw was needed to know it.

# %%
shares = uq.calibration.shares
ax = plots.site_shares(list(shares), list(shares.values()))
Path("output").mkdir(exist_ok=True)
ax.figure.savefig("output/no_sampling.png", dpi=160)
