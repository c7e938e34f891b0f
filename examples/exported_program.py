# %% [markdown]
"""An exported program: a `.pt2` file is calibrated, saved and loaded without the code that it was made from."""

# %%
import tempfile
from pathlib import Path

import torch
from torch import nn

import latedrop
from latedrop import plots

# %%
torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
x = torch.randn(1300, 3)
y = x[:, :1] * x[:, 1:2] + 0.2 * torch.randn(1300, 1)


# %%
def make() -> None:
    """Where the source is: train, and export in eval mode with a dynamic batch dimension."""
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.mse_loss(net(x[:500]), y[:500]).backward()
        optimiser.step()
    rows = {0: torch.export.Dim("rows")}
    torch.export.save(torch.export.export(net.eval(), (x[:2],), dynamic_shapes=(rows,)), folder / "model.pt2")


# %%
make()
program = latedrop.load_program(folder / "model.pt2")
uq = latedrop.calibrate(program, (x[500:800], y[500:800]), method=latedrop.FirstOrder(floor=True))
uq.save(folder / "model.latedrop.json")
print(uq.calibration.sites)

# %%
again = latedrop.load(folder / "model.latedrop.json", latedrop.load_program(folder / "model.pt2"))
p = again.predict(x[800:])
held = latedrop.metrics.coverage(p.mean, p.variance, y[800:], level=0.9)
print(f"the 90 % interval holds {held:.1%} of {len(p)} fresh rows")

# %% [markdown]
# What to see: the band comes from files alone, without the code of the network, and holds about nine of ten fresh rows.

# %%
low, high = p.interval(0.9)
ax = plots.intervals(p.mean, p.mean, {0.9: (low, high)}, target=y[800:], xlabel="predicted", ylabel="true")
Path("output").mkdir(exist_ok=True)
ax.figure.savefig("output/exported_program.png", dpi=160)
