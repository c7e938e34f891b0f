"""What labels do: the stream follows each at once, five or more refit the counts. Frames are proposed for them.

One frame of each stretch of time is proposed, so that labels are spread over the day: frames picked by the width of
their interval did no better.
"""

from __future__ import annotations

import time
import warnings
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop import LatedropWarning
from latedrop.errors import DataError
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.calibration.recalibration import FEWEST
from latedrop_crowd.calibration.usual import STRANGE
from latedrop_crowd.console.counter import LiveCounter
from latedrop_crowd.console.pictures import png
from latedrop_crowd.console.store import Store
from latedrop_crowd.recalibrating import recalibrate_counter

__all__ = ["forget", "frame_name", "learn", "lossless", "restored", "why_label"]


def why_label(strangeness: float) -> str:
    """What there is to say about a proposed frame."""
    if strangeness >= STRANGE:
        return "unlike the frames seen before"
    return "a little unusual" if strangeness > 1 else "regular check"


def lossless(image: Tensor) -> bytes:
    """A frame as the network takes it, `(C, H, W)` in [0, 1], as PNG."""
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return png(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def learn(counter: LiveCounter, store: Store, source: str, frame: int, people: float, heads: Any, lock: Any) -> str:
    """Take a label into account at once; what was done, in words. Counting goes on meanwhile, but for `lock`."""
    kept = store.frame(frame)
    if kept is None or kept["source"] != source:
        raise DataError("expected a frame that is still kept; it is gone. Take another one.")
    store.label(frame, people, heads)
    known = store.frames(source, labelled=True)
    reading = counter.read(kept["name"], _opened(kept["png"]))
    with lock:
        counter.learn(kept["name"], reading, people)
    if len(known) < FEWEST:
        missing = FEWEST - len(known)
        return (
            f"Learned: intervals follow this label. {missing} more label{'s' if missing > 1 else ''}, and the counts "
            "are fitted to this scene."
        )
    return _refitted(counter, store, source, len(known), lock)


def forget(counter: LiveCounter, store: Store, source: str, frame: int, own: CrowdCalibration, lock: Any) -> str:
    """Take a label back and learn anew from the others; what was done, in words.

    With too few labels left to fit counts to, the calibration is again `own`, that of the weights.
    """
    kept = store.frame(frame)
    if kept is None or kept["source"] != source or not store.unlabel(frame):
        raise DataError("expected a frame of this source that has a label; found none. Take another one.")
    left = store.frames(source, labelled=True)
    if len(left) >= FEWEST:
        return f"Label taken back. {_refitted(counter, store, source, len(left), lock)}"
    with lock:
        store.add_calibration(source, f"as it came, {len(left)} labels", own.to_json())
        counter.use(own)
    for row in left:
        reading = counter.read(row["name"], _opened((store.frame(row["id"]) or row)["png"]))
        with lock:
            counter.learn(row["name"], reading, row["people"])
    return (
        f"Label taken back. {len(left)} left: intervals follow {'them' if len(left) > 1 else 'it' if left else 'none'}."
    )


def _refitted(counter: LiveCounter, store: Store, source: str, number: int, lock: Any) -> str:
    fitted = recalibrated(counter, store, source)
    with lock:
        store.add_calibration(source, f"from {number} labels", fitted.to_json())
        counter.use(fitted)
    scene = fitted.recalibration
    assert scene is not None
    if scene.form == "as before":
        return (
            f"Intervals follow {number} labels. The count stays as it was, off by {scene.mae_before:.1f} people on "
            "average: a fit to the others comes no closer to a label left out."
        )
    return (
        f"Recalibrated on {number} labels: those left out of the fit are off by {scene.mae_after:.1f} people on "
        f"average, before by {scene.mae_before:.1f}."
    )


def recalibrated(counter: LiveCounter, store: Store, source: str) -> CrowdCalibration:
    """The calibration, fitted to all labels of a source."""
    rows = store.frames(source, labelled=True)
    frames = ((row["name"], _opened((store.frame(row["id"]) or row)["png"])) for row in rows)
    counts = {row["name"]: round(row["people"]) for row in rows}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only .* labelled frames", LatedropWarning)
        return recalibrate_counter(counter.trained, counter.calibration, frames, counts)


def restored(counter: LiveCounter, store: Store, source: str, own: CrowdCalibration) -> None:
    """Go on where the console was left: the calibration in use, and the labels that came since."""
    used = [row for row in store.calibrations(source) if row["used"]]
    since = 0.0
    if used:
        found = _read(used[0]["record"])
        if found is None or found.fingerprint != own.fingerprint or found.roi != own.roi:
            why = "cannot be read" if found is None else "is of another counter"
            store.add_event(source, "calibration", f"the calibration of last time {why}: that of the weights is in use")
            store.add_calibration(source, "as it came", own.to_json())
            return
        counter.use(found)
        since = max(float(used[0]["time"]), float(used[0]["used"]))  # 1 in files of before
    else:
        store.add_calibration(source, "as it came", own.to_json())
    for row in store.frames(source, labelled=True):
        if (row["labelled"] or 0) > since:
            png_bytes = (store.frame(row["id"]) or row)["png"]
            counter.learn(row["name"], counter.read(row["name"], _opened(png_bytes)), row["people"])


def _read(record: str) -> CrowdCalibration | None:
    try:
        return CrowdCalibration.from_json(record)
    except DataError:  # of another version, or damaged: no reason not to start
        return None


def frame_name(source: str) -> str:
    """Of a frame, now."""
    return f"{source} {time.time():.3f}"


def _opened(content: bytes) -> Tensor:
    from PIL import Image

    try:
        with Image.open(BytesIO(content)) as image:
            pixels = np.atleast_3d(np.asarray(image))
    except (OSError, ValueError, SyntaxError) as error:  # of Pillow, for a file that is damaged
        raise DataError(
            f"expected the picture of a labelled frame; it is damaged: {error}. Start with another --memory."
        ) from error
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)
