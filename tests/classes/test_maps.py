"""Maps of classes: pixels of images, an ignore index, maps of doubt, scores of images."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration import measure_classes
from latedrop.calibration.cross_validation import standard_error
from latedrop.calibration.fit_classes import Measured
from latedrop.calibration.measure_classes import pixels_of
from latedrop.errors import ArgumentError, DataError, OutputError
from networks import trained
from rounding import assert_same_up_to_rounding

VOID = 255
TASK = latedrop.Classification(ignore_index=VOID)


def scenes(count: int, size: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks of three levels of grey under noise, a border without labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count, size // 4, size // 4), generator=g).repeat_interleave(4, 1).repeat_interleave(4, 2)
    x = y[:, None].float() + 0.9 * torch.randn(count, 1, size, size, generator=g)
    y[:, 0] = VOID
    return x, y


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """Three classes by brightness; too sure of them."""
    torch.manual_seed(0)
    body = nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
    model = nn.Sequential(*body, nn.Conv2d(6, 3, 1))
    x, y = scenes(30, seed=1)
    trained(model, x, y, 150, 1e-2, partial(nn.functional.cross_entropy, ignore_index=VOID))
    with torch.no_grad():
        model[-1].weight *= 3
        model[-1].bias *= 3
    return model


@pytest.fixture(scope="module")
def uq(net: nn.Module) -> latedrop.ClassPredictor:
    uq = latedrop.calibrate(net, scenes(40, seed=2), task=TASK, progress=False)
    return uq


def nll(logs: Tensor, y: Tensor) -> float:
    return float(nn.functional.nll_loss(logs, y, ignore_index=VOID))


def test_maps_are_known_by_their_shapes_and_calibrated(uq: latedrop.ClassPredictor, net: nn.Module) -> None:
    x, y = scenes(20, seed=3)
    p = uq.predict(x)
    assert p.probabilities.shape == (20, 3, 12, 12)
    assert p.label.shape == p.confidence.shape == p.entropy.shape == (20, 12, 12)
    assert_same_up_to_rounding(p.probabilities.sum(1), torch.ones(20, 12, 12))
    own = torch.log_softmax(net(x), 1).detach()
    assert torch.equal(p.label, own.argmax(1))
    assert nll(p.log_probabilities, y) < 0.8 * nll(own, y)
    assert 1.5 < uq.calibration.alone < 6  # the logits were made three times as large
    assert uq.calibration.rows == 40
    assert "pixels by cross-validation" in str(uq.calibration.verdict)


def test_scores_of_images(uq: latedrop.ClassPredictor) -> None:
    x, _ = scenes(6, seed=4)
    x[3] += 8
    p = uq.predict(x, rate=0.2)
    scores = p.image_scores
    assert set(scores) == {"expected_error", "entropy", "mutual_information", "novelty"}
    assert all(value.shape == (6,) for value in scores.values())
    assert int(scores["novelty"].argmax()) == 3
    assert_same_up_to_rounding(scores["expected_error"], 1 - p.confidence.mean((1, 2)))
    assert p.mutual_information.shape == (6, 12, 12)
    assert float(p.mutual_information.min()) >= 0
    assert float(p.mutual_information.max()) > 1e-4
    assert bool((p.mutual_information <= p.entropy.max() + 1).all())
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    assert isinstance(p.to_pandas(), pandas.DataFrame)
    assert len(p.to_pandas()) == 6


def test_ignored_pixels_do_not_count(net: nn.Module) -> None:
    x, y = scenes(40, seed=2)
    void = torch.ones_like(y, dtype=torch.bool)
    void[:, 6:] = False
    first, second = (  # the same pixels under another number
        latedrop.calibrate(
            net,
            (x, y.masked_fill(void, number)),
            task=latedrop.Classification(ignore_index=number),
            method=latedrop.Terms(guard=False),
            progress=False,
        ).calibration
        for number in (VOID, -1)
    )
    assert first.verdict.rows == second.verdict.rows == 40 * 6 * 12
    assert first.alone == second.alone


def test_saved_and_loaded(uq: latedrop.ClassPredictor, net: nn.Module, tmp_path: Path) -> None:
    uq.save(tmp_path / "maps.json")
    again = latedrop.load(tmp_path / "maps.json", net)
    assert again.calibration.maps
    assert again.calibration.ignore_index == VOID
    x, _ = scenes(3, seed=7)
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(again.predict(x).log_probabilities, uq.predict(x).log_probabilities)


def test_folds_are_images_and_so_are_errors() -> None:
    image = torch.arange(12).repeat_interleave(50)
    rows = Measured(torch.zeros(600, 3), torch.zeros(600, dtype=torch.long), image=image)
    fold = rows.left_out.folds(600)
    assert all(len(fold[image == i].unique()) == 1 for i in range(12))
    assert len(fold.unique()) == 5
    of_images = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = float(of_images.std()) / 12**0.5
    assert standard_error(of_images.repeat_interleave(50), rows.left_out) == pytest.approx(wanted)


def test_memory_is_bounded_and_pixels_are_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_classes, "MOST", 3000)
    y = torch.arange(40 * 40).reshape(1, 40, 40).expand(20, -1, -1) % 3
    z = torch.nn.functional.one_hot(y, 3).movedim(-1, 1).float() * 5
    parts = pixels_of(z[:10], y[:10], None, 0, 20) + pixels_of(z[10:], y[10:], None, 10, 20)
    logits, labels, images = (torch.cat([part[name] for part in parts]) for name in ("logits", "labels", "image"))
    assert 1500 < logits.numel() <= 3000
    assert torch.equal(logits.argmax(1), labels)  # a pixel stays with its label
    assert images.unique().tolist() == list(range(20))
    assert len({int((images == i).sum()) for i in range(20)}) == 1
    # At most 1000 pixels: a standard error of 0.015 or more.
    torch.testing.assert_close((labels == 0).float().mean(), torch.tensor(1 / 3), atol=0.08, rtol=0)


@pytest.mark.parametrize(
    ("change", "task", "method", "words"),
    [
        (lambda y: torch.full_like(y, VOID), TASK, "terms", "found 0 among 6. Check the labels and ignore_index=255"),
        (lambda y: y, "classification", "terms", r"from 0 to 2, .* found 0 to 255\..*Classification\(ignore"),
        (lambda y: y + 1, latedrop.Classification(ignore_index=VOID + 1), "terms", "beside .* 256, .* found 1 to 3"),
        (lambda y: y[:, :5], "classification", "terms", "expected one label for each pixel"),
        (lambda y: y.float(), "classification", "terms", "expected labels as whole numbers"),
        (lambda y: y, TASK, latedrop.Terms(["gradients"]), r"expected Terms\(\['leverage'\]\)"),
        (lambda y: y, TASK, "sample", r"for maps of classes; found Sampling\..*mutual_information"),
    ],
    ids=["all ignored", "no index", "out of range", "another size", "floats", "gradients", "draws"],
)
def test_bad_labels(net: nn.Module, change: Any, task: Any, method: Any, words: str) -> None:
    x, y = scenes(6)
    with pytest.raises((DataError, ArgumentError), match=words):
        latedrop.calibrate(net, (x, change(y)), task=task, method=method, progress=False)


def test_other_bad_input(net: nn.Module, uq: latedrop.ClassPredictor) -> None:
    x, y = scenes(6)
    with pytest.raises(DataError, match="expected at least 2 validation images with labels"):
        latedrop.calibrate(net, (x[:1], y[:1]), task=TASK, progress=False)
    softmax = nn.Sequential(net, nn.Softmax(1))
    rows = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3))
    for attempt, match in (
        (lambda: latedrop.calibrate(softmax, (x, y), task=TASK), "logits, as they are before a softmax"),
        (lambda: latedrop.calibrate(rows, (x, y[:, 5, 5]), task=TASK), "ignore_index with maps of logits"),
        (lambda: latedrop.Classification(ignore_index=2.5), "ignore_index to be a whole number or None"),
        (lambda: uq.conformal((x, y)), "found maps, whose pixels depend on each other"),
        (lambda: uq.reject((x, y)), "found maps, whose pixels depend on each other"),
    ):
        with pytest.raises((ArgumentError, OutputError), match=match):
            attempt()
