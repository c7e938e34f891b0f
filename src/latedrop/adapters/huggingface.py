"""Predictions with uncertainty beside a Hugging Face `Trainer`: its data loader and collator, our predictor."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from latedrop import metrics
from latedrop.errors import ArgumentError, DataError
from latedrop.evaluation.evaluation import likelihood
from latedrop.evaluation.judgement import judge_classes
from latedrop.prediction.prediction import ClassPrediction, Prediction
from latedrop.prediction.predictor import ClassPredictor, Predictor
from latedrop.torch_private import bare

__all__ = ["predict_with"]


def predict_with(
    trainer: Any,
    dataset: Any,
    predictor: Predictor | ClassPredictor,
    *,
    level: float = 0.9,
    metric_key_prefix: str = "test",
) -> Any:
    """Predict a data set with the trainer's collator and batch size, and the predictor's uncertainty.

    Args:
        trainer: a `transformers.Trainer`; it does not have to be trained with.
        dataset: as for `Trainer.predict`.
        predictor: of the trainer's model, from `calibrate` or `load`.
        level: of the interval from `low` to `high`, or of the prediction sets.
        metric_key_prefix: goes before the names of all metrics.

    Returns:
        A named tuple of what `Trainer.predict` gives, `predictions` (means or logits), `label_ids` and `metrics`, and
        then of the arrays of `Prediction.to_dict`, or of `ClassPrediction.to_dict`: `std`, `low`, `high`, ... Where the
        data set has labels, `metrics` holds what the trainer's `compute_metrics` makes of the predictions, the NLL, and
        the coverage of the intervals, or the accuracy and the calibration error of a classifier.
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
    p: Any = (ClassPrediction if isinstance(predictor, ClassPredictor) else Prediction).joined(parts)
    named = {name: value.numpy() for name, value in p.to_dict(level).items()}
    predictions = p.logits.numpy() if isinstance(p, ClassPrediction) else named.pop("mean")
    label_ids, measured = None, {}
    if not any(target is None for target in targets):
        labels = torch.cat(targets).cpu()
        label_ids = labels.numpy()
        if trainer.compute_metrics is not None:
            from transformers.trainer_utils import EvalPrediction

            measured = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=label_ids))
        measured = {f"{metric_key_prefix}_{name}": v for name, v in (measured | _scores(p, labels, level)).items()}
    output = namedtuple("UncertainOutput", ["predictions", "label_ids", "metrics", *named])  # type: ignore[misc]
    return output(predictions, label_ids, measured, **named)  # type: ignore[call-arg]


def _scores(p: Prediction | ClassPrediction, labels: Tensor, level: float) -> dict[str, float]:
    if isinstance(p, ClassPrediction):
        scored = judge_classes(p, labels).scores[0]
        return {"nll": scored.nll, "accuracy": scored.accuracy, "ece": scored.ece}
    target = metrics.align_target(p.mean, labels)
    low, high = p.interval(level)
    return {"nll": likelihood(p, target), "coverage": float(((low <= target) & (target <= high)).double().mean())}
