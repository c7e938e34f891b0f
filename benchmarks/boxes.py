"""draft"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d, smooth_l1_loss

SIDE, STRIDE, CLASSES = 64, 4, 3
Scenes = list[tuple[Tensor, dict[str, Tensor]]]


class Detector(nn.Module):
    """Finds shapes from a grid of points, each with a score for each class and the distances to four sides.

    It takes a list of images `(1, H, W)` and returns what torchvision's detectors return.
    """

    def __init__(self, width: int = 32, least: float = 0.05) -> None:
        super().__init__()
        sizes, strides = (1, width // 2, width, width, width, width), (1, 2, 2, 1, 1)
        layers: list[nn.Module] = []
        for a, b, stride in zip(sizes, sizes[1:], strides, strict=False):
            layers += [nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.classes, self.sides = nn.Conv2d(width, CLASSES, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        nn.init.constant_(self.classes.bias, -3.0)
        nn.init.constant_(self.sides.bias, 2.0)
        self.least = least

    def dense(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `(N, P, 3)`, boxes `(N, P, 4)` and points `(P, 2)`."""
        hidden = self.body(images)
        rows, columns = (STRIDE * (torch.arange(size) + 0.5) for size in hidden.shape[2:])
        points = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1).flatten(0, 1)
        logits, sides = (part.flatten(2).mT for part in (self.classes(hidden), self.sides(hidden).exp()))
        return logits, torch.cat([points - sides[..., :2], points + sides[..., 2:]], -1), points

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        logits, boxes, _ = self.dense(torch.stack(list(images)))
        return [self._kept(*pair) for pair in zip(logits.sigmoid(), boxes, strict=True)]

    def _kept(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        best, label = scores.max(1)
        order = [i for i in best.argsort(descending=True).tolist() if bool(best[i] > self.least)]
        kept: list[int] = []
        overlaps = iou(boxes, boxes)
        for i in order:
            if not any(overlaps[i, j] > 0.4 for j in kept):
                kept.append(i)
        return {"boxes": boxes[kept], "scores": best[kept], "labels": label[kept] + 1}


def iou(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clamp_min(0).prod(2)
    areas = [(part[:, 2:] - part[:, :2]).prod(1) for part in (a, b)]
    return shared / (areas[0][:, None] + areas[1] - shared)


def blurred(image: Tensor, sigma: float) -> Tensor:
    if sigma < 0.2:
        return image
    reach = math.ceil(3 * sigma)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    kernel = kernel / kernel.sum()
    wide = conv2d(image[None, None], kernel[None, None, None], padding=(0, reach))
    return conv2d(wide, kernel[None, None, :, None], padding=(reach, 0))[0, 0]


def scenes(count: int, seed: int, blur: tuple[float, float] = (0.0, 3.0)) -> Scenes:
    """Return images of one to three shapes, blurred each by its own width, on noise."""
    dice = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE) + 0.5, torch.arange(SIDE) + 0.5, indexing="ij")

    def uniform(low: float, high: float) -> float:
        return float(low + (high - low) * torch.rand((), generator=dice))

    made: Scenes = []
    while len(made) < count:
        image = torch.zeros(SIDE, SIDE)
        boxes: list[Tensor] = []
        labels: list[int] = []
        for _ in range(int(torch.randint(1, 4, (), generator=dice))):
            width, height = uniform(10, 24), uniform(10, 24)
            kind = int(torch.randint(CLASSES, (), generator=dice))
            left, top = uniform(1, SIDE - 1 - width), uniform(1, SIDE - 1 - height)
            box = torch.tensor([left, top, left + width, top + height])
            if boxes and float(iou(box[None], torch.stack(boxes)).max()) > 0.05:
                continue
            u, v = (columns - left) / width * 2 - 1, (rows - top) / height * 2 - 1
            inside = (u.abs() < 1) & (v.abs() < 1)
            if kind == 0:
                inside = u**2 + v**2 < 1
            elif kind == 2:
                inside = inside & (u.abs() < (v + 1) / 2)
            image = image + uniform(0.4, 1) * blurred(inside.float(), uniform(*blur))
            boxes.append(box)
            labels.append(kind + 1)
        noisy = image + 0.2 * torch.randn(SIDE, SIDE, generator=dice)
        made.append((noisy[None], {"boxes": torch.stack(boxes), "labels": torch.tensor(labels)}))
    return made


def trained(rows: Scenes, seed: int, steps: int = 1000) -> Detector:
    torch.manual_seed(seed)
    net = Detector()
    images = torch.stack([image for image, _ in rows])
    _, _, points = net.eval().dense(images[:1])
    wanted = torch.zeros(len(rows), len(points), CLASSES)
    boxes = torch.zeros(len(rows), len(points), 4)
    for row, (_, truth) in enumerate(rows):
        for box, label in zip(truth["boxes"], truth["labels"], strict=True):
            centre, size = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
            near = ((points - centre).abs() < size * 0.25).all(1)
            near[(points - centre).square().sum(1).argmin()] = True
            wanted[row, near, label - 1] = 1.0
            boxes[row, near] = box
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, steps)
    dice = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(steps):
        batch = torch.randint(len(rows), (32,), generator=dice)
        logits, given, _ = net.dense(images[batch])
        there = wanted[batch].amax(2) > 0
        p, target = logits.sigmoid(), wanted[batch]
        focus = (target - p).square() * torch.where(target > 0, 0.25, 0.75)  # the focal loss of torchvision's detectors
        loss = binary_cross_entropy_with_logits(logits, target, focus.detach(), reduction="sum") / there.sum()
        loss = loss + smooth_l1_loss(given[there], boxes[batch][there], beta=1.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return net.eval()
