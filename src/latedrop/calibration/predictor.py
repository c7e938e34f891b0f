"""The calibrated model: `calibrate` makes it, `predict` uses it.

`calibrate` reads top to bottom: its arguments are one `Setup`, `search` measures the validation data and writes the
`Calibration`, and a `Predictor` is the model with that record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.calibration.batches import batches, failures_explained
from latedrop.calibration.beyond import warn_of_rows_beyond
from latedrop.calibration.calibrated import Calibrated
from latedrop.calibration.classes.fit import Scaling
from latedrop.calibration.classes.labels import Task
from latedrop.calibration.classes.making import ClassOptions, classifier
from latedrop.calibration.classes.predictor import ClassPredictor
from latedrop.calibration.explaining import explained
from latedrop.calibration.exporting import export
from latedrop.calibration.fit import Loss
from latedrop.calibration.intervals import Conformal, IntervalKind
from latedrop.calibration.measuring import Method, moments
from latedrop.calibration.names import in_order, index_of, names_of, pair_in_order
from latedrop.calibration.prediction import Explanation, Prediction, warn_of_overflow
from latedrop.calibration.rate_fit import residuals
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.search import search
from latedrop.calibration.seen import marks_of, merged, sketch, warn_of_fitted_rows
from latedrop.calibration.setup import Setup
from latedrop.calibration.transforms import Transform
from latedrop.calibration.usual import usual_of
from latedrop.calibration.verdict import Folds
from latedrop.calibration.whole import predicted_whole
from latedrop.data.arrays import check_inputs, floating, place
from latedrop.data.datasets import Unpack, first_inputs, gives_batches, inputs_in, is_loader, only_inputs
from latedrop.data.items import Collate, as_items
from latedrop.dropout.moments import Engine, Sampling
from latedrop.dropout.prefix import Prefix
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics import align_target
from latedrop.network.calling import Readout
from latedrop.network.find_sites import Select
from latedrop.network.sites import Kind, Rate, Site
from latedrop.streams import Stream
from latedrop.streams.tracking import STEP
from latedrop.terms import Rows, Term

if TYPE_CHECKING:
    import typing_extensions as types  # which torch brings along; `Unpack` is in typing from Python 3.11 on

    from latedrop.calibration.options import Options

__all__ = ["Explanation", "Prediction", "Predictor", "calibrate"]


@overload
def calibrate(
    model: nn.Module,
    data: Any,
    rates: Sequence[Rate] | None = ...,
    draws: int | None = ...,
    criterion: Literal["scaled", "unscaled"] | None = ...,
    *,
    task: Literal["regression"],
    **options: types.Unpack[Options],
) -> Predictor: ...


@overload
def calibrate(
    model: nn.Module,
    data: Any,
    rates: Sequence[Rate] | None = ...,
    draws: int | None = ...,
    criterion: Literal["scaled", "unscaled"] | None = ...,
    *,
    task: Literal["classification"],
    **options: types.Unpack[Options],
) -> ClassPredictor: ...


@overload
def calibrate(
    model: nn.Module,
    data: Any,
    rates: Sequence[Rate] | None = ...,
    draws: int | None = ...,
    criterion: Literal["scaled", "unscaled"] | None = ...,
    *,
    task: Task = ...,
    **options: types.Unpack[Options],
) -> Any: ...


def calibrate(
    model: nn.Module,
    data: Any,
    rates: Sequence[Rate] | None = None,
    draws: int | None = None,
    criterion: Literal["scaled", "unscaled"] | None = None,
    *,
    method: Method | None = None,
    terms: Sequence[str | Term] | None = None,
    reference: Any = None,
    guard: bool | None = None,
    features: Sequence[str] | None = None,
    folds: Folds = "shuffled",
    mean: Literal["draws", "model"] | None = None,
    floor: bool = False,
    per_site: bool = False,
    loss: Loss = "nll",
    per_output: bool | None = None,
    scale: Choice = "optimal",
    intervals: IntervalKind | None = None,
    conformal_data: Any = None,
    target: Transform | None = None,
    row_weights: Any = None,
    sites: Sequence[Site] | None = None,
    select: Select = None,
    kind: Kind = "element",
    readout: Readout = None,
    seed: int = 0,
    shared: bool = True,
    batch_size: int = 256,
    chunk: int | None = None,
    engine: Engine = "auto",
    unpack: Unpack | None = None,
    collate: Collate = None,
    progress: bool = True,
    task: Task = "auto",
    class_names: Sequence[str] | None = None,
    ignore_index: int | None = None,
    scaling: Scaling = "temperature",
) -> Any:
    """Fit the variance of a trained model to validation data, and say what it is worth.

    By default the variance is `guard(x) · (floor + sum_j theta_j t_j(x))`, the terms `t_j` being dropout at the sites
    to first order and leverage (see `latedrop.terms`), compared with simpler ones by cross-validation. Options that
    speak of draws (`rates`, `draws`, `criterion`) ask for the paper's procedure, `method="sample"`.

    Args:
        model: a trained module; it is left as it was.
        data: validation data that the model was not fitted to: a pair `(x, y)` of tensors, arrays or tables, a data
            set of torch or Hugging Face, or an iterable of batches (a `DataLoader`), read once. A batch is a pair, or
            a mapping with inputs by the names of `forward`'s and targets under `labels`, `label`, `target` or `y`.
        rates: the rates to try; each a float or a mapping from name patterns to floats.
        draws: thinned networks per rate.
        criterion: `"scaled"` picks the rate by the NLL of the scaled variance, `"unscaled"` of the raw one.
        method: `"terms"`, the default; `"sample"` draws thinned networks; `"linear"` takes the first-order variance,
            for all rates at once and without draws; `"propagate"` carries mean and variance through the layers, for
            dense outputs.
        terms: names (`"dropout"`, `"leverage"`, `"size"`, `"neighbours"`, `"local_errors"`) or objects of
            `latedrop.terms`; a candidate adds one after the other, in this order.
        reference: inputs of training rows, as arrays, as batches (targets in them are left out), or with `collate` as
            a list of items: what is usual. Worth much; where None the validation rows stand in.
        guard: False keeps the variance from growing for rows unlike the validation rows.
        features: names of the sites whose inputs are a row's features, which leverage, neighbours and the guard look
            at; all that can be used where None.
        folds: `"blocks"` where the rows stand in their order in time and neighbours are alike, as the frames of a
            video: folds are then runs of rows, and standard errors come from these.
        mean: `"draws"`: predict the mean over draws; `"model"`: keep the model's own prediction, and take only
            the variance from the draws. By default `"model"`, and `"draws"` where there are draws.
        floor: also fit a constant, `scale · variance + floor`.
        per_site: fit a rate for each site, with `method="linear"`.
        loss: what that fit minimises: `"nll"`, or `"crps"`, which outliers move less.
        per_output: True: each index of axis 1 has its own scale and floor; False: one for all. By default True for
            outputs `(N, K)` and `(N, C, H, W)`, False for `(N, H, W)`.
        scale: which scale predictions use: `"optimal"`, `"relaxed"` or a number. It can be changed later.
        intervals: `"gaussian"`, `"isotonic"` or `"conformal"`; the last where `conformal_data` is given.
        conformal_data: held-out data, in the form of `data`, for split-conformal intervals.
        target: how targets were transformed for training, where the model was not trained on them as they are in
            `data`: `Standardized(mean, std)`, `Log()` or `Transformed(forward, inverse)`. Predictions are then in the
            original unit.
        row_weights: `(N,)`, what each row of `data` counts, in the order in which these are read; all the same where
            None.
        sites: from `find_sites`; found on the first batch where None.
        select: narrows the sites, see `find_sites`.
        kind: `"element"` or `"channel"` masks, see `find_sites`.
        readout: from the raw output to the quantity that `y` holds: a function, or the name or index of a part.
        seed: fixes all masks.
        shared: False gives every example its own masks.
        batch_size: rows that run at once, for a pair of arrays.
        chunk: draws that run at once; chosen to fit memory where None.
        engine: how draws are run, see `sample`; the predictor runs them so, too.
        unpack: from a batch of the iterable to `(inputs, targets)`, also of batches of reference rows; of batches
            that are mappings, the name of the targets will do.
        collate: from a list of items to what `model` takes, where the inputs are lists of objects such as graphs; the
            predictor takes such lists, too.
        progress: show a bar on work longer than two seconds.
        task: `"classification"` calibrates probabilities instead, and returns a `ClassPredictor`; `"auto"` does so
            where targets are whole numbers `(N,)` and outputs `(N, K)`, or `(N, H, W)` and `(N, K, H, W)`.
        class_names: of the classes, in the order of the logits.
        ignore_index: of maps, the label of pixels that have no class.
        scaling: of classes: `"bias"` also tries a bias for each class, `"vector"` a weight and a bias.

    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> uq = calibrate(net, (x, x**2), rates=[0.1, 0.3], draws=20)
    >>> low, high = uq.predict(x).interval(0.9)
    >>> low.shape
    torch.Size([64, 1])
    """
    options: dict[str, Any] = dict(locals())
    ours = ("model", "data", "task", *ClassOptions._fields)
    options = {name: value for name, value in options.items() if name not in ours}
    return _calibrated(model, data, task, ClassOptions(class_names, ignore_index, scaling), options)


def _calibrated(
    model: nn.Module,
    data: Any,
    task: Task,
    theirs: ClassOptions,
    options: dict[str, Any],
) -> Predictor | ClassPredictor:
    found, data = classifier(model, data, options, task, theirs)
    if found is not None:
        return found
    record = search(model, data, Setup(**options, columns=names_of(data)).checked())
    parts = {name: options[name] for name in ("readout", "batch_size", "chunk", "engine", "collate")}
    made = Predictor(model, record, **parts)
    held = options["conformal_data"]
    return made if held is None else made.conformal(held, options["unpack"])


class Predictor(Calibrated[Calibration]):
    """A model with its calibration: call it on inputs, get `Prediction`s. The model itself is untouched.

    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> uq = calibrate(net, (x, x**2))
    >>> uq.predict(x).std.shape, uq.scaled("relaxed").predict(x).std.shape
    (torch.Size([64, 1]), torch.Size([64, 1]))
    """

    def __call__(self, x: Any) -> Prediction:
        """Same as `predict`."""
        return self.predict(x)

    def predict(self, x: Any) -> Prediction:
        """Predict N examples, in batches that fit memory: rows, a `DataLoader`, a data set, an iterator of batches.

        With `collate`, a list. The batch size does not change the result, unless every example has its own masks
        (`shared=False`). A data frame may have its columns in any order, where the calibration knows their names. Warns
        where the model's weights were changed since then, and of rows so far off that nothing can be known of them.
        """
        if gives_batches(x) and self.collate is None:
            return Prediction.joined(list(self.predict_batches(x)))
        self._weights.check(self.model)
        self._network = self._network.current()
        x, index = in_order(x, self.calibration.columns), index_of(x)
        x = place(as_items(x, self.collate), self.model, check=False, cut=True)
        with failures_explained(x, self.model):
            parts, beyond = self._predicted_rows(self._run, x, self._predicted)
        found = replace(Prediction.joined(parts), index=index)
        if beyond is not None:
            found = found.unknown(beyond, self._own_output(x))
            warn_of_rows_beyond(beyond, stacklevel=3)
            return found
        warn_of_overflow(found, stacklevel=3)
        return found

    def predict_batches(
        self, loader: Iterable[Any], unpack: Callable[[Any], Any] | str | None = None
    ) -> Iterator[Prediction]:
        """Yield one `Prediction` per batch; `unpack` takes the inputs out of a batch, as `lambda b: b[0]` does.

        Without it a batch is inputs alone, a pair (inputs, targets) where the model takes one input only, or a mapping;
        with `collate`, a list of items, or a tuple of it and targets. Of mappings `unpack` may name the targets.
        """
        yield from map(self.predict, inputs_in(loader, self.model, self.batch_size, unpack, self.collate))

    def predict_labelled(
        self, data: Any, unpack: Unpack | None = None, tick: Callable[[int], Any] = lambda rows: None
    ) -> tuple[Prediction, Tensor]:
        """The prediction of data as `calibrate` takes them, and their targets, on the CPU; a batch is held at a time.

        `tick` is called with the rows of each batch.
        """
        parts, targets = [], []
        data = pair_in_order(data, self.calibration.columns)
        for x, y in batches(data, self.model, batch_size=self.batch_size, unpack=unpack, collate=self.collate):
            parts.append(self.predict(x).cpu())
            targets.append(align_target(parts[-1].mean, y.cpu()))
            tick(len(y))
        return Prediction.joined(parts), torch.cat(targets)

    def scaled(self, choice: Choice) -> Predictor:
        """The same predictor with another scale; nothing is run again.

        `choice` is `"optimal"`, `"relaxed"`, a number, or a step of `predictor.calibration.tradeoff()`.
        """
        return self._with(self.calibration.with_choice(choice))

    def conformal(self, data: Any, unpack: Unpack | None = None) -> Predictor:
        """The same predictor with split-conformal intervals from `data`, which must have served for nothing else."""
        calibration = self.calibration
        if len(calibration.output_shape) > 1:
            raise ArgumentError(
                f"expected one value or a vector per example for conformal intervals; found outputs of shape "
                f"{calibration.output_shape}, whose entries are not exchangeable. Pass a readout, such as a map's sum."
            )
        columns: list[list[Tensor]] = []
        marks = []
        data = pair_in_order(data, calibration.columns)
        for x, y in batches(data, self.model, batch_size=self.batch_size, unpack=unpack, collate=self.collate):
            part = self.predict(x).in_model_unit()
            target = align_target(part.mean, y if calibration.target is None else calibration.target.forward(y))
            columns.append(residuals(part.mean, part.variance, target, per_output=part.mean.dim() > 1))
            marks.append(marks_of(part.mean, target))
        if not columns:
            raise DataError("expected conformal_data with at least one row; found none.")
        if not isinstance(calibration.intervals, Conformal):  # whose rows may come again
            warn_of_fitted_rows(calibration.seen, np.concatenate(marks), stacklevel=2)
        scales, floors = calibration.chosen()
        joined = [torch.cat(column) for column in zip(*columns, strict=True)]
        seen = merged(calibration.seen, sketch(np.concatenate(marks)))
        return self._with(replace(calibration, intervals=Conformal.fit(joined, scales, floors), seen=seen))

    def explain(self, x: Any, *, output: int = 0, most: int = 10) -> Explanation:
        """Where the doubt about one prediction comes from, to first order: the share of each site and its main units.

        With terms, also the share of every other one and of the floor.

        Args:
            x: inputs of one row, or a data set with one.
            output: which entry of the example's output, counted flat.
            most: how many units to list.
        """
        if is_loader(x) and self.collate is None:
            x = only_inputs(x, self.model)
        x = as_items(in_order(x, self.calibration.columns), self.collate)
        return explained(self.network, x, self.calibration, self.readout, output=output, most=most)

    def stream(
        self,
        level: float = 0.9,
        path: str | os.PathLike[str] | None = None,
        *,
        alarm: float = 0.01,
        waiting: int = 1000,
        step: float = STEP,
        watch_every: int = 1,
    ) -> Stream:
        """Intervals that follow the errors as labels arrive, and alarms; see `latedrop.streams.Stream`."""
        c = self.calibration
        options: dict[str, Any] = {"alarm": alarm, "waiting": waiting, "step": step, "watch_every": watch_every}
        made_with = c.fingerprint if c.target is None else f"{c.fingerprint} {json.dumps(c.target.to_dict())}"
        known: dict[str, Any] = {"usual": usual_of(c), "made_with": made_with, "unit": c.target}
        return Stream(self.predict, level, path, **options, **known)

    def to_onnx(self, path: str | os.PathLike[str], example: Any, *, level: float = 0.9) -> Path:
        """Write one ONNX file that gives `mean`, `std`, `low` and `high`; `latedrop.load_onnx` reads it without torch.

        Args:
            path: of the file.
            example: inputs of a few rows, or a loader that has them. The file takes any number of rows, and all other
                sizes as they are here.
            level: probability content of `low` and `high`.
        """
        example = first_inputs(example, self.model, self.collate)
        expected = self.predict(example)  # also tells what is wrong with the example
        placed = place(as_items(in_order(example, self.calibration.columns), self.collate), self.model)
        if self.calibration.method == "sample" and all(site.weight is None for site in self.calibration.sites):
            Prefix(self._network, placed, self.calibration.sites)  # layers before the first site run once in the file
        return export(path, self.model, expected.calibration, self._predicted, placed, level)

    def _run(self, x: Any) -> Prediction:
        """The prediction of one batch, by the engine that was asked for."""
        if self.engine != "compiled" or self.calibration.method == "sample":  # whose draws are a program
            return self._predicted(x)
        return predicted_whole(self._network, x, self.calibration, self.readout, self._predicted)

    def _predicted(self, x: Any) -> Prediction:
        """The same, step by step."""
        if self.calibration.terms is not None:
            terms = self.calibration.terms
            check_inputs(floating(x))
            rows = Rows(self._network, x, self.calibration.sites, self.readout, terms.features)
            variance, strangeness, shares = terms.variance(rows)
            self.calibration.check_outputs(rows.mean)
            return Prediction(rows.mean, variance, self.calibration, strangeness, shares=shares)
        c = self.calibration
        draws = c.draws if c.method == "sample" else 2  # the other methods draw nothing
        options = Sampling(draws, c.seed, self.readout, self.chunk, c.shared, engine=self.engine)
        (found,) = moments(self._network, x, [c.rate], c.sites, c.method, options)
        own = c.mean == "model" and c.method != "linear"  # which gives the model's own output anyway
        mean = own_output(self._network, x, self.readout).clone() if own else found.mean
        c.check_outputs(mean)
        return Prediction(mean, found.variance, c)
