"""Sources: the latest frame wins, broken streams come back, passwords stay hidden."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from threading import Condition, Event

import numpy as np
import pytest
from PIL import Image

from films import film
from latedrop.errors import ArgumentError, FileError, LatedropError
from latedrop_crowd.console.sources import Camera, Pixels, Source, _rate, demo_sources, open_sources
from waiting import waited

BLACK = np.zeros((8, 8), np.uint8)


def camera_of(frames: Callable[[], Iterator[Pixels]], *, live: bool, wait: float = 0.01) -> tuple[Camera, list[str]]:
    said: list[str] = []
    return Camera(Source("door", live, frames), Condition(), wait, lambda kind, text: said.append(kind)), said


def test_the_latest_frame_wins() -> None:
    go_on = Event()

    def frames() -> Iterator[Pixels]:
        for number in range(10):
            yield np.full((8, 8), number, np.uint8)
        go_on.wait(10)
        yield np.full((8, 8), 10, np.uint8)

    camera, said = camera_of(frames, live=False)
    camera.start()
    waited(lambda: camera.number == 10)
    shot = camera.take()
    assert shot is not None
    assert (int(shot.pixels[0, 0]), camera.skipped) == (9, 9)
    assert camera.take() is None
    go_on.set()
    waited(lambda: camera.state == "ended")
    shot = camera.take()
    assert shot is not None
    assert (int(shot.pixels[0, 0]), camera.skipped) == (10, 9)
    assert said == ["live", "ended"]


def test_a_broken_stream_is_opened_again_and_says_so() -> None:
    opened: list[float] = []

    def frames() -> Iterator[Pixels]:
        opened.append(time.monotonic())
        if len(opened) in (2, 3, 4):
            raise FileError("expected frames; connection refused.")
        yield BLACK
        if len(opened) == 1:
            raise RuntimeError("anything that a decoder may raise")
        Event().wait(0.05)

    camera, said = camera_of(frames, live=True, wait=0.05)
    camera.start()
    waited(lambda: len(opened) >= 5)
    camera.close()
    assert said[:3] == ["live", "lost", "live"]
    gaps = np.diff(opened[:5])
    assert all(later > earlier for earlier, later in pairwise(gaps))  # twice as long each time
    assert "Trying again in" in camera.words or camera.state == "live"


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for door in ("north", "south"):
        folder = tmp_path / door / "frames"
        folder.mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "a.png")
    folders = [str(tmp_path / door / "frames") for door in ("north", "south")]
    assert [source.name for source in open_sources(folders)] == ["frames", "frames (2)"]
    channels = [f"rtsp://recorder/live?channel={number}" for number in (1, 2, 3)]
    assert [source.name for source in open_sources(channels)] == [f"recorder/live{n}" for n in ("", " (2)", " (3)")]
    with pytest.raises(ArgumentError, match="once"):
        open_sources([folders[0], str(tmp_path / "north" / "." / "frames")])


def test_a_password_is_never_shown() -> None:
    pytest.importorskip("av")
    (source,) = open_sources(["rtsp://admin:secret@127.0.0.1:1/stream?key=hidden"])
    assert source.name == "127.0.0.1:1/stream"
    assert source.live
    with pytest.raises(LatedropError) as raised:
        next(iter(source.frames()))
    assert "secret" not in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert "secret" not in repr(source.name)


@pytest.mark.parametrize("word", ["ftp://host/x", "file:///etc/passwd", "rtsp://", "concat:a", "no/such/file", "-1"])
def test_words_that_are_no_source(word: str) -> None:
    with pytest.raises(LatedropError, match="expected"):
        open_sources([word])


def test_files_that_are_no_video(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileError, match="expected a video file such as"):
        open_sources([str(tmp_path / "notes.txt")])
    with pytest.raises(ArgumentError, match="frames per second"):
        open_sources([], fps=0)


def test_a_folder_ends_or_begins_again(tmp_path: Path) -> None:
    for number in (2, 10, 1):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp_path / f"f{number}.png")
    (once,) = open_sources([str(tmp_path)], fps=1000)
    assert [int(pixels[0, 0]) for pixels in once.frames()] == [1, 2, 10]
    (again,) = open_sources([str(tmp_path)], fps=1000, loop=True)
    turning = again.frames()
    assert [int(next(turning)[0, 0]) for _ in range(5)] == [1, 2, 10, 1, 2]
    with pytest.raises(ArgumentError, match="each source once"):
        open_sources([str(tmp_path), str(tmp_path)])


@pytest.mark.parametrize("layout", ["gray", "gray16le", "bgra"])
def test_videos_of_other_layouts(tmp_path: Path, layout: str) -> None:
    pictures = [np.full((1, 1, 3), 50 * number, np.uint8) for number in range(3)]
    path = film(tmp_path / "clip.mkv", pictures, "ffv1", 50, layout)
    (source,) = open_sources([str(path)], fps=500)
    assert [frame.shape for frame in source.frames()] == [(1, 1, 3)] * 3
    assert [int(frame[0, 0, 0]) for frame in source.frames()] == pytest.approx([0, 50, 100], abs=1)


def test_a_video_of_no_frames_is_not_read_round_and_round(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "clip.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        container.start_encoding()
    (source,) = open_sources([str(path)], loop=True)
    with pytest.raises(FileError, match="a video without any"):
        next(iter(source.frames()))


@pytest.mark.parametrize("content", [b"", b"no video"], ids=["empty", "text"])
def test_a_file_without_frames_says_so(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("av")
    (tmp_path / "clip.mp4").write_bytes(content)
    (source,) = open_sources([str(tmp_path / "clip.mp4")])
    camera = Camera(source, Condition(), 0.01)
    camera.start()
    waited(lambda: camera.words.startswith("no picture: expected frames; Invalid data"))
    camera.close()


def test_a_video_plays_at_its_own_pace(tmp_path: Path) -> None:
    path = film(tmp_path / "clip.mp4", (np.full((64, 64, 3), 20 * n, np.uint8) for n in range(10)), "mpeg4", 50)
    (source,) = open_sources([str(path)])
    begun = time.monotonic()
    frames = list(source.frames())
    assert len(frames) == 10
    assert type(frames[0]) is np.ndarray
    assert time.monotonic() - begun >= 8 / 50  # waits between frames, and never hurries


def test_the_demo_moves_and_is_the_same_again() -> None:
    from latedrop_crowd.scenes import Walks

    walks = Walks(3)
    one, other = walks.picture(10.0), walks.picture(10.5)
    assert one.shape == (576, 768, 3)
    assert (one != other).mean() > 0.1
    np.testing.assert_array_equal(one, Walks(3).picture(10.0))
    assert walks.people(15.0) != walks.people(45.0)
    assert [source.live for source in demo_sources()] == [True, True]


def test_slow_frames_have_a_rate() -> None:
    """One frame in seven seconds is no rate of 0; never more are counted than come in."""
    camera, _ = camera_of(lambda: iter(()), live=False)
    now = time.monotonic()
    camera._times["in"].extend([now - 3, now - 2, now - 1])
    camera._times["out"].extend([now - 3, now - 0.2, now - 0.1])
    assert camera.about()["arriving"] == camera.about()["counted"] == pytest.approx(2 / 3, abs=0.05)
    assert _rate([0.0, 7.0, 14.0], 16.0) == pytest.approx(1 / 9)
    assert _rate([0.0, 0.2, 0.4, 0.6], 0.8) == pytest.approx(3 / 0.8)
    assert _rate([0.0, 0.2, 10.0, 10.2, 10.4], 10.5) == pytest.approx(2 / 0.5)  # the last seconds alone
    assert _rate([3.0], 4.0) == 0
