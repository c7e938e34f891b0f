"""A calibrated people counter: its records, its counts with intervals, and files that keep what is finished."""

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import latedrop
from counters import network
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError, OutputError
from latedrop_crowd.calibration import CrowdCalibration, calibrate_counter, load_calibration, read_maps
from latedrop_crowd.counting import COLUMNS, CountFile, count_people, finished_frames, provenance_of, write_counts
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.panels import draw_panel, write_panel
from latedrop_crowd.regions import Policy
from rounding import assert_same_up_to_rounding, rounding

GRID = (18, 24)


@pytest.fixture(scope="module")
def half() -> Trained:
    roi = torch.zeros(GRID, dtype=torch.bool)
    roi[4:, :12] = True
    return Trained(network(), roi, {"set": "scenes"})


def images(scenes: CrowdSet) -> Iterator[tuple[str, Tensor]]:
    return ((scenes.frames[i].name, scenes.image(i)) for i in scenes.test)


def cut(crowd_set: CrowdSet, roi: Tensor) -> CrowdSet:
    """Return the scenes with a region of interest in pixels."""
    return replace(crowd_set, roi=roi.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy())


def test_a_reading_says_what_the_core_says(trained: Trained, scenes: CrowdSet, free: CrowdCalibration) -> None:
    x = scenes.image(scenes.test[0])
    reading = free.read(trained, x)
    own = trained.model(x[None]).detach()[0, 0].double()
    assert reading.density.shape == reading.std.shape == GRID
    assert_same_up_to_rounding(reading.density, own)
    assert float(reading.count.mean) == pytest.approx(float(own.sum()), rel=rounding())
    expected = latedrop.Predictor(trained.model, free.count, trained.count_of).predict(x[None])
    assert_same_up_to_rounding(reading.count.variance, expected.variance)
    assert reading.strangeness >= float(expected.novelty)  # type: ignore[arg-type]
    assert free.count.terms is not None
    assert {name.partition(":")[0] for name in free.count.terms.columns} == {"dropout", "size", "leverage"}


@pytest.mark.slow
def test_only_cells_of_the_region_of_interest_are_calibrated(half: Trained, scenes: CrowdSet) -> None:
    assert half.roi is not None
    inside = cut(scenes, half.roi)
    actual = calibrate_counter(half, inside, progress=False)
    assert actual.pixels.output_shape == (int(half.roi.sum()),)
    assert actual.pixels.table[0].zero_variances == 0
    reading = actual.read(half, inside.image(inside.test[0]))
    assert not reading.density[~half.roi].any()
    assert not reading.std[~half.roi].any()
    assert reading.std[half.roi].min() > 0
    assert float(reading.count.mean) == pytest.approx(reading.density.sum(), rel=rounding())
    maps = read_maps(half, actual, inside, inside.test, progress=False)
    assert maps.true.tolist() == [inside.count(i) for i in inside.test]
    np.testing.assert_array_equal(maps.roi, half.roi)


def test_files_that_are_refused(
    trained: Trained, half: Trained, free: CrowdCalibration, scenes: CrowdSet, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"

    def refused(match: str, network: Trained = trained) -> None:
        with pytest.raises(FileError, match=match):
            load_calibration(path, network)

    path.write_text(free.count.to_json())
    refused("expected the calibration of a people counter.*found that of a single readout")
    path.write_text(free.to_json().replace('"scenes"', '"mall"'))
    refused("the checksum does not match")
    free.save(path)
    refused("expected the calibration of these weights in .*; it was made for others", Trained(network(1)))
    refused(r"region of interest \(18 x 24 cells\); .* was made for another \(none cells\)", half)
    replace(free, count=replace(free.count, custom_readout="mean_of")).save(path)
    refused("c.json: expected crowd.count.custom_readout to be Trained.count_of; found 'mean_of'")


def test_sets_that_do_not_fit(trained: Trained, half: Trained, scenes: CrowdSet) -> None:
    def refused(match: str, network: Trained, crowd_set: CrowdSet, **settings: object) -> None:
        with pytest.raises((DataError, ArgumentError), match=match):
            calibrate_counter(network, crowd_set, progress=False, **settings)  # type: ignore[arg-type]

    refused(
        r"expected the network's region of interest \(18 x 24 cells\); found another in scenes \(none\)", half, scenes
    )
    enlarged = replace(trained, about={"enlarge": 2})
    refused("expected frames enlarged 2 times, as the network was trained with; found 1", enlarged, scenes)
    refused("expected at least 2 validation frames in scenes", trained, replace(scenes, validation=(0,)))


def test_counts_with_intervals(trained: Trained, scenes: CrowdSet, free: CrowdCalibration) -> None:
    rows = list(count_people(trained, free, images(scenes), 0.9))
    assert [row.name for row in rows] == [scenes.frames[i].name for i in scenes.test]
    (quick, *_) = count_people(trained, free, images(scenes), 0.9, deviations=False)
    assert quick.row() == rows[0].row()
    assert rows[0].mapped
    assert not quick.mapped
    narrow = list(count_people(trained, free, images(scenes), 0.5))
    for row, other in zip(rows, narrow, strict=True):
        assert row.low <= other.low <= row.count <= other.high <= row.high
        assert row.count == other.count == pytest.approx(row.density.sum(), rel=rounding())
        assert row.high - row.count == pytest.approx(1.6448536 * row.std, rel=rounding())
        remaining = row.density[~row.regions.mask(row.rejected)]
        assert row.count_kept == pytest.approx(remaining.sum(), rel=rounding())
        assert str(row) == f"{row.count:.1f} people, 90 % interval {row.low:.1f} to {row.high:.1f}"
        assert tuple(row.row()) == COLUMNS
        assert_same_up_to_rounding(
            torch.stack(row.prediction.interval(0.5))[:, 0].clamp_min(0), torch.tensor([other.low, other.high])
        )


def test_a_density_that_sums_below_zero_is_an_error(scenes: CrowdSet, free: CrowdCalibration) -> None:
    model = network()
    with torch.no_grad():
        model.fuse.weight.neg_()
        model.fuse.bias.fill_(-1)
    with pytest.raises(OutputError, match=r"expected a density that sums to people; found -\d.* in scene_0018"):
        next(count_people(Trained(model), free, images(scenes)))
    bad: list[LatedropError] = []
    strange = list(count_people(Trained(model), free, images(scenes), on_bad=bad.append))
    assert len(bad) + len(strange) == 4
    assert all(row.strangeness > 1 and row.count == 0 for row in strange)  # these are told anyway
    with torch.no_grad():
        model.fuse.weight.zero_()
        model.fuse.bias.fill_(-1e-3)
    (row, *_) = count_people(Trained(model), free, images(scenes))
    assert (row.count, row.low, row.count_kept) == (0, 0, 0)  # rounding of an empty frame
    assert row.density.sum() < 0 < row.high


def test_rejected_regions_leave_the_count(trained: Trained, scenes: CrowdSet, free: CrowdCalibration) -> None:
    rejecting = replace(free, policy=Policy(threshold=1e-6, greatest_mass=1e9))
    (row, *_) = count_people(trained, rejecting, images(scenes))
    assert row.rejected.all()
    assert row.row()["regions_rejected"] == len(row.regions) > 0
    assert row.count_kept == pytest.approx(0, abs=rounding())
    assert not row.faint.any()
    (plain, *_) = count_people(trained, replace(free, policy=None), images(scenes))
    assert plain.count_kept == plain.count == row.count
    (marked, *_) = count_people(trained, replace(free, policy=Policy(1e-6, faint_mass=1e9)), images(scenes))
    assert marked.faint.all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_counts_the_same(half: Trained, scenes: CrowdSet) -> None:
    assert half.roi is not None
    moved = replace(half, model=network().to("cuda"), roi=half.roi.to("cuda"))
    inside = cut(scenes, half.roi)
    actual = calibrate_counter(moved, inside, progress=False)
    there, here = (next(count_people(one, actual, images(inside))) for one in (moved, half))
    assert there.count == pytest.approx(here.count, rel=1e-3)  # convolutions of a GPU have 11 bits (TF32)
    assert there.std == pytest.approx(here.std, rel=1e-2)
    np.testing.assert_allclose(there.std_map, here.std_map, rtol=2e-2, atol=1e-6)


def test_frames_are_read_one_at_a_time(trained: Trained, scenes: CrowdSet, free: CrowdCalibration) -> None:
    pulled = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, image in images(scenes):
            pulled.append(name)
            yield name, image

    rows = count_people(trained, free, stream(), skip={scenes.frames[scenes.test[0]].name})
    assert next(rows).name == pulled[-1]
    assert len(pulled) == 2


BAD: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: torch.rand(1, 71, 96), "expected 72 pixels or more on each side.*found 71 x 96 in cam7"),
    (lambda: torch.rand(3, 72, 96), r"expected frames \(1, H, W\).*found \(3, 72, 96\) in cam7"),
    (lambda: torch.full((1, 72, 96), torch.nan), "cam7: expected finite inputs"),
]


@pytest.mark.parametrize(("bad", "match"), BAD)
def test_bad_frames_are_named(
    bad: Callable[[], Tensor], match: str, trained: Trained, scenes: CrowdSet, free: CrowdCalibration
) -> None:
    good = next(images(scenes))
    with pytest.raises(DataError, match=match):
        list(count_people(trained, free, [("cam7", bad()), good]))
    errors: list[Exception] = []
    rows = list(count_people(trained, free, [good, ("cam7", bad()), good], on_bad=errors.append))
    assert len(rows) == 2
    assert [type(error) for error in errors] == [DataError]


def test_enlarged_as_in_training(trained: Trained, free: CrowdCalibration) -> None:
    small = torch.rand(1, 40, 48)
    (row,) = count_people(replace(trained, about={"enlarge": 2}), free, [("cam7", small)])
    assert row.density.shape == (20, 24)
    assert row.image is small


def test_each_frame_is_in_the_file_at_once(
    trained: Trained, scenes: CrowdSet, free: CrowdCalibration, tmp_path: Path
) -> None:
    path, seen = tmp_path / "counts.csv", []

    def watched() -> Iterator[object]:
        for row in count_people(trained, free, images(scenes)):
            seen.append(set(finished_frames(path)))
            yield row
        raise RuntimeError("the power went off")

    with pytest.raises(RuntimeError, match="the power went off"):
        write_counts(watched(), path)  # type: ignore[arg-type]
    names = [scenes.frames[i].name for i in scenes.test]
    assert seen == [set(names[:k]) for k in range(len(names))]
    assert set(finished_frames(path)) == set(names)


def test_resume_after_half_a_line(trained: Trained, scenes: CrowdSet, free: CrowdCalibration, tmp_path: Path) -> None:
    path, whole = tmp_path / "counts.csv", tmp_path / "whole.csv"
    rows = list(count_people(trained, free, images(scenes)))
    assert write_counts(rows, whole) == len(rows)
    with whole.open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == COLUMNS
    assert [float(row["high"]) for row in read] == [row.row()["high"] for row in rows]
    write_counts(rows[:2], path)
    with path.open("a") as file:
        file.write("scene_0014,1.2")
    done = finished_frames(path)
    assert set(done) == {rows[0].name, rows[1].name}
    assert write_counts(count_people(trained, free, images(scenes), skip=done), path, resume=True) == 2
    assert path.read_bytes() == whole.read_bytes()


def test_frames_of_odd_names_and_files_that_a_spreadsheet_has_saved(
    trained: Trained, scenes: CrowdSet, free: CrowdCalibration, tmp_path: Path
) -> None:
    (_, image), *_ = images(scenes)
    names = ["a\u2028b.png", "c\x0bd.png", 'e"f,g.png', "h\x85.png"]
    path = tmp_path / "counts.csv"
    write_counts(count_people(trained, free, [(name, image) for name in names]), path)
    assert list(finished_frames(path, provenance_of(free, 0.9))) == names
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert list(finished_frames(path, provenance_of(free, 0.9))) == names


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("frame,count\n")
    with pytest.raises(FileError, match=r"expected no counts in .*counts.csv yet; found some. Resume to add"):
        write_counts([], path)
    with pytest.raises(FileError, match=r"expected a file of counts in .*; found something else"):
        finished_frames(path)
    with (
        pytest.raises(FileError, match=r"expected to write .*; the system says"),
        CountFile(tmp_path / "nowhere" / "counts.csv"),
    ):
        pass
    assert finished_frames(tmp_path / "new.csv") == {}


def test_full_disk_says_where_it_stopped(
    trained: Trained, scenes: CrowdSet, free: CrowdCalibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(count_people(trained, free, images(scenes)))
    path = tmp_path / "counts.csv"

    def full(values: object) -> None:
        raise OSError(28, "No space left on device")

    with CountFile(path) as file:
        file.add(rows[0])
        monkeypatch.setattr(file, "_line", full)
        with pytest.raises(FileError, match=f"No space left.* Frames before {rows[1].name} are in it"):
            file.add(rows[1])
    assert set(finished_frames(path)) == {rows[0].name}


def test_panel(trained: Trained, scenes: CrowdSet, free: CrowdCalibration, tmp_path: Path) -> None:
    (row, *_) = count_people(trained, replace(free, policy=Policy(1e-6, greatest_mass=1e9)), images(scenes))
    roi = torch.ones(GRID, dtype=torch.bool)
    roi[:, 5:] = False
    figure = draw_panel(row, roi=roi, heads=np.array([[3.0, 4.0]]), enlarge=2)
    said = figure.get_suptitle()
    assert said.startswith(
        f"{replace(row, reasons=())}; {row.count_kept:.1f} without {len(row.regions)} rejected region"
    )
    assert "; true count 1" in said
    titles = [ax.get_title() for ax in figure.axes[:3]]
    assert titles == [
        f"{row.name}, {len(row.regions)} region{'s' if len(row.regions) != 1 else ''} of density",
        "density",
        "standard deviation of the density",
    ]
    assert [ax.get_ylabel() for ax in figure.axes[3:]] == ["people per 2 x 2 pixels"] * 2
    write_panel(tmp_path / "p.png", row)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("change", "why"), [(0.0, "too dark"), (0.1, "too dark"), (1e3, "too bright")])
def test_a_frame_without_a_picture_is_not_counted(
    change: float, why: str, trained: Trained, scenes: CrowdSet, free: CrowdCalibration, tmp_path: Path
) -> None:
    (name, image), *_ = images(scenes)
    rows = list(count_people(trained, free, [(name, image), ("bad", (change * image).clamp(0, 1))]))
    assert rows[0].uncountable == ""
    assert rows[1].uncountable.startswith(why)
    assert str(rows[1]).startswith(f"cannot count: {why}")
    assert {rows[1].row()[column] for column in ("count", "std", "low", "high", "count_kept")} == {None}
    path = tmp_path / "counts.csv"
    write_counts(rows, path)
    assert list(finished_frames(path)) == [name, "bad"]
    grey = list(count_people(trained, free, [("grey", torch.full_like(image, 0.45))]))
    assert grey[0].uncountable.startswith("nothing in the picture")
