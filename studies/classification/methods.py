"""The classifiers of the study, and from trained networks to probabilities and scores of every row, method by method.

Every method has its temperature, fitted to the validation rows, and so has what else it has: rates, precision, scale.
The parts of our own (guard, leverage, dropout) are fitted by the functions that `latedrop.calibrate` fits with.

The Laplace approximation of the last layer is the full one (Daxberger et al., 2021, "Laplace Redux"). With `h` the
features of the last layer and a 1, and `p` the network's probabilities of a training row, the posterior precision of
the last weights is

    P = sum over training rows of (diag(p) - p p') ⊗ h h'  +  tau I,

and the logits of a row have the covariance `(I ⊗ h)' P^-1 (I ⊗ h)`. One eigendecomposition serves every `tau`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration.fit_classes import ClassFit, Measured, entropy, fitted, information, losses
from latedrop.metrics import auroc
from latedrop.metrics.classes import accuracy, brier, cross_entropy, ece, selective_risk
from latedrop.prediction.predictor import ClassPredictor
from studies.classification.data import ImageSet
from studies.classification.doubt import DoubtFit, differences, fitted_with_doubt, mutual_information

CLASSES = 10
BATCH, LEARNING_RATE = 64, 1e-3
_WIDTH, _HIDDEN = 16, 64
_ROWS = 500  # that run at once


def network(item: ImageSet, shape: torch.Size, rate: float = 0.0) -> nn.Sequential:
    """Untrained, for images `(channels, height, width)`; with a rate, dropout before every layer but the first.

    That is where `latedrop` injects it. Before a convolution whole channels are dropped, as is usual in training.
    """
    if item.network == "mlp":
        size = shape.numel()
        layers = [nn.Flatten(), nn.Linear(size, _HIDDEN), nn.ReLU(), nn.Dropout(rate), nn.Linear(_HIDDEN, _HIDDEN)]
    else:
        w, quarter = _WIDTH, -(-shape[1] // 4) * -(-shape[2] // 4)
        layers = [nn.Conv2d(shape[0], w, 5, stride=2, padding=2), nn.ReLU(), nn.Dropout2d(rate)]
        layers += [nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(rate)]
        layers += [nn.Linear(2 * w * quarter, _HIDDEN)]
    layers += [nn.ReLU(), nn.Dropout(rate), nn.Linear(_HIDDEN, CLASSES)]
    used = layers if rate else [layer for layer in layers if not isinstance(layer, (nn.Dropout, nn.Dropout2d))]
    return nn.Sequential(*used)


def trained(
    item: ImageSet, x: Tensor, y: Tensor, seed: int, epochs: int, rate: float = 0.0, tick: Callable[[], object] = int
) -> nn.Sequential:
    """A network in eval mode, trained by Adam; global random state is left as it was."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        net = network(item, x.shape[1:], rate).to(x.device)
        optimiser = torch.optim.Adam(net.parameters(), LEARNING_RATE)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).to(x.device).split(BATCH):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimiser.step()
            tick()
    return net.eval()


@torch.no_grad()
def plain_logits(net: nn.Module, x: Tensor) -> Tensor:
    """`(N, K)` on the CPU, of the network as it is."""
    return torch.cat([net(part).cpu() for part in x.split(_ROWS)])


@torch.no_grad()
def drawn_logits(net: nn.Module, x: Tensor, draws: int, seed: int) -> Tensor:
    """`(draws, N, K)` on the CPU, of a network that was trained with dropout, its dropout on."""
    layers = [layer for layer in net.modules() if isinstance(layer, (nn.Dropout, nn.Dropout2d))]
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        try:
            for layer in layers:
                layer.train()
            return torch.stack([plain_logits(net, x) for _ in range(draws)])
        finally:
            net.eval()


@torch.no_grad()
def features(net: nn.Sequential, x: Tensor) -> Tensor:
    """Return the inputs of the last layer, and a 1, `(N, units + 1)` on the CPU."""
    entering = torch.cat([net[:-1](part).cpu() for part in x.split(_ROWS)])
    return torch.cat([entering, torch.ones_like(entering[:, :1])], 1)


PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1000.0)
_SPREAD_ROWS = 200  # whose covariances are computed at once


@dataclass(frozen=True)
class LastLayer:
    """Hold the curvature of the last weights over the training rows.

    Attributes:
        values: `(P,)`, eigenvalues of the sum above without `tau`.
        vectors: `(K, D, P)`, its eigenvectors.
    """

    values: Tensor
    vectors: Tensor

    @classmethod
    def fit(cls, features: Tensor, logits: Tensor) -> "LastLayer":
        """From features `(N, D)` and logits `(N, K)` of the training rows."""
        h, p = features.double(), torch.softmax(logits.double(), 1)
        k, d = p.shape[1], h.shape[1]
        total = h.new_zeros(k, d, k, d)
        for i in range(k):
            for j in range(i, k):
                weight = p[:, i] * (float(i == j) - p[:, j])
                total[i, :, j] = total[j, :, i] = (h * weight[:, None]).T @ h
        values, vectors = torch.linalg.eigh(total.reshape(k * d, k * d))
        return cls(values.clamp_min(0), vectors.reshape(k, d, k * d))

    def spread(self, features: Tensor, precision: float) -> Tensor:
        """`(N, K, K)`, the variances of the logits' differences."""
        parts = []
        root = self.vectors / (self.values + precision).sqrt()
        for h in features.double().split(_SPREAD_ROWS):
            side = torch.einsum("nd,kdp->nkp", h, root)
            gram = side @ side.transpose(1, 2)
            squares = gram.diagonal(dim1=1, dim2=2)
            parts.append((squares[:, :, None] + squares[:, None] - 2 * gram).clamp_min(0))
        return torch.cat(parts)


MEASURES = ("nll", "brier", "ece", "accuracy", "aurc")


def scores(logs: Tensor, labels: Tensor) -> dict[str, float]:
    """NLL in nats, Brier score, calibration error (15 bins of equal mass), accuracy, area under risk-coverage.

    Args:
        logs: log probabilities `(N, K)`.
        labels: `(N,)`.
    """
    p = logs.exp()
    wrong = p.argmax(1) != labels
    values = (
        cross_entropy(p.clamp_min(1e-300), labels),
        brier(p, labels),
        ece(p, labels, mass=True),
        accuracy(p, labels),
        selective_risk(-p.amax(1), wrong),
    )
    return dict(zip(MEASURES, map(float, values), strict=True))


def told_apart(strange: Tensor, usual: Tensor) -> tuple[float, float]:
    """AUROC of strange against usual rows by a score, and the share of usual rows above what 95 % of strange ones are.

    >>> told_apart(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]))
    (1.0, 0.0)
    """
    positive = torch.arange(len(strange) + len(usual)) < len(strange)
    threshold = strange.sort(descending=True).values[math.ceil(0.95 * len(strange) - 1e-9) - 1]
    return float(auroc(torch.cat([strange, usual]), positive)), float((usual >= threshold).double().mean())


RATES = (0.02, 0.05, 0.1, 0.2)
"""Of draws of injected dropout; the validation rows choose."""
DEFAULT = "default"
_DOUBT_RATE = 0.1

Logs = dict[str, Tensor]


@dataclass(frozen=True)
class Networks:
    """Networks without dropout, of which the first is *the* network, and some with dropout in them, by rate."""

    plain: Sequence[nn.Sequential]
    embedded: Mapping[float, nn.Sequential]


@dataclass(frozen=True)
class Found:
    """By method or score, then by part.

    Attributes:
        logs: log probabilities `(N, K)`.
        scores: `(N,)`, large for strange rows.
        notes: what was chosen.
    """

    logs: dict[str, Logs]
    scores: dict[str, Logs]
    notes: dict[str, float | str]


def found(networks: Networks, x: Mapping[str, Tensor], labels: Tensor, train: Tensor, draws: int) -> Found:
    """All methods on all parts.

    Args:
        networks: trained ones.
        x: images by part; `validation` is what is fitted to.
        labels: of the validation rows.
        train: the training images.
        draws: thinned networks, for what is drawn.
    """
    net = networks.plain[0]
    uq = latedrop.calibrate(net, (x["validation"], labels), task="classification", reference=train, progress=False)
    assert isinstance(uq, ClassPredictor)
    ours = {part: uq.predict(rows) for part, rows in x.items()}
    sites = uq.calibration.sites
    rows = {part: Measured(p.logits.cpu(), labels, _cpu(p.novelty)) for part, p in ours.items()}
    spread = {part: differences(net, images, sites).double().cpu() for part, images in x.items()}
    result = Found({}, {}, {"choice": uq.calibration.choice, "temperature": uq.calibration.alone})
    _parts(result, rows, spread)
    result.logs[DEFAULT] = {part: p.log_probabilities.cpu() for part, p in ours.items()}
    _row_scores(result, rows, spread)
    _averaged(result, "draws", {rate: _injected(net, rate, draws, sites) for rate in RATES}, x, labels)
    twins = {rate: partial(drawn_logits, twin, draws=draws, seed=0) for rate, twin in networks.embedded.items()}
    _averaged(result, "embedded", twins, x, labels)
    _averaged(result, "ensemble", {0.0: lambda images: _members(networks.plain, images)}, x, labels)
    _laplace(result, net, rows, x, train)
    return result


def _cpu(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.cpu()


def _applied(fit: ClassFit, rows: Mapping[str, Measured]) -> Logs:
    return {part: fit.log_probabilities(m.logits.double(), m.novelty) for part, m in rows.items()}


def _doubted(fit: DoubtFit, rows: Mapping[str, Measured], spread: Mapping[str, Tensor]) -> Logs:
    return {part: fit.log_probabilities(m, spread[part]) for part, m in rows.items()}


def _parts(result: Found, rows: Mapping[str, Measured], spread: Mapping[str, Tensor]) -> None:
    """The network's own softmax, temperature, and what may come on top."""
    usual, part = rows["validation"], spread["validation"]
    result.logs["softmax"] = _applied(ClassFit(1.0), rows)
    result.logs["temperature"] = _applied(fitted(usual, sloped=None), rows)
    if usual.novelty is not None:
        result.logs["guard"] = _applied(fitted(usual, sloped=False), rows)
        result.logs["leverage"] = _applied(fitted(usual, sloped=True), rows)
    result.logs["dropout"] = _doubted(fitted_with_doubt(usual, part, sloped=None), rows, spread)
    if usual.novelty is not None:
        result.logs["leverage + dropout"] = _doubted(fitted_with_doubt(usual, part, sloped=True), rows, spread)


def _row_scores(result: Found, rows: Mapping[str, Measured], spread: Mapping[str, Tensor]) -> None:
    own, ours = result.logs["temperature"], result.logs[DEFAULT]
    result.scores["max probability"] = {part: -logs.exp().amax(1) for part, logs in own.items()}
    result.scores["entropy"] = {part: entropy(logs) for part, logs in own.items()}
    result.scores["energy"] = {part: -m.logits.logsumexp(1) for part, m in rows.items()}
    if rows["validation"].novelty is not None:
        result.scores["strangeness"] = {part: m.novelty for part, m in rows.items() if m.novelty is not None}
    result.scores["default, entropy"] = {part: entropy(logs) for part, logs in ours.items()}
    odds = _DOUBT_RATE / (1 - _DOUBT_RATE)
    result.scores["injected, mutual information"] = {
        part: mutual_information(m.logits.double(), odds * spread[part]) for part, m in rows.items()
    }


def _injected(net: nn.Module, rate: float, draws: int, sites: latedrop.Sites) -> Callable[[Tensor], Tensor]:
    def drawn(images: Tensor) -> Tensor:
        outputs = latedrop.sample(net, images, rate, draws, sites=sites, keep_draws=True).outputs
        assert outputs is not None
        return torch.as_tensor(outputs).cpu()

    return drawn


def _members(networks: Sequence[nn.Module], images: Tensor) -> Tensor:
    return torch.stack([plain_logits(net, images) for net in networks])


def _averaged(
    result: Found, name: str, drawn: Mapping[float, Callable[[Tensor], Tensor]], x: Mapping[str, Tensor], labels: Tensor
) -> None:
    """The mean softmax of logits `(T, N, K)` with a temperature, at the rate that the validation rows like best."""

    def tried(rate: float) -> tuple[float, ClassFit]:
        logits = drawn[rate](x["validation"]).double()
        fit = fitted(Measured(logits, labels), sloped=None)
        return float(losses(fit.log_probabilities(logits), labels).mean()), fit

    fits = {rate: tried(rate) for rate in drawn}
    best = min(fits, key=lambda rate: fits[rate][0])
    logits = {part: drawn[best](images).double() for part, images in x.items()}
    logs = {part: fits[best][1].log_probabilities(drawn_logits) for part, drawn_logits in logits.items()}
    result.logs[name] = logs
    result.scores[f"{name}, entropy"] = {part: entropy(drawn_logits) for part, drawn_logits in logs.items()}
    result.scores[f"{name}, mutual information"] = {
        part: information(torch.log_softmax(drawn_logits, 2)) for part, drawn_logits in logits.items()
    }
    if best:
        result.notes[f"{name} rate"] = best


def _laplace(
    result: Found, net: nn.Sequential, rows: Mapping[str, Measured], x: Mapping[str, Tensor], train: Tensor
) -> None:
    """Precision from a grid, scale and temperature fitted, all by the NLL of the validation rows."""
    last = LastLayer.fit(features(net, train), plain_logits(net, train))
    entering = {part: features(net, images) for part, images in x.items()}

    def at(precision: float, part: str) -> Tensor:
        return last.spread(entering[part], precision)

    rows = {part: replace(m, novelty=None) for part, m in rows.items()}
    usual = rows["validation"]

    def tried(precision: float) -> tuple[float, DoubtFit]:
        spread = at(precision, "validation")
        fit = fitted_with_doubt(usual, spread, sloped=None)
        return float(losses(fit.log_probabilities(usual, spread), usual.labels).mean()), fit

    fits = {precision: tried(precision) for precision in PRECISIONS}
    best = min(fits, key=lambda precision: fits[precision][0])
    result.logs["laplace"] = _doubted(fits[best][1], rows, {part: at(best, part) for part in rows})
    result.scores["laplace, entropy"] = {part: entropy(logs) for part, logs in result.logs["laplace"].items()}
    result.notes["laplace precision"] = best
