# %% [markdown]
"""Deployment: a calibrated network as one ONNX file, which runs without torch.

The file holds the network, what makes its variance, and the calibration. Any ONNX runtime gives mean, standard
deviation and interval from it; `latedrop.load_onnx` gives intervals at every level, with numpy and onnxruntime alone.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
from torch import nn

import latedrop

# %%
torch.manual_seed(0)
x = 2 * torch.rand(900, 1) - 1
y = torch.sin(4 * x) + (0.05 + 0.2 * x.abs()) * torch.randn(900, 1)
net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
for _ in range(300):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x[:500]), y[:500]).backward()
    optimiser.step()

# %%
uq = latedrop.calibrate(net, (x[500:], y[500:]), reference=x[:500], progress=False)
Path("output").mkdir(exist_ok=True)
path = uq.to_onnx("output/model.onnx", x[:8], level=0.9)
print(f"written: {Path(path).name}, {Path(path).stat().st_size / 1000:.0f} kB")

# %%
grid = np.linspace(-1.6, 1.6, 300, dtype=np.float32)[:, None]
session = onnxruntime.InferenceSession(path)
mean, low, high = session.run(["mean", "low", "high"], {"input": grid})
p = latedrop.load_onnx(path).predict(grid)
narrow_low, narrow_high = p.interval(0.5)
apart = np.abs(mean - uq.predict(torch.tensor(grid)).mean.numpy()).max()
print(f"largest difference between torch and onnxruntime: {apart:.0e}")

# %% [markdown]
# What to see: the same bands as in torch, from the file alone. Beyond the training inputs, where the shading ends, they
# widen.

# %%
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
ax.axvspan(-1, 1, color="0.94", zorder=0, label="training inputs")
ax.fill_between(grid[:, 0], low[:, 0], high[:, 0], color="#BBDDF2", label="90 % interval")
ax.fill_between(grid[:, 0], narrow_low[:, 0], narrow_high[:, 0], color="#7FBDE6", label="50 % interval")
ax.plot(grid, mean, color="#0072B2", label="mean")
ax.scatter(x[500:], y[500:], s=5, color="0.2", label="validation rows")
ax.set(xlabel="x", ylabel="y", ylim=(-3, 3))
ax.legend(loc="lower left", ncols=2, fontsize="small")
figure.savefig("output/onnx_file.png", dpi=140)
