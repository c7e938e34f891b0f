"""Scenes and detector of `benchmarks.boxes`."""

import torch

from benchmarks import boxes


def test_boxes_hold_their_shapes() -> None:
    for image, target in boxes.scenes(3, 0, (0.0, 0.0)):
        assert image.shape == (1, boxes.SIDE, boxes.SIDE)
        outside = torch.ones(boxes.SIDE, boxes.SIDE, dtype=torch.bool)
        for x1, y1, x2, y2 in target["boxes"].round().long().tolist():
            outside[y1 - 1 : y2 + 1, x1 - 1 : x2 + 1] = False
        # Noise of std 0.2 alone: the mean of n values lies within four standard errors of 0.
        assert abs(float(image[0][outside].mean())) < 4 * 0.2 / float(outside.sum()) ** 0.5


def test_the_detector_leaves_out_what_overlaps_a_better_box() -> None:
    scores = torch.tensor([[0.3, 0.9], [0.8, 0.1], [0.7, 0.2], [0.01, 0.02]])
    sides = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30], [40, 40, 50, 50]])
    best = boxes.best(scores, sides)
    assert best["scores"].tolist() == torch.tensor([0.9, 0.7]).tolist()
    assert best["labels"].tolist() == [2, 1]
    assert torch.equal(best["boxes"], sides[[0, 2]])
