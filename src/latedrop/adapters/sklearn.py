"""Networks with uncertainty as scikit-learn regressors and classifiers: arrays in, arrays out, the end of a pipeline.

`CalibratedRegressor` and `CalibratedClassifier` take a trained network, which `fit` calibrates, with parameters that
`GridSearchCV` can search; or a predictor, with which `fit` learns nothing, as that of scikit-learn's own
`FrozenEstimator`. Needs scikit-learn 1.6 or newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from latedrop import metrics
from latedrop.calibration.targets import as_logits
from latedrop.data.arrays import is_table, place
from latedrop.data.batches import in_order
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, LatedropError
from latedrop.prediction.calibrate import calibrate
from latedrop.prediction.predictor import Calibrated

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # then only the classes cannot be used; this module can still be imported
    BaseEstimator = ClassifierMixin = RegressorMixin = object
    validate_data = None

__all__ = ["CalibratedClassifier", "CalibratedRegressor", "neg_nll_score"]

Array = npt.NDArray[Any]
_Same = TypeVar("_Same", bound="_Estimator")


def neg_nll_score(estimator: Any, X: Any, y: Any) -> float:  # noqa: N803
    """The Gaussian log likelihood per target, for `scoring=` of `GridSearchCV` and `cross_val_score`: more is better.

    It judges mean and standard deviation together; R2, the `score` of all regressors, looks at the mean alone. The
    estimator is a regressor of this module, a pipeline that ends in one, or any with `predict(X, return_std=True)`.
    """
    mean, std = (torch.as_tensor(np.asarray(part, np.float64)) for part in estimator.predict(X, return_std=True))
    return -float(metrics.nll(mean, std.square(), torch.as_tensor(np.asarray(y, np.float64)).reshape(mean.shape)))


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """Calibrate a network in `fit`, or take a predictor as it is."""

    def __init__(self, model: Any = None, *, method: Any = None, options: Mapping[str, Any] | None = None) -> None:
        if validate_data is None:
            raise LatedropError('expected scikit-learn 1.6 or newer; not found. Run: pip install "scikit-learn>=1.6"')
        self.model = model
        self.method = method
        self.options = options

    def fit(self: _Same, X: Any, y: Any) -> _Same:  # noqa: N803
        """Calibrate the network on rows that it was not trained on; `predictor_` is the outcome.

        With a predictor nothing is learned: its network is trained and calibrated already.
        """
        if isinstance(self.model, Calibrated):
            self._checked(X, y, multi_output=True)
            return self
        if not isinstance(self.model, nn.Module):
            raise ArgumentError(
                f"expected model=, a trained torch.nn.Module or a predictor; found {type(self.model).__name__}. Train "
                "it before."
            )
        x, target, task = self._training_rows(X, y)
        method = {} if self.method is None else {"method": self.method}
        options = {**method, "progress": False, **(self.options or {}), "task": task}
        self.predictor_: Any = calibrate(self.model, (x, target), **options)
        return self

    def _predicted(self, X: Any) -> Any:  # noqa: N803
        check_is_fitted(self)
        uq = self.model if isinstance(self.model, Calibrated) else self.predictor_
        return uq.predict(self._checked(X))

    def _checked(self, X: Any, *y: Any, reset: bool = False, **options: Any) -> Any:  # noqa: N803
        if isinstance(self.model, Calibrated) and is_table(X):  # which knows the order of columns itself
            X = in_order(X, self.model.calibration.columns).to_numpy()  # noqa: N806
        return validate_data(self, X, *y, reset=reset, dtype=np.float64, allow_nd=True, **options)

    def __sklearn_is_fitted__(self) -> bool:
        return isinstance(self.model, Calibrated) or hasattr(self, "predictor_")

    def __sklearn_clone__(self) -> Any:
        # Nothing is ever written to the network, so that clones share it.
        return type(self)(**self.get_params(deep=False))


class CalibratedRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A calibrated network as a regressor.

    Outputs `(N, 1)` come back as `(N,)`, as scikit-learn has it.

    Args:
        model: a trained network, which `fit` calibrates; or a predictor from `calibrate` or `load`, which is used as it
            is, and puts the columns of a table in the order that it was calibrated with.
        method: as in `calibrate`, a name or an object such as `Sampling(rates=[0.1], draws=50)`.
        options: other arguments of `calibrate`, by name.

    >>> from latedrop import Sampling
    >>> from sklearn.model_selection import GridSearchCV
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> methods = [Sampling([rate], draws=20) for rate in (0.1, 0.3)]
    >>> search = GridSearchCV(CalibratedRegressor(net), {"method": methods}, scoring=neg_nll_score, cv=2)
    >>> search = search.fit(x.numpy(), (x[:, 0] ** 2).numpy())
    >>> mean, std = search.best_estimator_.predict(x.numpy(), return_std=True)
    >>> mean.shape, std.shape
    ((64,), (64,))
    """

    def predict(self, X: Any, return_std: bool = False, return_interval: float | None = None) -> Any:  # noqa: N803
        """The mean, `(N,)` or `(N, K)`, and after it what else is asked for.

        Args:
            X: `(N, D)`, an array or a table.
            return_std: also the standard deviation.
            return_interval: a level, such as 0.9: also the low and the high end of its interval.

        Returns:
            `mean`, `(mean, std)`, `(mean, low, high)` or `(mean, std, low, high)`.
        """
        prediction = self._predicted(X)
        wanted = [prediction.mean]
        if return_std:
            wanted.append(prediction.std)
        if return_interval is not None:
            wanted += prediction.interval(return_interval)
        arrays = [value.squeeze(1) if value.shape[1:] == (1,) else value for value in wanted]
        parts: tuple[Array, ...] = tuple(value.numpy(force=True) for value in arrays)
        return parts[0] if len(parts) == 1 else parts

    def _training_rows(self, X: Any, y: Any) -> tuple[Array, Array, str]:  # noqa: N803
        x, y = self._checked(X, y, reset=True, multi_output=True, y_numeric=True, ensure_min_samples=2)
        return x, np.asarray(y, np.float64), "regression"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class CalibratedClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A calibrated network as a classifier.

    Args:
        model: a trained network, which gives logits and which `fit` calibrates; or a classifier from `calibrate` or
            `load`, which is used as it is: its `class_names` are the classes, else their numbers.
        classes: in the order of the network's outputs; by default the whole numbers from 0, or where labels are
            something else, the labels of `fit` in their order.
        method: as in `calibrate`.
        options: other arguments of `calibrate`, by name.
    """

    def __init__(self, model: Any = None, *, classes: Any = None, method: Any = None, options: Any = None) -> None:
        super().__init__(model, method=method, options=options)
        self.classes = classes

    @property
    def classes_(self) -> Array:
        """The classes, in the order of the network's outputs."""
        if not isinstance(self.model, Calibrated):
            return self._classes
        record = self.model.calibration
        return np.asarray(record.names, dtype=object) if record.names else np.arange(record.classes)

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The likeliest class of every row, `(N,)`, by its name."""
        label = self._predicted(X).label.numpy(force=True)
        return self.classes_[label]  # type: ignore[no-any-return]

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Calibrated probabilities, `(N, K)`, in the order of `classes_`."""
        return self._predicted(X).probabilities.numpy(force=True)  # type: ignore[no-any-return]

    def predict_set(self, X: Any, level: float = 0.9) -> Array:  # noqa: N803
        """`(N, K)`, True for the classes of a set that holds the label with that probability.

        The predictor, which may be `predictor_`, needs sets: `uq = uq.conformal(rows)`.
        """
        return self._predicted(X).prediction_set(level).numpy(force=True)  # type: ignore[no-any-return]

    def _training_rows(self, X: Any, y: Any) -> tuple[Array, Array, str]:  # noqa: N803
        x, y = self._checked(X, y, reset=True, ensure_min_samples=2)
        check_classification_targets(y)
        output = own_output(self.model, place(x[:2], self.model), (self.options or {}).get("readout"))
        self._classes, codes = _coded(y, self.classes, as_logits(output).shape[1])
        return x, codes, "classification"


def _coded(y: Array, classes: Any, count: int) -> tuple[Array, Array]:
    """Return the classes in the order of the outputs, and the number of each label."""
    labels = np.unique(y)
    if classes is not None:
        known = np.asarray(classes)
    elif labels.dtype.kind in "iubf" and set(labels.tolist()) <= set(range(count)):
        known = np.arange(count)
    else:
        known = labels
    unknown = [label for label in labels.tolist() if label not in known.tolist()]
    if len(known) != count or unknown:
        raise ValueError(
            f"expected labels of the network's {count} classes; found {len(labels)}: {labels.tolist()[:12]}. Pass "
            "classes=, all of them in the order of its outputs."
        )
    place_of = {label: code for code, label in enumerate(known.tolist())}
    return known, np.array([place_of[label] for label in y.tolist()])
