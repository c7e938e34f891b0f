"""Calibrated models: `calibrate` makes them, `load` brings them back from a file, `predict` uses them.

`Batched` reads and predicts; `Calibrated` adds what numbers and classes share. `Predictor` gives numbers,
`ClassPredictor` probabilities of classes.

Some rows are beyond what numbers can hold, as those with a value of 1e20, whose square does not fit float32. Another
row stands in for each while its batch is predicted, so that all others are answered as ever; of such a row the
prediction says that nothing is known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, get_args
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.calibration.class_record import CLASSES, ClassCalibration, ClassSets, Score, rejection
from latedrop.calibration.fit_classes import entropy, information
from latedrop.calibration.fitted_terms import is_site
from latedrop.calibration.guard import LARGEST
from latedrop.calibration.measure_classes import largest_logit
from latedrop.calibration.rates import moments
from latedrop.calibration.record import CALIBRATION, Calibration, Choice
from latedrop.calibration.scale import conformal, residuals
from latedrop.calibration.seen import marks_of, merged, sketch, warn_of_fitted_rows
from latedrop.calibration.targets import as_labels, as_logits
from latedrop.data.arrays import any_true, check_dtypes, check_inputs, floating, map_values, place
from latedrop.data.batches import (
    Batches,
    Names,
    Unpack,
    first_inputs,
    gives_batches,
    in_order,
    inputs_in,
    is_pair,
    row_batches,
)
from latedrop.data.rows import Collate, Graphs, as_items, row_count, rows_are_nodes, stand_in, tensors
from latedrop.dropout.first_order import unit_variances
from latedrop.dropout.moments import PROGRAMS, Engine, Moments, out_of_memory
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import own_output, sample_rates, try_prefix
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError, LatedropWarning, OutputError
from latedrop.files import read_text, write_aside
from latedrop.metrics import align_target
from latedrop.network.network import Network, Readout, check_finite, check_module, part_of
from latedrop.network.sites import missing_sites, odds_by_site
from latedrop.prediction.acquiring import acquire
from latedrop.prediction.adapted import AdaptedPrediction, Shift, check_adaptable, fit_shift
from latedrop.prediction.detector import detector
from latedrop.prediction.exporting import export
from latedrop.prediction.joint import Joint, JointPrediction, check_outputs, correlation_of, fit_joint
from latedrop.prediction.prediction import ClassPrediction, Explanation, Predicted, Prediction
from latedrop.prediction.whole import predicted_whole
from latedrop.quantiles import ConformalScores
from latedrop.records import naming, plain
from latedrop.streams import Stream
from latedrop.terms import BatchContext, Term
from latedrop.terms.features import Features
from latedrop.weights import Weights, fingerprint

__all__ = [
    *("AdaptedPredictor", "Batched", "Calibrated", "ClassPredictor", "JointPredictor", "Predictor", "check_belongs"),
    *("explain_failure", "identity_of", "load"),
]

_OF_INPUTS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)
_DRAWS = 30  # thinned networks for the mutual information, where the calibration has none of its own
_Record = TypeVar("_Record", bound=Any)
_Made = TypeVar("_Made", bound=Predicted)
_Kind = TypeVar("_Kind", bound="Batched[Any, Any]")


class Batched(Generic[_Record, _Made]):
    """A model with its calibration, which predicts data of any form in batches that fit memory.

    Attributes:
        model: as the user has it.
        calibration: what was chosen and measured.
        cross_validated: the validation rows, each predicted by a fit to other rows: a `CrossValidated` with `mean`,
            `variance`, `target` and `errors`, or a `CrossValidatedClasses` with `probabilities` and `labels`. None
            after `load`, as a file holds no rows.
    """

    kind: ClassVar[type[Any]]
    """The type of its predictions."""
    flags_rows: ClassVar[bool] = True
    """False: a row whose output overflows is an error, as nothing that is said of it would hold."""

    def __init__(
        self,
        model: nn.Module,
        calibration: _Record,
        readout: Readout = None,
        *,
        batch_size: int = 256,
        chunk: int | None = None,
        engine: Engine = "auto",
        collate: Collate = None,
        cross_validated: Any = None,
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.readout = calibration.readout if readout is None else readout
        self.batch_size = batch_size
        self.chunk = chunk
        self.engine: Engine = engine
        self.collate = collate
        self.cross_validated = cross_validated
        self._weights = Weights(model, calibration.fingerprint)
        self._network = Network(model)

    @property
    def network(self) -> Network:
        """The private copy that makes predictions; made anew where tensors of the model were moved or replaced."""
        self._network = self._network.current()
        return self._network

    def __call__(self, x: Any) -> _Made:
        """Same as `predict`."""
        return self.predict(x)

    def predict(self, x: Any) -> _Made:
        """Predict N examples, in batches that fit memory: rows, a `DataLoader`, a data set, an iterator of batches.

        With `collate`, a list. The batch size does not change the result, unless every example has its own masks
        (`shared=False`). A data frame may have its columns in any order, where the calibration knows their names. Warns
        where the model's weights were changed since then, and of rows so far off that nothing can be known of them.
        """
        return self._predict(x)

    def _predict(self, x: Any, **options: Any) -> _Made:
        """Predict as `predict` does; `options` are those of `_step`."""
        if self.engine not in get_args(Engine):
            raise ArgumentError(f"expected engine to be one of {get_args(Engine)}; found {self.engine!r}.")
        index = None
        if not isinstance(x, Tensor) or self.collate is not None:
            if self.collate is None and gives_batches(x):
                loaded = inputs_in(x, self.model, self.batch_size)
                return self._joined([self._predict(part, **options) for part in loaded])
            index = getattr(x, "index", None) if hasattr(x, "iloc") else None  # of a data frame of pandas
            x = self._rows(x)
        if self._weights.changed(self.model):
            self._network = self._network.current()
        x = place(x, self._network.weight, check=False, cut=True)
        run = step = partial(self._step, **options) if options else self._step
        if self.engine in PROGRAMS and self._is_whole(**options):
            run = partial(predicted_whole, self, step)
        made, beyond = list[_Made](), None
        try:
            try:
                for part in row_batches(x, self.batch_size):
                    made.append(run(part))  # kept where a later batch fails
            except LatedropError as error:
                if error.rows is None:
                    raise
                if not self.flags_rows:
                    raise DataError(
                        f"expected rows whose output is finite; found {int(error.rows.sum())} of {len(error.rows)} "
                        f"rows of a batch that overflow, which {type(self).__name__} cannot flag. Leave such rows out.",
                        rows=error.rows,
                    ) from error
                made, beyond = self._answered(run, x, made)
        except Exception as error:
            explain_failure(error, x, self.model, step)
            raise
        prediction: Any = replace(made[0] if len(made) == 1 else self._joined(made), index=index)  # type: ignore[type-var]
        if beyond is not None and bool(beyond.any()):
            parts = row_batches(x, self.batch_size)
            output = torch.cat([own_output(self._network, part, self.readout, check=False) for part in parts])
            if not bool(output.isfinite().any()) and not isinstance(x, Graphs):
                check_finite(output, "without dropout")
            prediction = prediction.with_unknown(beyond, output)
            warn(
                f"nothing is known of {int(beyond.sum())} of {len(beyond)} rows: what the network makes of their "
                "inputs fits no number. Their novelty is the largest number, and their interval the widest. Look at "
                "their inputs, and leave such rows out.",
                LatedropWarning,
                stacklevel=3,
            )
        result: _Made = prediction
        return result

    def _joined(self, parts: Sequence[_Made]) -> _Made:
        joined: _Made = self.kind.joined(parts)
        return joined

    def _answered(self, run: Callable[[Any], _Made], x: Any, done: Sequence[_Made]) -> tuple[list[_Made], Tensor]:
        """Predict all batches, of which the first were `done`; other rows stand in for those that are beyond numbers.

        Also returns these rows, `(N,)` of bool.
        """
        beyond, given = torch.zeros(row_count(x), dtype=torch.bool), x
        alone = rows_are_nodes(x) or not any(site.coupled for site in self.calibration.sites)
        made = dict(enumerate(done))
        while True:
            more, start = beyond.clone(), 0
            for number, part in enumerate(row_batches(x, self.batch_size)):
                rows = slice(start, start + row_count(part))
                start = rows.stop
                if number in made:
                    continue
                try:
                    made[number] = run(part)
                except LatedropError as error:
                    named = error.rows is not None and len(error.rows) == len(more[rows])
                    if not named or not alone:
                        raise
                    wrong = error.rows.cpu()
                    more[rows] |= part.whole(wrong) if isinstance(part, Graphs) else wrong
                    if torch.equal(more[rows], beyond[rows]):
                        raise
            if torch.equal(more, beyond):
                return [made[number] for number in sorted(made)], beyond
            beyond, x = more, stand_in(given, more)

    def predict_batches(
        self, loader: Iterable[Any], unpack: Callable[[Any], Any] | str | None = None
    ) -> Iterator[_Made]:
        """Yield a prediction for each batch; `unpack` takes the inputs out of a batch, as `lambda b: b[0]` does.

        Without it a batch is inputs alone, a pair (inputs, targets) where the model takes one input only, or a mapping;
        with `collate`, a list of items, or a tuple of it and targets. Of mappings `unpack` may name the targets.
        """
        yield from map(self.predict, inputs_in(loader, self.model, self.batch_size, unpack, self.collate))

    def predict_labelled(
        self, data: Any, unpack: Unpack | None = None, tick: Callable[[int], Any] = lambda rows: None
    ) -> tuple[_Made, Tensor]:
        """Predict data as `calibrate` takes them; also return their targets. Both on the CPU; one batch at a time.

        `tick` is called with the rows of each batch.
        """
        parts, targets = [], []
        if is_pair(data):
            columns = self.calibration.columns
            data = in_order(data[0], columns), in_order(data[1], columns, "targets")
        for x, y in Batches(self.batch_size, unpack, self.collate).read(data, self.model):
            parts.append(self.predict(x).cpu())
            targets.append(self._truth(parts[-1], y.cpu()))
            tick(len(y))
        return self._joined(parts), torch.cat(targets)

    def _unseen(self, data: Any, unpack: Unpack | None, *, again: bool = False) -> tuple[Any, Tensor, Any]:
        """Predict rows with targets, in the model's unit, and mark them; warn of rows of the fit, unless `again`."""
        prediction: Any
        prediction, target = self.predict_labelled(data, unpack)
        if isinstance(prediction, Prediction):
            unit, prediction = prediction.calibration.target, prediction.in_model_unit()
            target = target if unit is None else unit.forward(target)
        marks = marks_of(prediction.output if isinstance(prediction, Prediction) else prediction.logits, target)
        if not again:
            warn_of_fitted_rows(self.calibration.seen, marks, stacklevel=3)
        return prediction, target, marks

    def batches(self, x: Any) -> Iterator[Any]:
        """Yield the rows of inputs in any form as `predict` runs them, batch by batch."""
        several = self.collate is None and gives_batches(x)
        for part in inputs_in(x, self.model, self.batch_size) if several else [x]:
            yield from row_batches(place(self._rows(part), self.network.weight, cut=True), self.batch_size)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, whole or not at all; the weights are not in it."""
        write_aside(path, self.calibration.to_json())

    def _rows(self, x: Any) -> Any:
        """Return inputs with their columns in order, and lists of items or graphs as such."""
        return as_items(in_order(x, self.calibration.columns), self.collate, self.calibration.sites)

    def _step(self, x: Any, **options: Any) -> _Made:
        """Predict one batch, which was placed, step by step."""
        raise NotImplementedError

    def _is_whole(self, **options: Any) -> bool:
        """Return True if a whole prediction can be a program; draws are one by themselves."""
        return False

    def _truth(self, prediction: _Made, y: Tensor) -> Tensor:
        """Return the targets of rows that were predicted; an error where they do not fit."""
        raise NotImplementedError

    def __repr__(self) -> str:
        note = getattr(self.calibration, "verdict_of_other", "")
        says = getattr(self.calibration, "verdict", self.calibration)
        return f"{type(self).__name__} of {type(self.model).__name__}: {says}{note and '. ' + note}"

    def _as(self, kind: type[_Kind], **changes: Any) -> _Kind:
        """Return a predictor of some kind with the state of this one, but for the changes."""
        made = kind.__new__(kind)
        vars(made).update(vars(self) | changes)
        return made


class Calibrated(Batched[_Record, _Made]):
    """Base of the predictors of numbers and of classes."""

    detector = detector
    acquire = acquire

    def to_onnx(self, path: str | os.PathLike[str], example: Any, *, level: float = 0.9) -> Path:
        """Write one ONNX file that `latedrop.load_onnx` reads without torch.

        It gives `mean`, `std`, `low` and `high`; of classes `probabilities`, `label` and scores.

        Args:
            path: of the file.
            example: inputs of a few rows, or a loader that has them. The file takes any number of rows, and all other
                sizes as they are here.
            level: probability content of `low` and `high`.
        """
        example = first_inputs(example, self.model, self.collate)
        self.predict(example)  # also tells what is wrong with the example
        placed, calibration = place(self._rows(example), self.model), self.calibration
        if isinstance(calibration, Calibration) and calibration.method == "sample":
            try_prefix(self._network, placed, calibration.sites, self.readout)
        return export(path, self.model, calibration, self._step, placed, level)  # type: ignore[arg-type]


class Predictor(Calibrated[Calibration, Prediction]):
    """A model with its calibration: call it on inputs, get `Prediction`s. The model itself is untouched.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2))
    >>> uq.predict(x).std.shape, uq.scaled("relaxed").predict(x).std.shape
    (torch.Size([64, 1]), torch.Size([64, 1]))
    """

    kind: ClassVar[type[Prediction]] = Prediction

    def scaled(self, choice: Choice) -> Predictor:
        """Return this predictor with another scale; nothing is run again.

        `choice` is `"optimal"`, `"relaxed"`, a number, or a step of `predictor.calibration.tradeoff()`.
        """
        return self._as(Predictor, calibration=self.calibration.with_choice(choice))

    def conformal(self, data: Any, unpack: Unpack | None = None) -> Predictor:
        """Return this predictor with split-conformal intervals from `data`, which must have served for nothing else."""
        c = self.calibration
        if len(c.output_shape) > 1:
            raise ArgumentError(
                f"expected one value or a vector per example for conformal intervals; found outputs of shape "
                f"{c.output_shape}, whose entries are not exchangeable. Pass a readout, such as a map's sum."
            )
        prediction, target, marks = self._unseen(data, unpack, again=isinstance(c.intervals, ConformalScores))
        scores = residuals(prediction.mean, prediction.variance, target, per_output=prediction.mean.dim() > 1)
        c = replace(c, intervals=conformal(scores, *c.chosen()), seen=merged(c.seen, sketch(marks)))
        return self._as(Predictor, calibration=c)

    def joint(self, data: Any, unpack: Unpack | None = None, *, seed: int = 0) -> JointPredictor:
        """Describe several outputs together: predictions then have `region(level)` and `bands(level)`.

        Args:
            data: labelled rows, in the form of `calibrate`'s, which must have served for nothing else.
            unpack: from a batch to `(inputs, targets)`.
            seed: divides the rows: one half tells how errors go together, the other how far they reach.
        """
        check_outputs(self.calibration)
        made = self._as(JointPredictor)
        prediction, target, _ = made._unseen(data, unpack)
        made.joint_errors = fit_joint(prediction, target, seed)
        return made

    def adapted(self, x_target: Any, data: Any, unpack: Unpack | None = None) -> AdaptedPredictor:
        """Follow rows of another population that has no labels: its scale, and intervals that hold there.

        It holds where the inputs are distributed otherwise and targets given the inputs are not (covariate shift), and
        where labelled rows overlap with the target; `DataError` where they do too little.

        Args:
            x_target: inputs of the target.
            data: labelled rows, in the form of `calibrate`'s, which must have served for nothing else.
            unpack: from a batch of these to `(inputs, targets)`.
        """
        check_adaptable(self.calibration)
        made = self._as(AdaptedPredictor)
        prediction, target, _ = made._unseen(data, unpack)
        like: Any = made.predict(x_target).cpu()
        made.shift, made.calibration = fit_shift(prediction, target, like)
        return made

    def explain(self, x: Any, *, output: int = 0, most: int = 10) -> Explanation:
        """Say where the doubt about one prediction comes from, to first order: shares of sites, and their main units.

        With terms, also the share of every other one and of the floor.

        Args:
            x: inputs of one row, or a data set with one.
            output: which entry of the example's output, counted flat.
            most: how many units to list.
        """
        if most < 0:
            raise ArgumentError(f"expected most, a number of units, to be 0 or more; found {most}.")
        c, network = self.calibration, self.network
        x = self._rows(first_inputs(x, self.model, self.collate))
        try:
            mean, columns = unit_variances(network, x, c.sites, self.readout)
        except Exception as error:
            explain_failure(error, place(x, network.weight, check=False), self.model)
            raise
        if not 0 <= output < len(columns):
            raise ArgumentError(f"expected an output between 0 and {len(columns) - 1}; found {output}.")
        odds: Sequence[float] = odds_by_site(c.sites, c.rate) if c.terms is None else ()
        others: dict[str, float] = {}  # the floor, and terms other than dropout to first order
        if c.terms is not None:
            odds = c.terms.odds([site.name for site in c.sites], output // prod(c.output_shape[1:]))
            added = c.terms.parts(self._context(place(x, network.copy)))
            others = {name: float(part[0].flatten()[output]) for name, part in added.items() if not is_site(name)}
        by_unit = {s.name: columns[output][s.name].double() * o for s, o in zip(c.sites, odds, strict=True)}
        amounts = {name: float(units.sum()) for name, units in by_unit.items()} | others
        total = sum(amounts.values())
        if total == 0:
            raise OutputError(
                "expected a prediction that dropout can move; no unit of any site contributes to it: the variance that "
                "is predicted here is the floor alone."
            )
        largest: list[tuple[str, tuple[int, ...], float]] = []
        for site in c.sites:
            values, places = (part.tolist() for part in by_unit[site.name].topk(min(most, by_unit[site.name].numel())))
            largest += [(site.name, site.place(k), value / total) for value, k in zip(values, places, strict=True)]
        largest.sort(key=lambda unit: -unit[2])
        original = mean if c.target is None else c.target.inverse(mean)
        shares = {name: amount / total for name, amount in amounts.items()}
        return Explanation(float(original.flatten()[output]), shares, tuple(largest[:most]))

    def stream(self, level: float = 0.9, path: str | os.PathLike[str] | None = None, **options: Any) -> Stream:
        """Return intervals that follow the errors as labels arrive, and alarms.

        `options` are those of `latedrop.streams.Stream`: `alarm`, `waiting` and `step`.
        """
        c = self.calibration
        made_with = c.fingerprint if c.target is None else f"{c.fingerprint} {json.dumps(plain(c.target))}"
        return Stream(self.predict, level, path, usual=c.usual(), made_with=made_with, unit=c.target, **options)

    def _context(self, x: Any) -> BatchContext:
        """Return what is measured of a batch, each part when it is first asked for."""
        c, terms = self.calibration, self.calibration.terms
        features, gradients = (None, False) if terms is None else (terms.features, terms.needs_gradients)
        return BatchContext(self._network, x, c.sites, self.readout, features, gradients=gradients)

    def _described(self, prediction: Prediction, rows: BatchContext) -> Prediction:
        """Return a prediction of rows with what else this kind of predictor says of them."""
        return prediction

    def _step(self, x: Any, **options: Any) -> Prediction:
        c, rows = self.calibration, self._context(x)
        if c.terms is not None:
            check_inputs(floating(x))
            mean, variance, novelty, shares = c.terms.predicted(rows)
        else:
            draws = c.draws if c.method == "sample" else 2  # the other methods draw nothing
            drawn = DrawOptions(draws, c.seed, self.readout, self.chunk, c.shared, engine=self.engine)
            (result,) = moments(self._network, x, [c.rate], c.sites, c.method, drawn)
            plain = c.mean == "model" and c.method != "linear"  # which gives the model's own output anyway
            mean = own_output(self._network, x, self.readout).clone() if plain else result.mean
            variance, novelty, shares = result.variance, None, None
        fixed = c.per_output or c.output_shape == (1,)  # else the cells of a map, which may be of another size
        if mean.dim() != len(c.output_shape) + 1 or (fixed and mean.shape[1] != c.output_shape[0]):
            raise DataError(
                f"expected outputs of shape (N, {', '.join(map(str, c.output_shape))}), as in the calibration; "
                f"found {tuple(mean.shape)}. Use the readout that the calibration was made with."
            )
        return self._described(Prediction(mean, variance, c, novelty, shares=shares), rows)

    def _is_whole(self, **options: Any) -> bool:
        return type(self) is Predictor and self.calibration.method != "sample"

    def _truth(self, prediction: Prediction, y: Tensor) -> Tensor:
        return align_target(prediction.mean, y)


class _Derived(Predictor):
    """A predictor that other rows were added to: it has one scale, and no file holds it."""

    flags_rows = False

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse: call it on the predictor that this one was made from."""
        raise ArgumentError(
            f"expected a predictor as calibrate() or load() gives it; found {type(self).__name__}, which has one scale "
            "and which no file holds. Call this on the predictor that it was made from, and make it again."
        )

    save = to_onnx = scaled = conformal = joint = adapted = _refuse


class JointPredictor(_Derived):
    """A predictor of several outputs together, which `Predictor.joint` makes; no file holds it.

    Its predictions are `JointPrediction`s, which also have `covariance`, `region` and `bands`.

    Attributes:
        joint_errors: how the errors of labelled rows go together, and how far they lie.
    """

    kind = JointPrediction
    joint_errors: Joint = None  # type: ignore[assignment]  # until it is fitted

    def _context(self, x: Any) -> BatchContext:
        rows = super()._context(x)
        _ = rows.gradients  # whose pass gives all else, too
        return rows

    def _described(self, prediction: Prediction, rows: BatchContext) -> JointPrediction:
        by_row = correlation_of(rows.gradients)
        return JointPrediction(**vars(prediction), by_row=by_row, joint=self.joint_errors)


class AdaptedPredictor(_Derived):
    """A predictor for rows of a target, which `Predictor.adapted` makes; no file holds it.

    Its predictions are `AdaptedPrediction`s, which also have `weight`.

    Attributes:
        shift: how labelled rows are weighed, and what they tell.
    """

    kind = AdaptedPrediction
    shift: Shift = None  # type: ignore[assignment]  # until it is fitted

    @property
    def effective_rows(self) -> float:
        """How many rows of one weight tell as much as the labelled rows do about the target."""
        return self.shift.effective_rows

    def _context(self, x: Any) -> BatchContext:
        rows = super()._context(x)
        if rows.has_features:
            return rows
        which = Features.all(self.calibration.sites)
        return BatchContext(self._network, x, rows.sites, self.readout, which, gradients=rows.wants_gradients)

    def _described(self, prediction: Prediction, rows: BatchContext) -> AdaptedPrediction:
        compared = [rows.features] if rows.has_features else []
        compared += [] if rows.table is None else [rows.table.to(prediction.output)]
        if not compared:
            raise ArgumentError(
                "expected a model with features, or inputs that are a table, to compare rows by; found neither. "
                "Calibrate with labelled rows of the target."
            )
        features = torch.cat([part.float() for part in compared], 1)
        return AdaptedPrediction(**vars(prediction), features=features, shift=self.shift)


class ClassPredictor(Calibrated[ClassCalibration, ClassPrediction]):
    """A classifier with its calibration: call it on inputs, get `ClassPrediction`s. The model itself is untouched.

    >>> import latedrop
    >>> x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    >>> uq = latedrop.calibrate(net, (x, x[:, :3].argmax(1)), progress=False)
    >>> p = uq.predict(x)
    >>> p.probabilities.shape, p.label.shape, p.novelty.shape
    (torch.Size([90, 3]), torch.Size([90]), torch.Size([90]))
    """

    kind = ClassPrediction

    def predict(self, x: Any, *, rate: float | None = None) -> ClassPrediction:
        """Predict N rows, in batches that fit memory; see `Predictor.predict`.

        Args:
            x: inputs, a `DataLoader`, a data set, or an iterator of batches.
            rate: also measure how much 30 thinned networks at this rate disagree, where the calibration uses no
                dropout of its own: gives `mutual_information`.
        """
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < 1):
            raise ArgumentError(f"expected a rate inside (0, 1); found {rate!r}.")
        return self._predict(x, **({} if rate is None else {"rate": rate}))

    def conformal(
        self, data: Any, score: Score = "lac", *, per_class: bool = False, unpack: Unpack | None = None
    ) -> ClassPredictor:
        """Return this predictor with prediction sets from `data`, which must have served for nothing else.

        Args:
            data: rows and labels, in the form of `calibrate`'s.
            score: `"lac"` makes the smallest sets, `"aps"` covers easy and hard rows more evenly, `"raps"` does so
                without long sets.
            per_class: sets that hold each class as often as they say, and not only the labels as a whole.
            unpack: from a batch to `(inputs, labels)`.
        """
        prediction, labels, _ = self._unseen(data, unpack)
        sets = ClassSets.fit(prediction.probabilities, labels, score, per_class=per_class)
        return self._as(ClassPredictor, calibration=replace(self.calibration, sets=sets))

    def reject(
        self, data: Any, risk: float = 0.01, *, confidence: float = 0.95, unpack: Unpack | None = None
    ) -> ClassPredictor:
        """Return this predictor with the most lenient rule under which less than `risk` of the kept rows are wrong.

        It does so with probability `confidence` over the rows of `data`, which must have served for nothing else.
        Predictions then have `kept()`; the rule is `calibration.rule`, and saved with it.
        """
        prediction, labels, _ = self._unseen(data, unpack)
        rule = rejection(prediction.confidence, prediction.label == labels, risk, confidence)
        return self._as(ClassPredictor, calibration=replace(self.calibration, rule=rule))

    def _truth(self, prediction: ClassPrediction, y: Tensor) -> Tensor:
        if self.calibration.maps:
            raise ArgumentError(
                "expected a classifier of rows for prediction sets, rejection and judgements; found maps, whose pixels "
                "depend on each other. Judge images by predict(...).image_scores."
            )
        return as_labels(y, self.calibration.classes, (len(prediction),))

    def _is_whole(self, **options: Any) -> bool:
        return not self.calibration.maps and self.calibration.rate is None and not options

    def _step(self, x: Any, *, rate: float | None = None) -> ClassPrediction:  # type: ignore[override]
        c = self.calibration
        check_inputs(floating(x))
        rows = BatchContext(self._network, x, c.sites, self.readout, c.features, of=largest_logit)
        novelty = c.novelty(rows)  # first, as the same pass gives the logits
        logits = as_logits(rows.mean, maps=c.maps)
        if logits.shape[1] != c.classes:
            raise DataError(
                f"expected logits of {c.classes} classes, as in the calibration; found {logits.shape[1]}. Use the "
                "readout that the calibration was made with."
            )
        logits = logits.float() if c.maps else logits.double()
        if novelty is not None:
            beyond = ~(novelty < LARGEST)
            if any_true(beyond):
                raise DataError(
                    f"expected inputs whose features fit a number; found {int(beyond.sum())} of {len(beyond)} rows "
                    "whose do not. Leave these rows out.",
                    rows=beyond,
                )
            novelty = novelty.to(logits)
        temperatures = c.fit.temperatures(novelty, logits).reshape(-1, *[1] * (logits.dim() - 1))
        logs = torch.log_softmax(logits / temperatures, 1)
        rate = c.rate if c.rate is not None else rate
        if rate is None:
            return ClassPrediction(logs, logits, c, novelty)
        if c.maps:
            return ClassPrediction(logs, logits, c, novelty, self._information_of_maps(x, rate, logits))
        outputs = self._drawn(x, rate, self.readout, keep=True).outputs
        assert outputs is not None
        draws = torch.stack([as_logits(part) for part in outputs]).to(logits)
        # At one temperature for all rows: at that of a strange one all draws would agree that nothing is known.
        disagreement = information(torch.log_softmax(draws / c.alone, 2))
        mean = logs if c.rate is None else c.fit.log_probabilities(draws, novelty)
        return ClassPrediction(mean, logits, c, novelty, disagreement)

    def _information_of_maps(self, x: Any, rate: float, logits: Tensor) -> Tensor:
        """Return the mutual information `H(mean p) - mean H(p)` of draws, `(N, H, W)`; only means are stored."""
        c, least = self.calibration, torch.finfo(logits.dtype).tiny

        def read(output: Any) -> Tensor:
            logs = torch.log_softmax(as_logits(part_of(output, self.readout), maps=True).to(logits) / c.alone, 1)
            return torch.cat([logs.exp(), entropy(logs.movedim(1, -1))[:, None]], 1)

        mean, each = self._drawn(x, rate, read).mean.split([c.classes, 1], 1)
        together = entropy(mean.clamp_min(least).log().movedim(1, -1))
        doubt: Tensor = (together - each[:, 0]).clamp_min(0)
        return doubt

    def _drawn(self, x: Any, rate: float, readout: Readout, *, keep: bool = False) -> Moments:
        """Run thinned networks; compiled programs have moments alone, so that classes run without these."""
        c, engine = self.calibration, self.engine
        engine = "auto" if engine in PROGRAMS else engine
        options = DrawOptions(c.draws or _DRAWS, c.seed, readout, self.chunk, keep=keep, engine=engine)
        return sample_rates(self._network, x, [rate], c.sites, options)[0]


def explain_failure(error: Exception, x: Any, model: nn.Module, run: Callable[[Any], object] | None = None) -> None:
    """Raise `DataError` where a model failed on inputs that were placed, and say what may be wrong with them.

    `run` predicts rows; it tells whether the inputs are a single image, without the axis that counts rows.
    """
    known = isinstance(error, LatedropError)
    if known:
        check_inputs(floating(x))  # which says how many of all rows are not finite
    elif not isinstance(error, _OF_INPUTS) or out_of_memory(error):
        return
    shapes = [tuple(value.shape) for value in tensors(x)]
    image = len(shapes) == 1 and len(shapes[0]) > 2 and _runs(run, map_values(x, lambda value: value[None]))
    if image or (shapes and all(len(shape) == 1 for shape in shapes)):
        raise DataError(
            f"expected rows as inputs, their first axis counting them; found shape {', '.join(map(str, shapes))}, "
            "which looks like a single row. Pass x[None] to predict one row."
        ) from error
    if not known:
        check_dtypes(x, model, error)
        raise DataError(
            f"expected inputs that the model takes; it raised {type(error).__name__}: {error}. Pass inputs of the "
            "shapes and dtypes that it was calibrated with; batches in a list, or with targets, go to "
            "predict_batches(batches, unpack)."
        ) from error


def _runs(run: Callable[[Any], object] | None, x: Any) -> bool:
    try:
        return run is not None and run(x) is not None
    except Exception:  # whatever it is, the first error is the one to report
        return False


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    readout: Readout = None,
    *,
    collate: Collate = None,
    terms: Sequence[Term] = (),
) -> Any:
    """Bring a saved calibration back to its model.

    With the same `terms`, where it was made with some of your own.

    Raises `FileError` where the file is missing, truncated or edited, or where the model lacks its sites or the
    readout that it was made with; warns where the weights are not the ones that were calibrated. With `collate`, which
    a file cannot hold, the predictor takes lists of items.

    >>> import tempfile, latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2))
    >>> path = os.path.join(tempfile.mkdtemp(), "net.latedrop.json")
    >>> _ = uq.save(path)
    >>> bool((load(path, net).predict(x).std == uq.predict(x).std).all())
    True
    """
    check_module(model)
    text = read_text(path, "a calibration file")
    with naming(path):
        classes = f'"{CLASSES.key}"' in text[:100]
        calibration: Any = CLASSES.from_json(text) if classes else CALIBRATION.from_json(text)
    wrong = missing_sites(model, calibration.sites, same_type=True)
    if wrong:
        raise FileError(
            f"expected a model with the sites of {path}; its layers {wrong} are missing or of another type. "
            "Load the model that was calibrated, or calibrate this one."
        )
    check_belongs(path, calibration, model, readout)
    if isinstance(calibration, Calibration):
        if calibration.terms is not None:
            calibration = replace(calibration, terms=calibration.terms.with_terms(terms, path))
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in model.parameters()) else torch.float32
        if not bool(calibration.variance(torch.tensor([calibration.least_variance], dtype=dtype)).isfinite().all()):
            raise FileError(
                f"expected scales and floors in {path} that give a finite variance; found {calibration.scales} and "
                f"{calibration.floors}. The file was edited, or its model was in float64: calibrate again."
            )
    return (ClassPredictor if classes else Predictor)(model, calibration, readout, collate=collate)


def identity_of(model: nn.Module, readout: Readout, columns: Names | None) -> dict[str, Any]:
    """Return the fields of every record by which it is known to belong to a model and its inputs."""
    return {
        "readout": None if callable(readout) else readout,
        "custom_readout": getattr(readout, "__qualname__", type(readout).__name__) if callable(readout) else None,
        "fingerprint": fingerprint(model),
        "columns": None if columns is None else {key: tuple(names) for key, names in columns.items()},
    }


def check_belongs(path: str | os.PathLike[str], calibration: Any, model: nn.Module, readout: Readout) -> None:
    """Raise `FileError` where the readout that a file was made with is missing; warn where the weights are others."""
    if calibration.custom_readout is not None and readout is None:
        raise FileError(
            f"expected readout=, as {path} was made with the function {calibration.custom_readout!r}, which a file "
            "cannot hold. Pass the same function when loading."
        )
    if fingerprint(model) != calibration.fingerprint:
        warn(
            f"the model's weights are not those that {path} was made with: what it says may not hold. Calibrate again "
            "after training.",
            LatedropWarning,
            stacklevel=3,
        )
