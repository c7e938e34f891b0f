"""The training loop of MCNN: epochs that depend on nothing but their number.

The loss is the mean squared error of the density map over the cells of the region of interest, in hundredths of a
person: `loss = mean(((density - target) / unit)^2)`.

All randomness of an epoch comes from (seed, epoch), so a run that was stopped and started again ends with the same
weights as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format
from tqdm import tqdm

from latedrop.errors import ArgumentError, OutputError
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import MCNN, STRIDE
from latedrop_crowd.training.batches import Data, cut_batch, load, plan_epoch
from latedrop_crowd.training.checkpoint import Checkpoint, Fit

__all__ = ["Settings", "fit"]

_WARM = 3  # epochs over which the learning rate grows from nothing
_AVERAGE = 0.99  # how much of the averaged weights each step keeps
_SAVE_EVERY = 20.0  # seconds between checkpoints


@dataclass(frozen=True)
class Settings:
    """What a network depends on, besides its frames.

    Attributes:
        epochs: passes over the training frames.
        batch: frames per step.
        lr: largest learning rate of Adam.
        crop: side in pixels of a random square, a multiple of 4; None: whole frames.
        rate: of embedded dropout; 0: none.
        seed: of weights, order, crops, flips, jitter and masks.
    """

    epochs: int = 200
    batch: int = 8
    lr: float = 1e-3
    crop: int | None = None
    rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "epochs": (self.epochs >= 1, "at least 1 epoch"),
            "batch": (self.batch >= 1, "at least 1 frame in a batch"),
            "lr": (self.lr > 0, "a learning rate above 0"),
            "crop": (self.crop is None or (self.crop >= 16 and self.crop % STRIDE == 0), "a multiple of 4 from 16 on"),
            "rate": (0 <= self.rate < 1, "a rate from 0 to below 1"),
            "seed": (0 <= self.seed < 2**63, "a seed from 0 to 2**63 - 1"),
        }
        for name, (good, expected) in limits.items():
            if not good:
                raise ArgumentError(f"expected {expected} as {name}; found {getattr(self, name)!r}. Change --{name}.")


def fit(
    crowd_set: CrowdSet,
    settings: Settings,
    device: torch.device,
    checkpoint: Checkpoint | None = None,
    *,
    progress: bool = True,
) -> Fit:
    """Train; what there is at the end.

    Raises:
        OutputError: the loss is not finite, or the network does not react to its input.
    """
    with _fast_convolutions(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        state = _start(settings, device)
        if checkpoint:
            checkpoint.read(state)
        data = load(crowd_set, settings.crop, device, progress)
        saved = time.perf_counter()
        with tqdm(
            disable=None if progress else True,
            desc="training",
            initial=state.epoch,
            total=settings.epochs,
            unit="epoch",
        ) as bar:
            while state.epoch < settings.epochs:
                _epoch(state, data, settings)
                bar.update()
                bar.set_postfix({name: f"{value:.3g}" for name, value in state.history[-1].items()})
                if checkpoint and time.perf_counter() - saved > _SAVE_EVERY:
                    checkpoint.write(state)
                    saved = time.perf_counter()
        if checkpoint:
            checkpoint.write(state)
    return state


def _start(settings: Settings, device: torch.device) -> Fit:
    """A fresh network."""
    torch.manual_seed(_key(settings.seed, 0, 0))
    model = MCNN(rate=settings.rate)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is model.fuse else "relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    model = convert_conv2d_weight_memory_format(model.to(device), torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), settings.lr, fused=True)
    return Fit(model, deepcopy(model).eval().requires_grad_(False), optimizer)


def _epoch(state: Fit, data: Data, settings: Settings) -> None:
    """Go once through the training frames, and look at the validation frames."""
    start = time.perf_counter()
    loss = _steps(state, data, settings)
    loss_value, mae, spread = measured = torch.stack([loss, *_validate(state.average, data, settings.batch)]).tolist()
    state.seconds += time.perf_counter() - start
    state.history.append({"loss": loss_value, "mae": mae})
    if not all(map(math.isfinite, measured)):
        raise OutputError(f"expected a finite loss; found {loss_value} in epoch {state.epoch}. Lower --lr.")
    if spread == 0:
        raise OutputError(
            f"expected a network that reacts to its input; all its maps are alike after epoch {state.epoch}. Lower "
            "--lr, or change --seed."
        )


def _steps(state: Fit, data: Data, settings: Settings) -> Tensor:
    """The mean loss of an epoch, still on the device."""
    model, device = state.model.train(), data.train.counts.device
    key = _key(settings.seed, 0, state.epoch + 1)
    plan = plan_epoch(data.train, settings.crop, key)
    torch.manual_seed(key)
    batches = max(1, len(plan.order) // settings.batch)
    total = torch.zeros((), device=device)
    for step in range(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = settings.lr * _warm_then_cosine(settings.epochs, state.epoch + step / batches)
        image, target, mask = cut_batch(data, plan, slice(step * settings.batch, (step + 1) * settings.batch))
        with _half_precision(device):
            density = model(image)
        error = (density.float() / data.unit - target) * mask
        loss = error.square().sum() / mask.sum().clamp(min=1)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        _follow(state, state.epoch * batches + step)
        total += loss.detach()
    return total / batches


def _warm_then_cosine(epochs: int, position: float) -> float:
    """Share of the learning rate at a position in epochs."""
    warm = min(_WARM, epochs / 4)
    if position < warm:
        return max(0.02, position / warm)
    return 0.5 + 0.5 * math.cos(math.pi * (position - warm) / (epochs - warm))


def _follow(state: Fit, step: int) -> None:
    """Move the averaged weights towards the present ones; faster at first, where these are still far off."""
    share = 1 - min(_AVERAGE, (1 + step) / (10 + step))
    with torch.no_grad():
        for average, value in zip(state.average.parameters(), state.model.parameters(), strict=True):
            average.lerp_(value, share)


def _validate(model: MCNN, data: Data, size: int) -> tuple[Tensor, Tensor]:
    """The mean absolute error of the counts, and how far a map is from flat; still on the device."""
    frames = data.validation
    counts, spreads = [], []
    with torch.inference_mode(), _half_precision(frames.counts.device):
        for images in frames.images.split(size):
            density = model(images.float().contiguous(memory_format=torch.channels_last) / 255).float()
            counts.append((density * data.roi).sum((1, 2, 3)))
            spreads.append(density.amax() - density.amin())
        return (torch.cat(counts) - frames.counts).abs().mean(), torch.stack(spreads).amax()


def _half_precision(device: torch.device) -> torch.autocast:
    """On a GPU, where it is faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def _fast_convolutions(device: torch.device) -> Iterator[None]:
    """Let a GPU try its algorithms, as all batches have one shape; and leave the setting as it was."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda" or before
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _key(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
