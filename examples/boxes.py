# %% [markdown]
"""Where exactly is the object? Margins around the boxes of a detector, and the probability that a box is right.

A small detector finds discs and squares, clear or faint, in scenes with little noise and with much. It returns a dict
of boxes, scores and labels for each image, as the detectors of torchvision do.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop

# %%
torch.manual_seed(0)
SIZE, STEP = 48, 4
Scene = tuple[Tensor, dict[str, Tensor]]


def scene() -> Scene:
    """An image `(1, 48, 48)` of up to three shapes, with their boxes and labels: 1 a disc, 2 a square."""
    at = torch.arange(SIZE) + 0.5
    image, boxes, labels = torch.zeros(SIZE, SIZE), torch.zeros(0, 4), []
    for place in torch.randperm(4)[: int(torch.randint(1, 4, ()))]:  # each in another quarter
        radius, label = 3 + 8 * torch.rand(()), int(torch.randint(1, 3, ()))
        x, y = 12 + 24 * torch.stack([place % 2, place // 2]) + (11.5 - radius) * (2 * torch.rand(2) - 1)
        across, down = (at - x).abs(), (at - y).abs()[:, None]
        far = (across**2 + down**2).sqrt() if label == 1 else torch.maximum(across, down)
        image = image + (0.3 + torch.rand(())) * (far < radius)
        boxes = torch.cat([boxes, torch.stack([x - radius, y - radius, x + radius, y + radius])[None]])
        labels.append(label)
    noise = 0.05 + 0.5 * torch.rand(())
    return (image + noise * torch.randn(SIZE, SIZE))[None], {"boxes": boxes, "labels": torch.tensor(labels)}


# %%
class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b, stride in ((1, 16, 2), (16, 32, 2), (32, 32, 1), (32, 32, 1)):
            layers += [nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU()]
        self.body, self.heat, self.sides = nn.Sequential(*layers), nn.Conv2d(32, 2, 1), nn.Conv2d(32, 4, 1)
        nn.init.constant_(self.heat.bias, -4.0)

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits `(N, 2, 12, 12)` of a shape's centre in each cell, and boxes `(N, 12, 12, 4)`."""
        hidden = self.body(images)
        y, x = torch.meshgrid(*[STEP * (torch.arange(SIZE // STEP) + 0.5)] * 2, indexing="ij")
        left, top, right, bottom = (2 + self.sides(hidden)).exp().unbind(1)
        return self.heat(hidden), torch.stack([x - left, y - top, x + right, y + bottom], 3)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        heat, boxes = self.maps(torch.stack(images))
        heat = heat.sigmoid()
        peaks = (heat == nn.functional.max_pool2d(heat.amax(1, keepdim=True), 3, 1, 1)) & (heat > 0.05)
        results = []
        for scores, sides, there in zip(heat, boxes, peaks, strict=True):
            label, row, column = there.nonzero().T
            results.append({"boxes": sides[row, column], "scores": scores[there], "labels": label + 1})
        return results


# %%
train = [scene() for _ in range(800)]
images = torch.stack([image for image, _ in train])
centres = torch.zeros(len(train), 2, SIZE // STEP, SIZE // STEP)
truth = torch.zeros(len(train), SIZE // STEP, SIZE // STEP, 4)
for row, (_, target) in enumerate(train):
    for box, label in zip(target["boxes"], target["labels"], strict=True):
        x, y = ((box[:2] + box[2:]) / 2 / STEP).long()
        centres[row, label - 1, y, x] = 1.0
        truth[row, y, x] = box

net = Detector()
optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 20 * 25)
for rows in (part for _ in range(20) for part in torch.randperm(len(train)).split(32)):
    heat, boxes = net.maps(images[rows])
    there = centres[rows].amax(1) > 0
    loss = nn.functional.binary_cross_entropy_with_logits(heat, centres[rows], reduction="sum") / there.sum()
    loss = loss + nn.functional.smooth_l1_loss(boxes[there], truth[rows][there])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()

# %%
uq = latedrop.calibrate_boxes(net.eval(), [scene() for _ in range(250)], progress=False)
uq = uq.conformal([scene() for _ in range(250)], progress=False)
print(uq)

test = [scene() for _ in range(300)]
predictions = uq.predict([image for image, _ in test])
inside = []
for p, (_, target) in zip(predictions, test, strict=True):
    inner, outer = p.margins(0.9)
    for k in range(len(p)):
        off = (target["boxes"] - p.boxes[k]).abs().amax(1)
        if p.labels[k] == target["labels"][off.argmin()] and off.min() < 4:
            best = target["boxes"][off.argmin()]
            between = (outer[k, :2] <= best[:2]) & (best[:2] <= inner[k, :2])
            inside.append(bool((between & (inner[k, 2:] <= best[2:]) & (best[2:] <= outer[k, 2:])).all()))
print(f"of {len(inside)} boxes {sum(inside) / len(inside):.1%} have all four sides within the margins of 90 %")

# %% [markdown]
# What to see: each side of a true box (blue) lies in a shaded band, in nine boxes of ten; on the right one does not.
# Numbers are the probabilities that a box is right.


# %%
def corners(box: Tensor) -> Tensor:
    """Return the corners `(5, 2)` of a box, back to the first."""
    x1, y1, x2, y2 = box.tolist()
    return torch.tensor([[x1, y1], [x2, y1], [x2, y2], [x1, y2], [x1, y1]])


several = [row for row in range(len(test)) if int((predictions[row].probabilities > 0.3).sum()) >= 2]
some = sorted(several, key=lambda row: float(predictions[row].std.max()))
figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), layout="constrained")
for ax, row in zip(axes, [some[len(some) // 20 * k] for k in (1, 7, 13, 19)], strict=True):
    p, (image, target) = predictions[row], test[row]
    ax.imshow(image[0].numpy(), cmap="gray_r", extent=(0, SIZE, SIZE, 0), alpha=0.7)
    inner, outer = p.margins(0.9)
    for k in (p.probabilities > 0.3).nonzero()[:, 0].tolist():
        ring = torch.cat([corners(outer[k]), corners(inner[k]).flip(0)]).clamp(0, SIZE)
        ax.fill(*ring.T.tolist(), color="tab:orange", alpha=0.5, lw=0)
        x, y = outer[k, [0, 3]].clamp(0, SIZE - 6).tolist()
        ax.text(x, y, f"{float(p.probabilities[k]):.0%}", va="top", fontsize=9, bbox={"fc": "w", "lw": 0, "pad": 1})
    for box in target["boxes"]:
        ax.plot(*corners(box).T.tolist(), color="tab:blue")
    ax.set(xticks=[], yticks=[], title=f"std up to {float(p.std.max()):.2f} pixels")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/boxes.png", dpi=160)
