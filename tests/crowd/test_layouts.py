"""Sets in the layouts of their releases: made small here, and the real ones where they are at hand."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from scipy.io import loadmat, savemat

from latedrop.errors import ArgumentError, DataError, FileError
from latedrop_crowd.layouts import CrowdSet, Frame, open_set
from rounding import rounding

DATA = Path(__file__).parents[3] / "shared" / "data"
SIZE = (34, 46)  # of the frames made here: no multiple of 4
ROI = np.ones(SIZE, dtype=np.uint8)
ROI[:, :6] = 0


def real(name: str) -> Path:
    if not (DATA / name).is_dir():
        pytest.skip(f"the original release is not at ../shared/data/{name}")
    return DATA / name


def picture(path: Path, size: tuple[int, int] = SIZE, *, colour: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, columns = np.mgrid[: size[0], : size[1]]
    pixels = ((rows * 3 + columns * 5) % 256).astype(np.uint8)
    Image.fromarray(np.stack([pixels, pixels // 2, pixels // 4], 2) if colour else pixels).save(path, quality=95)


def empties(folder: Path, names: list[str]) -> None:
    """Files that are never read: loading must not open images."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


def cells(items: list[object]) -> npt.NDArray[np.object_]:
    """A MATLAB cell array, 1 x n."""
    made = np.empty((1, len(items)), dtype=object)
    made[0] = items
    return made


def heads(number: int) -> npt.NDArray[np.float64]:
    """As many heads as the number's last digit; MATLAB coordinates; frames 10, 20, ... are empty."""
    return np.array([(3.0 + 4 * i, 5.0 + 2 * i) for i in range(number % 10)]).reshape(-1, 2)


def make_mall(folder: Path) -> Path:
    points = [heads(number) for number in range(1, 2001)]
    empties(folder / "frames", [f"seq_{number:06d}.jpg" for number in range(1, 2001)])
    for number in (1, 801):
        picture(folder / "frames" / f"seq_{number:06d}.jpg", colour=True)
    counts = np.array([[len(actual)] for actual in points], dtype=np.uint8)
    savemat(folder / "mall_gt.mat", {"frame": cells([{"loc": actual} for actual in points]), "count": counts})
    savemat(folder / "perspective_roi.mat", {"roi": {"mask": ROI}})
    return folder


def make_ucsd(folder: Path) -> Path:
    truth = folder / "vidf-cvpr"
    truth.mkdir(parents=True)
    for clip in range(10):
        stem = f"vidf1_33_{clip:03d}"
        empties(folder / "vidf" / f"{stem}.y", [f"{stem}_f{number:03d}.png" for number in range(1, 201)])
        picture(folder / "vidf" / f"{stem}.y" / f"{stem}_f001.png")
        actual = [np.c_[heads(number), np.full(number % 10, number)] for number in range(1, 201)]
        savemat(truth / f"{stem}_frame_full.mat", {"frame": cells([{"loc": item, "id": 1} for item in actual])})
    savemat(truth / "vidf1_33_roi_mainwalkway.mat", {"roi": {"xi": 0.0, "yi": 0.0, "mask": ROI}})
    return folder


def make_pets(folder: Path) -> Path:
    for time, number in (("13-57", 1), ("13-59", 2)):
        images = folder / "S1" / "L1" / f"Time_{time}" / "View_001"
        empties(images, [f"frame_{i:04d}.jpg" for i in range(1, 10)])
        picture(images / "frame_0000.jpg", colour=True)
        boxes = '<box h="20" w="8" xc="15.5" yc="18"/><box h="10" w="4" xc="100" yc="9"/>'
        frames = "".join(
            f'<frame number="{i}"><objectlist>{f"<object>{boxes}</object>" if i else ""}</objectlist></frame>'
            for i in range(10)
        )
        file = folder / "annotations" / f"PETS2009-S1L1-{number}.xml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'<?xml version="1.0"?><dataset name="x">{frames}</dataset>')
    (folder / "annotations" / "View_001.xml").write_text('<?xml version="1.0"?><Camera name="View_001"/>')
    return folder


@pytest.fixture(scope="module")
def mall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mall(tmp_path_factory.mktemp("mall"))


@pytest.fixture(scope="module")
def ucsd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ucsd(tmp_path_factory.mktemp("ucsd"))


def test_mall(mall: Path) -> None:
    actual = open_set("mall", mall)
    assert (actual.name, len(actual.frames), actual.size, actual.sigma) == ("mall", 2000, SIZE, 4.0)
    assert actual.train == tuple(range(640))
    assert actual.validation == tuple(range(640, 800))
    assert actual.test == tuple(range(800, 2000))
    assert actual.frames[2].name == "seq_000003"
    assert actual.frames[2].points.tolist() == [[2, 4], [6, 6], [10, 8]]  # MATLAB's 3, 5 is 2, 4
    assert actual.roi is None
    assert [actual.count(index) for index in (0, 9, 18)] == [1, 0, 9]
    assert actual.density(9).shape == (1, 8, 11)
    assert not actual.density(9).any()
    assert float(actual.density(18).sum()) == pytest.approx(9)
    assert actual.image(0).shape == (1, *SIZE)
    assert actual.image(800, 3).shape == (3, *SIZE)


def test_mall_inside_its_region(mall: Path) -> None:
    actual = open_set("mall", mall, use_roi=True)
    assert actual.roi is not None
    assert actual.roi.dtype == bool
    assert [actual.count(index) for index in (0, 1, 18)] == [0, 1, 8]  # the first head is in column 2
    assert float(actual.density(18).sum()) == pytest.approx(8)
    assert not actual.density(18)[..., :1].any()


def test_ucsd(ucsd: Path) -> None:
    actual = open_set("ucsd", ucsd)
    names = [frame.name for frame in actual.frames]
    assert names[0] == "vidf1_33_003_f001"
    assert [len(part) for part in (actual.train, actual.validation, actual.test)] == [640, 160, 1200]
    assert (names[actual.validation[0]], names[actual.validation[-1]]) == ("vidf1_33_003_f161", "vidf1_33_006_f200")
    assert {names[index][9:12] for index in actual.test} == {"000", "001", "002", "007", "008", "009"}
    assert actual.frames[1].points.tolist() == [[2, 4], [6, 6]]
    assert actual.count(1) == 1  # inside the region of interest
    assert open_set("ucsd", ucsd, use_roi=False).count(1) == 2


def test_pets(tmp_path: Path) -> None:
    actual = open_set("pets", make_pets(tmp_path))
    assert (actual.train, actual.validation, actual.test) == (tuple(range(8)), (8, 9), tuple(range(10, 20)))
    assert [actual.frames[index].name for index in (0, 19)] == ["13-57/frame_0000", "13-59/frame_0009"]
    np.testing.assert_allclose(actual.frames[1].points, [[15.5, 10], [100, 5]])  # a tenth below the top of the box
    assert [actual.count(index) for index in (0, 1)] == [0, 1]


def test_enlarged_frames_agree_with_their_heads(mall: Path) -> None:
    plain, large = (open_set("mall", mall, use_roi=True, enlarge=times) for times in (1, 3))
    assert large.size == (102, 138)
    assert (large.enlarge, large.sigma) == (3, 12.0)
    assert large.image(0).shape == (1, 102, 138)
    assert large.roi is not None
    assert large.roi.shape == large.size
    assert [large.count(index) for index in range(30)] == [plain.count(index) for index in range(30)]
    # The middle of a pixel stays the middle of what it becomes: pixel 6 is then 18, 19 and 20.
    np.testing.assert_allclose(large.frames[18].points[1], [19, 19])
    assert float(large.density(18).sum()) == pytest.approx(8)
    small = torch.nn.functional.avg_pool2d(large.image(0)[None], 3)[0]
    assert float((small - plain.image(0))[:, 2:-2, 2:-2].abs().mean()) < 0.02


def test_a_frame_without_a_picture() -> None:
    nothing = CrowdSet("scenes", (Frame("nothing", None, np.zeros((0, 2))),), (0,), (), ())
    with pytest.raises(DataError, match="expected a path or pixels in frame nothing; found neither"):
        nothing.image(0)


def test_arguments_are_checked(mall: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"expected a set among mall, ucsd, pets, .*; found 'mal'"):
        open_set("mal", mall)
    with pytest.raises(ArgumentError, match=r"expected enlarge to be 1, 2, \.\.\.; found 0"):
        open_set("mall", mall, enlarge=0)
    with pytest.raises(ArgumentError, match="expected a set with a region of interest; pets has none"):
        open_set("pets", mall, use_roi=True)
    with pytest.raises(FileError, match=r"expected the folder of mall at .*nowhere; there is none"):
        open_set("mall", tmp_path / "nowhere")
    for name in ("mall", "ucsd", "pets"):
        with pytest.raises(FileError, match=r"expected annotations at .*; there is no such file"):
            open_set(name, tmp_path)


def test_malformed_mall_annotations_are_named(tmp_path: Path, mall: Path) -> None:
    (tmp_path / "frames").symlink_to(mall / "frames")
    file, whole = tmp_path / "mall_gt.mat", (mall / "mall_gt.mat").read_bytes()
    frames = loadmat(mall / "mall_gt.mat")["frame"]

    def refused(match: str) -> None:
        with pytest.raises(FileError, match=rf"expected annotations as released in .*mall_gt\.mat; .*{match}"):
            open_set("mall", tmp_path)

    savemat(file, {"count": np.ones(2000)})
    refused("frame")
    savemat(file, {"frame": frames[:, 1:]})
    refused("1999 frames instead of 2000")
    for odd, match in (({"where": np.ones((3, 2))}, "loc"), ({"loc": np.array([[1, np.nan]])}, "not finite")):
        changed = frames.copy()
        changed[0, 2] = odd
        savemat(file, {"frame": changed})
        refused(match)
    for content in (b"not MATLAB" * 30, whole[: len(whole) // 2]):
        file.write_bytes(content)
        refused("")


def test_maps_and_frames_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = make_mall(tmp_path / "mall_dataset")  # as its archive unpacks
    picture(folder / "frames" / "seq_000002.jpg", (34, 44))
    with pytest.raises(DataError, match=r"expected frames of 34 x 46 pixels in mall; found 34 x 44 in .*seq_000002"):
        open_set("mall", tmp_path).image(1)
    with pytest.raises(DataError, match="expected frames of 34 x 46 pixels in mall; found 34 x 44"):
        open_set("mall", tmp_path, enlarge=2).image(1)
    savemat(folder / "perspective_roi.mat", {"roi": {"mask": ROI[:, 1:]}})
    assert open_set("mall", tmp_path).roi is None
    with pytest.raises(DataError, match=r"expected a region of interest of the frames' 34 x 46 pixels .*34, 45"):
        open_set("mall", tmp_path, use_roi=True)


def test_malformed_pets_boxes_are_named(tmp_path: Path) -> None:
    folder = make_pets(tmp_path)
    file = folder / "annotations" / "PETS2009-S1L1-1.xml"
    whole = file.read_text()
    for text, said in (
        (whole[:-40], "ParseError"),
        (whole.replace("yc=", "why="), "'yc'"),
        (whole.replace('"18"', '"low"'), "low"),
        ('<Camera name="View_001"/>', "10 frames instead of 0"),
    ):
        file.write_text(text)
        with pytest.raises(FileError, match=rf"expected annotations as released in .*PETS2009-S1L1-1\.xml; .*{said}"):
            open_set("pets", folder)


def test_the_real_mall() -> None:
    actual = open_set("mall", real("mall"))
    assert actual.size == (480, 640)
    assert sum(len(frame.points) for frame in actual.frames) == sum(map(actual.count, range(2000))) == 62315
    assert actual.image(1999, 3).shape == (3, 480, 640)
    for index in (0, 1999):
        assert float(actual.density(index).sum()) == pytest.approx(
            len(actual.frames[index].points), rel=rounding(terms=480 * 640)
        )
    inside = open_set("mall", real("mall"), use_roi=True)
    assert sum(map(inside.count, range(2000))) == 62315 - 4


def test_the_real_ucsd() -> None:
    folder = real("ucsd")
    actual = open_set("ucsd", folder)
    assert actual.size == (158, 238)
    assert actual.roi is not None
    # The counts that come with the release are of points inside frame and region, in every frame.
    counts = {}
    for clip in range(10):
        both = loadmat(folder / "vidf-cvpr" / f"vidf1_33_{clip:03d}_count_roi_mainwalkway.mat")["count"].ravel()
        total = sum(direction.ravel().astype(int) for direction in both)
        counts |= {f"vidf1_33_{clip:03d}_f{number + 1:03d}": int(count) for number, count in enumerate(total)}
    assert [actual.count(index) for index in range(2000)] == [counts[frame.name] for frame in actual.frames]
    assert sum(counts.values()) == 49_496
    # The total that is often quoted first moves points to the nearest pixel of the frame.
    points = np.concatenate([frame.points for frame in actual.frames])
    column, row = np.clip(np.rint(points), 0, [237, 157]).astype(int).T
    assert int(actual.roi[row, column].sum()) == 49_885


def test_the_real_pets() -> None:
    actual = open_set("pets", real("pets2009"))
    assert actual.size == (576, 768)
    assert [len(part) for part in (actual.train, actual.validation, actual.test)] == [177, 44, 241]
    assert (
        sum(len(frame.points) for frame in actual.frames) == sum(map(actual.count, range(len(actual.frames)))) == 8813
    )
