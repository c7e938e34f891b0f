"""Frames of your own: images, heads or counts, lists of parts, a region of interest; and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from latedrop.errors import DataError, LatedropError
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
    larger = open_set("own", camera, enlarge=2, sigma=3)
    assert larger.size == (160, 192)
    assert larger.sigma == 6


def test_one_name_for_each_frame(camera: Path) -> None:
    heads = (camera / "heads.csv").read_text()
    (camera / "heads.csv").write_text(heads.replace(".png", ""))
    assert len(open_set("own", camera).frames) == 10
    (camera / "frames" / "f1.bmp").write_bytes((camera / "frames" / "f1.png").read_bytes())
    with pytest.raises(DataError, match=r"expected one frame named f1; found .*f1\.png and another"):
        open_set("own", camera)


def test_lists_that_an_editor_marked_as_utf8(camera: Path) -> None:
    (camera / "train.txt").write_text("\ufefff0\nf2\n", encoding="utf-8")
    assert open_set("own", camera).train == (0, 2)


def test_counts_alone(camera: Path) -> None:
    (camera / "heads.csv").unlink()
    (camera / "counts.csv").write_text("frame,count\nf1,2\nf1,3\n")
    with pytest.raises(DataError, match=r"expected one whole number of people for each frame .* found '3'"):
        open_set("own", camera)
    (camera / "counts.csv").write_text("count,frame\n" + "".join(f"{n + 1},f{n}\n" for n in range(10)))
    opened = open_set("own", camera)
    assert counts(opened) == list(range(1, 11))
    assert not opened.has_points
    with pytest.raises(DataError, match=r"expected head points of f0.png; own has counts alone"):
        opened.density(0)


def test_lists_of_parts_and_maps(camera: Path) -> None:
    (camera / "validation.txt").write_text("# the first hour\nf3.png\nf1\n\n")
    (camera / "test.txt").write_text("f9\n")
    mask = np.zeros(SIZE, dtype=np.uint8)
    mask[:, :20] = 200
    Image.fromarray(mask).save(camera / "roi.png")
    opened = open_set("own", camera)
    assert [opened.frames[i].name for i in opened.validation] == ["f1.png", "f3.png"]
    assert [opened.frames[i].name for i in opened.test] == ["f9.png"]
    assert opened.train == ()
    assert opened.roi is not None
    assert [opened.count(i) for i in (1, 3, 9)] == [1, 3, 4]  # those of nine whose x is below 20
    assert counts(open_set("own", camera, use_roi=False)) == list(range(10))


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("heads.csv", "name,x,y\nf1.png,1,2\n", "expected the columns frame, x, y in .*; found name, x, y"),
        ("heads.csv", "frame,x,y\nf1.png,one,2\n", "expected a number on line 2 of .*heads.csv; found 'one'"),
        ("heads.csv", "frame,x,y\n,1,2\n", "expected the name of a frame on line 2"),
        ("heads.csv", "frame,x,y\nf77.png,1,2\n", r"expected the annotated frames in .*frames; missing: f77.png"),
        ("heads.csv", "frame,x,y\n", "expected annotations of at least one frame"),
        ("counts.csv", "frame,count\nf1.png,3\n", "expected heads.csv or counts.csv in .*; found heads"),
        ("train.txt", "f1.png\nf1.png\n", "expected each frame in one of the lists .*; found f1.png"),
        ("test.txt", "nobody.png\n", "found 'nobody.png', which is not annotated"),
        ("test.txt", "# nobody\n", "expected each frame in one of the lists .*; found none"),
        ("roi.png", "no image", "expected an image at .*roi.png; found another kind of file"),
    ],
)
def test_folders_that_are_refused(camera: Path, file: str, content: str, match: str) -> None:
    (camera / file).write_text(content)
    with pytest.raises(LatedropError, match=match):
        open_set("own", camera)


def test_black_regions_and_several_sizes(camera: Path) -> None:
    Image.fromarray(np.zeros(SIZE, dtype=np.uint8)).save(camera / "roi.png")
    with pytest.raises(DataError, match=r"expected pixels that are not black"):
        open_set("own", camera)
    Image.fromarray(np.full(SIZE, 9, dtype=np.uint8)).save(camera / "roi.png")
    Image.fromarray(np.zeros((90, 96), dtype=np.uint8)).save(camera / "frames" / "f2.png")
    with pytest.raises(DataError, match=r"expected frames of one size beside .*roi.png, 80 x 96 .*; found several"):
        open_set("own", camera)
    (camera / "roi.png").unlink()
    opened = open_set("own", camera)
    assert opened.size is None
    assert opened.shape(2) == (90, 96)
