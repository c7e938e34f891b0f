"""The calibrated model of numbers: `calibrate` makes it, `load` brings it back, `predict` uses it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from latedrop.calibration.intervals import Conformal, residuals
from latedrop.calibration.measure import moments
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.seen import marks_of, merged, sketch, warn_of_fitted_rows
from latedrop.data.arrays import check_inputs, floating
from latedrop.data.batches import Batches
from latedrop.data.datasets import Unpack, is_loader, only_inputs
from latedrop.data.items import as_items
from latedrop.data.names import in_order, pair_in_order
from latedrop.dropout.moments import Sampling as DrawOptions
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics import align_target
from latedrop.prediction.adapted import AdaptedSteps, check_adaptable, fit_shift
from latedrop.prediction.calibrated import Calibrated
from latedrop.prediction.explaining import explained
from latedrop.prediction.joint import JointSteps, check_outputs, fit_joint
from latedrop.prediction.prediction import Explanation, Prediction
from latedrop.records import plain
from latedrop.streams import Stream
from latedrop.streams.tracking import STEP
from latedrop.terms import BatchContext

__all__ = ["AdaptedPredictor", "JointPredictor", "Predictor"]

_Kind = TypeVar("_Kind", bound="Predictor")


class Predictor(Calibrated[Calibration, Prediction]):
    """A model with its calibration: call it on inputs, get `Prediction`s. The model itself is untouched.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2))
    >>> uq.predict(x).std.shape, uq.scaled("relaxed").predict(x).std.shape
    (torch.Size([64, 1]), torch.Size([64, 1]))
    """

    kind = Prediction

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
        for x, y in Batches(self.batch_size, unpack, self.collate).read(data, self.model):
            part = self.predict(x).in_model_unit()
            target = align_target(part.mean, y if calibration.target is None else calibration.target.forward(y))
            columns.append(residuals(part.mean, part.variance, target, per_output=part.mean.dim() > 1))
            marks.append(marks_of(part.mean, target))
        if not columns:
            raise DataError("expected at least one row for conformal intervals; found none.")
        if not isinstance(calibration.intervals, Conformal):  # whose rows may come again
            warn_of_fitted_rows(calibration.seen, np.concatenate(marks), stacklevel=2)
        scales, floors = calibration.chosen()
        joined = [torch.cat(column) for column in zip(*columns, strict=True)]
        seen = merged(calibration.seen, sketch(np.concatenate(marks)))
        return self._with(replace(calibration, intervals=Conformal.fit(joined, scales, floors), seen=seen))

    def joint(self, data: Any, unpack: Unpack | None = None, *, seed: int = 0) -> JointPredictor:
        """Describe several outputs together: predictions then have `region(level)` and `bands(level)`.

        Args:
            data: labelled rows, in the form of `calibrate`'s, which must have served for nothing else.
            unpack: from a batch to `(inputs, targets)`.
            seed: divides the rows: one half tells how errors go together, the other how far they reach.
        """
        check_outputs(self.calibration)
        made = self._become(JointPredictor)
        made.joint_errors = fit_joint(made, data, unpack, seed)
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
        made = self._become(AdaptedPredictor)
        made.shift, made.calibration = fit_shift(made, x_target, data, unpack)
        return made

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
        x = as_items(in_order(x, self.calibration.columns), self.collate, self.calibration.sites)
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
        made_with = c.fingerprint if c.target is None else f"{c.fingerprint} {json.dumps(plain(c.target))}"
        known: dict[str, Any] = {"usual": c.usual(), "made_with": made_with, "unit": c.target}
        return Stream(self.predict, level, path, **options, **known)

    def _step(self, x: Any, **options: Any) -> Prediction:
        c = self.calibration
        if c.terms is not None:
            check_inputs(floating(x))
            rows = BatchContext(
                self._network, x, c.sites, self.readout, c.terms.features, gradients=c.terms.needs_gradients
            )
            mean, variance, novelty, shares = c.terms.predicted(rows)
            c.check_outputs(mean)
            return Prediction(mean, variance, c, novelty, shares=shares)
        draws = c.draws if c.method == "sample" else 2  # the other methods draw nothing
        drawn = DrawOptions(draws, c.seed, self.readout, self.chunk, c.shared, engine=self.engine)
        (found,) = moments(self._network, x, [c.rate], c.sites, c.method, drawn)
        own = c.mean == "model" and c.method != "linear"  # which gives the model's own output anyway
        mean = own_output(self._network, x, self.readout).clone() if own else found.mean
        c.check_outputs(mean)
        return Prediction(mean, found.variance, c)

    def _is_whole(self, **options: Any) -> bool:
        return self.calibration.method != "sample"

    def _truth(self, prediction: Prediction, y: Tensor) -> Tensor:
        return align_target(prediction.mean, y)

    def _become(self, kind: type[_Kind]) -> _Kind:
        """Return the same calibrated model as a predictor of another kind."""
        if type(self) is not Predictor:
            raise ArgumentError(
                f"expected a predictor as calibrate() or load() gives it; found {type(self).__name__}. Start again "
                "from that one."
            )
        options: dict[str, Any] = {"batch_size": self.batch_size, "chunk": self.chunk, "engine": self.engine}
        options |= {"collate": self.collate, "cross_validated": self.cross_validated}
        return kind(self.model, self.calibration, self.readout, **options)


class JointPredictor(JointSteps, Predictor):  # type: ignore[misc]
    """A predictor of several outputs together, which `Predictor.joint` makes; `save` writes the calibration alone.

    Attributes:
        joint_errors: how the errors of labelled rows go together, and how far they lie.
    """


class AdaptedPredictor(AdaptedSteps, Predictor):  # type: ignore[misc]
    """A predictor for rows of a target, which `Predictor.adapted` makes; no file holds it.

    Attributes:
        shift: how labelled rows are weighed, and what they tell.
    """
