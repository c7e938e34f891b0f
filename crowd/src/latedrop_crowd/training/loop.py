"""The training loop of MCNN: epochs that depend on nothing but their number.

The loss is the mean squared error of the density map over the cells of the region of interest, in hundredths of a
person: `loss = mean(((density - target) / unit)^2)`.

All randomness of an epoch comes from (seed, attempt, epoch), so a run that was stopped and started again ends with the
same weights as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format
from tqdm import tqdm

from latedrop.errors import OutputError
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import MCNN
from latedrop_crowd.training.batches import Data, cut_batch, load, plan_epoch
from latedrop_crowd.training.checkpoint import Checkpoint, Fit
from latedrop_crowd.training.settings import Settings

__all__ = ["fit"]

_WARM = 3
"""Epochs over which the learning rate grows from nothing; the last of them also tell how long an epoch takes."""
_ATTEMPTS = 3
_SAVE_EVERY = 20.0
"""Seconds between checkpoints."""


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
        OutputError: the loss is not finite, or networks stay dead.
    """
    with _fast_convolutions(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        state = _start(settings, device, attempt=0)
        if checkpoint:
            checkpoint.read(state)
        data = load(crowd_set, settings, device, progress)
        saved = time.perf_counter()
        options = {"desc": "training", "initial": state.epoch, "total": state.epochs or None, "unit": "epoch"}
        with tqdm(disable=not progress, **options) as bar:
            while not state.epochs or state.epoch < state.epochs:
                state = _go_on(state, data, settings)
                _show(bar, state)
                if checkpoint and time.perf_counter() - saved > _SAVE_EVERY:
                    checkpoint.write(state)
                    saved = time.perf_counter()
        if checkpoint:
            checkpoint.write(state)
    return state


def _start(settings: Settings, device: torch.device, attempt: int) -> Fit:
    """A fresh network."""
    torch.manual_seed(_key(settings.seed, attempt, 0))
    model = MCNN(rate=settings.rate)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is model.fuse else "relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    model = convert_conv2d_weight_memory_format(model.to(device), torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), settings.lr, fused=True)
    epochs = 0 if settings.minutes else settings.epochs
    return Fit(model, deepcopy(model).eval().requires_grad_(False), optimizer, attempt, epochs=epochs)


def _go_on(state: Fit, data: Data, settings: Settings) -> Fit:
    """One more epoch, or, if the network is dead, another network."""
    start = time.perf_counter()
    loss = _epoch(state, data, settings)
    measured = torch.stack([loss, *_validate(state.average, data, settings)]).tolist()
    loss_value, mae, spread = measured
    state.epoch += 1
    seconds = time.perf_counter() - start
    state.seconds += seconds
    if not all(map(math.isfinite, measured)):
        raise OutputError(f"expected a finite loss; found {loss_value} in epoch {state.epoch}. Lower --lr.")
    state.history.append({"loss": loss_value, "mae": mae, "seconds": seconds})
    if spread == 0:
        return _restarted(state, settings)
    if settings.minutes and not state.epochs and state.epoch >= _WARM:
        # The first epoch also chooses convolution algorithms; it is no measure of the others.
        each = min(row["seconds"] for row in state.history[1:])
        left = 60 * settings.minutes - state.seconds
        state.epochs = max(state.epoch + 1, state.epoch + int(left / each))
    return state


def _restarted(state: Fit, settings: Settings) -> Fit:
    """A network with other initial weights in place of one whose map does not depend on the frame any more."""
    if state.attempt + 1 >= _ATTEMPTS:
        raise OutputError(
            f"expected a network that reacts to its input; {_ATTEMPTS} in a row died, all outputs alike. Lower --lr."
        )
    device = next(state.model.parameters()).device
    again = _start(settings, device, state.attempt + 1)
    again.seconds = state.seconds
    return again


def _epoch(state: Fit, data: Data, settings: Settings) -> Tensor:
    """Go once through the training frames; the mean loss, still on the device."""
    model, device = state.model.train(), data.train.counts.device
    key = _key(settings.seed, state.attempt, state.epoch + 1)
    plan = plan_epoch(data.train, settings, key)
    torch.manual_seed(key)
    batches = max(1, len(plan.order) // settings.batch)
    total = torch.zeros((), device=device)
    for step in range(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = settings.lr * _warm_then_cosine(state, settings, state.epoch + step / batches)
        image, target, mask = cut_batch(data, plan, slice(step * settings.batch, (step + 1) * settings.batch))
        with _precision(settings, device):
            density = model(image)
        loss = _loss(density, target, mask, data.unit)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        _follow(state, settings, state.epoch * batches + step)
        total += loss.detach()
    return total / batches


def _loss(density: Tensor, target: Tensor, mask: Tensor, unit: float) -> Tensor:
    error = (density.float() / unit - target) * mask
    return error.square().sum() / mask.expand_as(error).sum().clamp(min=1)


def _warm_then_cosine(state: Fit, settings: Settings, position: float) -> float:
    """Share of the learning rate at a position in epochs."""
    warm = _WARM if settings.minutes else min(_WARM, state.epochs / 4)
    if position < warm:
        return max(0.02, position / warm)
    return 0.5 + 0.5 * math.cos(math.pi * (position - warm) / (state.epochs - warm))


def _follow(state: Fit, settings: Settings, step: int) -> None:
    """Move the averaged weights towards the present ones; faster at first, where these are still far off."""
    share = 1 - min(settings.average, (1 + step) / (10 + step))
    with torch.no_grad():
        for kept, value in zip(state.average.parameters(), state.model.parameters(), strict=True):
            kept.lerp_(value, share)


def _validate(model: MCNN, data: Data, settings: Settings) -> tuple[Tensor, Tensor]:
    """The mean absolute error of the counts, and how far a map is from flat; still on the device."""
    frames = data.validation
    size = settings.batch if isinstance(frames.images, Tensor) else 1
    counts, spreads = [], []
    with torch.inference_mode(), _precision(settings, frames.counts.device):
        for start in range(0, len(frames.counts), size):
            chunk = frames.images[start : start + size]
            images = chunk if isinstance(chunk, Tensor) else chunk[0][None]
            density = model(images.float().contiguous(memory_format=torch.channels_last) / 255).float()
            counts.append((density if data.roi is None else density * data.roi).sum((1, 2, 3)))
            spreads.append(density.amax() - density.amin())
        return (torch.cat(counts) - frames.counts).abs().mean(), torch.stack(spreads).amax()


def _show(bar: Any, state: Fit) -> None:
    """How far it is; after a restart or once an epoch is timed, the numbers differ from what the bar knows."""
    bar.n, bar.total = state.epoch, state.epochs or None
    last = state.history[-1] if state.history else {}
    bar.set_postfix({name: f"{last[name]:.3g}" for name in ("loss", "mae") if last})


def _precision(settings: Settings, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")


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
