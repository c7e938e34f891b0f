# %% [markdown]
"""Save a calibration beside the weights, load it in another process, and change the scale later.

The file is plain JSON and holds no weights. It knows which weights it belongs to and says so if they have changed.
"""

# %%
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import latedrop

# %%
torch.manual_seed(0)
x = torch.rand(900, 3)
y = torch.sin(4 * x[:, :1]) * x[:, 1:2] + (0.05 + 0.2 * x[:, 2:]) * torch.randn(900, 1)


# %%
def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))


# %%
net = network()
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(200):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x[:400]), y[:400]).backward()
    optimiser.step()

# %%
with tempfile.TemporaryDirectory() as folder:
    weights, record = Path(folder, "model.pt"), Path(folder, "model.latedrop.json")
    torch.save(net.state_dict(), weights)
    uq = latedrop.calibrate(net, (x[400:600], y[400:600]), progress=False)
    uq.save(record)
    print(f"saved {record.name}, {record.stat().st_size / 1000:.0f} kB")

    # Elsewhere: the architecture from code, the weights and the calibration from files.
    again = network()
    again.load_state_dict(torch.load(weights, weights_only=True))
    loaded = latedrop.load(record, again)
    p, q = uq.predict(x[600:]), loaded.predict(x[600:])
    print(f"same predictions after loading: {torch.equal(p.mean, q.mean) and torch.equal(p.std, q.std)}")

    # The scale can be changed on a predictor, or on a prediction that was already made; nothing runs again.
    for choice in ("optimal", "relaxed", 4.0):
        r = q.scaled(choice)
        held = latedrop.metrics.coverage(r.mean, r.variance, y[600:], level=0.9)
        print(f"scale {choice!s:8} mean std {r.std.mean():.3f}, the 90 % interval holds {held:.1%}")
    print("steps between the two, of which any scale can be used:")
    for point in loaded.calibration.tradeoff()[::5]:
        print(f"  scale {point.scale[0]:6.2f}  NLL {point.nll:6.3f}  miscalibration area {point.ma:.3f}")

    with torch.no_grad():
        again[0].weight.add_(0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        latedrop.load(record, again)
    print(f"after the weights have moved: {str(caught[0].message).split(' that ')[0]} ...")

# %% [markdown]
# What to see: near the optimal scale the NLL is least, at the relaxed one the miscalibration is; any step between can
# be used, without running the network again.

# %%
steps = loaded.calibration.tradeoff()
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
ax.plot([step.nll for step in steps], [step.ma for step in steps], "o-", color="#0072B2", markersize=4)
for step, name, side in ((steps[0], "optimal", "left"), (steps[-1], "relaxed", "right")):
    ax.annotate(name, (step.nll, step.ma), (0, 8), textcoords="offset points", ha=side)
ax.margins(0.12)
ax.set(xlabel="NLL on the validation rows [nats]", ylabel="miscalibration area")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/save_load.png", dpi=160)
