"""The methods that `benchmarks.instead` compares: what each may see and gives, and how that is judged.

Other libraries are called as their own documentation says, on the one network: see `benchmarks/NOTES.md`.
"""

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import RandomForestRegressor
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import latedrop
from benchmarks.peers import imported
from latedrop import Terms, find_sites, metrics
from latedrop.calibration.cross_validation import CrossValidation
from latedrop.calibration.fitted_terms import Block, fit_terms
from latedrop.calibration.scale import fit_floor
from latedrop.metrics.tails import Tail, fit_tail
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import Features, folded
from latedrop.terms.forest import grow

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
COMPONENTS = 32
LEAST = 1e-4


@dataclass(frozen=True)
class Predicted:
    """Means `(n,)`, variances, and the tail of the standardised errors."""

    mean: Tensor
    variance: Tensor
    tail: Tail = field(default_factory=Tail)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        reach = self.tail.quantile((1 + level) / 2) * self.variance.sqrt()
        return self.mean - reach, self.mean + reach

    def nll(self, y: Tensor) -> float:
        return float(self.tail.nll(y - self.mean, self.variance).mean())

    def crps(self, y: Tensor) -> float:
        """Return the CRPS, of Student tails that of Jordan, Krüger and Lerch (2019)."""
        nu, width = self.tail.nu, self.variance.double().sqrt() * self.tail.scale
        if math.isinf(nu):
            return float(metrics.crps(self.mean, width.square(), y))
        t, law = ((y - self.mean).double() / width).numpy(), stats.t(nu)
        rest = 2 * math.sqrt(nu) / (nu - 1) * special.beta(0.5, nu - 0.5) / special.beta(0.5, nu / 2) ** 2
        scores = t * (2 * law.cdf(t) - 1) + 2 * law.pdf(t) * (nu + t**2) / (nu - 1) - rest
        return float((width.numpy() * scores).mean())


@dataclass(frozen=True)
class Bounds:
    """Means `(n,)`, the ends of their intervals `(levels, n)`, and perhaps a distribution as points `(n, points)`."""

    mean: Tensor
    low: Tensor
    high: Tensor
    points: Tensor | None = None

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        place = LEVELS.index(level)
        return self.low[place], self.high[place]

    def nll(self, y: Tensor) -> float:
        return math.nan

    def crps(self, y: Tensor) -> float:
        if self.points is None:
            return math.nan
        ordered = self.points.double().sort(1).values
        count = ordered.shape[1]
        ranks = 2 * torch.arange(1, count + 1, dtype=torch.float64) - count - 1
        apart = ordered @ ranks / count**2  # half the mean distance of two points
        return float(((ordered - y[:, None]).abs().mean(1) - apart).mean())


Judged = Predicted | Bounds


def at_least(predicted: Judged, case: "Case") -> Judged:
    """Raise variances to a small part of the mean squared validation error."""
    if isinstance(predicted, Bounds):
        return predicted
    return replace(predicted, variance=predicted.variance.clamp_min(LEAST * float(case.error.square().mean())))


Rule = Callable[[Tensor], Judged]


@dataclass(frozen=True)
class Case:
    """Five networks, the rows that they were trained on, and validation rows with float64 targets `(n,)`."""

    nets: list[nn.Module]
    x_train: Tensor
    y_train: Tensor
    x_val: Tensor
    y_val: Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def net(self) -> nn.Module:
        return self.nets[0]

    @property
    def error(self) -> Tensor:
        """Of the one network on the validation rows, `(n,)`."""
        return self.y_val - output(self.net, self.x_val)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what was made of networks and training rows, which cases of one situation share."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def table(self, x: Tensor) -> np.ndarray:
        """Return rows as libraries for tables take them: as they are, or components of the last layer's inputs."""
        if x.dim() == 2 and x.is_floating_point():
            return x.double().numpy()

        def components() -> tuple[Tensor, Tensor]:
            features = last_features(self.net, self.x_train)
            center = features.mean(0)
            return center, torch.linalg.svd(features - center, full_matrices=False)[2][:COMPONENTS].T

        center, basis = self.once("components", components)
        return ((last_features(self.net, x) - center) @ basis).numpy()


def output(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)[:, 0].double()


def last_features(net: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of the last linear layer, `(n, units)`, float64."""
    seen: list[Tensor] = []
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    handle = last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        net(x)
    handle.remove()
    return seen[0].double()


def measures(predicted: Judged, y: Tensor, inside: Judged | None = None) -> dict[str, Any]:
    """Return scores on test rows with targets `(n,)`; with rows from `inside`, how well widths tell these apart."""
    y = y.double()
    ends = [predicted.interval(level) for level in LEVELS]
    low, high = ends[LEVELS.index(0.9)]
    wide = width_of(predicted)
    scores = {
        "nll": predicted.nll(y),
        "crps": predicted.crps(y),
        "score": float((high - low + 20 * (torch.relu(low - y) + torch.relu(y - high))).mean()),
        "coverage": [round(float(((y >= a) & (y <= b)).double().mean()), 4) for a, b in ends],
        "width": float((high - low).mean()),
        "ranking": float(metrics.rank_correlation(predicted.mean, wide.square(), y)),
        "rmse": float((y - predicted.mean).square().mean().sqrt()),
    }
    if inside is not None:
        both = torch.cat([wide, width_of(inside)])
        scores["auroc"] = float(metrics.auroc(both, torch.arange(len(both)) < len(wide)))
    return scores


def width_of(predicted: Judged) -> Tensor:
    """Return widths of 80 % intervals, `(n,)`, rounded, so that equal widths are equal."""
    low, high = predicted.interval(0.8)
    wide = (high - low).nan_to_num(posinf=1e30).clamp_max(1e30)
    digits = 10 ** (6 - wide.clamp_min(1e-30).log10().floor())
    return (wide * digits).round() / digits


Method = Callable[[Case], Rule]
_SKETCH = 256


def constant(case: Case, *, tailed: bool = False) -> Rule:
    """The mean squared validation error for every row, perhaps with a Student t."""
    level = case.error.square().mean()
    tail = fit_tail(case.error / level.sqrt()) if tailed else Tail()
    return lambda x: Predicted(mean := output(case.net, x), level.expand_as(mean), tail)


def calibrated(case: Case, *, reference: bool = False, **options: Any) -> Rule:
    """By `latedrop.calibrate`, with training inputs as reference rows or without."""
    usual = case.x_train if reference else None
    predictor = latedrop.calibrate(
        case.net, (case.x_val, case.y_val[:, None].float()), reference=usual, progress=False, **options
    )
    tail = Tail.unit(predictor.calibration.degrees)

    def rule(x: Tensor) -> Predicted:
        p = predictor.predict(x)
        return Predicted(p.mean[:, 0].double(), p.variance[:, 0].double(), tail)

    return rule


def ensemble(case: Case, *, tail: bool = False, forest: bool = False) -> Rule:
    """Five networks with their own mean: `scale · variance + floor`, perhaps with a forest; Gaussian or with a t."""

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.stack([output(net, x) for net in case.nets])
        return outputs.mean(0)[:, None], outputs.var(0)[:, None]

    def inputs(x: Tensor, mean: Tensor, raw: Tensor) -> Any:
        looked = torch.from_numpy(case.table(x))
        return torch.cat([looked, mean, raw.clamp_min(1e-30).log()], 1).float().numpy()

    mean, raw = moments(case.x_val)
    error = case.y_val[:, None] - mean
    if forest:
        size = error.square().mean()
        trees, learned_errors = grow(inputs(case.x_val, mean, raw), (error.square() / size).numpy())
        columns = torch.stack([raw, size * torch.from_numpy(learned_errors)], 2)
        blocks = [Block([0], 0.5), Block([1], 2 / 3)]
        fit = fit_terms(error, columns, blocks)
        variance = torch.empty_like(error)
        for rest, out in CrossValidation().splits(len(error)):
            part = fit_terms(error[rest], columns[rest], blocks, columns.mean(0))
            variance[out] = part.variance(columns[out])
    else:
        scale, floor = (float(value) for value in fit_floor(mean[:, 0], raw[:, 0], case.y_val))
        variance = scale * raw + floor
    judged = fit_tail(error / variance.sqrt()) if tail else Tail()

    def rule(x: Tensor) -> Predicted:
        mean, raw = moments(x)
        if not forest:
            return Predicted(mean[:, 0], (scale * raw + floor)[:, 0], judged)
        learned = size * trees.sums(torch.from_numpy(inputs(x, mean, raw)))
        return Predicted(mean[:, 0], fit.variance(torch.stack([raw, learned], 2))[:, 0], judged)

    return rule


def alone(case: Case, kind: str) -> Rule:
    """`max(1, column / q) · (scale · column + floor)` with a Student t, the mean of the one network; see `COLUMNS`.

    q is the 99 % quantile of the column over the validation rows.
    """
    column = case.once(kind, lambda: _COLUMNS[kind](case))
    mean, raw = output(case.net, case.x_val), column(case.x_val)
    scale, floor = (float(value) for value in fit_floor(mean, raw, case.y_val))
    limit = raw.quantile(0.99)

    def variance(raw: Tensor) -> Tensor:
        return (raw / limit).clamp_min(1) * (scale * raw + floor)

    tail = fit_tail((case.y_val - mean) / (scale * raw + floor).sqrt())
    return lambda x: Predicted(output(case.net, x), variance(column(x)), tail)


def _leverage(case: Case, term: Any, look: Callable[[BatchContext], Tensor]) -> Callable[[Tensor], Tensor]:
    network = Network(case.net)
    sites = Sites(find_sites(case.net, case.x_train[:64]))
    known = Features.all(sites)

    def rows(x: Tensor) -> BatchContext:
        return BatchContext(network, x, sites, None, known, gradients=True)

    learned = term.learned_from([look(rows(part)) for part in case.x_train.split(512)], own=False)
    return lambda x: torch.cat([learned.values(rows(part)).reshape(len(part)).double() for part in x.split(512)])


def _all_weights(case: Case) -> Callable[[Tensor], Tensor]:
    """Leverage of the gradient by every weight, in a sketch of 256 numbers."""
    weights = {name: value.detach() for name, value in case.net.named_parameters()}

    def of(row: Tensor) -> Any:
        return grad(lambda values: functional_call(case.net, values, (row[None],))[0, 0])(weights)

    def sketch(x: Tensor) -> Tensor:
        parts = [torch.cat([g.flatten(1) for g in vmap(of)(part).values()], 1) for part in x.split(64)]
        return torch.cat([folded(part, _SKETCH) for part in parts])[:, None]

    def rows(x: Tensor) -> Any:
        return SimpleNamespace(index=None, gradients=sketch(x), mean=output(case.net, x)[:, None])

    learned = GradientLeverage().learned_from([sketch(case.x_train)], own=False)
    return lambda x: learned.values(rows(x)).reshape(len(x)).double()


_COLUMNS: dict[str, Callable[[Case], Callable[[Tensor], Tensor]]] = {
    "leverage of features": lambda case: _leverage(case, Leverage(), lambda rows: rows.features),
    "leverage of mask gradients": lambda case: _leverage(case, GradientLeverage(), lambda rows: rows.gradients),
    "leverage of all weights": _all_weights,
    "variance of five networks": lambda case: lambda x: torch.stack([output(net, x) for net in case.nets]).var(0),
}
COLUMNS: dict[str, Method] = {f"{name} alone": partial(alone, kind=name) for name in _COLUMNS}
"""One column, a floor and a guard on that column, with the mean of the one network."""

METHODS: dict[str, Method] = {
    "constant": constant,
    "constant + t": partial(constant, tailed=True),
    "paper": partial(calibrated, method="sample"),  # the rate with the best scaled likelihood, times the scale
    "latedrop": partial(calibrated, reference=True),
    "latedrop, no reference": calibrated,
    "latedrop, no forest": partial(calibrated, reference=True, method=Terms(["dropout", "leverage", "gradients"])),
    "latedrop, corrected mean": partial(calibrated, reference=True, method=Terms(mean="corrected")),
    **COLUMNS,
    "ensemble": ensemble,
    "ensemble + t": partial(ensemble, tail=True),
    "ensemble + forest + t": partial(ensemble, tail=True, forest=True),
}


NEIGHBOURS = 25
PRIORS = tuple(10.0**power for power in range(-2, 5))
NOISES = torch.logspace(-4, 1, 101, dtype=torch.float64)  # in units of the mean squared validation error
_MOST_WEIGHTS = 12_000


class Known(RegressorMixin, BaseEstimator):
    """The one network, as libraries take a fitted model; its prediction is the last column of every row."""

    def __init__(self, predictions: Any = None) -> None:
        self.predictions = predictions

    def fit(self, X: Any, y: Any = None) -> "Known":  # noqa: N803 - the name that scikit-learn asks for
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict(self, X: Any) -> Any:  # noqa: N803
        return np.asarray(X)[:, -1]


def _rows(case: Case, x: Tensor) -> np.ndarray:
    return np.column_stack([case.table(x), output(case.net, x).numpy()])


def mapie(case: Case, *, normalised: bool = False) -> Rule:
    """Split conformal intervals; those of a level that so few rows cannot reach are endless."""
    regression = imported("mapie.regression")
    x, y = _rows(case, case.x_val), case.y_val.numpy()
    score: Any = "absolute"
    if normalised:
        forest = RandomForestRegressor(200, min_samples_leaf=5, random_state=0)
        score = imported("mapie.conformity_scores").ResidualNormalisedScore(forest, split_size=0.5, random_state=0)
    rows = len(x) // 2 if normalised else len(x)
    reached = [level for level in LEVELS if round((1 - level) * rows, 9) >= 1]
    fitted = regression.SplitConformalRegressor(Known(), reached, score, prefit=True).conformalize(x, y)

    def rule(x: Tensor) -> Bounds:
        intervals = fitted.predict_interval(_rows(case, x))[1]
        endless = np.tile([-np.inf, np.inf], (len(x), 1))
        ends = [intervals[:, :, place] if place < len(reached) else endless for place in range(len(LEVELS))]
        return _bounds(output(case.net, x), ends)

    return rule


def _bounds(mean: Tensor, ends: list[Any], points: Tensor | None = None) -> Bounds:
    levels = torch.from_numpy(np.stack(ends).astype(float))
    return Bounds(mean, levels[:, :, 0], levels[:, :, 1], points)


def crepes(case: Case) -> Rule:
    difficulty = imported("crepes.extras").DifficultyEstimator()
    x, error = case.table(case.x_val), case.error.numpy()
    low, span = x.min(0), np.where(np.ptp(x, 0) > 0, np.ptp(x, 0), 1)
    difficulty.fit((x - low) / span, residuals=error, k=min(NEIGHBOURS, len(x) - 1), oob=True)
    system = imported("crepes").ConformalPredictiveSystem().fit(error, difficulty.apply(), seed=0)

    def rule(rows: Tensor) -> Bounds:
        mean = output(case.net, rows)
        sigmas = difficulty.apply((case.table(rows) - low) / span)
        ends = [system.predict_int(mean.numpy(), sigmas, confidence=level) for level in LEVELS]
        points = torch.from_numpy(np.asarray(system.predict_cpds(mean.numpy(), sigmas), dtype=float))
        return _bounds(mean, ends, points)

    return rule


def ngboost(case: Case) -> Rule:
    library = imported("ngboost")
    x, error = _rows(case, case.x_val), case.error.numpy()
    stop = np.random.default_rng(0).permutation(len(x)) < len(x) // 5
    model = library.NGBRegressor(verbose=False, random_state=0)
    model.fit(x[~stop], error[~stop], x[stop], error[stop], early_stopping_rounds=20)

    def rule(rows: Tensor) -> Predicted:
        normal = model.pred_dist(_rows(case, rows), max_iter=model.best_val_loss_itr)
        mean = output(case.net, rows) + torch.from_numpy(normal.params["loc"])
        return Predicted(mean, torch.from_numpy(normal.params["scale"]).square())

    return rule


def deup(case: Case) -> Rule:
    """Direct epistemic uncertainty prediction, `scale · g + floor` with a Student t; g was left out for validation."""
    library, features = imported("deup"), imported("deup.core.features")
    seen = [features.RawFeatures(), features.DensityFeature(), features.DistanceToTrain()]
    x, y = _rows(case, case.x_val), case.y_val.numpy()

    def fitted(rows: Any) -> Any:
        model = library.DEUPRegressor(
            base_model=Known(),
            error_model=RandomForestRegressor(200, min_samples_leaf=5, random_state=0),
            features=features.FeaturePipeline([(type(part).__name__, part) for part in seen]),
            target_transform="none",
            random_state=0,
        )
        return model.fit(x[rows], y[rows])

    raw = torch.empty_like(case.y_val)
    for rest, out in CrossValidation().splits(len(x)):
        raw[out] = torch.from_numpy(fitted(rest).predict_epistemic(x[out]))
    mean, model = output(case.net, case.x_val), fitted(slice(None))
    scale, floor = (float(value) for value in fit_floor(mean, raw, case.y_val))
    tail = fit_tail(case.error / (scale * raw + floor).sqrt())

    def rule(rows: Tensor) -> Predicted:
        wide = torch.from_numpy(model.predict_epistemic(_rows(case, rows)))
        return Predicted(output(case.net, rows), scale * wide + floor, tail)

    return rule


def laplace(case: Case, *, every: bool = False, tuned: bool = False) -> Rule:
    """A Gaussian of weights around those of the network, of the last layer or of all."""
    fitted, device = _posterior(case, every)

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        with device:
            parts = [fitted(part) for part in x.to(device).split(256)]
        mean, spread = (torch.cat(each).detach().cpu().double().flatten() for each in zip(*parts, strict=True))
        return mean, spread

    if tuned:
        best = np.inf
        chosen, noise = PRIORS[0], torch.tensor(1.0)
        levels = NOISES * case.error.square().mean()
        for prior in PRIORS:
            fitted.prior_precision = prior
            try:
                mean, spread = moments(case.x_val)
            except torch.linalg.LinAlgError:  # so weak a prior leaves a matrix without a square root
                continue
            total = spread[:, None] + levels
            costs = ((case.y_val - mean).square()[:, None] / total + total.log()).mean(0)
            if float(costs.min()) < best:
                best, chosen, noise = float(costs.min()), prior, levels[costs.argmin()]
        fitted.prior_precision = chosen
    else:
        noise = torch.tensor(_marginal(fitted) ** 2)

    def rule(x: Tensor) -> Predicted:
        mean, spread = moments(x)
        return Predicted(mean, spread + noise)

    return rule


def _posterior(case: Case, every: bool) -> tuple[Any, torch.device]:
    device = torch.device("cuda" if every and torch.cuda.is_available() else "cpu")

    def fitted() -> Any:
        model = deepcopy(case.net).requires_grad_(True).to(device)
        subset = "all" if every else "last_layer"
        posterior = imported("laplace").Laplace(model, "regression", subset_of_weights=subset, hessian_structure="full")
        rows = TensorDataset(case.x_train.to(device), case.y_train[:, None].float().to(device))
        with warnings.catch_warnings(), device:
            warnings.simplefilter("ignore")
            posterior.fit(DataLoader(rows, batch_size=128))
        return posterior

    return case.once(f"laplace {every}", fitted), device


def _marginal(fitted: Any) -> float:
    """Set the prior, and return the noise, that make the training rows most likely."""
    prior, noise = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([prior, noise], lr=0.1)
    for _ in range(100):
        optimiser.zero_grad()
        (-fitted.log_marginal_likelihood(prior.exp(), noise.exp())).backward()
        optimiser.step()
    with torch.no_grad():
        fitted.prior_precision, fitted.sigma_noise = prior.exp().detach(), noise.exp().detach()
    return float(noise.exp())


PEERS: dict[str, Callable[[Case], Rule]] = {
    "MAPIE, one width": mapie,
    "MAPIE, normalised": partial(mapie, normalised=True),
    "crepes": crepes,
    "NGBoost": ngboost,
    "DEUP": deup,
    "Laplace, last layer": laplace,
    "Laplace, last layer, tuned": partial(laplace, tuned=True),
    "Laplace, all weights, tuned": partial(laplace, every=True, tuned=True),
}
BELOW_60_ROWS = {
    "latedrop, corrected mean": "latedrop",
    "ensemble + forest + t": "ensemble + t",
    "MAPIE, normalised": "MAPIE, one width",
}
"""The methods that others equal if validation rows are too few for trees."""
NEEDS = {"crepes": 30, **dict.fromkeys(("NGBoost", "DEUP", "Laplace, all weights, tuned", *BELOW_60_ROWS), 60)}
"""The least number of validation rows."""
PACKAGES = ("mapie", "crepes", "ngboost", "deup", "laplace-torch", "datamol", "vaderSentiment")


def suits(method: str, case: Case) -> bool:
    weights = sum(value.numel() for value in case.net.parameters())
    small = weights <= _MOST_WEIGHTS or "all weights, tuned" not in method
    return small and len(case.y_val) >= NEEDS.get(method, 0)
