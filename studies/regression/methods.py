"""Ways to a mean and a variance, on the same splits: what the UCI and the shift study compare.

A method takes the trained networks of one split and gives, for every part but the training rows, a mean and a raw
variance `(n,)` in the standardised unit of the target: its moments. `predictions` has all of them, treated as `scores`
says: "injected, raw", "laplace, floor", ... Parts may have any name; "train" and "validation" must be among them, and
what is fitted is fitted on "validation" alone, save the last-layer Laplace approximation, which has its evidence on the
training rows,

    posterior precision  A = features' features / noise + alpha,     Var y = noise + f' A^-1 f,

for the features f that enter the last layer (and 1 for its bias). `alpha` and `noise` maximise the evidence by MacKay's
fixed point: with `lam` the eigenvalues of features' features and `gamma = sum(lam / (lam + noise · alpha))`,

    alpha = gamma / |w|^2,     noise = sum(e^2) / (n - gamma).

SWAG (Maddox et al. 2019) is a Gaussian over the weights, from where training went in its last quarter (Adam at its
constant learning rate). With K snapshots, their mean `m`, variance `d` of each weight and deviations `D`, a draw is

    w = m + sqrt(d / 2) z_1 + D' z_2 / sqrt(2 (K - 1)),     z_1, z_2 standard normal.

Leverage and distance to neighbours say how far a row is from the training rows in the space of what enters the sites,
`h`: `h' (G + r · tr(G) / d · I)^-1 h` with `G` the mean of `h h'` over the training rows, and the mean squared distance
to the ten nearest training rows, as in `latedrop.terms`. They have no unit of the target.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import latedrop
from latedrop import calibrate, find_sites, linearize, sample
from latedrop.devices import one_thread
from latedrop.errors import LatedropWarning
from latedrop.metrics import rank_correlation
from latedrop.metrics.levels import even_levels
from studies.regression.scores import (
    LEAST,
    LEVEL,
    Measure,
    Member,
    Predicted,
    conformal_reach,
    hidden_units,
    processed,
    rate_measures,
)
from studies.regression.training import (
    ConcreteTraining,
    GaussianTraining,
    Plan,
    Stack,
    Training,
    heads,
    key,
    train,
)
from studies.site_rates import fit_sites

MEMBERS = 5
# Of one row in one epoch, relative to a plain network of one hidden layer: for the time left.
_CONCRETE, _GAUSSIAN, _DEEPER = 3.0, 1.5, 1.5


@dataclass(frozen=True)
class Networks:
    """Trained networks of all splits; they are given in float64.

    Attributes:
        plain: without dropout, `MEMBERS` for each split; their `splits` are split times member.
        embedded: with dropout in training, at the stack's rates.
        concrete: with a learned rate for each site.
        gaussian: with a Gaussian head, as many as plain ones.
        seeds: of the splits.
    """

    plain: Stack
    embedded: Stack
    concrete: Stack
    gaussian: Stack
    seeds: tuple[int, ...]

    def ensemble(self, split: int) -> list[Member]:
        """The plain networks of a split."""
        return [_double(self.plain.member(split * MEMBERS + index, 0)) for index in range(MEMBERS)]

    def history(self, split: int) -> list[Member]:
        """The first plain network at its snapshots."""
        return [_double(member) for member in self.plain.history(split * MEMBERS, 0)]

    def thinned(self, split: int) -> list[Member]:
        """The embedded networks of a split, rate by rate."""
        return [_double(self.embedded.member(split, index)) for index in range(len(self.embedded.rates))]

    def gaussians(self, split: int) -> list[Member]:
        """The Gaussian heads of a split."""
        return [_double(self.gaussian.member(split * MEMBERS + index, 0)) for index in range(MEMBERS)]

    def learned(self, split: int) -> tuple[Member, list[float], float]:
        """The concrete network of a split, its rates, and its noise."""
        assert self.concrete.own is not None
        *logits, log_noise = self.concrete.own[:, split]
        member = _double(self.concrete.member(split, 0))
        return member, torch.stack(logits).sigmoid().tolist(), float(log_noise.exp())


def cost(hidden: Sequence[int], rates: Sequence[float]) -> float:
    """Return what `train_all` reports to its `tick` for one row of one split in one epoch."""
    return (MEMBERS + len(rates) + _CONCRETE + _GAUSSIAN * MEMBERS) * _DEEPER ** (len(hidden) - 1)


def train_all(
    x: Tensor,
    y: Tensor,
    plan: Plan,
    seeds: Sequence[int],
    rates: Sequence[float],
    *,
    tick: Callable[[float], object] = lambda done: None,
) -> Networks:
    """Train every network of one depth.

    Args:
        x: `(splits, n, inputs)`, float32, standardised.
        y: `(splits, n)`.
        plan: sizes and hyper-parameters; its rates are not looked at.
        seeds: one for each split.
        rates: of the embedded networks.
        tick: told what is done, in units of `cost`.

    Raises:
        OutputError: a network diverged.
    """
    many = x.repeat_interleave(MEMBERS, 0), y.repeat_interleave(MEMBERS, 0)
    own = [seed if index == 0 else key(seed, "member", index) for seed in seeds for index in range(MEMBERS)]
    alone = replace(plan, rates=(0.0,))

    def trained(costs: float, x: Tensor, y: Tensor, plan: Plan, seeds: Sequence[int], kind: Any = Training) -> Stack:
        each = costs * _DEEPER ** (len(plan.hidden) - 1)
        return train(x, y, plan, seeds, tick=lambda rows: tick(rows * each), kind=kind)

    return Networks(
        trained(1, *many, replace(alone, snapshots=SNAPSHOTS), own),
        trained(len(rates), x, y, replace(plan, rates=tuple(rates)), seeds),
        trained(_CONCRETE, x, y, alone, seeds, ConcreteTraining),
        trained(_GAUSSIAN, *many, alone, own, GaussianTraining),
        tuple(seeds),
    )


def _double(member: Member) -> Member:
    return [(weight.double(), bias.double()) for weight, bias in member]


Scores: TypeAlias = dict[str, float]
Moments: TypeAlias = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Network:
    """One trained network on one split, in the standardised unit of the target.

    Attributes:
        member: its layers.
        x: inputs by part.
        mean: output by part, `(n,)`.
        by_site: first-order variance of each site by part, `(n, sites)`.
        target: by part, `(n,)`.
    """

    member: Member
    x: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    by_site: Mapping[str, Tensor]
    target: Mapping[str, Tensor]

    @property
    def judged(self) -> list[str]:
        """The parts that a variance is wanted for: all but the training rows."""
        return [part for part in self.x if part != "train"]

    def error(self, part: str) -> Tensor:
        """Target minus output, `(n,)`."""
        return self.target[part] - self.mean[part]


def network(member: Member, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Network:
    """Run a network on every part, by `latedrop.linearize`."""
    model = latedrop.Network(_sequential(member))
    sites = find_sites(model, next(iter(x.values()))[:2])
    outputs = {part: linearize(model, rows, sites) for part, rows in x.items()}
    mean = {part: linear.mean[:, 0] for part, linear in outputs.items()}
    return Network(member, x, mean, {part: linear.variance_by_site[:, 0] for part, linear in outputs.items()}, y)


def dropout(
    net: Network, rates: Sequence[float], draws: int | None, seed: int, *, noise: float = 0.0, parts: Sequence[str] = ()
) -> Moments:
    """Dropout at the rate of each site, plus noise: injected, embedded or concrete is what the network was trained as.

    Args:
        net: the network.
        rates: of the sites.
        draws: masks of `latedrop.sample`, in float32; None: to first order, which is exact for one hidden layer.
        seed: of the masks, the same numbers for every rate.
        noise: variance that is added.
        parts: those wanted; all but the training rows where empty.
    """
    parts = parts or net.judged
    if draws is None:
        odds = net.by_site["validation"].new_tensor([rate / (1 - rate) for rate in rates])
        return {part: (net.mean[part], net.by_site[part] @ odds + noise) for part in parts}
    member = [(weight.float(), bias.float()) for weight, bias in net.member] if len(net.member) > 2 else net.member
    model, rows = latedrop.Network(_sequential(member)), {part: net.x[part].to(member[0][0]) for part in parts}
    sites = find_sites(model, next(iter(rows.values()))[:2])
    by_site = {site.name: rate for site, rate in zip(sites, rates, strict=True)}
    drawn = {part: sample(model, x, by_site, draws, seed, sites) for part, x in rows.items()}
    return {part: (each.mean[:, 0].double(), each.variance[:, 0].double() + noise) for part, each in drawn.items()}


def rate_in(net: Network) -> Moments:
    """Dropout at a rate for each site and call that loses a fixed share of information, to first order.

    That is what the public code of Rate-In (Zeevi et al. 2025) does: one rate per layer and call, without labels. A
    call is a part of the rows.
    """
    moments = {}
    for part in net.judged:
        rates = torch.stack([layer_rate(units) for units in hidden_units(net.member, net.x[part])])
        moments[part] = net.mean[part], net.by_site[part] @ (rates / (1 - rates))
    return moments


def laplace(net: Network) -> Moments:
    """Variance from a Gaussian posterior over the last layer, with its noise."""
    features = _with_ones(hidden_units(net.member, net.x["train"])[-1])
    weight = torch.cat([net.member[-1][0].flatten(), net.member[-1][1]])
    alpha, noise, values, vectors = _evidence(features, weight, net.error("train"))

    def variance(part: str) -> Tensor:
        rows = _with_ones(hidden_units(net.member, net.x[part])[-1])
        return posterior_variance(rows, alpha, noise, values, vectors) + noise

    return {part: (net.mean[part], variance(part)) for part in net.judged}


def ensemble(nets: Sequence[Network]) -> Moments:
    """Mean and variance over networks."""
    return {part: _moments([net.mean[part] for net in nets]) for part in nets[0].judged}


def spread(net: Network, moments: Moments) -> Moments:
    """The variance of moments on the mean of one network."""
    return {part: (net.mean[part], variance) for part, (_, variance) in moments.items()}


def gaussian(member: Member, x: Mapping[str, Tensor]) -> Moments:
    """Return the moments of a Gaussian head."""
    return {part: heads(member, rows) for part, rows in x.items() if part != "train"}


def gaussian_ensemble(members: Sequence[Member], x: Mapping[str, Tensor]) -> Moments:
    """Mean and variance of the mixture of Gaussian heads: mean of the variances plus variance of the means."""
    each = [gaussian(member, x) for member in members]
    mixture = {}
    for part in each[0]:
        mean, variance = (torch.stack(values) for values in zip(*(one[part] for one in each), strict=True))
        mixture[part] = mean.mean(0), variance.mean(0) + mean.var(0, correction=0)
    return mixture


def constant(net: Network) -> Moments:
    """The validation rows' mean squared error as the variance of every row: what every method must beat."""
    level = net.error("validation").square().mean()
    return {part: (net.mean[part], level.expand_as(net.mean[part])) for part in net.judged}


def per_site(net: Network) -> Moments:
    """`sum_s odds_s v_s + floor`, an odds for each site, fitted by NLL on the validation rows."""
    error, by_site = net.error("validation").cpu(), net.by_site["validation"].cpu()
    with one_thread():
        fit = fit_sites(error, by_site)
    return {part: (net.mean[part], fit.variance(net.by_site[part])) for part in net.judged}


def default(net: Network, *, reference: bool) -> Moments:
    """Calibrate by `latedrop.calibrate` without options, or with the training inputs as reference rows alone."""
    model, device = _sequential(net.member).cpu().float(), net.mean["validation"].device
    x = {part: rows.cpu().float() for part, rows in net.x.items()}
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)  # that it is little better than a constant is what is measured
        usual = x["train"] if reference else None
        target = net.target["validation"].cpu().float()[:, None]
        predictor = calibrate(model, (x["validation"], target), progress=False, reference=usual)
        predicted = {part: predictor.predict(x[part]) for part in net.judged}
    moments = {part: (p.mean[:, 0], p.variance[:, 0]) for part, p in predicted.items()}
    return {
        part: (mean.double().to(device), variance.double().to(device)) for part, (mean, variance) in moments.items()
    }


def posterior_variance(features: Tensor, alpha: Tensor, noise: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """`f' A^-1 f` for each row of features, from the eigenvalues and vectors of features' features."""
    return (features @ vectors).square() @ (1 / (values / noise + alpha))


def conformal_scores(net: Network, scale: Mapping[str, Tensor] | None, unit: float, part: str = "test") -> Scores:
    """Split conformal intervals `mean ± s · std` on the rows of a part, s ranked on the validation rows.

    Args:
        net: the network.
        scale: the standard deviation by part, `(n,)`; one for all where None.
        unit: of the target, in which the width is.
        part: that is judged.

    There is no density, and so neither NLL nor CRPS. A level above `n / (n + 1)` has an unbounded interval.
    """
    scores, test = net.error("validation").abs(), net.error(part).abs()
    std = torch.ones_like(test)
    if scale is not None:
        scores, std = scores / scale["validation"], scale[part]
    levels = even_levels(99).tolist()
    *radii, radius = (reach * std for reach in conformal_reach(scores, [*levels, LEVEL]))
    observed = [float((test <= reach).double().mean()) for reach in radii]
    return {
        "rmse": float(test.square().mean().sqrt()) * unit,
        "ma": sum(abs(pi - a) for pi, a in zip(observed, levels, strict=True)) / len(levels),
        "coverage": float((test <= radius).double().mean()),
        "width": 2 * float(radius.mean()) * unit,
        "ranking": float(rank_correlation(torch.zeros_like(test), std, test)),
    }


def _sequential(member: Member) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in member:
        inputs, outputs = weight.shape
        layer = nn.Linear(inputs, outputs, device=weight.device, dtype=weight.dtype)
        layer.weight.data, layer.bias.data = weight.T.contiguous(), bias
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def _evidence(features: Tensor, weight: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prior precision and noise of the largest evidence, and the eigen-decomposition of features' features."""
    values, vectors = torch.linalg.eigh(features.T @ features)
    values = values.clamp_min(0)
    square, sum_of_squares, n = weight.square().sum(), error.square().sum(), len(error)
    alpha, noise = weight.new_ones(()), sum_of_squares / n
    for _ in range(200):
        gamma = (values / (values + noise * alpha)).sum().clamp(1e-6, n - 1)
        alpha, noise = gamma / square, sum_of_squares / (n - gamma)
    return alpha, noise, values, vectors


def _with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)


LOSS, _BINS, _STEPS = 0.1, 10, 40


def layer_rate(activations: Tensor, loss: float = LOSS) -> Tensor:
    """Return the rate at which dropout loses a share of the information in a layer's activations `(n, units)`.

    All activations of a call are values of one quantity A, and those after dropout of B; the rate is raised until
    `1 - I(A; B) / H(A) = loss`. We count: A falls into bins, one for exactly 0 and ten of equal width up to the largest
    activation, with shares `q_b`. Dropout at rate p moves a share p of each bin into that of 0 (to multiply what is
    kept by 1 / (1 - p) loses nothing), so

        I(A; B) = H(B) - (1 - q_0) h(p),     B: q_0 + p (1 - q_0) in the bin of 0, (1 - p) q_b in the others,

    with the binary entropy h. I falls from H(A) to 0 as p goes from 0 to 1: bisection finds the rate. The authors
    estimate such a loss from drawn masks and move the rate by steps; 10 % is the share of their example. Activations
    that all fall into one bin have no information to lose, and rate 0.
    """
    most = activations.max().clamp_min(torch.finfo(activations.dtype).tiny)
    place = (activations / most * _BINS).ceil().long().clamp(0, _BINS).flatten()
    shares = torch.bincount(place, minlength=_BINS + 1).to(activations) / len(place)
    whole = information_kept(shares, torch.zeros_like(most))
    low, high = torch.zeros_like(most), torch.ones_like(most)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        enough = information_kept(shares, middle) >= (1 - loss) * whole
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return torch.where(whole > 1e-12, low, 0.0)


def information_kept(shares: Tensor, rate: Tensor) -> Tensor:
    """Return `I(A; B)` in nats, for shares `(bins,)`, the first of 0, and a rate.

    >>> information_kept(torch.tensor([0.5, 0.5]), torch.tensor(1.0))
    tensor(0.)
    """
    after = torch.cat([shares[:1] + rate * (1 - shares[:1]), (1 - rate) * shares[1:]])
    entropy = torch.special.entr(torch.stack([rate, 1 - rate])).sum()
    return torch.as_tensor(torch.special.entr(after).sum() - (1 - shares[0]) * entropy)


SNAPSHOTS = 20
_DRAWS = 50


def swag(history: Sequence[Member], x: Mapping[str, Tensor], seed: int) -> Moments:
    """Mean and variance `(n,)` over drawn networks, by part.

    Args:
        history: a network at two snapshots or more.
        x: inputs by part.
        seed: of the draws.
    """
    flat = torch.stack([torch.cat([part.flatten() for layer in member for part in layer]) for member in history])
    mean, deviations = flat.mean(0), flat - flat.mean(0)
    generator = torch.Generator().manual_seed(key(seed, "swag"))
    z = torch.randn(_DRAWS, flat.shape[1] + len(flat), generator=generator, dtype=torch.float64).to(flat)
    low_rank = z[:, flat.shape[1] :] @ deviations / math.sqrt(2 * (len(flat) - 1))
    drawn = mean + z[:, : flat.shape[1]] * (deviations.square().mean(0) / 2).sqrt() + low_rank
    return {part: _moments([_predicted(row, history[0], rows) for row in drawn]) for part, rows in x.items()}


def _predicted(flat: Tensor, like: Member, x: Tensor) -> Tensor:
    """Run the network whose weights stand in a row, in the order and shapes of another's."""
    sizes = [tensor.numel() for layer in like for tensor in layer]
    tensors = [
        part.view(old.shape) for part, old in zip(flat.split(sizes), (t for layer in like for t in layer), strict=True)
    ]
    *_, (weight, bias) = member = list(zip(tensors[::2], tensors[1::2], strict=True))
    outputs: Tensor = (hidden_units(member, x)[-1] @ weight + bias)[:, 0]
    return outputs


def _moments(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance over networks of outputs `(n,)`."""
    stacked = torch.stack([*outputs])
    return stacked.mean(0), stacked.var(0)


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

    def joined(self, each_case: Sequence[Moments]) -> dict[str, Predicted]:
        """The moments of every split, or of every (split, rate), as one, in the target's unit."""
        each = len(each_case) // len(self.units)
        units = self.units.repeat_interleave(each)[:, None]
        parts = {}
        for part in each_case[0]:
            mean, variance = (torch.stack([moments[part][i] for moments in each_case]) for i in (0, 1))
            target = self.y[part].repeat_interleave(each, 0)
            parts[part] = Predicted(mean * units, variance * units**2, target * units)
        return parts


def plain(networks: Networks, rows: Rows) -> list[Network]:
    """The network of each split that has no dropout."""
    return [network(networks.ensemble(split)[0], *rows.of(split)) for split in rows.splits]


def least_variance(nets: Sequence[Network], rows: Rows) -> Tensor:
    """Return the least variance that counts, `(splits,)`, in the target's unit squared."""
    errors = torch.stack([net.error("validation").square().mean() for net in nets])
    return LEAST * errors * rows.units**2


def by_rate(
    networks: Networks, nets: Sequence[Network], rows: Rows, draws: int | None, parts: Sequence[str] = ()
) -> dict[str, dict[str, Predicted]]:
    """Injected and embedded dropout by part, for each split and within a split for each rate: `(splits · rates, n)`.

    Args:
        networks: trained; the rates are those of the embedded ones.
        nets: the plain ones, of `plain`.
        rows: what to predict.
        draws: see `methods.dropout`.
        parts: those wanted; all but the training rows where empty.
    """
    injected, embedded = [], []
    for split, net in enumerate(nets):
        sites, seed = net.by_site["validation"].shape[1], networks.seeds[split]
        for rate, member in zip(networks.embedded.rates, networks.thinned(split), strict=True):
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
    by_name: dict[str, list[Moments]] = {}
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
            by_name.setdefault(name, []).append(moments)
    return {name: rows.joined(each) for name, each in by_name.items()}


def finished(nets: Sequence[Network], rows: Rows) -> dict[str, Measure]:
    """The methods that nothing is done to: the constant, the library's default, and rates per site in deep networks."""
    by_name = {
        "constant": [constant(net) for net in nets],
        "default": [default(net, reference=False) for net in nets],
        "default + reference": [default(net, reference=True) for net in nets],
    }
    if len(nets[0].member) > 2:
        by_name["injected per site, floor"] = [per_site(net) for net in nets]
    return {name: rows.joined(each) for name, each in by_name.items()}


def conformal(nets: Sequence[Network], rows: Rows, part: str = "test") -> dict[str, list[dict[str, float]]]:
    """The measures of conformal intervals on a part, split by split: there is no density."""
    by_name: dict[str, list[dict[str, float]]] = {"conformal": [], "conformal, injected": []}
    for net, unit in zip(nets, rows.units.tolist(), strict=True):
        std = {name: net.by_site[name].sum(1).clamp_min(1e-12).sqrt() for name in ("validation", part)}
        by_name["conformal"].append(conformal_scores(net, None, unit, part))
        by_name["conformal, injected"].append(conformal_scores(net, std, unit, part))
    return by_name


def predictions(
    networks: Networks, nets: Sequence[Network], rows: Rows, draws: int | None, dropped: Mapping[str, Measure]
) -> dict[str, dict[str, Predicted]]:
    """Every method that has a density: its Gaussians `(splits, n)`, by part.

    Args:
        networks: trained.
        nets: the plain ones, of `plain`.
        rows: what to predict.
        draws: see `methods.dropout`.
        dropped: injected and embedded dropout at the rates of the embedded networks, of `by_rate`.
    """
    least, rates = least_variance(nets, rows), len(networks.embedded.rates)
    by_name: dict[str, dict[str, Predicted]] = {}
    for kind, measure in dropped.items():
        validation = rate_measures({"validation": measure["validation"]}, least.repeat_interleave(rates))["validation"]
        for how, index in best_rates(validation, rates).items():
            by_name[f"{kind}, {how}"] = processed(_at(measure, index, rates), least, (how,))[how]
    for name, measure in measures(networks, nets, rows, draws).items():
        for how, parts in processed(measure, least, _PROCESSED).items():
            by_name[f"{name}, {how}"] = parts
    for name, measure in finished(nets, rows).items():
        by_name[name] = processed(measure, least, ("raw",))["raw"]
    return by_name


def _at(measure: Measure, index: Tensor, rates: int) -> dict[str, Predicted]:
    """Of `(splits · rates, n)` the rate that each split chose; not of the training rows."""
    at = torch.arange(len(index), device=index.device) * rates + index
    return {
        name: Predicted(part.mean[at], part.variance[at], part.target[at])
        for name, part in measure.items()
        if name != "train"
    }


_RIDGE = 1e-3
_NEAREST = 10


def leverage(net: Network) -> Moments:
    """Return leverage of the features of every part but the training rows, on the network's mean."""
    train = _with_ones(_features(net, "train"))
    count, width = train.shape
    gram = train.T @ train / count
    gram.diagonal().add_(_RIDGE * max(1.0, width / count) ** 2 * gram.diagonal().mean())
    root = torch.linalg.cholesky(gram)
    rows = {part: _with_ones(_features(net, part)) for part in net.judged}
    solved = {part: torch.linalg.solve_triangular(root, h.T, upper=False) for part, h in rows.items()}
    return {part: (net.mean[part], half.square().sum(0)) for part, half in solved.items()}


def neighbours(net: Network) -> Moments:
    """Return the distance of every part but the training rows, on the network's mean; dead units are left out."""
    train = _features(net, "train")
    spread, center = torch.std_mean(train, 0)
    spread = torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
    points = (train - center) / spread
    apart = {part: torch.cdist((_features(net, part) - center) / spread, points) for part in net.judged}
    nearest = {part: each.topk(min(_NEAREST, len(train)), largest=False).values for part, each in apart.items()}
    return {part: (net.mean[part], each.square().mean(1)) for part, each in nearest.items()}


def _features(net: Network, part: str) -> Tensor:
    """Return the inputs of all sites, one after the other, `(n, units)`."""
    return torch.cat(hidden_units(net.member, net.x[part]), 1)
