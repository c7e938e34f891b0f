"""What a network counts on frames of a set, and how far off that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from latedrop.errors import DataError
from latedrop_crowd.layouts import CrowdSet, in_order
from latedrop_crowd.mcnn import Trained

__all__ = ["evaluate_counts", "mean_errors", "predict_counts"]


def predict_counts(
    trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], device: str | torch.device = "cpu"
) -> Tensor:
    """Predicted counts of frames, `(N,)`; neighbours of one size go through together."""
    model = deepcopy(trained.model).to(device).eval()
    moved = replace(trained, roi=None if trained.roi is None else trained.roi.to(device))
    frames = in_order(lambda index: crowd_set.image(index, trained.channels), indices)
    size = 16 if torch.device(device).type == "cuda" else 1
    with torch.inference_mode():
        counts = [moved.count_of(model(torch.stack(run).to(device))).float().cpu() for run in _alike(frames, size)]
    return torch.cat(counts) if counts else torch.zeros(0)


def evaluate_counts(
    trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Errors of the counts of frames: `mae`, `rmse`, `bias` (predicted less true); and `frames`, how many."""
    if not indices:
        raise DataError(f"expected frames of {crowd_set.name} to evaluate; found none. Open another part of the set.")
    return _errors(predict_counts(trained, crowd_set, indices, device), crowd_set, indices)


def mean_errors(mean: float, crowd_set: CrowdSet, indices: Sequence[int]) -> dict[str, float]:
    """The same of one count for all frames, such as the mean of the training frames: what a network must beat."""
    return _errors(torch.full((len(indices),), mean, dtype=torch.float64), crowd_set, indices)


def _alike(frames: Iterator[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Runs of frames of one shape, at most `size` long."""
    run: list[Tensor] = []
    for frame in frames:
        if run and (len(run) == size or run[0].shape != frame.shape):
            yield run
            run = []
        run.append(frame)
    if run:
        yield run


def _errors(predicted: Tensor, crowd_set: CrowdSet, indices: Sequence[int]) -> dict[str, float]:
    error = predicted.double() - crowd_set.counts(indices, torch.float64)
    measures = {"mae": error.abs().mean(), "rmse": error.square().mean().sqrt(), "bias": error.mean()}
    return {**{name: round(value.item(), 4) for name, value in measures.items()}, "frames": len(indices)}
