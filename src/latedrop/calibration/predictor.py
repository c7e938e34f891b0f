"""The calibrated model: `calibrate` makes it, `load` brings it back, `predict` uses it.

`calibrate` reads top to bottom: its arguments are one `Setup`, `search` measures the validation data and writes the
`Calibration`, and a `Predictor` is the model with that record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.calibration.batches import Unpack, batches, inputs_of, row_batches
from latedrop.calibration.fit import Loss
from latedrop.calibration.intervals import Conformal, IntervalKind
from latedrop.calibration.measuring import Method, moments
from latedrop.calibration.prediction import Explanation, Prediction
from latedrop.calibration.rate_fit import residuals
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.search import fingerprint, search
from latedrop.calibration.setup import PAPER_RATES, Setup
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError, LatedropWarning, OutputError
from latedrop.files import readable, write_aside
from latedrop.metrics import align_target
from latedrop.model.arrays import place
from latedrop.model.calling import Readout
from latedrop.model.finding import Select
from latedrop.model.items import Collate, as_items
from latedrop.model.sites import Kind, Rate, Site, missing_sites, odds_by_site
from latedrop.variance.engine.options import Engine, Sampling
from latedrop.variance.first_order import unit_variances
from latedrop.variance.moments import out_of_memory
from latedrop.variance.sampling import own_output

__all__ = ["Explanation", "Prediction", "Predictor", "calibrate", "load"]


def calibrate(
    model: nn.Module,
    data: Any,
    rates: Sequence[Rate] = PAPER_RATES,
    draws: int = 100,
    criterion: Literal["scaled", "unscaled"] = "scaled",
    *,
    method: Method = "sample",
    mean: Literal["draws", "model"] | None = None,
    floor: bool = False,
    per_site: bool = False,
    loss: Loss = "nll",
    per_output: bool | None = None,
    scale: Choice = "optimal",
    intervals: IntervalKind | None = None,
    conformal_data: Any = None,
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
) -> Predictor:
    """Choose the dropout rate and the scale of the variance on validation data.

    Args:
        model: a trained module; it is left as it was.
        data: validation data that the model was not fitted to: a pair `(x, y)` of tensors, arrays or tables, or an
            iterable of such pairs (a `DataLoader`), read once.
        rates: the rates to try; each a float or a mapping from name patterns to floats.
        draws: thinned networks per rate.
        criterion: `"scaled"` picks the rate by the NLL of the scaled variance, `"unscaled"` of the raw one.
        method: `"sample"` draws thinned networks; `"linear"` takes the first-order variance, for all rates at once and
            without draws; `"propagate"` carries mean and variance through the layers, for dense outputs.
        mean: `"draws"`: predict the mean over draws; `"model"`: keep the model's own prediction, and take only
            the variance from the draws. By default `"draws"`, and `"model"` with `method="linear"`.
        floor: also fit a constant, `scale · variance + floor`.
        per_site: fit a rate for each site, with `method="linear"`.
        loss: what that fit minimises: `"nll"`, or `"crps"`, which outliers move less.
        per_output: True: each index of axis 1 has its own scale and floor; False: one for all. By default True for
            outputs `(N, K)` and `(N, C, H, W)`, False for `(N, H, W)`.
        scale: which scale predictions use: `"optimal"`, `"relaxed"` or a number. It can be changed later.
        intervals: `"gaussian"`, `"isotonic"` or `"conformal"`; the last where `conformal_data` is given.
        conformal_data: held-out data, in the form of `data`, for split-conformal intervals.
        sites: from `find_sites`; found on the first batch where None.
        select: narrows the sites, see `find_sites`.
        kind: `"element"` or `"channel"` masks, see `find_sites`.
        readout: from the raw output to the quantity that `y` holds: a function, or the name or index of a part.
        seed: fixes all masks.
        shared: False gives every example its own masks.
        batch_size: rows that run at once, for a pair of arrays.
        chunk: draws that run at once; chosen to fit memory where None.
        engine: how draws are run, see `sample`; the predictor runs them so, too.
        unpack: from a batch of the iterable to `(inputs, targets)`.
        collate: from a list of items to what `model` takes, where the inputs are lists of objects such as graphs; the
            predictor takes such lists, too.
        progress: show a bar on work longer than two seconds.

    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    >>> uq = calibrate(net, (x, x**2), rates=[0.1, 0.3], draws=20)
    >>> low, high = uq.predict(x).interval(0.9)
    >>> low.shape
    torch.Size([64, 1])
    """
    setup = Setup(
        rates=rates,
        draws=draws,
        criterion=criterion,
        method=method,
        mean=mean,
        floor=floor,
        per_site=per_site,
        loss=loss,
        per_output=per_output,
        scale=scale,
        intervals=intervals,
        conformal_data=conformal_data,
        sites=sites,
        select=select,
        kind=kind,
        readout=readout,
        seed=seed,
        shared=shared,
        batch_size=batch_size,
        chunk=chunk,
        engine=engine,
        unpack=unpack,
        collate=collate,
        progress=progress,
    ).checked()
    options: dict[str, Any] = {"batch_size": batch_size, "chunk": chunk, "engine": engine, "collate": collate}
    found = Predictor(model, search(model, data, setup), readout, **options)
    return found if conformal_data is None else found.conformal(conformal_data, unpack)


class Predictor:
    """A model with its calibration: call it on inputs, get `Prediction`s. The model itself is untouched."""

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration,
        readout: Readout = None,
        *,
        batch_size: int = 256,
        chunk: int | None = None,
        engine: Engine = "auto",
        collate: Collate = None,
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.readout = calibration.readout if readout is None else readout
        self.batch_size = batch_size
        self.chunk = chunk
        self.engine: Engine = engine
        self.collate = collate

    def __call__(self, x: Any) -> Prediction:
        """Same as `predict`."""
        return self.predict(x)

    def predict(self, x: Any) -> Prediction:
        """Predict N examples, in batches that fit memory; with `collate`, the items of a list.

        The batch size does not change the result, unless every example has its own masks (`shared=False`).
        """
        x = place(as_items(x, self.collate), self.model)
        try:
            parts = [self._moments(part) for part in row_batches(x, self.batch_size)]
        except LatedropError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            if out_of_memory(error):
                raise
            raise DataError(
                f"expected inputs that the model takes; it raised {type(error).__name__}: {error}. Pass inputs of the "
                "shapes and dtypes that it was calibrated with; where a batch holds targets too, pass unpack=."
            ) from error
        if not parts:
            raise DataError("expected at least one row to predict; found none.")
        mean, variance = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return Prediction(mean, variance, self.calibration)

    def predict_batches(
        self, loader: Iterable[Any], unpack: Callable[[Any], Any] | None = None
    ) -> Iterator[Prediction]:
        """Yield one `Prediction` per batch; `unpack` takes the inputs out of a batch, as `lambda b: b[0]` does.

        Without it a batch is inputs alone, or a pair (inputs, targets) where the model takes one input only; with
        `collate`, a list of items, or a tuple of it and targets.
        """

        def inputs(batch: Any) -> Any:
            if self.collate is None:
                return inputs_of(batch, self.model)
            return batch[0] if isinstance(batch, tuple) and len(batch) == 2 else batch

        for batch in loader:
            yield self.predict((unpack or inputs)(batch))

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
        for x, y in batches(data, self.model, batch_size=self.batch_size, unpack=unpack, collate=self.collate):
            part = self.predict(x)
            target = align_target(part.mean, y)
            columns.append(residuals(part.mean, part.variance, target, per_output=part.mean.dim() > 1))
        if not columns:
            raise DataError("expected conformal_data with at least one row; found none.")
        scales, floors = calibration.chosen()
        joined = [torch.cat(column) for column in zip(*columns, strict=True)]
        return self._with(replace(calibration, intervals=Conformal.fit(joined, scales, floors)))

    def explain(self, x: Any, *, output: int = 0, most: int = 10) -> Explanation:
        """Where the doubt about one prediction comes from, to first order: the share of each site and its main units.

        Args:
            x: inputs of one row.
            output: which entry of the example's output, counted flat.
            most: how many units to list.
        """
        calibration = self.calibration
        x = as_items(x, self.collate)
        mean, columns = unit_variances(self.model, x, calibration.sites, self.readout)
        if not 0 <= output < len(columns):
            raise ArgumentError(f"expected an output between 0 and {len(columns) - 1}; found {output}.")
        odds = odds_by_site(calibration.sites, calibration.rate).tolist()
        parts = {s.name: columns[output][s.name].double() * o for s, o in zip(calibration.sites, odds, strict=True)}
        total = sum(float(part.sum()) for part in parts.values())
        if total == 0:
            raise OutputError(
                "expected a prediction that dropout can move; no unit of any site contributes to it: the variance that "
                "is predicted here is the floor alone."
            )
        units = []
        for site in calibration.sites:
            values, places = parts[site.name].topk(min(most, parts[site.name].numel()))
            units += [
                (site.name, site.place(place), value / total)
                for value, place in zip(values.tolist(), places.tolist(), strict=True)
            ]
        units.sort(key=lambda unit: -unit[2])
        shares = {name: float(part.sum()) / total for name, part in parts.items()}
        return Explanation(float(mean.flatten()[output]), shares, tuple(units[:most]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON; the model's weights are not in it."""
        write_aside(path, self.calibration.to_json().encode())

    def __repr__(self) -> str:
        return f"Predictor of {type(self.model).__name__}: {self.calibration}"

    def _with(self, calibration: Calibration) -> Predictor:
        options: dict[str, Any] = {"batch_size": self.batch_size, "chunk": self.chunk, "engine": self.engine}
        return Predictor(self.model, calibration, self.readout, collate=self.collate, **options)

    def _moments(self, x: Any) -> tuple[Tensor, Tensor]:
        c = self.calibration
        draws = c.draws if c.method == "sample" else 2  # the other methods draw nothing
        options = Sampling(draws, c.seed, self.readout, self.chunk, c.shared, engine=self.engine)
        (found,) = moments(self.model, x, [c.rate], c.sites, c.method, options)
        own = c.mean == "model" and c.method != "linear"  # which gives the model's own output anyway
        mean = own_output(self.model, x, self.readout) if own else found.mean
        if mean.dim() != len(c.output_shape) + 1 or (c.per_output and mean.shape[1] != c.output_shape[0]):
            raise DataError(
                f"expected outputs of shape (N, {', '.join(map(str, c.output_shape))}), as in the calibration; found "
                f"{tuple(mean.shape)}. Use the readout that the calibration was made with."
            )
        return mean, found.variance


def load(
    path: str | os.PathLike[str], model: nn.Module, readout: Readout = None, *, collate: Collate = None
) -> Predictor:
    """Bring a saved calibration back to its model.

    Raises `FileError` where the file is missing, truncated or edited, or where the model lacks its sites or the
    readout that it was made with; warns where the weights are not the ones that were calibrated. With `collate`, which
    a file cannot hold, the predictor takes lists of items.
    """
    try:
        with readable(path, "a calibration file"):
            calibration = Calibration.from_json(Path(path).read_text(encoding="utf-8"))
    except (DataError, TypeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}") from error
    wrong = missing_sites(model, calibration.sites, same_type=True)
    if wrong:
        raise FileError(
            f"expected a model with the sites of {path}; its layers {wrong} are missing or of another type. "
            "Load the model that was calibrated, or calibrate this one."
        )
    if calibration.custom_readout is not None and readout is None:
        raise FileError(
            f"expected readout=, as {path} was made with the function {calibration.custom_readout!r}, which a file "
            "cannot hold. Pass the same function to load()."
        )
    if fingerprint(model) != calibration.fingerprint:
        warn(
            f"the model's weights are not those that {path} was made with: its intervals may not hold. "
            "Calibrate again after training.",
            LatedropWarning,
            stacklevel=2,
        )
    return Predictor(model, calibration, readout, collate=collate)
