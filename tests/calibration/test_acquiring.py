"""Rows to label next: places in the pool, different ones, spread over what is uncertain."""

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError
from latedrop.prediction.acquiring import spread_out
from networks import mlp


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def uq() -> latedrop.Predictor:
    net, x = mlp(3, 20, 20, 1, act=nn.ReLU), rows(80, 0)
    return latedrop.calibrate(net, (x, x.sum(1, keepdim=True)), reference=rows(80, 1), progress=False)


@pytest.fixture(scope="module")
def classes() -> latedrop.ClassPredictor:
    net, x = mlp(3, 20, 3, act=nn.ReLU), rows(80, 0)
    return latedrop.calibrate(net, (x, x.argmax(1)), reference=rows(80, 1), progress=False)


def test_places_are_different_and_repeat(uq: latedrop.Predictor, classes: latedrop.ClassPredictor) -> None:
    pool = rows(60, 2)
    for predictor in (uq, classes):
        for score in (None, "std" if predictor is uq else "novelty"):
            places = predictor.acquire(pool, 20, score=score)
            assert places.unique().numel() == 20
            assert places.tolist() == predictor.acquire(pool, 20, score=score).tolist()
            assert places.tolist()[1:] != predictor.acquire(pool, 20, score=score, seed=1).tolist()[1:]
        assert sorted(predictor.acquire(pool, 60).tolist()) == list(range(60))


def test_without_diversity_largest_scores_come_first(uq: latedrop.Predictor, classes: latedrop.ClassPredictor) -> None:
    pool = rows(60, 2)
    std, entropy = uq.predict(pool).std[:, 0], classes.predict(pool).entropy
    assert uq.acquire(pool, 5, score="std", diverse=False).tolist() == std.topk(5).indices.tolist()
    assert classes.acquire(pool, 5, diverse=False).tolist() == entropy.topk(5).indices.tolist()
    novelty = uq.predict(pool).novelty
    assert uq.acquire(pool, 5, diverse=False).tolist() == novelty.topk(5).indices.tolist()


def test_copies_of_a_row_are_taken_last(uq: latedrop.Predictor) -> None:
    pool = torch.cat([rows(1, 3).expand(50, 3), rows(10, 4)])
    assert int((uq.acquire(pool, 11) < 50).sum()) == 1


def test_spread_out_draws_by_squared_distance() -> None:
    vectors = torch.tensor([[10.0], [9.0], [0.0]])
    second = [int(spread_out(vectors, 2, seed)[1]) for seed in range(300)]
    # From 10 the squared distances are 1 and 100.
    share, error = second.count(2) / 300, (100 / 101 * 1 / 101 / 300) ** 0.5
    assert abs(share - 100 / 101) < 4 * error


def test_what_is_refused(uq: latedrop.Predictor, classes: latedrop.ClassPredictor) -> None:
    pool = rows(10, 5)
    for count in (0, 11, 2.0, True):
        with pytest.raises(ArgumentError, match=r"a count of 1 to 10 rows.*found"):
            uq.acquire(pool, count)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"score='std' or 'novelty'; found 'entropy'"):
        uq.acquire(pool, 2, score="entropy")
    with pytest.raises(ArgumentError, match=r"score='entropy' or 'novelty'; found 'std'"):
        classes.acquire(pool, 2, score="std")
    with pytest.raises(ArgumentError, match=r"a pool whose rows have places.*found list_iterator"):
        uq.acquire(iter([pool]), 2)
    plain = latedrop.calibrate(uq.model, (pool, pool.sum(1, keepdim=True)), method="linear", progress=False)
    assert len(plain.acquire(pool, 3)) == 3
    with pytest.raises(ArgumentError, match="tell novelty"):
        plain.acquire(pool, 2, score="novelty")
