"""How far a row lies from reference rows: leverage, which counts directions in which these vary little, or neighbours.

A row is a vector `h`: its features, what enters the sites; or its mask gradients, what first order makes of every unit.
With a constant appended, the root of the mean of `h' h`, and `G` the mean of `h h'` over the n reference rows, D
numbers in all,

    t(x) = h' (G + r · tr(G) / D · I)^-1 h,      r = ridge · max(1, D / n)^2.

A linear model of features fitted to the reference rows has a variance proportional to it. Of mask gradients it is the
variance of dropout, `phi' phi`, in the metric of the data: directions in which the reference rows vary count little,
others much, and the unit of the output cancels. A row that is itself a reference row is left out of them: the leverage
without it is `(n - 1) / n · t / (1 - t / n)`.

Neighbours measure the mean squared distance `|z - z_i|^2` to the nearest k reference rows, with `z` the features
standardised over these. A row is not its own neighbour. Trees find them in a time that hardly grows with the number of
rows, of which at most `_MOST_ROWS`, evenly spread, are stored.

References: Cook and Weisberg (1982), leverage; Immer et al. (2021), linearised Laplace; Sharma, Azizan and Pavone
(2021), sketches of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, DataError
from latedrop.records import Limits, record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.term import BatchContext, OnDevices, Term
from latedrop.torch_private import being_traced

__all__ = ["GradientLeverage", "Leverage", "Neighbours"]

_ROWS = 1024  # at once on a CPU: they stay in its cache
_SAMPLE = 1024  # reference rows at most whose leverage is remembered
_MOST_OUTPUTS = 4  # each costs a backward pass
_MOST_ROWS = 20_000
_FAR = 1e17  # whose square is a number, too
_Same = TypeVar("_Same", bound="_Leverage")


@dataclass(eq=False)
class _Leverage(Term):
    ridge: float = 1e-3
    _: KW_ONLY
    root: StoredTensor | None = field(default=None, repr=False)
    rows: Annotated[int, Limits(0)] = 0
    own: bool = False
    sample: ClassVar[Tensor | None] = None
    """`(m, K)`, leverage of some of the reference rows, each left out for itself; only where these are other rows."""

    def __post_init__(self) -> None:
        if isinstance(self.ridge, bool) or not 0 < self.ridge < 1e6:
            raise ArgumentError(f"expected a ridge above 0; found {self.ridge!r}.")
        if self.root is not None and (self.root.dim() != 3 or self.root.shape[1] != self.root.shape[2]):
            raise ArgumentError(f"expected a square root for each output; found shape {tuple(self.root.shape)}.")

    def learned_from(self: _Same, reference: Iterable[Tensor], own: bool) -> _Same:
        """Fit to features, or to mask gradients `(n, K, D)`, of the reference rows; see `Term`."""
        parts = list(reference)
        count = sum(map(len, parts))
        if count < 2:
            raise DataError(f"expected at least 2 reference rows; found {count}. Pass more as reference=.")
        gram: Any = sum(vectors.mT @ vectors for vectors in map(_with_one, parts))
        gram = gram / count
        diagonal = gram.diagonal(dim1=1, dim2=2)
        constant = diagonal[:, :-1].sum(1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        gram[:, -1] *= constant[:, None]
        gram[:, :, -1] *= constant[:, None]
        ridge = self.ridge * max(1.0, gram.shape[1] / count) ** 2
        diagonal += ridge * diagonal.mean(1, keepdim=True)
        root = torch.linalg.inv(torch.linalg.cholesky(gram))
        root[:, :, -1] *= constant[:, None]
        learned = replace(self, root=root.contiguous(), rows=count, own=own)
        if not own:
            step = 2 ** max(0, math.ceil(math.log2(count / _SAMPLE)))
            some = _with_one(torch.cat(parts)[::step])
            learned.sample = _left_out((some @ root.mT).square().sum(2).T, count)  # type: ignore[misc]
        return learned

    def directions(self, vectors: Tensor, *, exact: bool = True) -> Tensor:
        """Return `(K, n, D)` from rows `(n, K, D - 1)`: in the metric, where squares add up to the leverage.

        In double precision where `exact`, on a GPU, and where products of single precision are rounded.
        """
        if self.root is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        if vectors.shape[1:] != (self.root.shape[0], self.root.shape[1] - 1):
            raise DataError(
                f"expected rows of shape {(self.root.shape[0], self.root.shape[1] - 1)}, as the reference rows have; "
                f"found {tuple(vectors.shape[1:])}. Calibrate again, without sites whose width changes with the input."
            )
        # float32 rounds features as much; but with more numbers than rows, a row's own share is nearly all of it.
        exact = exact or vectors.is_cuda or torch.get_float32_matmul_precision() != "highest"
        dtype = torch.float64 if exact else torch.promote_types(vectors.dtype, torch.float32)
        root = self._roots.on(vectors.device)[dtype == torch.float64]
        # Stacked: onnxruntime 1.23 fuses transpositions into products, and lacks these in double precision.
        rows = torch.stack(vectors.to(dtype).unbind(1))
        return torch.baddbmm(root[:, None, :, -1], rows, root[:, :, :-1].mT)

    @cached_property
    def _roots(self) -> OnDevices:
        assert self.root is not None
        return OnDevices(self.root.float(), self.root.double())

    def _measured(self, vectors: Tensor, index: Tensor | None) -> Tensor:
        """Return the leverage `(n, K)` of rows `(n, K, D)`."""
        at_once = _ROWS if vectors.device.type == "cpu" and not being_traced() else max(1, len(vectors))
        without_itself = self.own and index is not None
        parts = [self.directions(part, exact=without_itself).square().sum(2).T for part in vectors.split(at_once)]
        value = torch.cat(parts).double()
        return _left_out(value, self.rows) if without_itself else value


@record
@dataclass(eq=False)
class Leverage(_Leverage):
    """Leverage of the features that enter the sites.

    Args:
        ridge: added to the mean square of every direction, in units of their average; more where features outnumber
            the reference rows, as most directions then were not seen at all.
        root, rows, own: what it has learned: a root of the inverse above, the number of reference rows, and whether
            they were the validation rows.
    """

    name: Literal["leverage"] = "leverage"
    needs_features: ClassVar[bool] = True

    def values(self, rows: BatchContext) -> Tensor:
        """Return the leverage of the features, `(N,)`."""
        return self._measured(rows.features[:, None], rows.index)[:, 0]


@record
@dataclass(eq=False)
class GradientLeverage(_Leverage):
    """Leverage of the mask gradients: dropout in the metric of the reference rows.

    Args:
        ridge: added to the mean square of every direction, in units of their average.
        root, rows, own: what it has learned, for each output.
    """

    name: Literal["gradients"] = "gradients"
    needs_gradients: ClassVar[bool] = True

    def prepared(self, rows: BatchContext) -> GradientLeverage:
        """Return the term, or raise where outputs are too many or cannot be differentiated."""
        if rows.mean[0].numel() > _MOST_OUTPUTS:
            raise ArgumentError(
                f"expected at most {_MOST_OUTPUTS} outputs for leverage of mask gradients, as each costs a backward "
                f"pass; found {rows.mean[0].numel()}. Leave 'gradients' out, or pass a readout."
            )
        _ = rows.gradients
        return self

    def values(self, rows: BatchContext) -> Tensor:
        """Return the leverage of the mask gradients, for each output or once for all."""
        value = self._measured(rows.gradients, rows.index)
        return value.reshape(rows.mean.shape) if value.numel() == rows.mean.numel() else value[:, 0]


def _with_one(part: Tensor) -> Tensor:
    """Return `(K, n, D + 1)` in double precision, from features `(n, D)` or mask gradients `(n, K, D)`."""
    rows = part.double() if part.dim() == 3 else part.double()[:, None]
    return torch.cat([rows, torch.ones_like(rows[..., :1])], -1).transpose(0, 1)


def _left_out(value: Tensor, rows: int) -> Tensor:
    return value * (1 - 1 / rows) / (1 - value / rows).clamp_min(1e-9)


@record
@dataclass(eq=False)
class Neighbours(Term):
    """Mean squared distance to the nearest reference rows.

    Args:
        k: how many.
        own: whether the reference rows were the validation rows.
        points, center, spread: what it has learned: rows in standardised feature space.
    """

    k: int = 10
    _: KW_ONLY
    own: bool = False
    points: StoredTensor | None = field(default=None, repr=False)
    center: StoredTensor | None = field(default=None, repr=False)
    spread: StoredTensor | None = field(default=None, repr=False)
    name: Literal["neighbours"] = "neighbours"
    needs_features: ClassVar[bool] = True
    is_lookup: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ArgumentError(f"expected at least 1 neighbour; found {self.k!r}.")
        shapes = [None if part is None else tuple(part.shape) for part in (self.points, self.center, self.spread)]
        if shapes != [None] * 3 and (not shapes[0] or shapes[0][0] < 1 or shapes[1:] != [shapes[0][1:]] * 2):
            raise ArgumentError(f"expected points (n, d) with their center and spread (d,); found {shapes}.")

    def learned_from(self, reference: Iterable[Tensor], own: bool) -> Neighbours:
        """Return the term with the reference rows, standardised."""
        features = torch.cat([part.cpu().float() for part in reference])
        if len(features) < 3:
            raise DataError(f"expected at least 3 reference rows for neighbours; found {len(features)}.")
        spread, center = torch.std_mean(features, 0)
        spread = torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
        places = torch.linspace(0, len(features) - 1, min(len(features), _MOST_ROWS)).round().long()
        return replace(self, own=own, points=(features[places] - center) / spread, center=center, spread=spread)

    def values(self, rows: BatchContext) -> Tensor:
        """Return the mean squared distance to the nearest reference rows, `(N,)`."""
        return self.distances(rows.features, rows.index)

    def distances(self, features: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the distance of rows with these features, `(N,)`; `index` are their places among the reference."""
        if self.points is None or self.center is None or self.spread is None:
            raise DataError("expected a term that has seen reference rows; found one that has not.")
        z = ((features.cpu().float() - self.center) / self.spread).nan_to_num(nan=_FAR).clamp(-_FAR, _FAR)
        alone = index is not None and self.own and len(self.points) < _MOST_ROWS  # a row has a place of its own
        k = min(self.k + alone, len(self.points))
        distances, places = (np.asarray(part).reshape(len(z), -1) for part in self._tree.query(z.numpy(), k=k))
        if alone:
            same = places == index.cpu().numpy()[:, None]  # type: ignore[union-attr]
            same[~same.any(1), -1] = True  # equal rows may hide it: then the farthest goes
            distances = distances[~same].reshape(len(z), k - 1)
        return torch.as_tensor(distances).square().to(features).mean(1)

    @cached_property
    def _tree(self) -> Any:
        from scipy.spatial import cKDTree

        assert self.points is not None
        return cKDTree(self.points.numpy())
