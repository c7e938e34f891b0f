"""The training loop of MCNN: frames held on the device, epochs that depend on nothing but their number, checkpoints.

The loss is the mean squared error of the density map over the cells of the region of interest, in hundredths of a
person: `loss = mean(((density - target) / unit)^2)`.

All randomness of an epoch comes from (seed, attempt, epoch), so a run that was stopped and started again ends with the
same weights as one that was not.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from latedrop.crowd.density import roi_cells
from latedrop.crowd.layouts import CrowdSet
from latedrop.crowd.mcnn import MCNN, STRIDE
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.files import write_aside

__all__ = ["Checkpoint", "Fit", "Settings", "differences", "fit", "in_order"]

_WARM = 3
"""Epochs over which the learning rate grows from nothing; the last of them also tell how long an epoch takes."""
_ATTEMPTS = 3
_SAVE_EVERY = 20.0
"""Seconds between checkpoints."""
# Of a `Fit`, besides weights and optimizer: what a checkpoint holds.
_PLAIN = ("attempt", "epoch", "epochs", "seconds", "best", "best_epoch", "best_mae", "history")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Settings:
    """What a network depends on, besides its frames.

    Attributes:
        epochs: passes over the training frames.
        minutes: where given, as many epochs as fit into this time, instead of `epochs`.
        batch: frames per step.
        lr: largest learning rate of Adam.
        crop: side in pixels of a random square, a multiple of 4; None: whole frames.
        rate: of embedded dropout; 0: none.
        seed: of weights, order, crops, flips, jitter and masks.
        jitter: how far contrast (as a share) and brightness (by half of it) may move.
        flip: mirror half of the frames.
        average: how much of the averaged weights each step keeps.
        precision: `"bf16"` for a GPU, where it is faster; `"fp32"`.
    """

    epochs: int = 200
    minutes: float | None = None
    batch: int = 8
    lr: float = 1e-3
    crop: int | None = None
    rate: float = 0.0
    seed: int = 0
    jitter: float = 0.2
    flip: bool = True
    average: float = 0.99
    precision: str = "fp32"

    def __post_init__(self) -> None:
        limits = {
            "epochs": (self.epochs >= 1, "at least 1 epoch"),
            "minutes": (self.minutes is None or self.minutes > 0, "more than 0 minutes"),
            "batch": (self.batch >= 1, "at least 1 frame in a batch"),
            "lr": (self.lr > 0, "a learning rate above 0"),
            "crop": (self.crop is None or (self.crop >= 16 and self.crop % STRIDE == 0), "a multiple of 4 from 16 on"),
            "rate": (0 <= self.rate < 1, "a rate from 0 to below 1"),
            "seed": (0 <= self.seed < 2**63, "a seed from 0 to 2**63 - 1"),
            "jitter": (0 <= self.jitter < 1, "a jitter from 0 to below 1"),
            "average": (0 <= self.average < 1, "a share from 0 to below 1"),
            "precision": (self.precision in ("bf16", "fp32"), "bf16 or fp32"),
        }
        for name, (good, expected) in limits.items():
            if not good:
                raise ArgumentError(f"expected {expected} as {name}; found {getattr(self, name)!r}. Change --{name}.")


@dataclass
class Fit:
    """A training under way.

    Attributes:
        model: whose weights Adam moves.
        average: the average of its weights; this is what is validated and kept.
        optimizer: Adam.
        attempt: how many networks were dead before this one.
        epoch: epochs done.
        epochs: to do in all; 0: not known yet, as the time is given and an epoch has not been timed.
        seconds: spent.
        best: weights of the best epoch of the second half.
        best_epoch: which it was, from 1.
        best_mae: its validation error.
        history: by epoch, `loss`, `mae` of validation counts and `seconds`.
    """

    model: MCNN
    average: MCNN
    optimizer: torch.optim.Adam
    attempt: int = 0
    epoch: int = 0
    epochs: int = 0
    seconds: float = 0.0
    best: dict[str, Tensor] = field(default_factory=dict)
    best_epoch: int = 0
    best_mae: float = math.inf
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """A file that a stopped training goes on from.

    Attributes:
        path: of the file.
        identity: settings and frames; plain JSON. Those of another training are refused.
    """

    path: Path
    identity: dict[str, Any]

    def write(self, state: Fit) -> None:
        """Put the training into the file, all of it or nothing."""
        content = {
            "identity": json.dumps(self.identity),
            "model": state.model.state_dict(),
            "average": state.average.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            **{name: getattr(state, name) for name in _PLAIN},
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_aside(self.path, buffer.getvalue())

    def read(self, state: Fit) -> None:
        """Take the training up from the file, if there is one.

        Raises:
            FileError: the file is damaged, or of another training.
        """
        if not self.path.exists():
            return
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            identity = json.loads(found["identity"])
        except (OSError, RuntimeError, UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
            raise FileError(
                f"expected the checkpoint of a training in {self.path}; it cannot be read ({type(error).__name__}). "
                "Pass --fresh to start again."
            ) from error
        other = differences(self.identity, identity)
        if other:
            raise FileError(
                f"expected the checkpoint {self.path} to be of this training; found another: {other}. "
                "Use the same settings and frames to go on, or pass --fresh to start again."
            )
        state.model.load_state_dict(found["model"])
        state.average.load_state_dict(found["average"])
        state.optimizer.load_state_dict(found["optimizer"])
        for name in _PLAIN:
            setattr(state, name, found[name])


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What differs between two identities, in words; empty if nothing does.

    >>> differences({"settings": {"lr": 0.1, "seed": 0}}, {"settings": {"lr": 0.2, "seed": 0}})
    'lr 0.2 instead of 0.1'
    """
    words = []
    for group, values in json.loads(json.dumps(wanted)).items():
        there = found.get(group) or {}
        words += [
            f"{key} {there.get(key)} instead of {value}" for key, value in values.items() if there.get(key) != value
        ]
    return ", ".join(words)


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
        data = _load(crowd_set, settings, device, progress)
        saved = time.perf_counter()
        with _bar(progress, desc="training", initial=state.epoch, total=state.epochs or None, unit="epoch") as bar:
            while not state.epochs or state.epoch < state.epochs:
                state = _go_on(state, data, settings)
                _show(bar, state)
                if checkpoint and time.perf_counter() - saved > _SAVE_EVERY:
                    checkpoint.write(state)
                    saved = time.perf_counter()
        if checkpoint:
            checkpoint.write(state)
    return state


def in_order(read: Callable[[int], _Item], indices: Sequence[int], *, ahead: int = 32) -> Iterator[_Item]:
    """Results in the order of the indices, read by a few threads, as decoding leaves the interpreter alone.

    Only so many are read ahead: a set of frames may be larger than the memory.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        waiting = deque(pool.submit(read, index) for index in indices[:ahead])
        for index in indices[ahead:]:
            first = waiting.popleft()
            yield first.result()
            waiting.append(pool.submit(read, index))
        while waiting:
            yield waiting.popleft().result()


@dataclass(frozen=True)
class _Frames:
    """Frames as bytes `(C, H, W)` and targets in units of the network `(1, h, w)`; lists where sizes differ."""

    images: Tensor | list[Tensor]
    targets: Tensor | list[Tensor]
    counts: Tensor


@dataclass(frozen=True)
class _Data:
    train: _Frames
    validation: _Frames
    roi: Tensor | None
    unit: float


def _load(crowd_set: CrowdSet, settings: Settings, device: torch.device, progress: bool) -> _Data:
    """Decode the frames once."""
    unit = float(MCNN().unit)

    def read(index: int) -> tuple[Tensor, Tensor]:
        return (crowd_set.image(index) * 255).round().to(torch.uint8), crowd_set.density(index) / unit

    def part(name: str, crop: int) -> _Frames:
        indices: tuple[int, ...] = getattr(crowd_set, name)
        if not indices:
            raise DataError(f"expected {name} frames in {crowd_set.name}; found none. Open the set's training part.")
        images, targets = [], []
        with _bar(progress, desc=f"reading {name} frames", total=len(indices), delay=1, leave=False) as bar:
            for image, target in in_order(read, indices):
                images.append(_at_least(image, crop))
                targets.append(_at_least(target, crop // STRIDE))
                if bar is not None:
                    bar.update()
        counts = torch.tensor([crowd_set.count(i) for i in indices], dtype=torch.float32)
        return _Frames(_held(images, device), _held(targets, device), counts.to(device))

    train = part("train", settings.crop or 0)
    if settings.crop is None and isinstance(train.images, list):
        raise ArgumentError(
            f"expected a crop, as frames of {crowd_set.name} differ in size; found none. Pass --crop 256."
        )
    roi = None if crowd_set.roi is None else torch.from_numpy(roi_cells(crowd_set.roi, STRIDE)).to(device)
    return _Data(train, part("validation", 0), roi, unit)


def _at_least(x: Tensor, side: int) -> Tensor:
    """A frame smaller than the crop gets black below and to the right of it."""
    down, right = max(0, side - x.shape[-2]), max(0, side - x.shape[-1])
    return nn.functional.pad(x, (0, right, 0, down)) if down or right else x


def _held(items: list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """On the device, as one tensor where all have one shape."""
    if len({item.shape for item in items}) == 1:
        return torch.stack(items).to(device)
    return [item.to(device) for item in items]


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


def _go_on(state: Fit, data: _Data, settings: Settings) -> Fit:
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
    # In its first half a training passes good counts by luck, with maps that are still wrong.
    if state.epochs and 2 * state.epoch > state.epochs and mae < state.best_mae:
        weights = {name: value.detach().cpu().clone() for name, value in state.average.state_dict().items()}
        state.best, state.best_epoch, state.best_mae = weights, state.epoch, mae
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


def _epoch(state: Fit, data: _Data, settings: Settings) -> Tensor:
    """Go once through the training frames; the mean loss, still on the device."""
    model, device = state.model.train(), data.train.counts.device
    key = _key(settings.seed, state.attempt, state.epoch + 1)
    plan = _plan(data.train, settings, key)
    torch.manual_seed(key)
    batches = max(1, len(plan.order) // settings.batch)
    total = torch.zeros((), device=device)
    for step in range(batches):
        for group in state.optimizer.param_groups:
            group["lr"] = settings.lr * _warm_then_cosine(state, settings, state.epoch + step / batches)
        image, target, mask = _batch(data, plan, slice(step * settings.batch, (step + 1) * settings.batch))
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


@dataclass(frozen=True)
class _Plan:
    """What happens to which frame in an epoch; drawn on the host, and sent to the device in one go.

    Attributes:
        order: of the frames.
        corners: top and left of the crops; None: whole frames.
        side: rows and columns of a crop.
        index: `order` on the device.
        flip: which are mirrored, `(N, 1, 1, 1)`.
        contrast: factors, `(N, 1, 1, 1)`.
        brightness: shifts, `(N, 1, 1, 1)`.
    """

    order: list[int]
    corners: list[tuple[int, int]] | None
    side: tuple[int, int]
    index: Tensor
    flip: Tensor
    contrast: Tensor
    brightness: Tensor


def _plan(frames: _Frames, settings: Settings, key: int) -> _Plan:
    generator = torch.Generator().manual_seed(key)
    device = frames.counts.device
    order = torch.randperm(len(frames.counts), generator=generator)
    uniform = torch.rand(5, len(order), generator=generator)
    numbers, crop, corners = order.tolist(), settings.crop, None
    h, w = frames.targets[0].shape[-2:]
    side = (crop, crop) if crop else (STRIDE * h, STRIDE * w)
    if crop:
        # On the grid of the cells, so that frame and target stay together.
        room = torch.tensor([frames.targets[i].shape[-2:] for i in numbers]) - crop // STRIDE + 1
        corners = [(top, left) for top, left in (STRIDE * (uniform[:2].T * room).long()).tolist()]
    flip = (uniform[2] < 0.5) & settings.flip
    contrast = 1 + settings.jitter * (2 * uniform[3] - 1)
    brightness = settings.jitter * (uniform[4] - 0.5)
    sent = torch.stack([flip, contrast, brightness])[..., None, None, None].to(device)
    return _Plan(numbers, corners, side, order.to(device), sent[0] > 0, sent[1], sent[2])


def _batch(data: _Data, plan: _Plan, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Frames in [0, 1], targets, and which cells count, `(N or 1, 1, h or 1, w or 1)`; pixels off the grid are cut."""
    frames = data.train
    (down, right), (h, w) = plan.side, (plan.side[0] // STRIDE, plan.side[1] // STRIDE)
    roi = torch.ones(1, 1, 1, device=frames.counts.device) if data.roi is None else data.roi[None].float()
    if plan.corners is None:
        assert isinstance(frames.images, Tensor)  # `_load` refuses others
        assert isinstance(frames.targets, Tensor)
        image, target = frames.images[plan.index[rows]][..., :down, :right], frames.targets[plan.index[rows]]
        mask = roi[None]
    else:
        places = list(zip(plan.order[rows], plan.corners[rows], strict=True))
        image = torch.stack([frames.images[i][:, y : y + down, x : x + right] for i, (y, x) in places])
        cells = [(i, slice(y // STRIDE, y // STRIDE + h), slice(x // STRIDE, x // STRIDE + w)) for i, (y, x) in places]
        target = torch.stack([frames.targets[i][:, y, x] for i, y, x in cells])
        mask = roi[None] if data.roi is None else torch.stack([roi[:, y, x] for _, y, x in cells])
    flip = plan.flip[rows]
    image = image.to(memory_format=torch.channels_last).float() / 255
    image = ((image - 0.5) * plan.contrast[rows] + 0.5 + plan.brightness[rows]).clamp(0, 1)
    image, target = (torch.where(flip, x.flip(-1), x) for x in (image, target))
    mask = mask if data.roi is None else torch.where(flip, mask.flip(-1), mask)
    return image.contiguous(memory_format=torch.channels_last), target, mask


def _validate(model: MCNN, data: _Data, settings: Settings) -> tuple[Tensor, Tensor]:
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


@contextmanager
def _bar(progress: bool, **options: Any) -> Iterator[Any]:
    """A progress bar, or None."""
    if not progress:
        yield None
        return
    from tqdm import tqdm

    with tqdm(**options) as bar:
        yield bar


def _show(bar: Any, state: Fit) -> None:
    """How far it is; after a restart or once an epoch is timed, the numbers differ from what the bar knows."""
    if bar is not None:
        bar.n, bar.total = state.epoch, state.epochs or None
        last = state.history[-1] if state.history else {}
        bar.set_postfix({name: f"{last[name]:.3g}" for name in ("loss", "mae") if last}, best=f"{state.best_mae:.3g}")


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
