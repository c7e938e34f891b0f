"""Frames of your own: images or a video, heads or counts, lists of parts, maps beside them; and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("PIL")
from PIL import Image

from latedrop.errors import ArgumentError, DataError, FileError, LatedropError
from latedrop_crowd.layouts import CrowdSet, open_set
from rounding import rounding

SIZE = (80, 96)


@pytest.fixture
def camera(tmp_path: Path) -> Path:
    folder = tmp_path / "camera"
    (folder / "frames").mkdir(parents=True)
    for number in range(10):
        pixels = np.full((*SIZE, 3), 20 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "frames" / f"f{number}.png")
    rows = ["frame,x,y"] + [f"f{n}.png,{5 * k + 3},{7 * n}" for n in range(10) for k in range(n)] + ["f0.png,,"]
    (folder / "heads.csv").write_text("\n".join(rows) + "\n")
    return folder


def counts(opened: CrowdSet) -> list[int]:
    return [opened.count(i) for i in range(len(opened.frames))]


def test_images_and_heads_in_a_csv(camera: Path) -> None:
    opened = open_set("own", camera)
    assert counts(opened) == list(range(10))
    assert (opened.train, opened.validation, opened.test) == (tuple(range(6)), (6, 7), (8, 9))
    assert opened.size == SIZE
    assert opened.sigma == 4.0
    assert opened.image(3, 3).shape == (3, *SIZE)
    assert float(opened.image(3).mean()) == pytest.approx(60 / 255, abs=rounding())
    assert float(opened.density(5).sum()) == pytest.approx(5, rel=rounding())
    assert opened.summary()["counted"] == 45
    assert counts(open_set("own", camera, part="test")) == [8, 9]
    larger = open_set("own", camera, enlarge=2, sigma="adaptive")
    assert larger.size == (160, 192)
    assert larger.sigma == "adaptive"


def test_points_in_json_and_coco(camera: Path) -> None:
    expected = open_set("own", camera)
    points = {frame.name: frame.points.tolist() for frame in expected.frames}
    (camera / "heads.csv").unlink()
    (camera / "heads.json").write_text(json.dumps(points))
    again = open_set("own", camera)
    for a, b in zip(again.frames, expected.frames, strict=True):
        np.testing.assert_array_equal(a.points, b.points)
    coco = {
        "images": [{"id": 7, "file_name": "f1.png"}, {"id": 8, "file_name": "f0.png"}],
        "categories": [{"id": 1, "keypoints": ["nose", "left_eye", "head"]}],
        "annotations": [
            {"image_id": 7, "category_id": 1, "keypoints": [1, 1, 2, 2, 2, 2, 30, 40, 1], "bbox": [0, 0, 9, 9]},
            {"image_id": 7, "category_id": 1, "keypoints": [5, 6, 2, 0, 0, 0, 0, 0, 0], "bbox": [0, 0, 9, 9]},
            {"image_id": 7, "category_id": 1, "keypoints": [0] * 9, "bbox": [10, 20, 8, 40]},
        ],
    }
    (camera / "heads.json").write_text(json.dumps(coco))
    opened = open_set("own", camera)
    assert [frame.name for frame in opened.frames] == ["f0.png", "f1.png"]
    assert opened.frames[1].points.tolist() == [[30, 40], [5, 6], [14, 24]]
    assert opened.count(0) == 0


def test_other_categories_than_people(camera: Path) -> None:
    (camera / "heads.csv").unlink()
    boxes = [{"image_id": 0, "category_id": kind, "bbox": [10, 20, 8, 40]} for kind in (1, 2, 2)]
    coco = {
        "images": [{"id": 0, "file_name": "f0.png"}],
        "categories": [{"id": 1, "name": "Person"}, {"id": 2, "name": "car"}],
        "annotations": boxes,
    }
    (camera / "heads.json").write_text(json.dumps(coco))
    assert counts(open_set("own", camera)) == [1]
    (camera / "heads.json").write_text(json.dumps(coco | {"categories": [{"id": 2, "name": "visitor"}]}))
    assert counts(open_set("own", camera)) == [2]
    several = [{"id": 1, "name": "visitor"}, {"id": 2, "name": "car"}]
    (camera / "heads.json").write_text(json.dumps(coco | {"categories": several}))
    with pytest.raises(DataError, match=r"expected a category of people .* found 'visitor', 'car'"):
        open_set("own", camera)


def test_one_name_for_each_frame(camera: Path) -> None:
    heads = (camera / "heads.csv").read_text()
    (camera / "heads.csv").write_text(heads + "\nf1,3,3\n")
    with pytest.raises(DataError, match=r"expected one name for each frame .* found f1\.png, f1 for"):
        open_set("own", camera)
    (camera / "heads.csv").write_text(heads.replace(".png", ""))
    assert len(open_set("own", camera).frames) == 10
    (camera / "frames" / "f1.bmp").write_bytes((camera / "frames" / "f1.png").read_bytes())
    with pytest.raises(DataError, match=r"expected one name for each frame .* found f1 for .*f1\.png"):
        open_set("own", camera)


def test_lists_that_an_editor_marked_as_utf8(camera: Path) -> None:
    (camera / "train.txt").write_text("\ufefff0\nf2\n", encoding="utf-8")
    assert [frame.name for frame in open_set("own", camera).frames] == ["f0.png", "f2.png"]


def test_counts_alone(camera: Path) -> None:
    (camera / "heads.csv").unlink()
    (camera / "counts.csv").write_text("count,frame\n" + "".join(f"{n + 1},f{n}\n" for n in range(10)))
    opened = open_set("own", camera)
    assert counts(opened) == list(range(1, 11))
    assert not opened.has_points
    assert opened.summary()["counted"] == 55
    with pytest.raises(DataError, match=r"expected head points of f0.png; own has counts alone"):
        opened.density(0)


def test_lists_of_parts_and_maps(camera: Path) -> None:
    (camera / "validation.txt").write_text("# the first hour\nf3.png\nframes/f1.png\n\n")
    (camera / "test.txt").write_text("f9\n")
    mask = np.zeros(SIZE, dtype=np.uint8)
    mask[:, :20] = 200
    Image.fromarray(mask).save(camera / "roi.png")
    np.save(camera / "perspective.npy", np.ones(SIZE))
    opened = open_set("own", camera)
    assert [opened.frames[i].name for i in opened.validation] == ["f1.png", "f3.png"]
    assert [opened.frames[i].name for i in opened.test] == ["f9.png"]
    assert opened.train == ()
    assert opened.roi is not None
    assert opened.perspective is not None
    assert counts(opened) == [1, 3, 4]  # those of nine whose x is below 20
    assert counts(open_set("own", camera, use_roi=False)) == [1, 3, 9]


def test_a_video(camera: Path) -> None:
    av = pytest.importorskip("av")
    (camera / "heads.csv").write_text("frame,x,y\n12,5,6\nclip.mp4#000002,7,8\n2,9,9\n5,,\n")
    with av.open(str(camera / "clip.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        for number in range(15):
            image = np.full((*SIZE, 3), 10 * number, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        file.mux(stream.encode())
    with pytest.raises(DataError, match=r"expected each frame of the video once"):
        open_set("own", camera)
    (camera / "heads.csv").write_text("frame,x,y\n12,5,6\nclip.mp4#000002,7,8\n5,,\n")
    opened = open_set("own", camera)
    assert [frame.name for frame in opened.frames] == ["clip.mp4#000002", "clip.mp4#000005", "clip.mp4#000012"]
    assert counts(opened) == [1, 0, 1]
    for index, number in ((2, 12), (0, 2), (1, 5), (2, 12)):  # also backwards
        assert float(opened.image(index).mean()) == pytest.approx(number * 10 / 255, abs=0.02)
    (camera / "heads.csv").write_text("frame,x,y\n99,5,6\n")
    with pytest.raises(FileError, match=r"expected frame 99 in .*clip.mp4; it has 15, counted from 0"):
        open_set("own", camera).image(0)
    (camera / "heads.csv").write_text("frame,x,y\nf1.png,5,6\n")
    with pytest.raises(DataError, match=r"expected frames of clip.mp4 by their number from 0"):
        open_set("own", camera)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("heads.csv", "name,x,y\nf1.png,1,2\n", "missing: frame, found name, x, y"),
        ("heads.csv", "frame,x,y\nf1.png,one,2\n", "expected a number on line 2 of .*heads.csv; found 'one'"),
        ("heads.csv", "frame,x,y\nf1.png,1,\n", "expected a number on line 2"),
        ("heads.csv", "frame,x,y\n,1,2\n", "expected the name of a frame on line 2"),
        ("heads.csv", "frame,x,y\nf77.png,1,2\n", r"expected the annotated frames in .*frames; missing: f77.png"),
        ("heads.csv", "frame,x,y\n", "expected the heads of at least one frame"),
        (
            "counts.csv",
            "frame,count\nf1.png,3\n",
            "expected one of heads.csv, .* counts.csv in .*; found heads",
        ),
        ("train.txt", "f1.png\nf1.png\n", "expected each frame in one list; found 'f1.png' in train and train"),
        ("test.txt", "nobody.png\n", "found 'nobody.png', which is not annotated"),
        ("perspective.csv", "1,2\n3,4\n", r"expected a perspective map of 80 x 96 pixels, .*; found 2 x 2"),
        ("perspective.csv", "a,b\n", "expected a map of numbers in .*perspective.csv"),
        ("roi.png", "no image", "expected an image at .*roi.png; found another kind of file"),
    ],
)
def test_folders_that_are_refused(camera: Path, file: str, content: str, match: str) -> None:
    (camera / file).write_text(content)
    with pytest.raises(LatedropError, match=match):
        open_set("own", camera)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"f1.png": [[1, 2]], "f1.png": []}', "the key 'f1.png' stands there twice"),
        ("[1]", "expected points by frame, .* or COCO .*; found a list"),
        ("{", "expected the JSON of heads of people"),
        ('{"f1.png": [[1, 2, 3]]}', r"expected finite points \[\[x, y\], ...\] for 'f1.png'"),
        ('{"f1.png": "many"}', "expected finite points"),
        ('{"images": [{"id": 1}], "annotations": []}', "expected COCO in .*: .*file_name"),
        (
            '{"images": [{"id": 1, "file_name": "f1.png"}], "annotations": [{"image_id": 1, "iscrowd": 1}]}',
            "found a crowd as one in 'f1.png'",
        ),
    ],
    ids=["twice", "list", "cut", "triples", "text", "coco", "crowd"],
)
def test_json_that_is_refused(camera: Path, content: str, match: str) -> None:
    (camera / "heads.csv").unlink()
    (camera / "heads.json").write_text(content)
    with pytest.raises(DataError, match=match):
        open_set("own", camera)


def test_black_regions_and_several_sizes(camera: Path) -> None:
    Image.fromarray(np.zeros(SIZE, dtype=np.uint8)).save(camera / "roi.png")
    with pytest.raises(DataError, match=r"expected pixels that are not black"):
        open_set("own", camera)
    Image.fromarray(np.zeros((90, 96), dtype=np.uint8)).save(camera / "frames" / "f2.png")
    with pytest.raises(DataError, match=r"expected a region of interest and frames of one size.*found several sizes"):
        open_set("own", camera)
    (camera / "roi.png").unlink()
    opened = open_set("own", camera)
    assert opened.size is None
    assert opened.shape(2) == (90, 96)
    with pytest.raises(ArgumentError, match=r"expected a view only for pets"):
        open_set("own", camera, view=2)


def test_one_of_our_own_is_trained_on(camera: Path) -> None:
    from latedrop_crowd.train import Settings, train

    trained = train(open_set("own", camera), Settings(epochs=2, batch=3), progress=False, checked=False)
    assert trained.about["set"] == "own"
    assert trained.model(torch.rand(1, 1, *SIZE)).shape == (1, 1, 20, 24)
