"""Boxes of a detector, measured: `python -m benchmarks.boxes`.

A small detector finds blurred circles, squares and triangles on noise. Test scenes are like those of the calibration,
or more blurred. Margins are made with one std for all sides, with one from score and side, and with the draws too.
"""

from __future__ import annotations

import math
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d, smooth_l1_loss

from benchmarks.timing import machine, markdown_table, write
from latedrop import Sites
from latedrop.boxes import predictor
from latedrop.boxes.detections import BoxOptions, overlap
from latedrop.boxes.detections import Detector as BoxRunner
from latedrop.boxes.record import BoxErrors, features

SIDE, STRIDE, CLASSES, SEEDS, LEAST = 64, 4, 3, 5, 0.05
LEVELS = (0.8, 0.9, 0.95)
BLUR, MORE_BLUR = (0.0, 3.0), (2.5, 4.5)
Scenes = list[tuple[Tensor, dict[str, Tensor]]]


def main() -> None:
    torch.set_num_threads(1)
    start, runs = time.process_time(), list[dict[str, Any]]()
    for seed in range(SEEDS):
        runs.append(measured(trained(scenes(800, 10 * seed), seed), seed))
        record = {"machine": machine(torch.device("cpu")), "runs": runs}
        write("boxes", record | {"cpu_seconds": round(time.process_time() - start)})


def measured(net: nn.Module, seed: int, count: int = 250) -> dict[str, Any]:
    """Run a detector over scenes, and judge its boxes on fresh ones."""
    blurs = {"validation": BLUR, "margins": BLUR, "like these": BLUR, "more blurred": MORE_BLUR}
    drawn = {name: scenes(count, 10 * seed + i, blur) for i, (name, blur) in enumerate(blurs.items(), 1)}
    options = BoxOptions(sites=Sites(), rate=0.02, draws=20, seed=0, overlap=0.5, least_score=LEAST)
    detector = BoxRunner(net, options).with_sites(drawn["validation"][0][0])
    rows = {name: predictor._rows(detector, predictor._pairs(data), None, show=False) for name, data in drawn.items()}
    return {
        name: {
            "boxes": _boxes(rows, name),
            "scores": _scores(rows, name),
            "share": sum(int(row.hit.sum()) for row in rows[name]) / sum(row.objects for row in rows[name]),
        }
        for name in ("like these", "more blurred")
    }


def _boxes(rows: dict[str, Any], name: str) -> dict[str, Any]:
    """Judge std and margins of each candidate on the matched boxes of some scenes."""
    parts = {
        key: [(features(r.detections)[r.hit], r.errors) for r in rows[key] if bool(r.hit.any())]
        for key in ("validation", "margins", name)
    }
    f, errors = (torch.cat(part) for part in zip(*parts["validation"], strict=True))
    judged = {}
    for choice, columns in predictor._STD.items():
        weights = predictor._fit_std(f, errors, slice(None), columns)
        ratios = [(off.abs() / (x @ weights).exp()) for x, off in parts["margins"]]
        margins = BoxErrors(tuple(map(tuple, torch.cat(ratios).tolist())), tuple(map(len, ratios)))
        off = torch.cat([off for _, off in parts[name]])
        std = torch.cat([(x @ weights).exp() for x, _ in parts[name]])
        each = [(off.abs() / (x @ weights).exp()).amax(1) for x, off in parts[name]]
        radii = [margins.radius(level) for level in LEVELS]
        shares = [statistics.mean(float((z <= radius).double().mean()) for z in each) for radius in radii]
        width = 2 * std * torch.tensor([margins.radius(0.9, side) for side in range(4)])
        beyond = (off.abs() - width / 2).clamp_min(0)
        judged[choice] = {
            "holds": shares,
            "interval_score": float((width + 2 / 0.1 * beyond).mean()),
            "margin": float(margins.radius(0.9) * std.mean()),
            "rank": 0.0 if choice == "constant" else float(spearmanr(std.mean(1), off.abs().mean(1))[0]),
        }
    return judged


def _scores(rows: dict[str, Any], name: str) -> dict[str, Any]:
    """Judge probabilities of each candidate on all boxes of some scenes."""
    f, hit, x, y = (
        torch.cat(part)
        for key in ("validation", name)
        for part in zip(*((features(r.detections).mean(1), r.hit) for r in rows[key]), strict=True)
    )
    judged = {}
    for choice, columns in predictor._RIGHT.items():
        weights = predictor._fit_score(f, hit, slice(None), columns)
        p, order = (x @ weights).sigmoid().sort()
        parts = zip(p.tensor_split(15), y[order].double().tensor_split(15), strict=True)
        judged[choice] = {
            "nll": float(predictor._score_losses(x, y, weights, slice(None)).mean()),
            "ece": statistics.mean(abs(float(chance.mean() - share.mean())) for chance, share in parts),
        }
    return judged


def std_table(record: dict[str, Any]) -> str:
    """Means over seeds of what margins hold and of how wide they are."""
    rows = []
    for scene in ("like these", "more blurred"):
        for choice, name in (("constant", "one for all"), ("score", "score and side"), ("draws", "draws too")):
            runs = [run[scene]["boxes"][choice] for run in record["runs"]]
            shares = [f"{statistics.mean(run['holds'][i] for run in runs):.1%}" for i in range(len(LEVELS))]
            figures = [_mean_and_spread([run[key] for run in runs]) for key in ("margin", "interval_score", "rank")]
            rows.append([f"{scene}, {name}", *shares, *figures[:2], "-" if choice == "constant" else figures[2]])
    head = ["scenes, std from", *(f"{level:.0%}" for level in LEVELS)]
    return markdown_table([*head, "margin, pixels", "interval score", "rank correlation"], rows)


def score_table(record: dict[str, Any]) -> str:
    """Means over seeds of NLL and ECE of scores and probabilities."""
    rows = []
    for scene in ("like these", "more blurred"):
        runs = [run[scene]["scores"] for run in record["runs"]]
        for key, name in (("nll", "NLL"), ("ece", "ECE")):
            figures = [_mean_and_spread([run[each][key] for run in runs]) for each in ("model", "score", "draws")]
            rows.append([f"{scene}, {name}", *figures])
    return markdown_table(["scenes", "the model's score", "calibrated score", "draws too"], rows)


def _mean_and_spread(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} (± {spread:.3f})"


class Detector(nn.Module):
    """Finds shapes in images `(1, H, W)`, from a grid of points with scores and the distances to four sides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes, strides = (1, width // 2, width, width, width, width), (1, 2, 2, 1, 1)
        layers: list[nn.Module] = []
        for (a, b), stride in zip(pairwise(sizes), strides, strict=True):
            layers += [nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.classes, self.sides = nn.Conv2d(width, CLASSES, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        nn.init.constant_(self.classes.get_parameter("bias"), -3.0)
        nn.init.constant_(self.sides.get_parameter("bias"), 2.0)

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
        order = best.argsort(descending=True)[: int((best > LEAST).sum())]
        close = (overlap(boxes[order], boxes[order]) > 0.4).tolist()
        places: list[int] = []
        for i in range(len(order)):
            if not any(close[i][j] for j in places):
                places.append(i)
        order = order[places]
        return {"boxes": boxes[order], "scores": best[order], "labels": label[order] + 1}


def blurred(image: Tensor, sigma: float) -> Tensor:
    if sigma < 0.2:
        return image
    reach = math.ceil(3 * sigma)
    kernel = torch.softmax(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2, 0)
    wide = conv2d(image[None, None], kernel[None, None, None], padding=(0, reach))
    return conv2d(wide, kernel[None, None, :, None], padding=(reach, 0))[0, 0]


def scenes(count: int, seed: int, blur: tuple[float, float] = BLUR) -> Scenes:
    """Return images of one to three shapes, blurred each by its own width, on noise."""
    dice = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE) + 0.5, torch.arange(SIDE) + 0.5, indexing="ij")

    def uniform(low: float, high: float) -> float:
        return float(low + (high - low) * torch.rand((), generator=dice))

    made: Scenes = []
    while len(made) < count:
        image = torch.zeros(SIDE, SIDE)
        boxes, labels = list[Tensor](), list[int]()
        for _ in range(int(torch.randint(1, 4, (), generator=dice))):
            width, height = uniform(10, 24), uniform(10, 24)
            kind = int(torch.randint(CLASSES, (), generator=dice))
            left, top = uniform(1, SIDE - 1 - width), uniform(1, SIDE - 1 - height)
            box = torch.tensor([left, top, left + width, top + height])
            if boxes and float(overlap(box[None], torch.stack(boxes)).max()) > 0.05:
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
        image = image + 0.2 * torch.randn(SIDE, SIDE, generator=dice)
        made.append((image[None], {"boxes": torch.stack(boxes), "labels": torch.tensor(labels)}))
    return made


def trained(rows: Scenes, seed: int, steps: int = 400) -> Detector:
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
    dice, net = torch.Generator().manual_seed(seed), net.train()
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


if __name__ == "__main__":
    main()
