"""Frames from images, folders and videos: the right pixels in the right order, and clear errors."""

import io
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import nn

import films
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError, LatedropWarning
from latedrop_crowd.frames import RECEPTIVE_FIELD, check_size, image_shape, open_frames, read_image, to_tensor
from latedrop_crowd.mcnn import MCNN
from rounding import assert_same_up_to_rounding

LUMA = np.array([0.299, 0.587, 0.114])
COLOURS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
GREYS = COLOURS[..., 0]


def saved(folder: Path, image: Image.Image, name: str = "image.png", **options: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / name, **options)
    return folder / name


def shade(number: int) -> npt.NDArray[np.uint8]:
    """A frame whose brightness tells its number."""
    return np.full((80, 96, 3), 10 * number + 10, dtype=np.uint8)


def film(path: Path, frames: int = 20, codec: str = "mjpeg", rate: int = 5, **options: str) -> Path:
    noise, pictures = np.random.default_rng(0), [shade(number) for number in range(frames)]
    for pixels in pictures:  # some detail, so that frames have bytes to lose
        pixels[:40] = noise.integers(0, 256, (40, 96, 1))
    return films.film(path, pictures, codec, rate, **options)


def numbers(taken: list[tuple[str, torch.Tensor]]) -> list[int]:
    """Which frames of a film these are, by their brightness."""
    return [round((float(image[:, 50:].mean()) * 255 - 10) / 10) for _, image in taken]


def until_it_stops(path: Path) -> tuple[list[tuple[str, torch.Tensor]], str]:
    """The frames before the error, and what it says."""
    taken: list[tuple[str, torch.Tensor]] = []

    def take() -> None:
        for pair in open_frames([path]):
            taken.append(pair)

    with pytest.raises(FileError) as error:
        take()
    return taken, str(error.value)


def test_colour_and_grey(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(COLOURS))
    assert image_shape(path) == (6, 9)
    colour, grey = read_image(path, 3), read_image(path)
    assert colour.shape == (3, 6, 9)
    assert grey.shape == (1, 6, 9)
    assert colour.dtype == grey.dtype == torch.float32
    assert_same_up_to_rounding(colour.permute(1, 2, 0), COLOURS / 255)
    assert_same_up_to_rounding(grey[0], COLOURS @ LUMA / 255)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits(tmp_path: Path, suffix: str) -> None:
    values = (GREYS.astype(np.uint16) * 257) - 3 * (GREYS > 0)
    path = saved(tmp_path, Image.fromarray(values.astype(np.uint16)), f"deep.{suffix}")
    assert_same_up_to_rounding(read_image(path)[0], values / 65535)
    assert read_image(path, 3).shape == (3, 6, 9)


def test_floats(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray((GREYS / 255).astype(np.float32)), "deep.tif")
    assert_same_up_to_rounding(read_image(path)[0], GREYS / 255)
    path = saved(tmp_path, Image.fromarray(GREYS.astype(np.float32)), "deep.tif")
    with pytest.raises(FileError, match="expected values between 0 and 1 in an image of mode F; found 1 to 248"):
        read_image(path)


def test_palettes_and_single_bits(tmp_path: Path) -> None:
    two = np.where(COLOURS[..., :1] > 127, [200, 30, 10], [0, 90, 250]).astype(np.uint8)
    palette = saved(tmp_path, Image.fromarray(two).quantize(4), "palette.png")
    assert_same_up_to_rounding(read_image(palette, 3).permute(1, 2, 0), two / 255)
    bits = saved(tmp_path, Image.fromarray(GREYS > 127), "bits.png")
    np.testing.assert_allclose(read_image(bits)[0], GREYS > 127)


def test_what_is_transparent_is_black(tmp_path: Path) -> None:
    alpha = np.zeros((6, 9), dtype=np.uint8)
    alpha[:, 4:] = 255
    image = Image.fromarray(np.dstack([np.full((6, 9, 3), 200, dtype=np.uint8), alpha]), "RGBA")
    clear = read_image(saved(tmp_path, image, "clear.png"))
    np.testing.assert_allclose(clear[0], np.where(alpha, 200, 0) / 255, atol=0.01)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.jpg").write_text("no image at all")
    (tmp_path / "empty.png").touch()
    for name in ("notes.jpg", "empty.png"):
        for read in (read_image, image_shape):
            with pytest.raises(FileError, match=rf"expected an image at .*{name}; found another kind of file"):
                read(tmp_path / name)
    for missing in (tmp_path / "missing.png", tmp_path):
        with pytest.raises(FileError, match=r"expected an image at .*; there is no such file"):
            read_image(missing)


@pytest.mark.parametrize("kind", ["jpeg", "png", "bmp"])
def test_images_that_are_cut_short_are_named(tmp_path: Path, kind: str) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 96, 3), dtype=np.uint8)).save(stream, kind)
    (tmp_path / "cut").write_bytes(stream.getvalue()[: len(stream.getvalue()) // 2])
    assert image_shape(tmp_path / "cut") == (80, 96)
    with pytest.raises(FileError, match=r"expected a whole image at .*cut; "):
        read_image(tmp_path / "cut")


def test_channels_are_one_or_three(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(GREYS))
    for call in (lambda: read_image(path, 2), lambda: open_frames([path], 4), lambda: to_tensor(GREYS, 0)):
        with pytest.raises(ArgumentError, match="expected 1 channel for grey or 3 for colour; found"):
            call()


def test_a_folder_in_natural_order(tmp_path: Path) -> None:
    for name in ("f10.png", "f2.png", "F1.PNG", "f2b.png", ".hidden.png", "m².png"):
        saved(tmp_path, Image.fromarray(GREYS), name)
    (tmp_path / "notes.txt").write_text("not a frame")
    (tmp_path / "sub.png").mkdir()
    frames = open_frames([tmp_path])
    assert frames.total == 5
    for _ in range(2):  # as often as wanted
        assert [name for name, _ in frames] == ["F1.PNG", "f2.png", "f2b.png", "f10.png", "m².png"]
    assert [name for name, _ in open_frames(tmp_path, every=2)] == ["F1.PNG", "f2b.png", "m².png"]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [
        saved(tmp_path / folder, Image.fromarray(GREYS), name) for folder in "ab" for name in ("1.png", folder + ".png")
    ]
    names = [name for name, _ in open_frames(paths)]
    assert names == [paths[0].as_posix(), "a.png", paths[2].as_posix(), "b.png"]


def test_every_counts_within_each_source(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for number in range(5):
        saved(folder, Image.fromarray(GREYS), f"f{number}.png")
    files = [saved(tmp_path, Image.fromarray(GREYS), f"g{number}.png") for number in range(4)]
    clip = film(tmp_path / "clip.avi", 7)
    frames = open_frames([*files, folder, clip, files[0]], every=3)
    names = [name for name, _ in frames]
    assert names == [
        "g0.png", "g3.png", "f0.png", "f3.png", "clip.avi#000000", "clip.avi#000003", "clip.avi#000006", "g0.png",
    ]  # fmt: skip
    assert frames.total == len(names)


def test_bad_files_can_be_told_and_passed_over(tmp_path: Path) -> None:
    first, last = (saved(tmp_path, Image.fromarray(GREYS), name) for name in ("first.png", "last.png"))
    (tmp_path / "bad.png").write_text("no image")
    whole = film(tmp_path / "whole.mkv").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    message: list[FileError] = []
    sources = [first, tmp_path / "bad.png", tmp_path / "cut.mkv", last]
    names = [name for name, _ in open_frames(sources, on_bad=message.append)]
    assert (names[0], names[1], names[-1]) == ("first.png", "cut.mkv#000000", "last.png")
    assert "bad.png; found another kind of file" in str(message[0])
    assert f"cut.mkv; it stopped after {len(names) - 2}: " in str(message[1])
    assert len(message) == 2


def test_sources_are_checked_first(tmp_path: Path) -> None:
    good = saved(tmp_path, Image.fromarray(GREYS))
    with pytest.raises(
        FileError, match=r"expected an image, a folder or a video at .*missing\.png; there is no such file"
    ):
        open_frames([good, tmp_path / "missing.png"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(FileError, match=r"expected images in the folder .*empty; found 1 files, none of them an image"):
        open_frames([good, tmp_path / "empty"])
    with pytest.raises(ArgumentError, match="found no source"):
        open_frames([])
    with pytest.raises(ArgumentError, match="found every=0"):
        open_frames([good], every=0)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.avi", "mjpeg"), ("a.mp4", "mpeg4"), ("a.MOV", "mjpeg"), ("a.ts", "mpeg2video")],
)
def test_videos(tmp_path: Path, name: str, codec: str) -> None:
    frames = open_frames([film(tmp_path / name, codec=codec, rate=25 if codec == "mpeg2video" else 5)])
    taken = list(frames)
    assert [label for label, _ in taken] == [f"{name}#{number:06d}" for number in range(20)]
    assert frames.total == 20
    assert taken[0][1].shape == (1, 80, 96)
    assert taken[0][1].dtype == torch.float32
    assert numbers(taken) == list(range(20))
    assert [label for label, _ in frames] == [label for label, _ in taken]


def test_frames_of_a_video_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("latedrop_crowd.frames.to_tensor", lambda pixels, channels: seen.append(pixels.shape))
    frames = iter(open_frames([film(tmp_path / "a.mkv")]))
    next(frames)
    next(frames)
    assert len(seen) == 2


@pytest.mark.parametrize(("suffix", "codec"), [("avi", "mjpeg"), ("avi", "mpeg4"), ("mkv", "mpeg4"), ("mp4", "mpeg4")])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_video_that_ends_early_gives_what_it_has(tmp_path: Path, suffix: str, codec: str, share: float) -> None:
    options = {"movflags": "faststart"} if suffix == "mp4" else {}  # else its header is what is lost
    whole = film(tmp_path / f"whole.{suffix}", codec=codec, **options).read_bytes()
    cut = tmp_path / f"cut.{suffix}"
    cut.write_bytes(whole[: int(share * len(whole))])
    taken, said = until_it_stops(cut)
    assert 0 < len(taken) < 20
    assert f"expected more frames in {cut}; it stopped after {len(taken)}: " in said
    assert numbers(taken[:-1]) == list(range(len(taken) - 1))  # the last may be half a frame


def test_a_video_with_a_gap_is_told(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mkv")
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = bytes(third)
    path.write_bytes(content)
    with pytest.warns(
        LatedropWarning, match=r"expected about 20 frames in .*a\.mkv; decoded \d+\. Part of it is damaged"
    ):
        taken = list(open_frames([path]))
    assert 0 < len(taken) < 18


def test_a_film_cut_off_in_its_header_or_no_film_is_refused_first(tmp_path: Path) -> None:
    whole = film(tmp_path / "whole.mp4", codec="mpeg4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "none.mp4").write_text("no video")
    for name in ("cut.mp4", "none.mp4"):
        with pytest.raises(FileError, match=rf"expected a video at .*{name}; .*Pass a file that plays to its end"):
            open_frames([tmp_path / name])


def test_without_av_a_video_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = film(tmp_path / "a.avi", 2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(LatedropError, match=r'expected av; not installed\. Run: pip install "latedrop-crowd\[video\]"'):
        open_frames([path])
    assert list(open_frames([saved(tmp_path, Image.fromarray(GREYS))]))


def test_the_receptive_field_is_what_gradients_reach() -> None:
    model = MCNN().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    for column in model.columns:
        for name, layer in column.named_children():
            if isinstance(
                layer, nn.MaxPool2d
            ):  # the mean lets gradients through to all that the largest is chosen from
                setattr(column, name, nn.AvgPool2d(2))
    x = torch.ones(1, 1, 160, 160, dtype=torch.double, requires_grad=True)
    model(x)[0, 0, 20, 20].backward()
    assert x.grad is not None
    reached = x.grad[0, 0] != 0
    sides = [int(reached.any(axis).sum()) for axis in (0, 1)]
    assert sides == [RECEPTIVE_FIELD, RECEPTIVE_FIELD]


def test_frames_smaller_than_the_receptive_field_are_refused() -> None:
    check_size((72, 72))
    check_size(torch.zeros(1, 3, 72, 300).shape)
    for shape in ((71, 300), (300, 71), (1, 71, 72)):
        with pytest.raises(
            DataError, match=r"expected 72 pixels or more on each side, .*; found \d+ x \d+ in tiny\.png"
        ):
            check_size(shape, "tiny.png")
