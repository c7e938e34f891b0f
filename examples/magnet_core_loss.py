# %% [markdown]
"""Core loss of a ferrite, by a network that others trained: what its intervals are worth, at home and elsewhere.

`mag-net` carries 30 small float64 networks and the measurements behind them:

    pip install --no-deps mag-net==0.1.0 h5py

This one takes frequency and flux density of a sine wave in N87 and gives the loss. It was trained on part of the same
measurements, nobody says on which, so its errors here are on the small side. The data sheet of the material was made
in another laboratory and at several temperatures. The network has no input for that, so its uncertainty cannot rise.
"""

# %%
import math
import warnings
from importlib.resources import files
from pathlib import Path

import h5py
import matplotlib.pyplot as plt
import torch
from torch import Tensor

import latedrop
from latedrop.evaluation.evaluation import compare, evaluate
from latedrop.report import table, write_report

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the package opens its files as Python 3.11 no longer likes
    from magnet.net import model

    net = model("N87", "Sinusoidal")


# %%
def rows(name: str) -> dict[str, Tensor]:
    with h5py.File(str(files("magnet.data").joinpath(f"N87_{name}.h5"))) as file:
        columns, values = file["dataframe/block0_items"][:], torch.tensor(file["dataframe/block0_values"][:])
    return {column.decode(): values[:, i] for i, column in enumerate(columns)}


# %%
def pairs(found: dict[str, Tensor], some: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of frequency and flux density, and 100 times that of the loss: there, 1 is about one percent."""
    x = torch.stack([found["Frequency"], found["Flux_Density"]], 1)[some].log10()
    return x, 100 * found["Power_Loss"][some].log()


# %%
def percent(output: Tensor) -> Tensor:
    """From the decimal logarithm that the network gives."""
    return 100 * math.log(10) * output[:, 0]


# %%
measured, sheet = rows("database"), rows("datasheet")
sine = torch.nonzero(measured["Duty_1"] < 0)[:, 0]  # the other rows are triangles and trapezoids
sine = sine[torch.randperm(len(sine), generator=torch.Generator().manual_seed(0))]
validation, held_out, test = (pairs(measured, part) for part in sine.tensor_split(3))
elsewhere = {f"data sheet, {t} °C": pairs(sheet, sheet["Temperature"] == t) for t in (25, 60, 100)}

# %%
print(latedrop.find_sites(net, validation[0]), end="\n\n")
uq = latedrop.calibrate(net, validation, readout=percent, method="sample").conformal(held_out)
floored = latedrop.calibrate(net, validation, readout=percent, method=latedrop.Sampling(mean="model", floor=True))

# %%
x, y = test
p, q = uq.predict(x), floored.predict(x)
with torch.no_grad():
    own, error2 = percent(net(x)), (percent(net(validation[0])) - validation[1]).square().mean()
scores = [evaluate(own, error2.expand(len(y)), y, label="constant"), *compare(p, y)[:-1]]
scores.append(evaluate(q.mean, q.variance, y, label="floor", scale=floored.calibration.scales))
lines = table(scores, "%")
widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
for line in lines:
    print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
print(f"with a floor: {str(floored.calibration).splitlines()[2]}\n")

# %% [markdown]
# What to see: the measurements of the network's own laboratory lie inside the interval; those of a data sheet, at other
# temperatures, do not.

# %%
figure, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
low, high = (float(end[0] - q.mean[0]) for end in q.interval(0.9))
ax.axhspan(low, high, color="#56B4E9", alpha=0.4, label="90 % interval")
styles = zip(("black", "#009E73", "#E69F00", "#D55E00"), ("o", "s", "^", "D"), strict=True)
for (name, (x, y)), (colour, marker) in zip({"measured": test, **elsewhere}.items(), styles, strict=True):
    p = floored.predict(x)
    held = f"{latedrop.metrics.coverage(p.mean, p.variance, y, level=0.9):.1%}"
    rmse = latedrop.metrics.rmse(p.mean, None, y)
    print(f"{name:18} the 90 % interval holds {held} of {len(y)} rows; RMSE {rmse:.1f} %")
    some = torch.linspace(0, len(y) - 1, 150).long()
    flux = 1000 * 10 ** x[some, 1]
    ax.plot(flux, (y - p.mean)[some], marker, color=colour, markersize=3, label=f"{name}: {held} inside")
ax.set(xscale="log", xlabel="flux density [mT]", ylabel="100 ln(true loss / predicted)", title="N87, sine waves")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/magnet_core_loss.png", dpi=140)
write_report(
    "output/magnet_core_loss.html",
    title="Core loss of N87, sine waves",
    calibration=uq.calibration,
    prediction=uq.predict(test[0]),
    target=test[1],
    unit="%",
)
