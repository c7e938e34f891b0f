"""Which score tells novel rows of a classifier, and what a temperature that follows it is worth.

`python -m benchmarks.novelty` trains small networks, each on some classes of a set, and compares scores of rows:
leverage of the features of the last site and of all sites, leverage of mask gradients of the largest logit, mean
squared distance to ten reference rows, the larger of two of them, each in units of what 95 % of the reference rows stay
below, and the entropy. Rows are novel by noise in the place of values, by permuted values, and by classes never seen.
Under shift rows are noisy, turned, blurred or larger, and have their labels. The default was chosen on the sets
`choice`; `other` were run afterwards.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.nets import Rows, ViT, mlp, random_batches, trained
from benchmarks.sets import SHARED, in_and_out, shipped
from benchmarks.timing import by_seeds, markdown_table
from latedrop import find_sites
from latedrop.calibration.fit_classes import Measured, entropy, fitted, losses
from latedrop.calibration.guard import upper_quantile
from latedrop.metrics import auroc
from latedrop.metrics.classes import ece
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.terms import BatchContext, GradientLeverage, Leverage, Neighbours
from latedrop.terms.features import Features
from studies.classification.data import blurred, letters, noisy, turned


class Split(NamedTuple):
    """A trained network, its rows and labels, and other rows by name."""

    net: nn.Module
    train: Rows
    validation: Rows
    test: Rows
    novel: dict[str, Tensor]
    shifted: dict[str, Rows]


def measured(split: Split) -> dict[str, Any]:
    """Return AUROC of every score for novel rows, and NLL and calibration error of temperatures that follow it."""
    scores = scores_of(split)
    parts = {"test": split.test, **split.shifted}
    with torch.no_grad():
        logits = {name: split.net(x).double() for name, (x, _) in {**parts, "validation": split.validation}.items()}
        novel = {name: split.net(x).double() for name, x in split.novel.items()}
    labels = split.validation[1]
    alone = fitted(Measured(logits["validation"], labels), sloped=None)
    doubt = {name: entropy(alone.log_probabilities(z)) for name, z in {**logits, **novel}.items()}
    record = {"auroc": {}, "nll": {}, "ece": {}}
    for name, values in {**scores, "entropy": doubt}.items():
        record["auroc"][name] = {kind: _auroc(values[kind], values["test"]) for kind in split.novel}
    fits = {"one temperature": (alone, None)}
    for name, values in scores.items():
        rows = Measured(logits["validation"], labels, values["validation"])
        fits[name] = fitted(rows, sloped=True), values
    for name, (fit, values) in fits.items():
        logs = {p: fit.log_probabilities(logits[p], None if values is None else values[p]) for p in parts}
        record["nll"][name] = {p: float(losses(logs[p], y).mean()) for p, (_, y) in parts.items()}
        record["ece"][name] = {p: float(ece(logs[p].exp(), y, mass=True)) for p, (_, y) in parts.items()}
    return record


def scores_of(split: Split) -> dict[str, dict[str, Tensor]]:
    """By name and part, each score in units of its limit."""
    network, reference = Network(split.net), split.train[0]
    sites = Sites(find_sites(split.net, reference[:64]))
    known = Features.all(sites)
    parts = {"validation": split.validation[0], "test": split.test[0], **split.novel}
    parts |= {name: x for name, (x, _) in split.shifted.items()}

    def rows(x: Tensor, which: Features = known) -> BatchContext:
        return BatchContext(network, x, sites, None, which, of=lambda z: z.amax(1, keepdim=True))

    def in_limits(values: Callable[[Tensor], Tensor], usual: Tensor) -> dict[str, Tensor]:
        return {part: values(x).double() / upper_quantile(usual) for part, x in parts.items()}

    seen = {}
    for name, which in (("last features", Features(known.sites[-1:])), ("features", known)):
        term = Leverage().learned_from([rows(reference, which).features], own=False)
        seen[name] = in_limits(lambda x, t=term, w=which: t.values(rows(x, w)), term.sample[:, 0])
    slopes = GradientLeverage().learned_from([rows(reference).gradients], own=False)
    seen["mask gradients"] = in_limits(lambda x: slopes.values(rows(x)), slopes.sample[:, 0])
    features = rows(reference).features
    near = Neighbours().learned_from([features], own=True)
    usual = near.distances(features, torch.arange(len(features)))
    seen["neighbours"] = in_limits(lambda x: near.distances(rows(x).features), usual)
    for other in ("last features", "features", "neighbours"):
        seen[f"gradients or {other}"] = {p: torch.maximum(seen["mask gradients"][p], seen[other][p]) for p in parts}
    return seen


def _auroc(novel: Tensor, usual: Tensor) -> float:
    positive = torch.arange(len(novel) + len(usual)) < len(novel)
    return float(auroc(torch.cat([novel, usual]), positive))


def mean(records: list[Any]) -> Any:
    """Of numbers in mappings of one shape, rounded."""
    if isinstance(records[0], dict):
        return {key: mean([each[key] for each in records]) for key in records[0]}
    return round(statistics.fmean(records), 4)


def _trained(build: Callable[[int], nn.Module], rows: Rows, steps: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    batches = random_batches(len(rows[0]), torch.Generator().manual_seed(seed), steps)
    return trained(build(int(rows[1].max()) + 1), rows, batches=batches, loss=nn.functional.cross_entropy, decay=False)


def _images(x: Tensor, y: Tensor, unseen: Tensor, build: Any, sizes: tuple[int, int], steps: int, seed: int) -> Split:
    """Images `(N, 1, h, w)` from 0 to 1, and those of classes that the network never sees; `sizes` leave test rows."""
    dice = torch.Generator().manual_seed(seed)
    train, validation, test = _parts(x, y, sizes, dice)
    images = test[0]
    order = torch.rand(len(images), images[0].numel(), generator=dice).argsort(1)
    novel = {
        "noise": torch.rand(images.shape, generator=dice),
        "permuted": images.flatten(1).gather(1, order).reshape(images.shape),
        "new classes": unseen[torch.randperm(len(unseen), generator=dice)[:500]],
    }
    shifts = {"noise": noisy, "turned": turned, "blurred": blurred}
    shifted = {f"{name} {s}": (shift(images, s, dice), test[1]) for name, shift in shifts.items() for s in (2, 4)}
    return Split(_trained(build, train, steps, seed), train, validation, test, novel, shifted)


def _table(x: Tensor, y: Tensor, unseen: Tensor, sizes: tuple[int, int], steps: int, seed: int) -> Split:
    dice = torch.Generator().manual_seed(seed)
    train, validation, test = _parts(x, y, sizes, dice)
    spread, center = torch.std_mean(train[0], 0)
    train, validation, test = (((rows - center) / spread, labels) for rows, labels in (train, validation, test))
    values = test[0]
    low, high = train[0].amin(0), train[0].amax(0)
    novel = {
        "noise": low + (high - low) * torch.rand(values.shape, generator=dice),
        "permuted": values.gather(0, torch.rand(values.shape, generator=dice).argsort(0)),
    }
    novel |= {"new classes": (unseen - center) / spread} if len(unseen) else {}
    draw = torch.randn(values.shape, generator=dice)
    shifted = {f"noise {s}": (values + s * draw, test[1]) for s in (0.5, 1.0)}
    shifted["larger"] = 2 * values, test[1]
    return Split(_trained(lambda k: _mlp(x.shape[1], k), train, steps, seed), train, validation, test, novel, shifted)


def _parts(x: Tensor, y: Tensor, sizes: tuple[int, int], dice: torch.Generator) -> Iterable[Rows]:
    order = torch.randperm(len(x), generator=dice)
    return [(x[at], y[at]) for at in order.split([*sizes, len(x) - sum(sizes)])]


def _digit_split(build: Callable[[int], nn.Module], steps: int, seed: int) -> Split:
    """Three of the digits are never seen, others with every seed."""
    x, y = shipped("load_digits")
    x, hidden = x.reshape(-1, 1, 8, 8) / 16, torch.isin(y, torch.tensor([seed, seed + 3, seed + 6]))
    names = y[~hidden].unique()
    return _images(x[~hidden], torch.searchsorted(names, y[~hidden]), x[hidden], build, (600, 300), steps, seed)


def _pair_split(build: Callable[[int], nn.Module], steps: int, seed: int) -> Split:
    """Two digits side by side from 0 to 6, 49 classes; pairs with 7, 8 or 9 are never seen."""
    (x, y), dice = shipped("load_digits"), torch.Generator().manual_seed(100 + seed)
    x = x.reshape(-1, 1, 8, 8) / 16

    def pairs(pool: Tensor, count: int) -> tuple[Tensor, Tensor]:
        at = pool[torch.randint(len(pool), (count, 2), generator=dice)]
        return torch.cat([x[at[:, 0]], x[at[:, 1]]], 3), 7 * y[at[:, 0]] + y[at[:, 1]]

    images, labels = pairs((y < 7).nonzero()[:, 0], 6000)
    unseen, _ = pairs((y >= 7).nonzero()[:, 0], 500)
    return _images(images, labels, unseen, build, (4000, 1000), steps, seed)


def _letter_split(build: Callable[[int], nn.Module], steps: int, seed: int) -> Split:
    """Twelve letters in all fonts, shifted and turned a little; other letters are never seen."""
    every = letters().float() / 255
    fonts = len(every) // 48
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0)).argsort()
    x = nn.functional.interpolate(every[order], size=(14, 14), mode="area")  # by font, then by letter
    y = torch.arange(48).repeat(fonts)
    dice = torch.Generator().manual_seed(200 + seed)

    def moved(part: Tensor) -> Tensor:
        by = torch.randint(-1, 2, (2,), generator=dice).tolist()
        return turned(part, 1, dice).roll(by, (2, 3)) if torch.rand((), generator=dice) < 0.5 else part.roll(by, (2, 3))

    first, rest = y < 12, (y >= 12) & (y < 24)
    images = torch.cat([moved(x[first]) for _ in range(6)])
    return _images(images, y[first].repeat(6), x[rest], build, (600, 300), steps, seed)


def _tumours(seed: int) -> Split:
    x, y = shipped("load_breast_cancer")
    return _table(x, y, x[:0], (200, 150), 200, seed)


def _wine(seed: int) -> Split:
    """One of the three growers is never seen, another with every seed."""
    x, y = shipped("load_wine")
    hidden = y == seed % 3
    names = y[~hidden].unique()
    return _table(x[~hidden], torch.searchsorted(names, y[~hidden]), x[hidden], (50, 40), 150, seed)


def _wine_quality(seed: int) -> Split:
    """Up to 5, 6, and 7 and more of the marks of red wines, from the folder of data beside the repository."""
    x, marks = in_and_out(np.loadtxt(SHARED / "uci" / "wine-quality-red.txt"))
    return _table(x, (marks[:, 0] - 5).clamp(0, 2).long(), x[:0], (700, 400), 300, seed)


def _mlp(inputs: int, classes: int, width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *mlp(inputs, classes, (width, width)))


def _cnn(side: int, classes: int) -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    flat = 32 * (-(-side // 2)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 64), nn.ReLU(), nn.Linear(64, classes))


def _transformer(classes: int) -> nn.Module:
    net = ViT(14, 2, 32, 2, 2)
    net.embed, net.head = nn.Conv2d(1, 32, 2, 2), nn.Linear(32, classes)
    return net


SETS: dict[str, dict[str, Callable[[int], Split]]] = {
    "choice": {
        "digits, MLP": lambda seed: _digit_split(lambda k: _mlp(64, k), 600, seed),
        "digits, CNN": lambda seed: _digit_split(lambda k: _cnn(8, k), 400, seed),
        "two digits, MLP": lambda seed: _pair_split(lambda k: _mlp(128, k, 128), 1200, seed),
        "tumours, MLP": _tumours,
    },
    "other": {
        "letters, MLP": lambda seed: _letter_split(lambda k: _mlp(196, k), 600, seed),
        "letters, CNN": lambda seed: _letter_split(lambda k: _cnn(14, k), 400, seed),
        "letters, transformer": lambda seed: _letter_split(_transformer, 400, seed),
        "wine, MLP": _wine,
        "wine quality, MLP": _wine_quality,
    },
}
_DEFAULT = "gradients or features"
_KINDS = ("noise", "permuted", "new classes")


def table(record: dict[str, Any], group: str) -> str:
    """Return means over some sets; NLL and calibration errors in distribution and under shift."""
    sets = [record["sets"][name] for name in SETS[group]]
    rows = []
    for name in ("one temperature", *sets[0]["auroc"]):
        each = [s["auroc"].get(name, {}) for s in sets]
        cells = [_mean([one[kind] for one in each if kind in one], ".3f") for kind in _KINDS]
        for measure, form in (("nll", "+.4f"), ("ece", ".3f")):
            for shifted in (False, True):
                values = [_at(s[measure][name], shifted) for s in sets if name in s[measure]]
                if measure == "nll":
                    values = [v - _at(s["nll"]["one temperature"], shifted) for v, s in zip(values, sets, strict=False)]
                cells.append(_mean(values, form))
        rows.append([f"**{name}**" if name == _DEFAULT else name, *cells])
    return markdown_table(["follows", *_KINDS, "NLL", "NLL, shifted", "ECE", "ECE, shifted"], rows)


def _mean(values: list[float], form: str) -> str:
    return format(statistics.fmean(values) + 0.0, form) if values else ""


def _at(values: dict[str, float], shifted: bool) -> float:
    return statistics.fmean(value for part, value in values.items() if part != "test") if shifted else values["test"]


def everything(seeds: int) -> dict[str, Any]:
    sets = {}
    for name, split in (one for group in SETS.values() for one in group.items()):
        sets[name] = mean([measured(split(seed)) for seed in range(seeds)])
        print(name, sets[name], flush=True)
    return {"sets": sets}


if __name__ == "__main__":
    by_seeds("novelty", everything, seeds=3)
