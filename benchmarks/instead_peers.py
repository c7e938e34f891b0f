"""The libraries that one would use instead, each called as its own documentation says, on the one network.

- `MAPIE`: `SplitConformalRegressor`, of one width, or with `ResidualNormalisedScore` and a forest (200 trees, leaves of
  5 rows) on half of the validation rows. Intervals alone.
- `crepes`: `ConformalPredictiveSystem` with the errors of the 25 nearest validation rows as difficulty, each row left
  out for itself. Intervals and distributions without a density.
- `NGBoost`: a Gaussian for the validation errors, with a mean of its own; a fifth of the rows says when to stop.
- `DEUP`: its error model learns the squared errors of half of the validation rows, and the other half is for its
  normalised conformal intervals. Intervals alone. It divides errors by squared errors, hence their width.
- `Laplace`: laplace-torch, fitted to the training rows. `last layer`: prior and noise by marginal likelihood, as in its
  example. `tuned`: prior and noise by the likelihood of the validation rows. `all weights`: the full matrix.

Libraries for tables see rows as they are, or 32 components of the last layer's inputs of images and texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import RandomForestRegressor
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.instead_case import LEVELS, Bounds, Case, Predicted, Rule, output
from benchmarks.peers import _imported as imported

__all__ = ["NEEDS", "PEERS", "peer_versions"]

NEIGHBOURS = 25
PRIORS = tuple(10.0**power for power in range(-2, 5))
NOISES = torch.logspace(-4, 1, 101, dtype=torch.float64)
"""In units of the mean squared validation error."""
_MOST_WEIGHTS = 12_000


class Known(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The one network, as libraries take a fitted model; its prediction is the last column of every row."""

    def __init__(self, predictions: Any = None) -> None:
        self.predictions = predictions

    def fit(self, X: Any, y: Any = None) -> Known:  # noqa: N803 - the name that scikit-learn asks for
        """Do nothing."""
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return what the network says of rows whose predictions stand in their last column."""
        return np.asarray(X)[:, -1]


def _rows(case: Case, x: Tensor) -> np.ndarray:
    """Rows as tables, the prediction of the network last."""
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
        found = fitted.predict_interval(_rows(case, x))[1]
        endless = np.tile([-np.inf, np.inf], (len(x), 1))
        ends = [found[:, :, place] if place < len(reached) else endless for place in range(len(LEVELS))]
        return _bounds(output(case.net, x), ends)

    return rule


def _bounds(mean: Tensor, ends: list[Any], points: Tensor | None = None) -> Bounds:
    found = torch.from_numpy(np.stack(ends).astype(float))
    return Bounds(mean, found[:, :, 0], found[:, :, 1], points)


def crepes(case: Case) -> Rule:
    """The normalised predictive system."""
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
    """A Gaussian of the error of every row."""
    library = imported("ngboost")
    x, error = _rows(case, case.x_val), case.error.numpy()
    stop = np.random.default_rng(0).permutation(len(x)) < len(x) // 5
    model = library.NGBRegressor(verbose=False, random_state=0)
    model.fit(x[~stop], error[~stop], x[stop], error[stop], early_stopping_rounds=20)

    def rule(rows: Tensor) -> Predicted:
        found = model.pred_dist(_rows(case, rows), max_iter=model.best_val_loss_itr)
        mean = output(case.net, rows) + torch.from_numpy(found.params["loc"])
        return Predicted(mean, torch.from_numpy(found.params["scale"]).square())

    return rule


def deup(case: Case) -> Rule:
    """Direct epistemic uncertainty prediction, with its conformal intervals."""
    library = imported("deup")
    x, y = _rows(case, case.x_val), case.y_val.numpy()
    seen = np.random.default_rng(0).permutation(len(x)) % 2 == 0
    model = library.DEUPRegressor(base_model=Known(), random_state=0).fit(x[seen], y[seen])

    def rule(rows: Tensor) -> Bounds:
        wanted, ends = _rows(case, rows), []
        for level in LEVELS:
            model.calibrate(x[~seen], y[~seen], alpha=1 - level)
            found = model.predict_interval(wanted)
            ends.append(np.stack([found.lower, found.upper], 1))
        return _bounds(output(case.net, rows), ends)

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
    key = f"laplace {every}"
    if key not in case.kept:
        model = deepcopy(case.net).requires_grad_(True).to(device)
        subset = "all" if every else "last_layer"
        fitted = imported("laplace").Laplace(model, "regression", subset_of_weights=subset, hessian_structure="full")
        rows = TensorDataset(case.x_train.to(device), case.y_train[:, None].float().to(device))
        with warnings.catch_warnings(), device:
            warnings.simplefilter("ignore")
            fitted.fit(DataLoader(rows, batch_size=128))
        case.kept[key] = fitted
    return case.kept[key], device


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
NEEDS = {"crepes": 30, "NGBoost": 60, "DEUP": 60, "Laplace, all weights, tuned": 60}
"""The least number of validation rows."""
_PACKAGES = ("mapie", "crepes", "ngboost", "deup", "laplace-torch", "datamol", "vaderSentiment")


def suits(method: str, case: Case) -> bool:
    """Whether a method has enough rows, and a network that is small enough."""
    if len(case.y_val) < NEEDS.get(method, 0):
        return False
    weights = sum(value.numel() for value in case.net.parameters())
    return "all weights, tuned" not in method or weights <= _MOST_WEIGHTS


def peer_versions() -> dict[str, str | None]:
    """Return the version of every package that is compared with, or whose data are used."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
