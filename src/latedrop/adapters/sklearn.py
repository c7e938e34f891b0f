"""A predictor as a scikit-learn regressor: arrays in, arrays out, the last step of a pipeline.

Training and calibration are over when it is made, so that `fit` learns nothing, as that of scikit-learn's own
`FrozenEstimator`. Needs scikit-learn 1.6 or newer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from latedrop.calibration.predictor import Predictor
from latedrop.errors import LatedropError
from latedrop.model.arrays import is_table
from latedrop.model.wrappers import bare

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # then only the class cannot be used; this module can still be imported
    BaseEstimator = RegressorMixin = object
    validate_data = None

__all__ = ["LatedropRegressor"]

Array = npt.NDArray[Any]


class LatedropRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A calibrated network that scikit-learn takes for a fitted regressor.

    Outputs `(N, 1)` come back as `(N,)`, as scikit-learn has it.

    Args:
        predictor: from `calibrate` or `load`.
        feature_names: the columns that the network was trained with, in order; tables with others are refused.

    >>> import torch, latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> regressor = LatedropRegressor(latedrop.calibrate(net, (x, x**2), rates=[0.1, 0.3], draws=20))
    >>> mean, std = regressor.predict(x.numpy(), return_std=True)
    >>> mean.shape, std.shape
    ((64,), (64,))
    """

    def __init__(self, predictor: Predictor | None = None, feature_names: Any = None) -> None:
        if validate_data is None:
            raise LatedropError('expected scikit-learn 1.6 or newer; not found. Run: pip install "scikit-learn>=1.6"')
        self.predictor = predictor
        self.feature_names = feature_names

    def fit(self, X: Any, y: Any = None) -> LatedropRegressor:  # noqa: N803
        """Itself, unchanged: the network is trained and calibrated already. Data of the wrong form are refused."""
        check_is_fitted(self)
        self._checked(X, y, multi_output=True)
        return self

    def predict(
        self,
        X: Any,  # noqa: N803
        return_std: bool = False,
        return_interval: float | None = None,
    ) -> Any:
        """The mean, `(N,)` or `(N, K)`, and after it what else is asked for.

        Args:
            X: `(N, D)`, an array or a table.
            return_std: also the standard deviation.
            return_interval: a level, such as 0.9: also the low and the high end of its interval.

        Returns:
            `mean`, `(mean, std)`, `(mean, low, high)` or `(mean, std, low, high)`.
        """
        check_is_fitted(self)
        assert self.predictor is not None
        found = self.predictor.predict(self._checked(X))
        wanted = [found.mean]
        if return_std:
            wanted.append(found.std)
        if return_interval is not None:
            wanted += found.interval(return_interval)
        arrays = [value.squeeze(1) if value.shape[1:] == (1,) else value for value in wanted]
        parts: tuple[Array, ...] = tuple(value.numpy(force=True) for value in arrays)
        return parts[0] if len(parts) == 1 else parts

    @property
    def n_features_in_(self) -> int:
        """How many columns the network takes, where its first layer tells."""
        if self.feature_names is not None:
            return len(self.feature_names)
        layers = [] if self.predictor is None else [*bare(self.predictor.model).modules()]
        first = next((layer for layer in layers if [*layer.parameters(recurse=False)]), None)
        if isinstance(first, nn.Linear):
            return first.in_features
        if isinstance(first, nn.BatchNorm1d):
            return first.num_features
        raise AttributeError("the network's first layer does not tell how many columns it takes")

    @property
    def feature_names_in_(self) -> Array:
        """The names that were given."""
        if self.feature_names is None:
            raise AttributeError("no feature names were given")
        return np.asarray(self.feature_names, dtype=object)

    def _checked(self, X: Any, *y: Any, **options: Any) -> Any:  # noqa: N803
        if self.feature_names is None and is_table(X):
            X = X.to_numpy()  # noqa: N806 (else scikit-learn warns of names that were not there before)
        return validate_data(self, X, *y, reset=False, dtype=np.float64, allow_nd=True, **options)

    def __sklearn_is_fitted__(self) -> bool:
        return self.predictor is not None

    def __sklearn_clone__(self) -> LatedropRegressor:
        # Nothing is ever written to the predictor, so that clones share the network.
        return type(self)(self.predictor, self.feature_names)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
