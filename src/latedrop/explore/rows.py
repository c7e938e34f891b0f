"""What the page shows: rows with their predictions, the intervals of any level, slices, and shares of the variance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import ArgumentError, LatedropError
from latedrop.evaluation.evaluation import constant_std
from latedrop.evaluation.groups import Floats, Held, Inputs, by_deviation, by_input, by_strangeness
from latedrop.evaluation.judgement import Judgement
from latedrop.lazy import lazy
from latedrop.metrics.levels import central_quantile, checked_level
from latedrop.prediction.prediction import Prediction
from latedrop.prediction.predictor import Predictor

__all__ = ["Explored", "check_shape"]

_SHOWN = 4000
_UNITS = 5


def check_shape(prediction: Prediction) -> None:
    """`ArgumentError` where outputs are maps: a page of rows has no place for them."""
    if prediction.mean.dim() > 2:
        raise ArgumentError(
            f"expected one number, or some, for each row; found maps of shape {tuple(prediction.mean.shape[1:])}. Name "
            "what to look at: --readout package.module:function, such as the map's sum."
        )


@dataclass(frozen=True)
class Explored:
    """Test rows, predicted and judged.

    Attributes:
        title: of the page.
        predictor: gives the shares of a row's variance.
        prediction: of all rows, on the CPU.
        target: their true values, of the same shape.
        judgement: of the same rows; the rows of its `worst` are counted from 0.
        places: what rows are called, such as the lines of a file.
        place: what these are, such as "line".
        columns: inputs to look along.
        row: the inputs of one row as the model takes them, by its number.
    """

    title: str
    predictor: Predictor
    prediction: Prediction
    target: Tensor
    judgement: Judgement
    places: Sequence[int | str]
    place: str
    columns: Inputs
    row: Callable[[int], Any]

    def about(self) -> dict[str, Any]:
        """What does not depend on the level."""
        return {
            "title": self.title,
            "rows": len(self.target),
            "level": self.judgement.level,
            "place": self.place,
            "outputs": [{"name": output.name, "unit": output.unit} for output in self.judgement.outputs],
            "shown": self._shown.tolist(),
            "places": [self.places[row] for row in self._shown],
            "columns": {name: _plain(self.columns.at(name, self._shown)) for name in self.columns.columns},
            "strangeness": _plain(self._strange[self._shown]) if self._strange is not None else None,
        }

    def at(self, output: int, level: float) -> dict[str, Any]:
        """Intervals of the rows that are shown, coverage of all rows and of slices, and the rows furthest off."""
        held, low, high = self._held(output, checked_level(level))
        mean, std, target = self._columns(output)
        shown = {"mean": mean, "std": std, "target": target, "low": low, "high": high}
        slices = [by_deviation(held), *by_input(held, self.columns, {"prediction": mean}, most=None)]
        slices += [] if self._strange is None else [by_strangeness(held, self._strange)]
        judged = self.judgement.outputs[output]
        return {
            "level": level,
            "verdict": "" if judged.verdict is None else str(judged.verdict),
            "grade": "" if judged.verdict is None else judged.verdict.grade,
            "coverage": float(held.inside.mean()),
            "coverage_error": (level * (1 - level) / len(mean)) ** 0.5,
            "constant": None if held.constant is None else float(held.constant.mean()),
            "width": float((high - low).mean()),
            **{name: _plain(values[self._shown]) for name, values in shown.items()},
            "slices": [{"name": groups[0].name, "groups": [asdict(g) for g in groups]} for groups in slices if groups],
            "worst": [
                {"row": one["row"], "place": self.places[one["row"]], "target": one["target"], "mean": one["mean"],
                 "low": float(low[one["row"]]), "high": float(high[one["row"]]), "deviations": one["deviations"]}
                for one in judged.worst
            ],
        }  # fmt: skip

    def of(self, row: int, output: int) -> dict[str, Any]:
        """One row: its inputs, and where the variance of its prediction comes from."""
        if not 0 <= row < len(self.target):
            raise ArgumentError(f"expected a row between 0 and {len(self.target) - 1}; found {row}.")
        at = np.array([row])
        found: dict[str, Any] = {
            "row": row,
            "place": self.places[row],
            "inputs": {name: _plain(self.columns.at(name, at))[0] for name in self.columns.columns},
            "strangeness": None if self._strange is None else float(self._strange[row]),
            "shares": {},
            "units": [],
            "why": "",
        }
        try:
            explained = self.predictor.explain(self.row(row), output=output, most=_UNITS)
        except LatedropError as error:  # such as a variance that is the floor alone
            return {**found, "why": str(error)}
        units = [
            {"site": site, "place": list(place), "share": share} for site, place, share in explained.units if share > 0
        ]
        return {**found, "shares": explained.sites, "units": units}

    def _columns(self, output: int) -> tuple[Floats, Floats, Floats]:
        if not 0 <= output < len(self.judgement.outputs):
            raise ArgumentError(f"expected an output between 0 and {len(self.judgement.outputs) - 1}; found {output}.")
        p = self.prediction
        mean, std, target = (_column(part, output) for part in (p.mean, p.std, self.target))
        return mean, std, target

    def _held(self, output: int, level: float) -> tuple[Held, Floats, Floats]:
        mean, std, target = self._columns(output)
        low, high = (_column(end, output) for end in self.prediction.interval(level))
        error, same = target - mean, None
        if self.prediction.calibration.constant is not None:
            same = np.abs(error) <= central_quantile(level) * _column(constant_std(self.prediction), output)
        inside = (low <= target) & (target <= high)
        return Held(level, np.arange(len(mean)), error, std, inside, same), low, high

    @lazy
    def _shown(self) -> npt.NDArray[np.intp]:
        """An even choice of the rows, and the worst."""
        count = len(self.target)
        even = np.linspace(0, count - 1, min(count, _SHOWN)).round().astype(np.intp)
        worst = [one["row"] for output in self.judgement.outputs for one in output.worst]
        return np.unique(np.concatenate([even, np.array(worst, dtype=np.intp)]))

    @lazy
    def _strange(self) -> Floats | None:
        strange = self.prediction.strangeness
        return None if strange is None else strange.double().numpy()


def _column(part: Tensor, output: int) -> Floats:
    found: Floats = torch.as_tensor(part).detach().cpu().double().reshape(len(part), -1)[:, output].numpy()
    return found


def _plain(values: Floats) -> list[float | None]:
    """Numbers for JSON, of six digits; None for those that are none."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
