"""The comparison of scores for novel rows has every score of every part, and becomes tables."""

import pytest
import torch

from benchmarks import novelty


def test_scores_and_tables() -> None:
    pytest.importorskip("sklearn")
    split = novelty.SETS["choice"]["tumours, MLP"](0)
    scores = novelty.scores_of(split)
    for part, values in scores["gradients or features"].items():
        assert torch.equal(values, torch.maximum(scores["mask gradients"][part], scores["features"][part]))
    actual = novelty.mean([novelty.measured(split)])
    assert set(actual["auroc"]) == {*scores, "entropy"}
    assert all(0 <= value <= 1 for kinds in actual["auroc"].values() for value in kinds.values())
    table = novelty.table({"sets": dict.fromkeys(novelty.SETS["choice"], actual)}, "choice")
    assert table.count("\n") == len(scores) + 3
    assert f"| **gradients or features** | {actual['auroc']['gradients or features']['noise']:.3f} |" in table
