"""Networks with uncertainty as scikit-learn regressors and classifiers: arrays in, arrays out, the end of a pipeline.

`LatedropRegressor` and `LatedropClassifier` are predictors that are calibrated already: `fit` learns nothing, as that
of scikit-learn's own `FrozenEstimator`. `CalibratedRegressor` and `CalibratedClassifier` are trained networks whose
`fit` calibrates them, with parameters that `GridSearchCV` can search. Needs scikit-learn 1.6 or newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from latedrop import metrics
from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.labels import as_logits
from latedrop.data.arrays import is_table, place
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, LatedropError
from latedrop.prediction.calibrate import calibrate
from latedrop.prediction.class_prediction import ClassPrediction
from latedrop.prediction.class_predictor import ClassPredictor
from latedrop.prediction.predictor import Predictor
from latedrop.wrappers import bare

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # then only the classes cannot be used; this module can still be imported
    BaseEstimator = ClassifierMixin = RegressorMixin = object
    validate_data = None

__all__ = ["CalibratedClassifier", "CalibratedRegressor", "LatedropClassifier", "LatedropRegressor", "neg_nll_score"]

Array = npt.NDArray[Any]


def neg_nll_score(estimator: Any, X: Any, y: Any) -> float:  # noqa: N803
    """The Gaussian log likelihood per target, for `scoring=` of `GridSearchCV` and `cross_val_score`: more is better.

    It judges mean and standard deviation together; R2, the `score` of all regressors, looks at the mean alone. The
    estimator is a regressor of this module, a pipeline that ends in one, or any with `predict(X, return_std=True)`.
    """
    mean, std = (torch.as_tensor(np.asarray(part, np.float64)) for part in estimator.predict(X, return_std=True))
    return -float(metrics.nll(mean, std.square(), torch.as_tensor(np.asarray(y, np.float64)).reshape(mean.shape)))


class _Network(BaseEstimator):  # type: ignore[misc]
    """What all of them share: how data are checked, and that clones share the network."""

    def __init__(self) -> None:
        if validate_data is None:
            raise LatedropError('expected scikit-learn 1.6 or newer; not found. Run: pip install "scikit-learn>=1.6"')

    def _predictor(self) -> Any:
        raise NotImplementedError

    def _checked(self, X: Any, *y: Any, reset: bool = False, **options: Any) -> Any:  # noqa: N803
        return validate_data(self, X, *y, reset=reset, dtype=np.float64, allow_nd=True, **options)

    def __sklearn_clone__(self) -> Any:
        # Nothing is ever written to the network, so that clones share it.
        return type(self)(**self.get_params(deep=False))


class _UncertainRegressor(RegressorMixin, _Network):  # type: ignore[misc]
    """What both regressors share: how they predict."""

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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _UncertainClassifier(ClassifierMixin, _Network):  # type: ignore[misc]
    """What both classifiers share: how they predict."""

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The likeliest class of every row, `(N,)`, by its name."""
        label = self._prediction(X).label.numpy(force=True)
        found: Array = self.classes_[label]
        return found

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Calibrated probabilities, `(N, K)`, in the order of `classes_`."""
        found: Array = self._prediction(X).probabilities.numpy(force=True)
        return found

    def predict_set(self, X: Any, level: float = 0.9) -> Array:  # noqa: N803
        """`(N, K)`, True for the classes of a set that holds the label with that probability; after `conformal`."""
        found: Array = self._prediction(X).prediction_set(level).numpy(force=True)
        return found

    def _prediction(self, X: Any) -> ClassPrediction:  # noqa: N803
        check_is_fitted(self)
        found: ClassPrediction = self._predictor().predict(self._checked(X))
        return found


class CalibratedRegressor(_UncertainRegressor):
    """A trained network that `fit` calibrates; the network itself learns nothing more.

    Args:
        model: the trained network.
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

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        method: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.method = method
        self.options = options

    def fit(self, X: Any, y: Any) -> CalibratedRegressor:  # noqa: N803
        """Calibrate the network on rows that it was not trained on; `predictor_` is the outcome."""
        network = _trained(self.model)
        wanted = {"multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        x, y = self._checked(X, y, reset=True, **wanted)
        options = _options(self.method, self.options, "regression")
        self.predictor_: Any = calibrate(network, (x, np.asarray(y, np.float64)), **options)
        return self

    def _predictor(self) -> Predictor:
        found: Predictor = self.predictor_
        return found


class _Frozen(_Network):
    """What is calibrated already, and knows its columns before any `fit`."""

    def __init__(self, predictor: Any = None, feature_names: Any = None) -> None:
        super().__init__()
        self.predictor = predictor
        self.feature_names = feature_names

    def fit(self, X: Any, y: Any = None) -> Any:  # noqa: N803
        """Itself, unchanged: the network is trained and calibrated already. Data of the wrong form are refused."""
        check_is_fitted(self)
        self._checked(X, y, multi_output=True)
        return self

    def _predictor(self) -> Any:
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


class LatedropRegressor(_UncertainRegressor, _Frozen):
    """A calibrated network that scikit-learn takes for a fitted regressor.

    Outputs `(N, 1)` come back as `(N,)`, as scikit-learn has it.

    Args:
        predictor: from `calibrate` or `load`.
        feature_names: the columns that the network was trained with, in order; tables with others are refused.

    >>> import torch, latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2), method=latedrop.Sampling([0.1, 0.3], draws=20))
    >>> regressor = LatedropRegressor(uq)
    >>> mean, std = regressor.predict(x.numpy(), return_std=True)
    >>> mean.shape, std.shape
    ((64,), (64,))
    """

    def __init__(self, predictor: Predictor | None = None, feature_names: Any = None) -> None:
        _Frozen.__init__(self, predictor, feature_names)


class LatedropClassifier(_UncertainClassifier, _Frozen):
    """A calibrated network that scikit-learn takes for a fitted classifier.

    Args:
        predictor: a classifier from `calibrate` or `load`; its `class_names` are the classes, else their numbers.
        feature_names: the columns that the network was trained with, in order; tables with others are refused.

    >>> import torch, latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2))
    >>> uq = latedrop.calibrate(net, (x, (x[:, 0] > 0).long()), task=latedrop.Classification(names=["below", "above"]))
    >>> classifier = LatedropClassifier(uq)
    >>> classifier.predict_proba(x.numpy()).shape, classifier.classes_
    ((64, 2), array(['below', 'above'], dtype=object))
    """

    def __init__(self, predictor: ClassPredictor | None = None, feature_names: Any = None) -> None:
        _Frozen.__init__(self, predictor, feature_names)

    @property
    def classes_(self) -> Array:
        """The classes, in the order of the network's outputs."""
        if self.predictor is None:
            raise AttributeError("no predictor was given")
        c: ClassCalibration = self.predictor.calibration
        return np.asarray(c.names, dtype=object) if c.names else np.arange(c.classes)


class CalibratedClassifier(_UncertainClassifier):
    """A trained network that `fit` calibrates; the network itself learns nothing more.

    Args:
        model: the trained network, which gives logits.
        classes: in the order of the network's outputs; by default the whole numbers from 0, or where labels are
            something else, the labels of `fit` in their order.
        method: as in `calibrate`.
        options: other arguments of `calibrate`, by name.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        classes: Any = None,
        method: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.classes = classes
        self.method = method
        self.options = options

    def fit(self, X: Any, y: Any) -> CalibratedClassifier:  # noqa: N803
        """Calibrate the network on rows that it was not trained on; `predictor_` is the outcome."""
        network = _trained(self.model)
        x, y = self._checked(X, y, reset=True, ensure_min_samples=2)
        check_classification_targets(y)
        count = as_logits(own_output(network, place(x[:2], network), (self.options or {}).get("readout"))).shape[1]
        self.classes_, codes = _coded(y, self.classes, count)
        options = _options(self.method, self.options, "classification")
        self.predictor_: Any = calibrate(network, (x, codes), **options)
        return self

    def conformal(self, X: Any, y: Any, score: Any = "lac", *, per_class: bool = False) -> CalibratedClassifier:  # noqa: N803
        """Itself, with prediction sets from rows used for nothing else; see `ClassPredictor.conformal`."""
        check_is_fitted(self)
        x, y = self._checked(X, y)
        codes = _coded(y, self.classes_, len(self.classes_))[1]
        self.predictor_ = self.predictor_.conformal((x, codes), score, per_class=per_class)
        return self

    def _predictor(self) -> ClassPredictor:
        found: ClassPredictor = self.predictor_
        return found


def _coded(y: Array, classes: Any, count: int) -> tuple[Array, Array]:
    """The classes in the order of the outputs, and the number of each label."""
    found = np.unique(y)
    if classes is not None:
        known = np.asarray(classes)
    elif found.dtype.kind in "iubf" and set(found.tolist()) <= set(range(count)):
        known = np.arange(count)
    else:
        known = found
    unknown = [label for label in found.tolist() if label not in known.tolist()]
    if len(known) != count or unknown:
        raise ValueError(
            f"expected labels of the network's {count} classes; found {len(found)}: {found.tolist()[:12]}. Pass "
            "classes=, all of them in the order of its outputs."
        )
    place_of = {label: code for code, label in enumerate(known.tolist())}
    return known, np.array([place_of[label] for label in y.tolist()])


def _trained(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"expected model=, a trained torch.nn.Module; found {type(model).__name__}. Train it before."
        )
    return model


def _options(method: Any, more: Any, task: str) -> dict[str, Any]:
    """Arguments of `calibrate`."""
    named = {} if method is None else {"method": method}
    return {**named, "progress": False, **(more or {}), "task": task}
