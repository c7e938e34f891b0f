"""The frames of a training, held on the device as bytes, and the batches that an epoch cuts from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError
from latedrop.progress import shown_on
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import MCNN, STRIDE

__all__ = ["Data", "Frames", "Plan", "cut_batch", "load", "plan_epoch"]

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
    """What happens to which frame in an epoch; drawn on the host, and sent to the device in one go.

    Attributes:
        order: of the frames.
        corners: top and left of the crops.
        side: rows and columns of a crop.
        flip: which are mirrored, `(N, 1, 1, 1)`.
        contrast: factors, `(N, 1, 1, 1)`.
        brightness: shifts, `(N, 1, 1, 1)`.
    """

    order: list[int]
    corners: list[tuple[int, int]]
    side: tuple[int, int]
    flip: Tensor
    contrast: Tensor
    brightness: Tensor


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
