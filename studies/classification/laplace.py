"""The Laplace approximation of the last layer, in full (Daxberger et al., 2021, "Laplace Redux").

With `h` the features of the last layer and a 1, and `p` the network's probabilities of a training row, the posterior
precision of the last weights is

    P = sum over training rows of (diag(p) - p p') ⊗ h h'  +  tau I,

and the logits of a row have the covariance `(I ⊗ h)' P^-1 (I ⊗ h)`. One eigendecomposition serves every `tau`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PRECISIONS", "LastLayer"]

PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1000.0)
_ROWS = 200


@dataclass(frozen=True)
class LastLayer:
    """What the training rows say of the last weights.

    Attributes:
        values: `(P,)`, eigenvalues of the sum above without `tau`.
        vectors: `(K, D, P)`, its eigenvectors.
    """

    values: Tensor
    vectors: Tensor

    @classmethod
    def fit(cls, features: Tensor, logits: Tensor) -> LastLayer:
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
        """`(N, 1, K, K)`, the variances of the logits' differences."""
        found = []
        root = self.vectors / (self.values + precision).sqrt()
        for h in features.double().split(_ROWS):
            side = torch.einsum("nd,kdp->nkp", h, root)
            gram = side @ side.transpose(1, 2)
            squares = gram.diagonal(dim1=1, dim2=2)
            found.append((squares[:, :, None] + squares[:, None] - 2 * gram).clamp_min(0))
        return torch.cat(found)[:, None]
