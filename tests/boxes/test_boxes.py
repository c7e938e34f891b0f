"""Boxes of detectors: draws are matched, std and probabilities fitted, and margins hold what they say."""

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
from architectures import missing
from latedrop.boxes.detections import BoxOptions, Detector, matched, overlap
from latedrop.boxes.predictor import fit_std, radius
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from rounding import assert_same_up_to_rounding

Rows = list[tuple[Tensor, dict[str, Tensor]]]


class OneBox(nn.Module):
    """Finds one box in an image whose channels are the four sides with noise, and how large the noise is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.sides = nn.Linear(5, 40), nn.Linear(40, 40), nn.Linear(40, 4)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        x = torch.stack([image.mean((1, 2)) for image in images])
        hidden = torch.relu(self.hidden(torch.relu(self.first(x))))
        scores = torch.sigmoid(5 - 4 * x[:, 4:])
        boxes = 10 * (x[:, :4] + self.sides(hidden))[:, None]
        label = torch.ones(1, dtype=torch.long)
        return [{"boxes": b, "scores": s, "labels": label} for b, s in zip(boxes, scores, strict=True)]


def rows(count: int, seed: int) -> Rows:
    """Return images of two sizes, one object in each; a fifth of the objects has another label."""
    dice = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        corner, size = 20 * torch.rand(2, generator=dice), 10 + 10 * torch.rand(2, generator=dice)
        box, noise = torch.cat([corner, corner + size]), torch.rand((), generator=dice)
        seen = torch.cat([box / 10 + 0.2 * noise * torch.randn(4, generator=dice), noise[None]])
        label = 1 + (torch.rand(1, generator=dice) < 0.2).long()
        made.append((seen[:, None, None].expand(5, 4, 4 + i // 10 % 2).clone(), {"boxes": box[None], "labels": label}))
    return made


@pytest.fixture(scope="module")
def model() -> OneBox:
    torch.manual_seed(0)
    net = OneBox()
    with torch.no_grad():
        net.sides.weight *= 0.1
        net.sides.bias.zero_()
    return net.eval()


@pytest.fixture(scope="module")
def uq(model: OneBox) -> latedrop.BoxPredictor:
    return latedrop.calibrate_boxes(model, rows(300, 0), progress=False).conformal(rows(300, 1), progress=False)


def test_overlap_and_matches() -> None:
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1], [5, 5, 6, 6]])
    assert_same_up_to_rounding(overlap(boxes, boxes[:2])[:, 0], torch.tensor([1.0, 0.5, 0.0]))
    labels = torch.tensor([1, 1, 1])
    # The first box takes the object, and leaves none for the second.
    assert matched(boxes, labels, boxes[:1], labels[:1], 0.4).tolist() == [0, -1, -1]
    assert matched(boxes, labels, boxes[[1, 0]], labels[:2], 0.4).tolist() == [1, 0, -1]
    assert matched(boxes, labels, boxes[:1], labels[:1] + 1, 0.4).tolist() == [-1, -1, -1]
    assert matched(boxes, labels, boxes[:0], labels[:0], 0.4).tolist() == [-1, -1, -1]


def test_the_radius_is_that_of_risk_control() -> None:
    # Three images, with one, two and one boxes: outside may count 4 (1 - level) - 1.
    errors = (((1.0, 0.0, 0.0, 0.0),), ((0.0, 4.0, 0.0, 0.0), (0.0, 0.0, 2.0, 0.0)), ((3.0, 0.0, 0.0, 0.0),))
    assert [radius(errors, level) for level in (0.75, 0.6, 0.5, 0.25)] == [4.0, 3.0, 3.0, 1.0]
    assert radius(errors, 0.75, side=2) == 2.0
    with pytest.raises(ArgumentError, match=r"at least 9 images.*level 0\.9; found 3\. Call uq = uq.conformal"):
        radius(errors, 0.9)


def test_the_std_follows_its_features() -> None:
    f = torch.randn(2000, 4, 5, dtype=torch.float64)
    f[..., 0] = 1.0
    true = torch.tensor([-1.0, 0.5, 0.0, -0.3, 0.2], dtype=torch.float64)
    errors = (f @ true).exp() * torch.randn(2000, 4, dtype=torch.float64)
    fitted = fit_std(f, errors, [0, 1, 2, 3, 4])
    # Of 8000 sides with features of variance 1, the Fisher information of each coefficient is 2 per side.
    assert float((fitted - true).abs().max()) < 4 / math.sqrt(2 * 8000)
    assert_same_up_to_rounding(fit_std(f, errors, [0]).exp()[0], errors.square().mean().sqrt())


def test_without_dropout_draws_are_the_plain_boxes(model: OneBox) -> None:
    images = [image for image, _ in rows(15, 2)]
    detector = Detector(model, BoxOptions(rate=0.0, draws=3, seed=0, overlap=0.5))
    for (boxes, scores, _, features), image in zip(detector.detect(images), images, strict=True):
        plain = model([image])[0]
        assert_same_up_to_rounding(boxes, plain["boxes"].detach().double())
        assert_same_up_to_rounding(scores, plain["scores"].detach().double())
        assert_same_up_to_rounding(features[..., 3], features[..., 4])
        assert_same_up_to_rounding(features[..., 1] - math.log(1e-4), features[..., 2])  # the least std there is
    assert [site.name for site in detector.options.sites] == ["hidden", "sides"]


def test_three_boxes_are_not_taken_for_three_images() -> None:
    class ThreeBoxes(OneBox):
        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            return [{name: torch.cat([v, v, v + 1]) for name, v in part.items()} for part in super().forward(images)]

    detector = Detector(ThreeBoxes().eval(), BoxOptions(draws=2))
    assert len(next(detector.detect([rows(1, 2)[0][0]]))[0]) == 3
    assert [site.name for site in detector.options.sites] == ["hidden", "sides"]


def test_draws_spread_as_their_boxes_do(model: OneBox) -> None:
    image = rows(1, 2)[0][0]
    detector = Detector(model, BoxOptions(rate=0.2, draws=400, seed=0, overlap=0.0))
    *_, features = next(detector.detect([image]))
    x = image.mean((1, 2))
    hidden = torch.relu(model.first(x))
    with torch.no_grad():
        keep = [(torch.rand(4000, 40) >= 0.2) / 0.8 for _ in range(2)]
        thinned = 10 * model.sides(torch.relu(model.hidden(hidden * keep[0])) * keep[1])
    # A std of 400 draws has a relative error of about 1 / sqrt(800).
    assert float((features[0, :, 1].exp() / thinned.std(0) - 1).abs().max()) < 5 / math.sqrt(800)


def test_margins_hold(uq: latedrop.BoxPredictor) -> None:
    pairs = [(p, target) for p, target in _predicted(uq, rows(1500, 3))]
    right = [(p, t) for p, t in pairs if bool((matched(p.boxes, p.labels, t["boxes"], t["labels"], 0.5) >= 0).any())]
    for level in (0.8, 0.95):
        inside, each = [], []
        for p, target in right:
            inner, outer = p.margins(level)
            truth = target["boxes"].double()
            apart = torch.stack([outer[:, :2] <= truth[:, :2], truth[:, 2:] <= outer[:, 2:]])
            apart &= torch.stack([truth[:, :2] <= inner[:, :2], inner[:, 2:] <= truth[:, 2:]])
            inside.append(float(apart.all()))
            low, high = p.interval(level)
            each.append(((low <= truth) & (truth <= high)).double().mean())
        # Means over 1200 boxes or so, after about 240 chose the radius.
        error = math.sqrt(level * (1 - level) * (1 / len(right) + 1 / 230))
        assert abs(sum(inside) / len(inside) - level) < 4 * error
        assert abs(float(torch.stack(each).mean()) - level) < 4 * error


def _predicted(uq: latedrop.BoxPredictor, data: Rows) -> Any:
    return zip(uq.predict([image for image, _ in data]), [target for _, target in data], strict=True)


def test_probabilities_and_std_follow_the_truth(uq: latedrop.BoxPredictor) -> None:
    assert uq.calibration.score.candidate.name != "model"  # which is too sure by far
    assert uq.calibration.std.candidate.name != "constant"
    pairs = list(_predicted(uq, rows(1500, 4)))
    hit = torch.cat([matched(p.boxes, p.labels, t["boxes"], t["labels"], 0.5) >= 0 for p, t in pairs]).double()
    chance = torch.cat([p.probabilities for p, _ in pairs])
    error = math.sqrt(0.2 * 0.8 * (1 / 1500 + 1 / 300))
    assert abs(float(hit.mean() - chance.mean())) < 4 * error
    std = torch.cat([p.std for p, _ in pairs]).mean(1)
    off = torch.cat([(t["boxes"] - p.boxes).abs().mean(1) for p, t in pairs])
    assert (
        float(torch.corrcoef(torch.stack([std.argsort().argsort().double(), off.argsort().argsort().double()]))[0, 1])
        > 0.4
    )


def test_an_image_alone_is_what_it_is_beside_others(uq: latedrop.BoxPredictor) -> None:
    images = [image for image, _ in rows(20, 5)]
    before = {name: value.clone() for name, value in uq.model.state_dict().items()}
    for one, image in zip(uq.predict(images), images, strict=True):
        alone = uq.predict([image])[0]
        assert_same_up_to_rounding(one.std, alone.std)
        assert_same_up_to_rounding(one.probabilities, alone.probabilities)
    assert all(torch.equal(value, before[name]) for name, value in uq.model.state_dict().items())
    assert "1 boxes" in repr(alone)
    assert "\n" not in repr(uq)


def test_a_file_brings_it_back(uq: latedrop.BoxPredictor, tmp_path: Path) -> None:
    path = tmp_path / "boxes.json"
    uq.save(path)
    again = latedrop.load_boxes(path, uq.model)
    assert again.calibration == uq.calibration
    images = [image for image, _ in rows(5, 6)]
    for a, b in zip(again.predict(images), uq.predict(images), strict=True):
        assert torch.equal(a.margins(0.9)[1], b.margins(0.9)[1])
    path.write_text(path.read_text().replace('"summary"', '"words"'))
    with pytest.raises(FileError):
        latedrop.load_boxes(path, uq.model)


def test_other_inputs_and_outputs(model: OneBox, tmp_path: Path) -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, images: Tensor) -> Tensor:
            parts = self.inner(list(images))
            return torch.stack([torch.cat([p["boxes"][0], p["scores"]]) for p in parts])

    def readout(output: Tensor) -> list[dict[str, Tensor]]:
        return [{"boxes": r[None, :4], "scores": r[4:], "labels": torch.ones(1)} for r in output]

    data = rows(100, 7)
    options: dict[str, Any] = {"collate": torch.stack, "readout": readout}
    uq = latedrop.calibrate_boxes(Stacked(), data, draws=4, progress=False, **options)
    plain = latedrop.calibrate_boxes(model, data, draws=4, progress=False)
    images = [image for image, _ in rows(4, 8)]
    for a, b in zip(uq.predict(images), plain.predict(images), strict=True):
        assert_same_up_to_rounding(a.boxes, b.boxes)
    uq.save(tmp_path / "boxes.json")
    with pytest.raises(FileError, match=r"expected readout=.*Pass the same function when loading"):
        latedrop.load_boxes(tmp_path / "boxes.json", Stacked())
    loader: Any = torch.utils.data.DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=7,
        collate_fn=lambda part: tuple(zip(*part, strict=True)),
    )
    with torch.inference_mode():
        assert latedrop.calibrate_boxes(model, loader, draws=4, progress=False).calibration == plain.calibration


def test_what_is_refused(uq: latedrop.BoxPredictor, model: OneBox) -> None:
    data = rows(40, 9)
    for rows_given, match in (
        ([], "images with their objects; found none"),
        ([image for image, _ in data], r"pairs \(image, target\).*found None\. Pass a list"),
        ([(x, {"bbox": t["boxes"]}) for x, t in data], r"boxes \(M, 4\) and labels \(M,\) in a target; found {'bbox'"),
        ([(x, {**t, "boxes": t["boxes"].flip(1)}) for x, t in data], r"boxes \(x1, y1, x2, y2\) with x1 < x2"),
        (
            [(x, {**t, "labels": t["labels"] + 5}) for x, t in data],
            "at least 30 boxes .* found 0 of 40 .*labels must be",
        ),
    ):
        with pytest.raises(DataError, match=match):
            latedrop.calibrate_boxes(model, rows_given, progress=False)
    with pytest.raises(DataError, match=r"images \(C, H, W\).*found shape \(4, 5\)"):
        uq.predict([torch.zeros(4, 5)])
    with pytest.raises(OutputError, match=r"a dict of boxes \(K, 4\), scores \(K,\).*Pass readout="):
        latedrop.calibrate_boxes(model, data, readout=lambda output: output[0]["boxes"], progress=False)
    with pytest.raises(ArgumentError, match="overlap of at least 0 and below 1; found 2"):
        latedrop.calibrate_boxes(model, data, overlap=2)
    plain = latedrop.calibrate_boxes(model, rows(100, 0), draws=4, progress=False)
    with pytest.raises(ArgumentError, match=r"boxes that find an object.*found 0\. Call uq = uq\.conformal"):
        plain.predict([data[0][0]])[0].margins()
    with pytest.warns(latedrop.LatedropWarning, match="used for nothing else"):
        plain.conformal(rows(100, 0), progress=False)
    with torch.no_grad():
        model.sides.bias += 1
    with pytest.warns(latedrop.LatedropWarning, match="weights"):
        uq.predict([data[0][0]])
    with torch.no_grad():
        model.sides.bias -= 1


def _nms(boxes: Tensor, scores: Tensor, most: float) -> Tensor:
    """Stand in for torchvision's compiled operator: leave out what overlaps a box of a higher score."""
    order, chosen = scores.argsort(descending=True, stable=True), list[Tensor]()
    while len(order):
        chosen.append(order[0])
        order = order[1:][overlap(boxes[order[:1]], boxes[order[1:]])[0] <= most]
    return torch.stack(chosen) if chosen else order


@pytest.mark.skipif(bool(missing("torchvision")), reason="needs torchvision")
@pytest.mark.parametrize("name", ["FCOS", "RetinaNet", "FasterRCNN"])
def test_detectors_of_torchvision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    detection = importlib.import_module("torchvision.models.detection")
    anchors = importlib.import_module("torchvision.models.detection.anchor_utils").AnchorGenerator
    monkeypatch.setattr(importlib.import_module("torchvision.ops.boxes"), "nms", _nms)
    pooling = importlib.import_module("torchvision.ops.roi_align")  # its Python function, without compiling it
    monkeypatch.setattr(pooling, "_roi_align", pooling._roi_align.__wrapped__)
    layers = (nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU())
    body: Any = nn.Sequential(*layers)
    body.out_channels = 32
    sizes = ((16,),) if name == "FCOS" else ((16, 32),)
    sides: dict[str, Any] = {"anchor_generator": anchors(sizes, ((1.0,),))}
    if name == "FasterRCNN":
        sides = {"rpn_anchor_generator": anchors(sizes, ((1.0,),)), "box_score_thresh": 0.0}
        sides["box_roi_pool"] = importlib.import_module("torchvision.ops").MultiScaleRoIAlign(["0"], 3, 2)
        sides |= {"rpn_post_nms_top_n_test": 20, "rpn_pre_nms_top_n_test": 50, "box_detections_per_img": 10}
    else:
        sides |= {"score_thresh": 0.0, "detections_per_img": 10, "topk_candidates": 30}
    net = getattr(detection, name)(body, num_classes=3, min_size=64, max_size=96, **sides).eval()
    images = [torch.rand(3, 64, 64 + 16 * (i // 5 % 2)) for i in range(20)]
    with torch.no_grad():
        targets = [
            {"boxes": out["boxes"] + torch.tensor([-2.0, -2, 2, 2]), "labels": out["labels"]} for out in net(images)
        ]
    data = list(zip(images, targets, strict=True))
    options: dict[str, Any] = {"overlap": 0.05, "draws": 3}
    uq = latedrop.calibrate_boxes(net, data, progress=False, **options)
    uq = uq.conformal([(image.flip(2), t) for image, t in zip(images, targets, strict=True)], progress=False)
    predictions = uq.predict(images[:3])
    assert len(uq.calibration.options.sites) >= 3
    assert all(len(p) > 0 and bool((p.std > 0).all()) for p in predictions)
    assert all(bool((p.probabilities > 0).all()) for p in predictions)
