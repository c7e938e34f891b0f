"""Predictions with uncertainty beside a Hugging Face `Trainer`: its data loader and collator, our predictor.

`predict_with` gives what `Trainer.predict` gives, and after it std, low and high, or probabilities.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from latedrop import metrics
from latedrop.errors import ArgumentError, DataError
from latedrop.evaluation.evaluation import likelihood
from latedrop.evaluation.judgement import judge_classes
from latedrop.prediction.prediction import ClassPrediction, Prediction
from latedrop.prediction.predictor import ClassPredictor, Predictor
from latedrop.wrappers import bare

__all__ = ["ClassOutput", "UncertainOutput", "predict_with"]

Array = npt.NDArray[Any]


class UncertainOutput(NamedTuple):
    """The fields of transformers' `PredictionOutput`, then the uncertainty; arrays `(N, ...)`."""

    predictions: Array
    label_ids: Array | None
    metrics: dict[str, float]
    std: Array
    low: Array
    high: Array
    novelty: Array | None = None


class ClassOutput(NamedTuple):
    """The fields of transformers' `PredictionOutput`, then what a calibrated classifier knows; arrays `(N, ...)`.

    `predictions` are the model's logits, as `Trainer.predict` gives them.
    """

    predictions: Array
    label_ids: Array | None
    metrics: dict[str, float]
    probabilities: Array
    label: Array
    confidence: Array
    entropy: Array
    novelty: Array | None = None
    mutual_information: Array | None = None
    set: Array | None = None
    kept: Array | None = None


def predict_with(
    trainer: Any,
    dataset: Any,
    predictor: Predictor | ClassPredictor,
    *,
    level: float = 0.9,
    metric_key_prefix: str = "test",
) -> Any:
    """Predict a data set with the trainer's collator and batch size, and the predictor's uncertainty.

    Gives an `UncertainOutput`, or a `ClassOutput` of a classifier. Where the data set has labels, `metrics` holds what
    the trainer's `compute_metrics` makes of the means or logits, and the NLL and the coverage of the intervals; of a
    classifier the NLL, the accuracy and the calibration error.

    Args:
        trainer: a `transformers.Trainer`; it does not have to be trained with.
        dataset: as for `Trainer.predict`.
        predictor: of the trainer's model, from `calibrate` or `load`.
        level: of the interval from `low` to `high`, or of the prediction sets.
        metric_key_prefix: goes before the names of all metrics.
    """
    if bare(trainer.model) is not bare(predictor.model):
        raise ArgumentError(
            "expected a predictor of the trainer's model; found one of another "
            f"{type(bare(predictor.model)).__name__}. Calibrate trainer.model."
        )
    if trainer.args.world_size > 1:
        raise ArgumentError(
            f"expected a trainer that runs in one process; found {trainer.args.world_size}, each with its own part of "
            "the data. Predict in one."
        )
    parts: list[Any] = []
    targets: list[Any] = []
    for batch in trainer.get_test_dataloader(dataset):
        labelled = [name for name in trainer.label_names if batch.get(name) is not None]
        if len(labelled) > 1:
            raise DataError(f"expected one array of labels in a batch; found {labelled}. Set trainer.label_names.")
        targets.append(batch[labelled[0]] if labelled else None)
        inputs = {name: value for name, value in batch.items() if name not in trainer.label_names}
        parts.append(predictor.predict(inputs).cpu())
    p = (ClassPrediction if isinstance(predictor, ClassPredictor) else Prediction).joined(parts)
    outputs = (p.logits if isinstance(p, ClassPrediction) else p.mean).numpy()
    labels = None if any(target is None for target in targets) else torch.cat(targets).cpu()
    measured = {} if labels is None else _measured(trainer, outputs, labels) | _scores(p, labels, level)
    label_ids = None if labels is None else labels.numpy()
    about = (outputs, label_ids, {f"{metric_key_prefix}_{name}": value for name, value in measured.items()})
    named = {name: value.numpy() for name, value in p.to_dict(level).items() if name != "mean"}
    return (ClassOutput if isinstance(p, ClassPrediction) else UncertainOutput)(*about, **named)


def _measured(trainer: Any, predictions: Array, labels: Tensor) -> dict[str, float]:
    """Return what the trainer's own `compute_metrics` makes of means or logits."""
    if trainer.compute_metrics is None:
        return {}
    both = import_module("transformers.trainer_utils").EvalPrediction
    measured: dict[str, float] = trainer.compute_metrics(both(predictions=predictions, label_ids=labels.numpy()))
    return measured


def _scores(p: Prediction | ClassPrediction, labels: Tensor, level: float) -> dict[str, float]:
    """Return the NLL, and the coverage of the intervals, or accuracy and calibration error."""
    if isinstance(p, ClassPrediction):
        scored = judge_classes(p, labels).scores[0]
        return {"nll": scored.nll, "accuracy": scored.accuracy, "ece": scored.ece}
    target = metrics.align_target(p.mean, labels)
    low, high = p.interval(level)
    return {"nll": likelihood(p, target), "coverage": float(((low <= target) & (target <= high)).double().mean())}
