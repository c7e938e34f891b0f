# %% [markdown]
"""Segmentation with a U-Net: probabilities of pixels that hold, maps of doubt, and a score for each image.

Discs and squares on a noisy ground; the rim of each shape has no label (255), as in many real sets. The network is
trained on few images and is too sure of itself. Fresh images get maps of entropy and of mutual information. Two kinds
of images are new to it: dark shapes on a bright ground, whose novelty is large, and crosses, whose is hardly.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop
from latedrop.metrics import auroc
from latedrop.metrics.classes import cross_entropy, ece

# %%
torch.manual_seed(0)
SIZE, VOID = 32, 255


# %%
def scenes(number: int, *, crosses: bool = False) -> tuple[Tensor, Tensor]:
    """Images `(N, 1, 32, 32)` and labels `(N, 32, 32)`: 0 the ground, 1 discs, 2 squares, 255 the rims of both."""
    at = torch.arange(float(SIZE))
    image, labels = torch.zeros(number, SIZE, SIZE), torch.zeros(number, SIZE, SIZE, dtype=torch.long)
    for kind in (1, 2):
        centre, radius = 5 + 22 * torch.rand(2, number, 1, 1), 3 + 4 * torch.rand(number, 1, 1)
        down, across = (at[:, None] - centre[0]).abs(), (at - centre[1]).abs()
        far = (down**2 + across**2).sqrt() if kind == 1 else torch.maximum(down, across)
        far = torch.minimum(down, across) + 3 + (torch.maximum(down, across) > radius) * 9 if crosses else far
        inside = far < radius
        image = torch.where(inside, 0.5 + torch.rand(number, 1, 1), image)
        labels = labels.masked_fill(inside, kind).masked_fill((far - radius).abs() < 0.5, VOID)
    return (image + 0.5 * torch.randn_like(image))[:, None], labels


# %%
class UNet(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.deep, self.up = nn.Conv2d(24, 24, 3, padding=2, dilation=2), nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.merge, self.leave = nn.Conv2d(24, 12, 3, padding=1), nn.Conv2d(12, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x).relu()
        coarse = self.deep(self.down(fine).relu()).relu()
        return self.leave(self.merge(torch.cat([fine, self.up(coarse)], 1)).relu())


# %%
net, (x_train, y_train) = UNet(), scenes(60)
optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
for rows in 80 * torch.arange(60).split(20):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(x_train[rows]), y_train[rows], ignore_index=VOID).backward()
    optimiser.step()
net.eval()

# %%
uq = latedrop.calibrate(
    net,
    scenes(100),
    reference=x_train,
    task=latedrop.Classification(ignore_index=VOID),
    batches=latedrop.Batches(25),
    progress=False,
)
print(uq)

# %%
x, y = scenes(200)
p = uq.predict(x)
known = y != VOID
pixels, labels = p.probabilities.movedim(1, -1)[known], y[known]
own = torch.softmax(p.logits.movedim(1, -1)[known], 1)
print(f"fresh pixels: NLL {cross_entropy(own, labels):.3f} and calibration error {ece(own, labels):.1%} as they come,")
print(f"              NLL {cross_entropy(pixels, labels):.3f} and {ece(pixels, labels):.1%} calibrated")

# %%
wrong = torch.stack([(p.label[i] != y[i])[known[i]].float().mean() for i in range(len(y))])
scores = p.image_scores
worst = wrong > wrong.quantile(0.9)
expected = scores["expected_error"]  # of all pixels, the rims too
print(f"of 200 fresh images {wrong.mean():.1%} of the pixels are wrong, {expected.mean():.1%} expected;")
print(f"the worst tenth is told by the expected error with AUROC {auroc(expected, worst):.2f}")

# %%
dark, crosses = 1 - x, scenes(200, crosses=True)[0]
for name, images in (("dark shapes", dark), ("crosses", crosses)):
    strange = torch.cat([scores["novelty"], uq.predict(images).image_scores["novelty"]])
    told = auroc(strange, torch.arange(400) >= 200)
    print(f"{name} are told from fresh images by their novelty with AUROC {told:.2f}")

# %% [markdown]
# What to see: on a fresh image only the rims are uncertain. Dark shapes, which no image had before, are uncertain
# everywhere.

# %%
usual = int(expected.argsort()[150])
rows = {"fresh": x[usual], "dark": dark[usual], "crosses": crosses[0]}
found = uq.predict(torch.stack(list(rows.values())), rate=0.1)  # with a rate: how much thinned networks disagree
figure, axes = plt.subplots(3, 5, figsize=(11, 6.6), layout="constrained")
for i, (row, (name, image)) in enumerate(zip(axes, rows.items(), strict=True)):
    shown = {
        "image": (image[0], "gray", None),
        "likeliest class": (found.label[i], "viridis", 2),
        "confidence": (found.confidence[i], "cividis", 1),
        "entropy": (found.entropy[i], "magma", 1.1),
        "mutual information": (found.mutual_information[i], "magma", 0.5),
    }
    for ax, (title, (values, colours, most)) in zip(row, shown.items(), strict=True):
        drawn = ax.imshow(values.numpy(), cmap=colours, vmax=most, vmin=None if title == "image" else 0)
        figure.colorbar(drawn, ax=ax, shrink=0.85, ticks=[0, 1, 2] if title == "likeliest class" else None)
        ax.set(title=title, xticks=[], yticks=[])
    row[0].set_ylabel(f"{name}: novelty {float(found.novelty[i]):.1f}", fontsize="small")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/segmentation.png", dpi=100)
