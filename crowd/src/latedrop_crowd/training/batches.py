"""The frames of a training, held on the device as bytes, and the batches that an epoch cuts from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, DataError
from latedrop.progress import shown_on
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import MCNN, STRIDE
from latedrop_crowd.training.settings import Settings

__all__ = ["Data", "Frames", "Plan", "cut_batch", "load", "plan_epoch"]


_WATCHED = 16


@dataclass(frozen=True)
class Frames:
    """Frames as bytes `(C, H, W)` and targets in units of the network `(1, h, w)`; lists where sizes differ."""

    images: Tensor | list[Tensor]
    targets: Tensor | list[Tensor]
    counts: Tensor


@dataclass(frozen=True)
class Data:
    """The frames of both parts, the cells that count, bool `(h, w)` or None for all, and the network's unit."""

    train: Frames
    validation: Frames
    roi: Tensor | None
    unit: float


def load(crowd_set: CrowdSet, settings: Settings, device: torch.device, progress: bool) -> Data:
    """Decode the frames once."""
    unit = float(MCNN().unit)

    def read(index: int) -> tuple[Tensor, Tensor]:
        return crowd_set.pixels(index), crowd_set.density(index) / unit

    def part(name: str, crop: int) -> Frames:
        indices: tuple[int, ...] = getattr(crowd_set, name)
        if not indices:
            raise DataError(f"expected {name} frames in {crowd_set.name}; found none. Open the set's training part.")
        images, targets = [], []
        found = in_order(read, indices)
        for image, target in shown_on(found, f"reading {name} frames", len(indices), "frames", show=progress):
            images.append(_at_least(image, crop))
            targets.append(_at_least(target, crop // STRIDE))
        return Frames(_held(images, device), _held(targets, device), crowd_set.counts(indices).to(device))

    train = part("train", settings.crop or 0)
    if settings.crop is None and isinstance(train.images, list):
        raise ArgumentError(
            f"expected a crop, as frames of {crowd_set.name} differ in size; found none. Pass --crop 256."
        )
    cells = crowd_set.cells()
    held = part("validation", 0) if crowd_set.validation else _watched(train)
    return Data(train, held, None if cells is None else cells.to(device), unit)


def _watched(frames: Frames) -> Frames:
    """A few frames that show whether a network is alive, where all of them are trained on."""
    some = range(0, len(frames.counts), max(1, len(frames.counts) // _WATCHED))
    images, targets = ([part[i] for i in some] for part in (frames.images, frames.targets))
    device = frames.counts.device
    return Frames(_held(images, device), _held(targets, device), frames.counts[list(some)])


@dataclass(frozen=True)
class Plan:
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


def plan_epoch(frames: Frames, settings: Settings, key: int) -> Plan:
    """Order, crops, flips and jitter of an epoch; all of them follow from the key."""
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
    return Plan(numbers, corners, side, order.to(device), sent[0] > 0, sent[1], sent[2])


def cut_batch(data: Data, plan: Plan, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Frames in [0, 1], targets, and which cells count, `(N or 1, 1, h or 1, w or 1)`; pixels off the grid are cut."""
    frames = data.train
    (down, right), (h, w) = plan.side, (plan.side[0] // STRIDE, plan.side[1] // STRIDE)
    roi = torch.ones(1, 1, 1, device=frames.counts.device) if data.roi is None else data.roi[None].float()
    if plan.corners is None:
        assert isinstance(frames.images, Tensor)  # `load` refuses others
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


def _at_least(x: Tensor, side: int) -> Tensor:
    """A frame smaller than the crop gets black below and to the right of it."""
    down, right = max(0, side - x.shape[-2]), max(0, side - x.shape[-1])
    return nn.functional.pad(x, (0, right, 0, down)) if down or right else x


def _held(items: list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """On the device, as one tensor where all have one shape."""
    if len({item.shape for item in items}) == 1:
        return torch.stack(items).to(device)
    return [item.to(device) for item in items]
