"""The training loop of MCNN: epochs that depend on nothing but their number.

The loss is the mean squared error of the density map over the cells of the region of interest, in hundredths of a
person: `loss = mean(((density - target) / unit)^2)`.

All randomness of an epoch comes from (seed, epoch), so a run that was stopped and started again ends with the same
weights as one that was not.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format
from tqdm import tqdm

from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.files import parsed, write_aside
from latedrop.records import checked
from latedrop.terminal import shown_on
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import MCNN, STRIDE

__all__ = ["Checkpoint", "Fit", "Settings", "differences", "fit"]

_WARM = 3  # epochs over which the learning rate grows from nothing
_AVERAGE = 0.99  # how much of the averaged weights each step keeps
_SAVE_EVERY = 20.0  # seconds between checkpoints


@dataclass(frozen=True)
class Settings:
    """Choices that a network depends on, besides its frames."""

    epochs: int = 200  # passes over the training frames
    batch: int = 8  # frames per step
    lr: float = 1e-3  # largest learning rate of Adam
    crop: int | None = None  # side in pixels of a random square, a multiple of 4; None: whole frames
    rate: float = 0.0  # of embedded dropout; 0: none
    seed: int = 0  # of weights, order, crops, flips, jitter and masks

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
    """Train; `OutputError` where the loss is not finite, or the network does not react to its input."""
    # All batches have one shape, so that a GPU may try its algorithms once.
    with (
        torch.backends.cudnn.flags(enabled=True, benchmark=device.type == "cuda"),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        state = _start(settings, device)
        if checkpoint:
            checkpoint.read(state)
        data = load(crowd_set, settings.crop, device, progress)
        saved = time.perf_counter()
        disable, done = None if progress else True, state.epoch
        with tqdm(disable=disable, desc="training", initial=done, total=settings.epochs, unit="epoch") as bar:
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


def _key(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


_WATCHED = 16
_JITTER = 0.2  # how far contrast, as a share, and twice the brightness may move


class Frames(NamedTuple):
    """Frames as bytes `(N, C, H, W)`, targets in units of the network `(N, 1, h, w)`, and counts `(N,)`."""

    images: Tensor
    targets: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Data:
    """The frames of both parts, the cells that count, 0 or 1 `(1, h, w)`, and the network's unit."""

    train: Frames
    validation: Frames
    roi: Tensor
    unit: float


def load(crowd_set: CrowdSet, crop: int | None, device: torch.device, progress: bool) -> Data:
    """Decode the frames once."""
    unit = float(MCNN().unit)
    if crowd_set.size is None or (crop or 0) > min(crowd_set.size):
        size = "several sizes" if crowd_set.size is None else f"{crowd_set.size[0]} x {crowd_set.size[1]} pixels"
        raise ArgumentError(
            f"expected frames of one size to train on, as large as a crop; found {size} in {crowd_set.name} and a crop "
            f"of {crop}. Resize the frames, or pass a smaller --crop."
        )

    def read(index: int) -> tuple[Tensor, Tensor]:
        return crowd_set.pixels(index), crowd_set.density(index) / unit

    def part(name: str) -> Frames:
        indices: tuple[int, ...] = getattr(crowd_set, name)
        if not indices:
            raise DataError(f"expected {name} frames in {crowd_set.name}; found none. Open another folder.")
        frames = shown_on(in_order(read, indices), f"reading {name} frames", len(indices), "frames", show=progress)
        images, targets = zip(*frames, strict=True)
        parts = torch.stack(images), torch.stack(targets), crowd_set.counts(indices)
        return Frames(*(values.to(device) for values in parts))

    train, cells = part("train"), crowd_set.cells()
    # Where all frames are trained on, a few of them show whether a network is alive.
    some = slice(None, None, max(1, len(train.counts) // _WATCHED))
    validation = part("validation") if crowd_set.validation else Frames(*(values[some] for values in train))
    roi = torch.ones_like(train.targets[0]) if cells is None else cells[None].float().to(device)
    return Data(train, validation, roi, unit)


class Plan(NamedTuple):
    """Order, crops and changes of the frames of an epoch; drawn on the host, and sent to the device in one go."""

    order: list[int]  # of the frames
    corners: list[tuple[int, int]]  # top and left of the crops
    side: tuple[int, int]  # rows and columns of a crop
    flip: Tensor  # which are mirrored, `(N, 1, 1, 1)`
    contrast: Tensor  # factors, `(N, 1, 1, 1)`
    brightness: Tensor  # shifts, `(N, 1, 1, 1)`


def plan_epoch(frames: Frames, crop: int | None, key: int) -> Plan:
    """Order, crops, flips and jitter of an epoch; all of them follow from the key."""
    generator = torch.Generator().manual_seed(key)
    order = torch.randperm(len(frames.counts), generator=generator)
    uniform = torch.rand(5, len(order), generator=generator)
    h, w = frames.targets.shape[-2:]
    side = (crop, crop) if crop else (STRIDE * h, STRIDE * w)
    # On the grid of the cells, so that frame and target stay together.
    room = torch.tensor([h - side[0] // STRIDE + 1, w - side[1] // STRIDE + 1])
    corners = [(top, left) for top, left in (STRIDE * (uniform[:2].T * room).long()).tolist()]
    contrast, brightness = 1 + _JITTER * (2 * uniform[3] - 1), _JITTER * (uniform[4] - 0.5)
    sent = torch.stack([(uniform[2] < 0.5).float(), contrast, brightness])[..., None, None, None]
    flip, contrast, brightness = sent.to(frames.counts.device)
    return Plan(order.tolist(), corners, side, flip > 0, contrast, brightness)


def cut_batch(data: Data, plan: Plan, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Frames in [0, 1], targets, and which cells count, `(N, 1, h, w)`; pixels off the grid are cut."""
    (down, right), (h, w) = plan.side, (side // STRIDE for side in plan.side)
    places = list(zip(plan.order[rows], plan.corners[rows], strict=True))
    image = torch.stack([data.train.images[i][:, y : y + down, x : x + right] for i, (y, x) in places])
    cells = [(i, slice(y // STRIDE, y // STRIDE + h), slice(x // STRIDE, x // STRIDE + w)) for i, (y, x) in places]
    target = torch.stack([data.train.targets[i][:, y, x] for i, y, x in cells])
    mask = torch.stack([data.roi[:, y, x] for _, y, x in cells])
    image = image.to(memory_format=torch.channels_last).float() / 255
    image = ((image - 0.5) * plan.contrast[rows] + 0.5 + plan.brightness[rows]).clamp(0, 1)
    image, target, mask = (torch.where(plan.flip[rows], x.flip(-1), x) for x in (image, target, mask))
    return image.contiguous(memory_format=torch.channels_last), target, mask


@dataclass
class Fit:
    """A training under way."""

    model: MCNN  # whose weights Adam moves
    average: MCNN  # the average of its weights; this is what is validated and kept
    optimizer: torch.optim.Adam  # Adam
    seconds: float = 0.0  # spent
    history: list[dict[str, float]] = field(default_factory=list)  # by epoch, `loss` and `mae` of validation counts

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.history)


@dataclass(frozen=True)
class Checkpoint:
    """A file that a stopped training goes on from."""

    path: Path  # of the file
    identity: dict[str, Any]  # settings and frames; plain JSON. Those of another training are refused

    def write(self, state: Fit) -> None:
        """Put the training into the file, all of it or nothing."""
        content = {
            "identity": json.dumps(self.identity),
            "model": state.model.state_dict(),
            "average": state.average.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "seconds": state.seconds,
            "history": state.history,
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_aside(self.path, buffer.getvalue())

    def read(self, state: Fit) -> None:
        """Take the training up from the file, if there is one; one of another training is a `FileError`."""
        if not self.path.exists():
            return
        with self._readable():
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            identity = checked(
                dict[str, Any], parsed(content["identity"], "the identity of a training", ""), "identity", ""
            )
        other = differences(self.identity, identity)
        if other:
            raise FileError(
                f"expected the checkpoint {self.path} to be of this training; found another: {other}. "
                "Use the same settings and frames to go on, or pass --fresh to start again."
            )
        with self._readable():
            state.model.load_state_dict(content["model"])
            state.average.load_state_dict(content["average"])
            state.optimizer.load_state_dict(content["optimizer"])
            state.seconds, state.history = content["seconds"], content["history"]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a damaged file can raise any error
            raise FileError(
                f"expected the checkpoint of a training in {self.path}; it cannot be read ({type(error).__name__}). "
                "Pass --fresh to start again."
            ) from error


def differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """Say how two identities differ; empty if they do not.

    >>> differences({"settings": {"lr": 0.1, "seed": 0}}, {"settings": {"lr": 0.2, "seed": 0}})
    'lr 0.2 instead of 0.1'
    """
    words = []
    for group, values in json.loads(json.dumps(wanted)).items():
        entry = stored.get(group)
        other = {key: entry.get(key) if isinstance(entry, dict) else None for key in values}
        words += [f"{key} {other[key]} instead of {value}" for key, value in values.items() if other[key] != value]
    return ", ".join(words)
