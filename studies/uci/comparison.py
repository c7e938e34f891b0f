"""Every method on every part of the rows, for all splits of one depth: from trained networks to predictive Gaussians.

`by_rate` and `measures` give raw variances, `predictions` all of them, treated as `processing` says: "injected, raw",
"laplace, floor", ... Parts may have any name; "train" and "validation" must be among them, and what is fitted is
fitted on "validation" alone and applied to every part but "train".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from studies.uci.measures import Predicted
from studies.uci.methods import (
    Moments,
    Network,
    conformal_scores,
    constant,
    default,
    dropout,
    ensemble,
    gaussian,
    gaussian_ensemble,
    laplace,
    network,
    per_site,
    rate_in,
    spread,
)
from studies.uci.networks import Networks
from studies.uci.processing import LEAST, Measure, processed, rate_measures
from studies.uci.swag import swag

__all__ = [
    "Rows",
    "best_rates",
    "by_rate",
    "conformal",
    "finished",
    "least_variance",
    "measures",
    "plain",
    "predictions",
]

_PROCESSED = ("raw", "scaled", "floor")
_CRITERIA = {"raw": "unscaled", "scaled": "scaled", "relaxed": "scaled", "floor": "floor"}


@dataclass(frozen=True)
class Rows:
    """The rows of all splits, standardised, in float64.

    Attributes:
        x: `(splits, n, inputs)` by part.
        y: `(splits, n)` by part.
        units: of each split's target, `(splits,)`.
    """

    x: Mapping[str, Tensor]
    y: Mapping[str, Tensor]
    units: Tensor

    @property
    def splits(self) -> range:
        """Their numbers."""
        return range(len(self.units))

    def of(self, split: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and targets of one split by part."""
        return {part: x[split] for part, x in self.x.items()}, {part: y[split] for part, y in self.y.items()}

    def joined(self, found: Sequence[Moments]) -> dict[str, Predicted]:
        """The moments of every split, or of every (split, rate), as one, in the target's unit."""
        each = len(found) // len(self.units)
        units = self.units.repeat_interleave(each)[:, None]
        parts = {}
        for part in found[0]:
            mean, variance = (torch.stack([moments[part][i] for moments in found]) for i in (0, 1))
            target = self.y[part].repeat_interleave(each, 0)
            parts[part] = Predicted(mean * units, variance * units**2, target * units)
        return parts


def plain(networks: Networks, rows: Rows) -> list[Network]:
    """The network of each split that has no dropout."""
    return [network(networks.ensemble(split)[0], *rows.of(split)) for split in rows.splits]


def least_variance(nets: Sequence[Network], rows: Rows) -> Tensor:
    """What no variance is below, `(splits,)`, in the target's unit squared."""
    errors = torch.stack([net.error("validation").square().mean() for net in nets])
    return LEAST * errors * rows.units**2


def by_rate(
    networks: Networks,
    nets: Sequence[Network],
    rows: Rows,
    rates: Sequence[float],
    draws: int | None,
    parts: Sequence[str] = (),
) -> dict[str, dict[str, Predicted]]:
    """Injected and embedded dropout by part, for each split and within a split for each rate: `(splits · rates, n)`.

    Args:
        networks: trained; the embedded ones at `rates`.
        nets: the plain ones, of `plain`.
        rows: what to predict.
        rates: of dropout.
        draws: see `methods.dropout`.
        parts: those wanted; all but the training rows where empty.
    """
    injected, embedded = [], []
    for split, net in enumerate(nets):
        sites, seed = net.by_site["validation"].shape[1], networks.seeds[split]
        for rate, member in zip(rates, networks.thinned(split), strict=True):
            own = network(member, *rows.of(split))
            injected.append(dropout(net, [rate] * sites, draws, seed, parts=parts))
            embedded.append(dropout(own, [rate] * sites, draws, seed, parts=parts))
    return {"injected": rows.joined(injected), "embedded": rows.joined(embedded)}


def best_rates(validation: Mapping[str, Tensor], rates: int) -> dict[str, Tensor]:
    """For every treatment of the variance the index of the rate with its best validation NLL, `(splits,)`.

    The first of equally good rates is taken: with exact variances all are, once scaled. The relaxed scale has the
    rate of the scaled one.

    Args:
        validation: what `rate_measures` says of the validation rows.
        rates: how many.
    """
    curves = {how: validation[f"nll_{criterion}"].view(-1, rates) for how, criterion in _CRITERIA.items()}
    return {how: (curve <= curve.amin(1, keepdim=True) + 1e-9).int().argmax(1) for how, curve in curves.items()}


def measures(networks: Networks, nets: Sequence[Network], rows: Rows, draws: int | None) -> dict[str, Measure]:
    """The raw variance of every measure that has no rate to choose, `(splits, n)` by part."""
    found: dict[str, list[Moments]] = {}
    for split, net in enumerate(nets):
        x, y = rows.of(split)
        judged = {part: x[part] for part in net.judged}
        member, rates, noise = networks.learned(split)
        five = [net, *(network(other, judged, y) for other in networks.ensemble(split)[1:])]
        seed, heads, together = networks.seeds[split], networks.gaussians(split), ensemble(five)
        each = {
            "concrete": dropout(network(member, judged, y), rates, draws, seed, noise=noise),
            "laplace": laplace(net),
            "ensemble": together,
            "ensemble variance": spread(net, together),
            "gaussian": gaussian(heads[0], x),
            "gaussian ensemble": gaussian_ensemble(heads, x),
            "rate-in": rate_in(net),
            "swag": swag(networks.history(split), judged, seed),
        }
        for name, moments in each.items():
            found.setdefault(name, []).append(moments)
    return {name: rows.joined(each) for name, each in found.items()}


def finished(nets: Sequence[Network], rows: Rows) -> dict[str, Measure]:
    """The methods that nothing is done to: the constant, the library's default, and rates per site in deep networks."""
    found = {
        "constant": [constant(net) for net in nets],
        "default": [default(net, reference=False) for net in nets],
        "default + reference": [default(net, reference=True) for net in nets],
    }
    if len(nets[0].member) > 2:
        found["injected per site, floor"] = [per_site(net) for net in nets]
    return {name: rows.joined(each) for name, each in found.items()}


def conformal(nets: Sequence[Network], rows: Rows, part: str = "test") -> dict[str, list[dict[str, float]]]:
    """The measures of conformal intervals on a part, split by split: there is no density."""
    found: dict[str, list[dict[str, float]]] = {"conformal": [], "conformal, injected": []}
    for net, unit in zip(nets, rows.units.tolist(), strict=True):
        std = {name: net.by_site[name].sum(1).clamp_min(1e-12).sqrt() for name in ("validation", part)}
        found["conformal"].append(conformal_scores(net, None, unit, part))
        found["conformal, injected"].append(conformal_scores(net, std, unit, part))
    return found


def predictions(
    networks: Networks,
    nets: Sequence[Network],
    rows: Rows,
    draws: int | None,
    *,
    dropped: Mapping[str, tuple[Measure, Mapping[str, Tensor]]] | None = None,
) -> dict[str, dict[str, Predicted]]:
    """Every method that has a density: its Gaussians `(splits, n)`, by part.

    Args:
        networks: trained.
        nets: the plain ones, of `plain`.
        rows: what to predict.
        draws: see `methods.dropout`.
        dropped: of injected and embedded dropout, what `by_rate` gave and what `rate_measures` says of its validation
            rows, where they are known.
    """
    least, rates = least_variance(nets, rows), networks.embedded.rates
    if dropped is None:
        each = least.repeat_interleave(len(rates))
        raw = by_rate(networks, nets, rows, rates, draws)
        dropped = {
            kind: (measure, rate_measures({"validation": measure["validation"]}, each)["validation"])
            for kind, measure in raw.items()
        }
    found: dict[str, dict[str, Predicted]] = {}
    for kind, (measure, validation) in dropped.items():
        for how, index in best_rates(validation, len(rates)).items():
            picked = _at(measure, index, len(rates))
            found[f"{kind}, {how}"] = processed(picked, least, (how,))[how]
    for name, measure in measures(networks, nets, rows, draws).items():
        for how, parts in processed(measure, least, _PROCESSED).items():
            found[f"{name}, {how}"] = parts
    for name, measure in finished(nets, rows).items():
        found[name] = processed(measure, least, ("raw",))["raw"]
    return found


def _at(measure: Measure, index: Tensor, rates: int) -> dict[str, Predicted]:
    """Of `(splits · rates, n)` the rate that each split chose; not of the training rows."""
    at = torch.arange(len(index), device=index.device) * rates + index
    return {
        name: Predicted(part.mean[at], part.variance[at], part.target[at])
        for name, part in measure.items()
        if name != "train"
    }
