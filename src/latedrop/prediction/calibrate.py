"""Calibrate a trained model on validation data.

    data -> measure (mean, terms, features) -> candidates -> fit -> tails -> guard -> verdict -> record -> predictor

Regression uses a Gaussian likelihood (with Student t tails for terms): the variance is a sum of terms (`fit_terms`), or
the scaled dropout variance of one rate (`rates`). Classification uses a categorical likelihood with a temperature
(`fit_classes`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal
from warnings import catch_warnings, filterwarnings, warn

import torch
from torch import Tensor, nn

from latedrop.calibration.class_record import ClassCalibration, ClassVerdict
from latedrop.calibration.cross_validation import (
    CrossValidated,
    CrossValidatedClasses,
    CrossValidation,
    standard_error,
)
from latedrop.calibration.fit_classes import Measured, chosen, losses
from latedrop.calibration.fit_terms import compare, described, fitted_variance, judge, nested, with_guard
from latedrop.calibration.measure import TermRows, measure_terms
from latedrop.calibration.measure_classes import measure_classes
from latedrop.calibration.methods import Classification, Method, Plan, Sampling, Task, Terms
from latedrop.calibration.rates import FittedRates, ScaleFit, fit_rates, fit_scale
from latedrop.calibration.record import Calibration
from latedrop.calibration.seen import marks_of, sketch
from latedrop.calibration.targets import Transform, is_classification
from latedrop.calibration.verdict import judged
from latedrop.data.batches import Batches, Labelled, names_of
from latedrop.dropout.moments import Engine
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.metrics.classes import accuracy, ece
from latedrop.network.find_sites import Select
from latedrop.network.network import Network, Readout, check_module
from latedrop.network.sites import Sites
from latedrop.prediction.predictor import ClassPredictor, Predictor, identity_of

__all__ = ["calibrate", "calibrate_cross_fitted"]

_log = logging.getLogger(__name__)
_FEW = 4


def calibrate(
    model: nn.Module,
    data: Any,
    *,
    reference: Any = None,
    method: Method | str = "terms",
    task: Task = "auto",
    readout: Readout = None,
    sites: Sites | Select = None,
    target: Transform | None = None,
    intervals: Literal["student", "gaussian", "isotonic"] | None = None,
    per_output: bool | None = None,
    row_weights: Any = None,
    batches: Batches = Batches(),  # noqa: B008 - it is frozen
    engine: Engine = "auto",
    progress: bool = True,
) -> Any:
    """Fit the variance of a trained model's errors to validation data, and score the fit by cross-validation.

    By default the variance is `guard(x) · (floor + sum_j theta_j t_j(x))`. The terms `t_j` are the first-order variance
    of dropout at the sites, the leverage of features and of mask gradients, and a forest fitted to the validation
    errors (see `latedrop.terms`). Simpler candidates are compared by cross-validation. Errors follow a Student t
    distribution. For the procedure of the paper pass `method="sample"` or `method=Sampling(rates, draws)`.

    Args:
        model: a trained module; it is not changed.
        data: validation data that the model was not trained on: a pair `(x, y)` of tensors, arrays or tables, a torch
            or Hugging Face data set, or an iterable of batches (a `DataLoader`), which is read once. A batch is a
            pair, or a mapping with inputs under the parameter names of `forward` and targets under `labels`, `label`,
            `target` or `y`.
        reference: inputs of training rows, against which leverage and novelty are measured: arrays, batches (their
            targets are ignored), or with `Batches(collate=...)` a list of items. Recommended: it improves the variance,
            above all for unusual rows. None: the validation inputs are used instead.
        method: `Terms(...)`, `Sampling(...)`, `FirstOrder(...)` or `Propagation(...)`, or a name for one with its
            default options. `"terms"`: the sum above. `"sample"`: the variance of thinned networks drawn at random.
            `"linear"`: its first-order approximation, for all rates at once and without draws. `"propagate"`: mean and
            variance are propagated through the layers, for dense outputs.
        task: `"regression"`, `"classification"` or `Classification(...)` with options. Classification calibrates
            probabilities and returns a `ClassPredictor`. `"auto"` selects it if targets are whole numbers `(N,)` and
            outputs `(N, K)`, or `(N, H, W)` and `(N, K, H, W)`; otherwise it selects regression.
        readout: function from the model's raw output to the prediction of `y`, or the name or index of that part of
            the output.
        sites: sites from `find_sites`, or a filter for those found on the first batch: a name pattern
            (`"encoder.*"`), a type of layer, a predicate `(name, module) -> bool`, or a sequence of these.
        target: transform of the targets that the model was trained on, if `data` holds them untransformed:
            `Standardized(mean, std)` or `Log()`. Predictions are then in the unit of `data`.
        intervals: `"student"`: Student t, with tails fitted to the errors; `"gaussian"`; or `"isotonic"`: recalibrated
            on the validation rows. None: `"student"` for terms, `"gaussian"` for other methods. For conformal
            intervals call `uq.conformal(other_rows)`.
        per_output: True: fit scale and floor for each index of axis 1; False: one for all. None: True for outputs
            `(N, K)` and `(N, C, H, W)`, False for `(N, H, W)`.
        row_weights: weight of each row of `data`, `(N,)`, in the order in which rows are read. None: equal weights.
        batches: how `data` and `reference` are read: `Batches(size, unpack, collate)`.
        engine: how draws are run, here and by the predictor; see `sample`.
        progress: show a progress bar if the work takes longer than two seconds.

    Returns:
        A `Predictor`, or a `ClassPredictor` for classes. Its `calibration` is the record of the fit.

    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> uq = calibrate(net, (x, x**2), method=Sampling(rates=[0.1, 0.3], draws=20))
    >>> low, high = uq.predict(x).interval(0.9)
    >>> low.shape
    torch.Size([64, 1])
    """
    check_module(model)
    plan = Plan(
        method=method,  # type: ignore[arg-type]
        task=task,
        reference=reference,
        readout=readout,
        sites=sites,
        target=target,
        intervals=intervals,
        per_output=per_output,
        row_weights=row_weights,
        batches=batches,
        engine=engine,
        progress=progress,
        columns=names_of(data),
    )
    rows = plan.batches.read(data, model)
    classes = _classes_in(rows, model, plan)
    network = Network(model)
    _log.info("calibrating %s by method %s", type(model).__name__, plan.method.name)
    if classes is not None:
        plan = plan.for_classes(classes)
        return _by_classes(network, measure_classes(network, rows, plan), plan)
    plan = plan.for_numbers()
    if isinstance(plan.method, Terms):
        return _by_terms(network, measure_terms(network, rows, plan))
    return _by_rates(network, fit_rates(network, rows, plan), plan)


def calibrate_cross_fitted(
    model: nn.Module,
    data: Any,
    folds: Sequence[tuple[nn.Module, Any, Any]],
    *,
    reference: Any = None,
    method: Terms | Literal["terms"] = "terms",
    readout: Readout = None,
    sites: Sites | Select = None,
    intervals: Literal["student", "gaussian", "isotonic"] | None = None,
    progress: bool = True,
) -> Predictor:
    """Fit the variance of a model to cross-fitted errors, so that no row is reserved for validation.

    Train `model` on all rows, and one network per fold on the rows outside the fold. All networks share the
    coefficients of the terms; the leverage of each is measured against its own training rows.

    Args:
        model: network trained on all rows; it makes the predictions, and is not changed.
        data: some of its training rows `(x, y)`, for the shapes and sizes of outputs and features; their errors are
            not used.
        folds: one tuple per network: network, rows `(x, y)` it was not trained on, inputs it was trained on.
        reference: inputs of training rows of `model`.
        method: `Terms(...)`, or `"terms"` for its default options.
        readout: as in `calibrate`, for all networks.
        sites: as in `calibrate`.
        intervals: as in `calibrate`.
        progress: as in `calibrate`.
    """
    check_module(model)
    if not folds:
        raise ArgumentError("expected the networks of at least one fold; found none. Call calibrate() instead.")
    options: dict[str, Any] = {"readout": readout, "sites": sites, "intervals": intervals, "progress": progress}
    plan = Plan(method=method, reference=reference, **options).for_numbers()  # type: ignore[arg-type]
    if not isinstance(plan.method, Terms):
        raise ArgumentError(f"expected method=Terms(...) for folds; found {plan.method.name!r}.")
    terms = [term for term in plan.method.objects if not term.needs_errors]
    if plan.method.mean == "corrected" or (plan.method.chosen and len(terms) < len(plan.method.objects)):
        raise ArgumentError(
            "expected terms that learn nothing from errors for folds, as `model` has seen every row; found "
            f"{plan.method!r}. Leave 'forest' and mean='corrected' out."
        )
    plan = replace(plan, method=replace(plan.method, terms=terms))
    network = Network(model)
    with catch_warnings():
        filterwarnings("ignore", "only .* validation rows", LatedropWarning)  # counts one fold, not all
        # The final model was trained on `data`, but its errors are not used.
        filterwarnings("ignore", ".* among the reference rows", LatedropWarning)
        parts = [
            measure_terms(Network(one), plan.batches.read(rows, one), replace(plan, reference=seen))
            for one, rows, seen in folds
        ]
        final = measure_terms(network, plan.batches.read(data, model), plan)
    leverage = [part.leverage for part in parts if part.leverage is not None]
    measured = replace(
        final,
        mean=torch.cat([part.mean for part in parts]),
        target=torch.cat([part.target for part in parts]),
        columns={name: torch.cat([part.columns[name] for part in parts]) for name in final.columns},
        leverage=torch.cat(leverage) if len(leverage) == len(parts) else None,
    )
    return _by_terms(network, measured)


def _by_terms(network: Network, measured: TermRows) -> Predictor:
    """Choose and fit the terms of the variance on measured rows; return the predictor."""
    plan, shape = measured.plan, measured.target.shape
    rows = with_guard(measured)
    picked = compare(rows, nested(rows))  # cross-validated fits and tails, and the fit to all rows
    for candidate in picked.candidates:
        _log.debug("%s: %+.4f nats (+- %.4f)", candidate.name, candidate.gain, candidate.gain_error)
    _log.info("the variance is made of %s", picked.name)
    scales = torch.full((rows.error.shape[1],), picked.tail.variance, dtype=torch.float64)
    variance = fitted_variance(rows, picked.fit).reshape(shape)
    # The scale comes from the tails alone; `fit_scale` adds the relaxed scale.
    optimal = scales, torch.zeros_like(scales)
    scale = fit_scale(rows.mean, variance, rows.target, plan, rows.per_output, optimal=optimal)
    return _predictor(
        network,
        plan,
        rows.sites,
        scale,
        scale.left_out(picked.variance.reshape(shape) * picked.tail.variance),
        rate={},
        table=(scale.row({}),),
        mean="model" if rows.correction is None else "corrected",
        output_shape=rows.shape,
        terms=described(rows, picked),
        verdict=judge(rows, picked),
        degrees=picked.tail.degrees,
        constant=tuple((scale.constant() * picked.trivial.variance).tolist()),
        constant_degrees=picked.trivial.degrees,
    )


def _by_rates(network: Network, fitted: FittedRates, plan: Plan) -> Predictor:
    """Return the predictor with the best of the fitted rates."""
    method, fit = plan.method, fitted.fit
    assert not isinstance(method, Terms)
    for row in fitted.table:
        _log.debug("rate %s: NLL %.4f raw, %.4f scaled", row.rate, row.nll_unscaled, row.nll_scaled)
    _log.info("rate %s, scales %s", fitted.rate, fit.optimal[0].tolist())
    variance, constant = fit.crossed(floor=method.floor)
    left, error = CrossValidation(plan.weights), (fit.target - fit.mean).double()
    return _predictor(
        network,
        plan,
        fitted.sites,
        fit,
        fit.left_out(variance),
        rate=fitted.rate,
        table=fitted.table,
        criterion=method.criterion,
        mean=method.mean,
        output_shape=tuple(fit.target.shape[1:]),
        shares=fitted.shares,
        verdict=judged(error, variance, constant, fitted="cross-validation", rows=left),
        constant=tuple(fit.constant().tolist()),
        draws=method.draws if isinstance(method, Sampling) else 0,
        shared=method.shared if isinstance(method, Sampling) else True,
    )


def _predictor(
    network: Network, plan: Plan, sites: Sites, fit: ScaleFit, left_out: CrossValidated, **fitted: Any
) -> Predictor:
    """Make the record of a regression, by any method, and the predictor that uses it."""
    record = Calibration(
        choice=plan.method.scale,
        method=plan.method.name,
        seed=plan.method.seed,
        per_output=fit.per_output,
        rows=len(fit.target),
        least_variance=tuple(fit.least.tolist()),
        path=fit.path(),
        curves=fit.curves(),
        intervals=fit.isotonic(plan.method.scale) if plan.intervals == "isotonic" else None,
        target=plan.target,
        seen=sketch(marks_of(fit.mean, fit.target)),
        versions={"torch": torch.__version__},
        sites=sites,
        **identity_of(network.model, plan.readout, plan.columns),
        **fitted,
    )
    _log.info("%d validation rows: %s", record.rows, record.verdict)
    return Predictor(network.model, record, plan.readout, cross_validated=left_out, **_running(plan))


def _by_classes(network: Network, rows: Measured, plan: Plan) -> ClassPredictor:
    """Choose and fit a temperature on measured rows; return the predictor."""
    method, task, classes = plan.method, plan.task, rows.logits.shape[1]
    assert isinstance(task, Classification)
    if task.names and len(task.names) != classes:
        raise ArgumentError(
            f"expected names of {classes} classes, as the model has; found {len(task.names)}. Name every class once."
        )
    guard = method.guard if isinstance(method, Terms) else True
    picked = chosen(rows, guard=guard)
    p, gain = picked.left_out.exp(), losses(picked.alone, rows.labels) - losses(picked.left_out, rows.labels)
    verdict = ClassVerdict(
        rows=len(rows.labels),
        fitted="cross-validation",
        gain=float(gain.mean()),
        gain_error=standard_error(gain, rows.left_out),
        nll=float(losses(picked.left_out, rows.labels).mean()),
        accuracy=float(accuracy(p, rows.labels)),
        ece=float(ece(p, rows.labels, mass=True)),
        unit="rows" if rows.image is None else "pixels",
    )
    record = ClassCalibration(
        classes=classes,
        names=tuple(task.names),
        binary=rows.binary,
        fit=picked.fit,
        alone=picked.temperature,
        rate=picked.rate,
        draws=method.draws if isinstance(method, Sampling) and picked.rate is not None else 0,
        seed=method.seed,
        features=rows.features,
        terms=rows.terms,
        guard=rows.guard,
        reference_rows=rows.reference_rows,
        rows=rows.rows,
        choice=picked.name,
        candidates=picked.candidates,
        verdict=verdict,
        maps=rows.image is not None,
        ignore_index=task.ignore_index,
        seen="" if rows.image is not None else sketch(marks_of(rows.logits, rows.labels)),
        sites=rows.sites,
        **identity_of(network.model, plan.readout, plan.columns),
    )
    left_out = CrossValidatedClasses(p, rows.labels)
    return ClassPredictor(network.model, record, plan.readout, cross_validated=left_out, **_running(plan))


def _running(plan: Plan) -> dict[str, Any]:
    """Return the options that make the predictor run as the calibration did."""
    chunk = plan.method.chunk if isinstance(plan.method, Sampling) else None
    return {"batch_size": plan.batches.size, "collate": plan.batches.collate, "engine": plan.engine, "chunk": chunk}


def _classes_in(rows: Labelled, model: nn.Module, plan: Plan) -> Classification | None:
    """Return the classification task, or None for regression; `"auto"` looks at the first rows."""
    first = rows.first(_FEW) if plan.task == "auto" else None
    if first is None:
        return plan.task if isinstance(plan.task, Classification) else None
    x, labels = first
    if labels.is_floating_point() and not _zero_or_one(labels):
        return None
    try:
        output = own_output(model, x, plan.readout)
    except Exception:  # the same rows are used later, and the error is reported then
        return None
    if is_classification(labels, output):
        return Classification()
    if not _zero_or_one(labels):
        return None
    if labels.dim() == output.dim() == 2 and labels.shape[1] > 1 and bool((labels.sum(1) == 1).all()):
        raise DataError(
            f"expected one label for each row, or numbers; found targets of shape {tuple(labels.shape)} with a single "
            "1 in every row, as one-hot labels are. Pass labels.argmax(1), or task='regression' where they are numbers."
        )
    if output[0].numel() == 1:
        warn(
            "the targets are all 0 or 1, and are fitted as numbers: the outputs should be close to 0 and 1. For a "
            "classifier with one logit pass task='classification'; for numbers pass task='regression'.",
            LatedropWarning,
            stacklevel=3,
        )
    return None


def _zero_or_one(values: Tensor) -> bool:
    """Return True if values are all 0 or 1, and both occur."""
    return bool(((values == 0) | (values == 1)).all()) and len(values.unique()) == 2
