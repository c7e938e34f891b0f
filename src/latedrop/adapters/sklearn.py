"""Networks with uncertainty as scikit-learn regressors: arrays in, arrays out, the last step of a pipeline.

`LatedropRegressor` is a predictor that is calibrated already: its `fit` learns nothing, as that of scikit-learn's own
`FrozenEstimator`. `CalibratedRegressor` is a trained network whose `fit` calibrates it, with parameters that
`GridSearchCV` can search. Needs scikit-learn 1.6 or newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from latedrop import metrics
from latedrop.calibration.predictor import Predictor, calibrate
from latedrop.errors import ArgumentError, LatedropError
from latedrop.model.arrays import is_table
from latedrop.model.wrappers import bare

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # then only the class cannot be used; this module can still be imported
    BaseEstimator = RegressorMixin = object
    validate_data = None

__all__ = ["CalibratedRegressor", "LatedropRegressor", "neg_nll_score"]

Array = npt.NDArray[Any]


def neg_nll_score(estimator: Any, X: Any, y: Any) -> float:  # noqa: N803
    """The Gaussian log likelihood per target, for `scoring=` of `GridSearchCV` and `cross_val_score`: more is better.

    It judges mean and standard deviation together; R2, the `score` of all regressors, looks at the mean alone. The
    estimator is a regressor of this module, a pipeline that ends in one, or any with `predict(X, return_std=True)`.
    """
    mean, std = (torch.as_tensor(np.asarray(part, np.float64)) for part in estimator.predict(X, return_std=True))
    return -float(metrics.nll(mean, std.square(), torch.as_tensor(np.asarray(y, np.float64)).reshape(mean.shape)))


class _UncertainRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """What both regressors share: how they predict."""

    def __init__(self) -> None:
        if validate_data is None:
            raise LatedropError('expected scikit-learn 1.6 or newer; not found. Run: pip install "scikit-learn>=1.6"')

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
        found = self._predictor().predict(self._checked(X))
        wanted = [found.mean]
        if return_std:
            wanted.append(found.std)
        if return_interval is not None:
            wanted += found.interval(return_interval)
        arrays = [value.squeeze(1) if value.shape[1:] == (1,) else value for value in wanted]
        parts: tuple[Array, ...] = tuple(value.numpy(force=True) for value in arrays)
        return parts[0] if len(parts) == 1 else parts

    def _predictor(self) -> Predictor:
        raise NotImplementedError

    def _checked(self, X: Any, *y: Any, reset: bool = False, **options: Any) -> Any:  # noqa: N803
        return validate_data(self, X, *y, reset=reset, dtype=np.float64, allow_nd=True, **options)

    def __sklearn_clone__(self) -> Any:
        # Nothing is ever written to the network, so that clones share it.
        return type(self)(**self.get_params(deep=False))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class CalibratedRegressor(_UncertainRegressor):
    """A trained network that `fit` calibrates; the network itself learns nothing more.

    Args:
        model: the trained network.
        method: as in `calibrate`.
        rate: one dropout rate to draw with, in place of the rates that `calibrate` tries; with `method` None or one
            that takes rates.
        draws: thinned networks per rate.
        options: other arguments of `calibrate`, by name.

    >>> from sklearn.model_selection import GridSearchCV
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> regressor = CalibratedRegressor(net, method="sample", draws=20)
    >>> search = GridSearchCV(regressor, {"rate": [0.1, 0.3]}, scoring=neg_nll_score, cv=2)
    >>> search = search.fit(x.numpy(), (x[:, 0] ** 2).numpy())
    >>> mean, std = search.best_estimator_.predict(x.numpy(), return_std=True)
    >>> mean.shape, std.shape
    ((64,), (64,))
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        method: str | None = None,
        rate: Any = None,
        draws: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.method = method
        self.rate = rate
        self.draws = draws
        self.options = options

    def fit(self, X: Any, y: Any) -> CalibratedRegressor:  # noqa: N803
        """Calibrate the network on rows that it was not trained on; `predictor_` is the outcome."""
        if not isinstance(self.model, nn.Module):
            raise ArgumentError(
                f"expected model=, a trained torch.nn.Module; found {type(self.model).__name__}. Train it before."
            )
        wanted = {"multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        x, y = self._checked(X, y, reset=True, **wanted)
        options: dict[str, Any] = {
            "method": self.method,
            "draws": self.draws,
            "progress": False,
            **(self.options or {}),
        }
        if self.rate is not None:
            options["rates"] = [self.rate]
        options |= {"task": "regression"}
        self.predictor_: Any = calibrate(self.model, (x, np.asarray(y, np.float64)), **options)
        return self

    def _predictor(self) -> Predictor:
        found: Predictor = self.predictor_
        return found


class LatedropRegressor(_UncertainRegressor):
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
        super().__init__()
        self.predictor = predictor
        self.feature_names = feature_names

    def fit(self, X: Any, y: Any = None) -> LatedropRegressor:  # noqa: N803
        """Itself, unchanged: the network is trained and calibrated already. Data of the wrong form are refused."""
        check_is_fitted(self)
        self._checked(X, y, multi_output=True)
        return self

    def _predictor(self) -> Predictor:
        assert self.predictor is not None
        return self.predictor

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

    def _checked(self, X: Any, *y: Any, reset: bool = False, **options: Any) -> Any:  # noqa: N803
        if self.feature_names is None and is_table(X):
            X = X.to_numpy()  # noqa: N806 (else scikit-learn warns of names that were not there before)
        return super()._checked(X, *y, reset=reset, **options)

    def __sklearn_is_fitted__(self) -> bool:
        return self.predictor is not None
