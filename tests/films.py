"""Videos for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def film(
    path: Path, pictures: Iterable[Any], codec: str = "mjpeg", rate: int = 5, layout: str = "", **options: str
) -> Path:
    """Write pictures `(H, W, 3)` of bytes as a video; a layout of pixels that suits the codec where none is given."""
    av = pytest.importorskip("av", reason="videos need av")
    layout = layout or ("yuvj420p" if codec == "mjpeg" else "yuv420p")
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.pix_fmt, frames = layout, list(pictures)
        stream.height, stream.width = frames[0].shape[:2]
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame.reformat(format=layout)))
        container.mux(stream.encode(None))
    return path
