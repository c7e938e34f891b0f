"""Make a Lightning callback with which `Trainer.predict` returns means, deviations and intervals, or probabilities.

Dropout is injected while a batch is predicted, not left on in the module, so that Lightning, which puts the module in
eval mode, has nothing to switch off. The module is not written to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from latedrop.data.batches import inputs_of
from latedrop.errors import ArgumentError, LatedropError
from latedrop.metrics.levels import checked_level
from latedrop.prediction.predictor import ClassPredictor, Predictor
from latedrop.torch_private import bare

__all__ = ["predict_callback"]


def predict_callback(
    predictor: Predictor | ClassPredictor, *, level: float = 0.9, unpack: Callable[[Any], Any] | None = None
) -> Any:
    """Make a callback with which `Trainer.predict` returns a dict per batch: `mean`, `std`, `low`, `high`, on the CPU.

    For a classifier the dict is `ClassPrediction.to_dict()`: `label`, `confidence`, `probabilities` and others.

    The module's own `predict_step` runs too, once per batch, and its result is replaced. Put processing after the
    network into the predictor's readout. With `return_predictions=False` nothing is computed.

    Args:
        predictor: from `calibrate` or `load`, of the LightningModule or of a network inside it.
        level: level of the interval from `low` to `high`, or of the prediction sets.
        unpack: maps a batch to the inputs; by default the batch, or the first part where it can only be a pair of
            inputs and targets.

    Returns:
        A `Callback` of lightning, or of pytorch-lightning where only that is installed.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if find_spec(name.partition(".")[0]) is not None:
            library = import_module(f"{name}.callbacks").Callback
            return type("PredictCallback", (_Hooks, library), {})(predictor, checked_level(level), unpack)
    raise LatedropError("expected lightning; it is not installed. Run: pip install lightning")


class _Hooks:
    """The hooks of the callback; its other base is the library's own class."""

    def __init__(self, predictor: Any, level: float, unpack: Callable[[Any], Any] | None) -> None:
        self.predictor, self.level, self.unpack = predictor, level, unpack
        self._predictions: list[list[Any]] = []

    def __reduce__(self) -> Any:
        return partial(predict_callback, level=self.level, unpack=self.unpack), (self.predictor,)

    def on_predict_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Check that the predictor belongs to the module."""
        if not any(module is bare(self.predictor.model) for module in pl_module.modules()):
            raise ArgumentError(
                f"expected a predictor of {type(pl_module).__name__} or of a network inside it; found one of another "
                f"{type(bare(self.predictor.model)).__name__}. Calibrate the module that the trainer predicts with."
            )
        self._predictions = []

    def on_predict_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Predict the batch again, with uncertainty."""
        if trainer.predict_loop.return_predictions:
            inputs = inputs_of(batch, self.predictor.model) if self.unpack is None else self.unpack(batch)
            self._predictions += [[] for _ in range(dataloader_idx + 1 - len(self._predictions))]
            self._predictions[dataloader_idx].append(self.predictor.predict(inputs).cpu().to_dict(self.level))

    def on_predict_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Replace the module's results by ours."""
        loaders = trainer.predict_loop.predictions
        loaders = [loaders] if len(self._predictions) == 1 else loaders
        for outputs, predictions in zip(loaders if self._predictions else (), self._predictions, strict=True):
            outputs[:] = predictions
        self._predictions = []
