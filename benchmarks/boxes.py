"""Boxes of a detector, measured: `python -m benchmarks.boxes`, and with `--large` torchvision's FCOS on a GPU.

A detector finds blurred circles, squares and triangles on noise. Test scenes are like those of the calibration, or more
blurred. Margins are made with one std for all sides, with one from score and side, and with the draws too. The large
one has the body of a ResNet-50 and sees scenes enlarged to 256 x 256.
"""

import math
import statistics
import sys
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d, interpolate, smooth_l1_loss

from benchmarks.nets import calibration_error, random_batches, trained
from benchmarks.timing import by_seeds, machine, markdown_table, stored, write
from latedrop.boxes.detections import BoxOptions, Detector, overlap
from latedrop.boxes.predictor import SCORE, STD, MatchedBoxes, fit_score, fit_std, radius

SIDE, STRIDE, CLASSES, LEAST = 64, 4, 3, 0.05
LEVELS, SEEDS_LARGE = (0.8, 0.9, 0.95), 1
BLUR, MORE_BLUR = (0.0, 3.0), (2.5, 4.5)
SCENES = ("like these", "more blurred")
POINTS = STRIDE * (torch.cartesian_prod(*[torch.arange(SIDE // STRIDE)] * 2).flip(1) + 0.5)
Scenes = list[tuple[Tensor, dict[str, Tensor]]]


def measured(detector: Detector, seed: int, count: int = 250, factor: int = 1) -> dict[str, Any]:
    """Run a detector over scenes, and judge its boxes on fresh ones."""
    drawn = [scenes(count, 10 * seed + i, blur) for i, blur in enumerate((BLUR, BLUR, BLUR, MORE_BLUR), 1)]
    drawn = [enlarged(rows, factor) for rows in drawn] if factor > 1 else drawn
    fit, held_out, *tests = (MatchedBoxes.of(detector, data, progress=False) for data in drawn)
    judged = [{"boxes": sides(fit, held_out, test), "scores": scores(fit, test)} for test in tests]
    return dict(zip(SCENES, judged, strict=True))


def sides(fit: MatchedBoxes, held_out: MatchedBoxes, test: MatchedBoxes) -> dict[str, Any]:
    """Judge std and margins of each candidate on the boxes of a test that find an object."""
    judged = {}
    for choice, columns in STD.items():
        weights = fit_std(fit.features[fit.right], fit.errors, columns)
        errors, std, off = held_out.ratios(weights), (test.features[test.right] @ weights).exp(), test.errors.abs()
        images = [torch.tensor(image).amax(1) for image in test.ratios(weights)]
        radii = [radius(errors, level) for level in LEVELS]
        width = 2 * std * torch.tensor([radius(errors, 0.9, side) for side in range(4)])
        judged[choice] = {
            "holds": [statistics.mean(float((z <= most).double().mean()) for z in images) for most in radii],
            "interval_score": float((width + 2 / 0.1 * (off - width / 2).clamp_min(0)).mean()),
            "margin": float(radius(errors, 0.9) * std.mean()),
            "rank": 0.0 if choice == "constant" else float(spearmanr(std.mean(1), off.mean(1))[0]),
        }
    return judged


def scores(fit: MatchedBoxes, test: MatchedBoxes) -> dict[str, Any]:
    """Judge probabilities of each candidate on all boxes of a test."""
    judged = {}
    for choice, columns in SCORE.items():
        logits = test.features.mean(1) @ fit_score(fit.features.mean(1), fit.right.double(), columns)
        right = test.right.double()
        judged[choice] = {
            "nll": float(binary_cross_entropy_with_logits(logits, right)),
            "ece": calibration_error(logits.sigmoid(), right),
        }
    return judged


def large_table(record: dict[str, Any]) -> str:
    return std_table(record["large"]) + "\n\n" + scores_table(record["large"])


def std_table(record: dict[str, Any]) -> str:
    rows = []
    for scene in SCENES:
        for choice, name in (("constant", "one for all"), ("score", "score and side"), ("draws", "draws too")):
            runs = [run[scene]["boxes"][choice] for run in record["runs"]]
            shares = [f"{statistics.mean(run['holds'][i] for run in runs):.1%}" for i in range(len(LEVELS))]
            figures = [_mean_and_spread([run[key] for run in runs]) for key in ("margin", "interval_score", "rank")]
            rows.append([f"{scene}, {name}", *shares, *figures[:2], "-" if choice == "constant" else figures[2]])
    head = ["scenes, std from", *(f"{level:.0%}" for level in LEVELS)]
    return markdown_table([*head, "margin, pixels", "interval score", "rank correlation"], rows)


def scores_table(record: dict[str, Any]) -> str:
    rows = []
    for scene in SCENES:
        runs = [run[scene]["scores"] for run in record["runs"]]
        for key, name in (("nll", "NLL"), ("ece", "ECE")):
            figures = [_mean_and_spread([run[each][key] for run in runs]) for each in ("model", "score", "draws")]
            rows.append([f"{scene}, {name}", *figures])
    return markdown_table(["scenes", "the model's score", "calibrated score", "draws too"], rows)


def _mean_and_spread(values: list[float]) -> str:
    spread = f" (± {statistics.stdev(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


class Dense(nn.Module):
    """Gives logits and four sides `(N, P, 7)` at each point of a grid, for images `(N, 1, H, W)`."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for a, b, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2), (32, 32, 1), (32, 32, 1)):
            layers += [nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU()]
        body, head = nn.Sequential(*layers), nn.Conv2d(32, CLASSES + 4, 3, padding=1)
        head.get_parameter("bias").data = torch.tensor([-3.0] * CLASSES + [2.0] * 4)
        self.dense = nn.ModuleDict({"body": body, "head": head})

    def forward(self, images: Tensor) -> Tensor:
        logits, distances = self.dense["head"](self.dense["body"](images)).flatten(2).mT.tensor_split([CLASSES], -1)
        left_top, right_bottom = distances.exp().tensor_split(2, -1)
        return torch.cat([logits, POINTS - left_top, POINTS + right_bottom], -1)


def readout(output: Tensor) -> list[dict[str, Tensor]]:
    logits, boxes = output.tensor_split([CLASSES], -1)
    return [best(*image) for image in zip(logits.sigmoid(), boxes, strict=True)]


def best(scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    """Leave out boxes that overlap one of a higher score."""
    score, label = scores.max(1)
    order = score.argsort(descending=True)[: int((score > LEAST).sum())]
    close, places = overlap(boxes[order], boxes[order]) > 0.4, list[int]()
    for i in range(len(order)):
        places += [] if bool(close[i, places].any()) else [i]
    order = order[places]
    return {"boxes": boxes[order], "scores": score[order], "labels": label[order] + 1}


def finder(seed: int, steps: int = 250) -> nn.Module:
    rows = scenes(800, 10 * seed)
    targets = torch.zeros(len(rows), len(POINTS), CLASSES + 4)
    for target, (_, truth) in zip(targets, rows, strict=True):
        for box, label in zip(truth["boxes"], truth["labels"], strict=True):
            centre, size = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
            near = ((POINTS - centre).abs() < size * 0.25).all(1)
            near[(POINTS - centre).square().sum(1).argmin()] = True
            target[near, label - 1] = 1.0
            target[near, CLASSES:] = box

    def loss(output: Tensor, target: Tensor) -> Tensor:
        (logits, boxes), (wanted, truth) = (part.tensor_split([CLASSES], -1) for part in (output, target))
        there = wanted.amax(2) > 0
        focus = (wanted - logits.sigmoid()).square() * torch.where(wanted > 0, 0.25, 0.75)  # the usual focal loss
        classes = binary_cross_entropy_with_logits(logits, wanted, focus.detach(), reduction="sum") / there.sum()
        return classes + smooth_l1_loss(boxes[there], truth[there])

    torch.manual_seed(seed)
    images = torch.stack([image for image, _ in rows])
    batches = random_batches(len(images), torch.Generator().manual_seed(seed), steps)
    return trained(Dense(), (images, targets), batches=batches, loss=loss)


def large(seed: int, steps: int = 600, factor: int = 4) -> dict[str, Any]:
    """Train torchvision's FCOS on scenes, and measure its boxes."""
    from torchvision.models.detection import fcos_resnet50_fpn

    torch.manual_seed(seed)
    device, side = torch.device("cuda" if torch.cuda.is_available() else "cpu"), factor * SIDE
    sizes = {"min_size": side, "max_size": side, "num_classes": CLASSES + 1}
    net = fcos_resnet50_fpn(weights=None, weights_backbone=None, **sizes).to(device)
    rows = enlarged(scenes(3000, 10 * seed), factor)
    rows = [(image.to(device), {key: value.to(device) for key, value in truth.items()}) for image, truth in rows]
    optimizer = torch.optim.AdamW(net.parameters(), 5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, steps)
    for places in torch.randint(len(rows), (steps, 16)):
        losses = net(*zip(*[rows[i] for i in places.tolist()], strict=True))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        if not schedule.last_epoch % 100:
            print(f"step {schedule.last_epoch} of {steps}: loss {float(sum(losses.values()).detach()):.3f}", flush=True)
    return measured(Detector(net.eval(), BoxOptions(), batch_size=64), seed, 150, factor)


def enlarged(rows: Scenes, factor: int) -> Scenes:
    """Return scenes of a larger side, in three equal colours."""
    made = []
    for image, truth in rows:
        wide = interpolate(image[None], scale_factor=factor, mode="bilinear")[0].expand(3, -1, -1).contiguous()
        made.append((wide, {**truth, "boxes": factor * truth["boxes"]}))
    return made


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

    made = []
    for _ in range(count):
        image, boxes, labels = torch.zeros(SIDE, SIDE), [], []
        for _ in range(int(torch.randint(1, 4, (), generator=dice))):
            width, height = uniform(10, 24), uniform(10, 24)
            kind = int(torch.randint(CLASSES, (), generator=dice))
            left, top = uniform(1, SIDE - 1 - width), uniform(1, SIDE - 1 - height)
            box = torch.tensor([left, top, left + width, top + height])
            if boxes and float(overlap(box[None], torch.stack(boxes)).max()) > 0.05:
                continue
            u, v = (columns - left) / width * 2 - 1, (rows - top) / height * 2 - 1
            square = (u.abs() < 1) & (v.abs() < 1)
            inside = (u**2 + v**2 < 1, square, square & (u.abs() < (v + 1) / 2))[kind]
            image = image + uniform(0.4, 1) * blurred(inside.float(), uniform(*blur))
            boxes.append(box)
            labels.append(kind + 1)
        image = image + 0.2 * torch.randn(SIDE, SIDE, generator=dice)
        made.append((image[None], {"boxes": torch.stack(boxes), "labels": torch.tensor(labels)}))
    return made


def small(seed: int) -> dict[str, Any]:
    return measured(Detector(finder(seed), BoxOptions(), torch.stack, readout), seed)


if __name__ == "__main__":
    of_large = stored("boxes").get("large", {})
    if "--large" in sys.argv:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        of_large = {"machine": machine(device), "runs": []}
        for seed in range(SEEDS_LARGE):
            of_large["runs"].append(large(seed))
            write("boxes", stored("boxes") | {"large": of_large})
    else:
        by_seeds("boxes", lambda seeds: {"runs": list(map(small, range(seeds))), "large": of_large}, seeds=5)
