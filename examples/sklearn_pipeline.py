# %% [markdown]
"""A network as the last step of a scikit-learn pipeline: tables in, arrays out, a standard deviation for every row.

The data are scikit-learn's bundled diabetes set. The scaler is fitted and the network trained before the pipeline is
put together; calling its `fit` would not train the network again.
"""

# %%
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import latedrop
from latedrop import plots
from latedrop.adapters.sklearn import CalibratedRegressor

# %%
torch.manual_seed(0)
x, y = load_diabetes(return_X_y=True, as_frame=True)
x_train, x_rest, y_train, y_rest = train_test_split(x, y, test_size=0.5, random_state=0)
x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=0)

# %%
scaler = StandardScaler().fit(x_train)
net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
inputs = torch.tensor(scaler.transform(x_train), dtype=torch.float32)
targets = torch.tensor(((y_train - y_train.mean()) / y_train.std()).to_numpy(), dtype=torch.float32)[:, None]
optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(inputs), targets).backward()
    optimiser.step()


# %%
def progression(output: torch.Tensor) -> torch.Tensor:
    """From the network's standardised output to the unit of the target."""
    return output * float(y_train.std()) + float(y_train.mean())


# %%
uq = latedrop.calibrate(net, (scaler.transform(x_val), y_val), readout=progression, progress=False)
pipeline = make_pipeline(scaler, CalibratedRegressor(uq))

# %%
mean, std = pipeline.predict(x_test, return_std=True)
_, low, high = pipeline.predict(x_test, return_interval=0.9)
inside = (low <= y_test) & (y_test <= high)
print(f"R2 of the pipeline {pipeline.score(x_test, y_test):.2f}; std from {std.min():.0f} to {std.max():.0f}")
print(f"the 90 % interval holds {inside.mean():.1%} of {len(y_test)} test rows")

# %% [markdown]
# What to see: each dot is a patient at the true value; about nine of ten lie inside the band.

# %%
name = "progression after a year [score]"
ax = plots.intervals(mean, mean, {0.9: (low, high)}, target=y_test, xlabel=f"predicted {name}", ylabel=name)
Path("output").mkdir(exist_ok=True)
ax.figure.savefig("output/sklearn_pipeline.png", dpi=160)
