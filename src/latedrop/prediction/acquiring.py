"""Which rows of a pool to label next: uncertain or novel ones that differ from each other.

Each row has a direction and a size. The direction is that of its mask gradients phi (of the largest logit, of
classes; of several outputs, all of them one after the other), each unit in units of its root mean square in the pool.
The size is the standard deviation, the novelty or the entropy. The first row of a batch is the one of the largest size;
each further one is drawn as in k-means++ (Arthur and Vassilvitskii 2007), with a chance that grows with the squared
distance to the nearest row in the batch. So rows of small size are rare, and so are rows that move the output by the
same units. Ash et al. (2020) draw gradients of the last layer in this way (BADGE).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.measure_classes import largest_logit
from latedrop.data.batches import gives_batches
from latedrop.data.rows import as_items, rows_are_nodes
from latedrop.errors import ArgumentError, DataError
from latedrop.terms import BatchContext

__all__ = ["Uncertainty", "acquire", "spread_out"]

Uncertainty: TypeAlias = Literal["std", "novelty", "entropy"]


def acquire(
    uq: Any, pool: Any, count: int, *, score: Uncertainty | None = None, diverse: bool = True, seed: int = 0
) -> Tensor:
    """Return the places of `count` rows of a pool without labels that are worth a label, `(count,)`.

    Args:
        uq: a calibrated model.
        pool: inputs, whose rows have places.
        count: how many rows are labelled together.
        score: `"novelty"`; `"entropy"` of classes, or `"std"` of numbers. By default entropy of classes, and of numbers
            novelty, where the calibration can tell it.
        diverse: rows that differ from each other; False: those of the largest scores, in that order.
        seed: of the choice among rows that differ.
    """
    if not isinstance(pool, Tensor) and uq.collate is None and gives_batches(pool):
        raise ArgumentError(
            f"expected a pool whose rows have places: a tensor, an array or a table; found {type(pool).__name__}. Pass "
            "the inputs themselves."
        )
    if uq.collate is None and rows_are_nodes(as_items(pool, None, uq.calibration.sites)):
        raise ArgumentError(
            "expected a calibration whose rows are graphs to choose graphs by; found one whose rows are nodes, which "
            "have no places in a list of graphs. Rank graphs by their nodes: uq.predict(graph).std.mean() of each."
        )
    classes = isinstance(uq.calibration, ClassCalibration)
    if classes and uq.calibration.maps:
        raise ArgumentError(
            "expected a classifier of rows to choose rows for; found maps. Rank images by predict(...).image_scores."
        )
    if score is None:
        terms = None if classes else uq.calibration.terms
        score = "entropy" if classes else "std" if terms is None or terms.guard is None else "novelty"
    if score not in get_args(Uncertainty) or score == ("std" if classes else "entropy"):
        names = "'entropy' or 'novelty'" if classes else "'std' or 'novelty'"
        raise ArgumentError(f"expected score={names}; found {score!r}.")
    p = uq.predict(pool)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= len(p):
        raise ArgumentError(f"expected a count of 1 to {len(p)} rows, as many as the pool has; found {count!r}.")
    values = getattr(p, score)
    if values is None:
        raise ArgumentError("expected a calibration that can tell novelty; found one that cannot. Pass another score=.")
    values = values.detach().double().cpu()
    if score == "std" and values.dim() > 1:  # of outputs of any unit
        flat = values.flatten(1)
        values = (flat / flat.mean(0).clamp_min(torch.finfo(torch.float64).tiny)).square().mean(1).sqrt()
    if not bool(values.isfinite().all()):
        raise DataError(
            "expected finite scores of the pool; found rows without. Leave out the rows that predict warns of."
        )
    if not diverse:
        largest: Tensor = values.argsort(descending=True, stable=True)
        return largest[:count]
    return spread_out(_directions(uq, pool, classes) * values[:, None], count, seed)


def spread_out(vectors: Tensor, count: int, seed: int = 0) -> Tensor:
    """Return the places of `count` different rows of `(N, D)`, by k-means++ from the longest one on.

    >>> spread_out(torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), 3).tolist()[::2]
    [0, 3]
    """
    dice = torch.Generator().manual_seed(seed)
    nearest = vectors.square().sum(1)
    places = [int(nearest.argmax())]
    nearest = (vectors - vectors[places[0]]).square().sum(1)
    left = torch.ones(len(vectors), dtype=torch.bool)
    while len(places) < count:
        left[places[-1]] = False
        weights = torch.where(left, nearest, 0.0)
        if not bool(weights.sum() > 0):  # copies of rows of the batch alone
            weights = left.to(weights)
        places.append(int(torch.multinomial(weights, 1, generator=dice)))
        nearest = torch.minimum(nearest, (vectors - vectors[places[-1]]).square().sum(1))
    return torch.tensor(places)


def _directions(uq: Any, pool: Any, classes: bool) -> Tensor:
    """Return mask gradients of length 1, `(N, D)`, each unit in units of its root mean square in the pool."""
    c = uq.calibration
    of = largest_logit if classes else None
    parts = []
    for x in uq.batches(pool):
        rows = BatchContext(uq.network, x, c.sites, uq.readout, None, gradients=True, of=of)
        parts.append(rows.gradients.detach().double().cpu().flatten(1))
    phi = torch.cat(parts)
    unit = phi.square().mean(0).sqrt()
    phi = phi / unit.clamp_min(1e-12 * float(unit.max().clamp_min(torch.finfo(torch.float64).tiny)))
    directions: Tensor = phi / phi.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return directions
