"""Run the console behind its page: read cameras, count in one thread, judge zones, raise alarms, store and report.

From five labels on, counts are refitted to the scene. One frame per stretch of time is proposed for labelling, so that
labels are spread over the day; choosing frames by the width of their interval was not better.
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from threading import Condition, Event, RLock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop import LatedropError, LatedropWarning
from latedrop.errors import DataError, FileError
from latedrop_crowd.calibration import CrowdCalibration, recalibrate_counter
from latedrop_crowd.calibration.recalibration import FEWEST
from latedrop_crowd.calibration.record import STRANGE
from latedrop_crowd.console.counter import Count, LiveCounter
from latedrop_crowd.console.daily import write_reports
from latedrop_crowd.console.notices import Notices
from latedrop_crowd.console.pictures import density_layer, doubt_layer, jpeg, png, regions_layer
from latedrop_crowd.console.sources import Camera, Shot, Source
from latedrop_crowd.console.store import Heat, Store
from latedrop_crowd.console.zones import Alarm, Amount, Rule, Zone, probability_above
from latedrop_crowd.mcnn import Trained

__all__ = ["Settings", "View", "Watch"]

_LOOKED_AT = 4.0  # seconds without a request after which a layer is no longer computed
_MAP_PART = 0.5  # largest fraction of time for computing uncertainty maps
_REPORTS_EVERY = 60.0  # seconds between checks whether a report is due
_KINDS = ("density", "doubt", "faint")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Hold the settings of the console."""

    level: float = 0.9  # probability of the intervals
    rule: Rule = field(default_factory=Rule)  # when a zone changes its colour
    stretch: float = 120.0  # seconds between frames proposed for labelling
    wait: float = 1.0  # seconds before a broken stream is opened again
    reports: Path | None = None  # folder for daily reports; None: none are written


class View:
    """Hold the state of one source: camera, counter, zones, and the latest frame and count."""

    def __init__(self, number: int, source: Source, counter: LiveCounter, zones: list[Zone], heat: Heat) -> None:
        self.number, self.source, self.counter, self.zones, self.heat = number, source, counter, zones, heat
        self.propose_at: float | None = None
        self.alarms: dict[int, Alarm] = {}
        self.camera: Camera | None = None
        self.shot: Shot | None = None
        self.count: Count | None = None
        self.mapped: tuple[Shot, Count, npt.NDArray[np.float64]] | None = None
        self.message: dict[str, Any] = {}
        self.strange = False
        self._picture: tuple[int, bytes] | None = None
        self._asked: dict[str, float] = {}
        self._maps_due = 0.0

    @property
    def name(self) -> str:
        """Return the name of the source."""
        return self.source.name

    def wants_maps(self) -> bool:
        """Return True if the uncertainty layer was requested recently, and the next map is due."""
        now = time.monotonic()
        asked = self._asked.get("doubt", -1e9)
        if now - asked >= _LOOKED_AT:
            self.mapped = None  # the next request must not get an old map
        return now - asked < _LOOKED_AT and now > self._maps_due

    def map_took(self, seconds: float) -> None:
        """Delay the next map after one that took `seconds`, so that maps take a bounded fraction of time."""
        self._maps_due = time.monotonic() + seconds / _MAP_PART - seconds

    def shown(self, *, mapped: bool = False) -> Shot | None:
        """Return the frame that was counted last, or with `mapped` the one of the uncertainty map."""
        return self.mapped[0] if mapped and self.mapped is not None else self.shot

    def picture_of(self, shot: Shot) -> bytes:
        """Return a frame as JPEG; the last one is cached."""
        if self._picture is None or self._picture[0] != shot.number:
            self._picture = (shot.number, jpeg(shot.pixels))
        return self._picture[1]

    def layer(self, kind: str, *, mapped: bool = False) -> bytes | None:
        """Return a layer for the frame as PNG; None if it does not exist yet."""
        if kind not in _KINDS:
            return None
        self._asked[kind] = time.monotonic()
        last = self.mapped
        if kind == "doubt":
            return None if last is None else doubt_layer(last[2])
        count = last[1] if mapped and last is not None else self.count
        if count is None:
            return None
        return density_layer(count.reading.density) if kind == "density" else regions_layer(self.counter.faint(count))


class Watch:
    """Count the latest frame of each source in turn; raise alarms, and send them to `notices`."""

    def __init__(
        self,
        sources: Sequence[Source],
        trained: Trained,
        calibration: CrowdCalibration,
        store: Store,
        settings: Settings,
        notices: Notices,
    ) -> None:
        self.store, self.settings, self.notices, self.own = store, settings, notices, calibration
        self.lock, self._labelling, self._arrived, self._stop = RLock(), RLock(), Condition(), Event()
        self.tell: Callable[[dict[str, Any]], None] = lambda message: None
        self.views = []
        for number, source in enumerate(sources):
            counter = LiveCounter(trained, _last_used(store, source.name, calibration), settings.level)
            heat = Heat(store, source.name)
            self.views.append(View(number, source, counter, store.zones(source.name), heat))
        going = {event["zone"] for event in store.open_alarms() if event["ended"] is None}
        for view in self.views:
            view.alarms = {z.id: Alarm(settings.rule, "red" if z.id in going else None) for z in view.zones}
        self._thread = Thread(target=self._run, name="counting", daemon=True)

    def start(self) -> None:
        """Start the cameras and the counting thread."""
        for view in self.views:
            view.camera = Camera(view.source, self._arrived, self.settings.wait, self._noted(view))
            view.camera.start()
        self._thread.start()

    def close(self) -> None:
        """Stop counting, and write what is still in memory."""
        self._stop.set()
        with self._arrived:
            self._arrived.notify_all()
        for view in self.views:
            if view.camera is not None:
                view.camera.close()
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.notices.close()
        with suppress(FileError):  # a full disk
            for view in self.views:
                view.heat.flush()
        self.store.close()

    def view(self, number: int) -> View:
        """Return the view of a source by its number."""
        if not 0 <= number < len(self.views):
            raise DataError(f"expected a source from 0 to {len(self.views) - 1}; found {number}. Reload the page.")
        return self.views[number]

    def zones_changed(self, view: View) -> None:
        """Read the zones of a source again; reset the alarm of zones whose limit or corners changed."""
        with self.lock:
            before = {zone.id: zone for zone in view.zones}
            view.zones = self.store.zones(view.name)
            judged = {(zone.id, zone.limit, zone.points) for zone in view.zones}
            same = {zone for zone, old in before.items() if (zone, old.limit, old.points) in judged}
            for zone in set(before) - same:
                self.store.end_alarms(zone)
            view.alarms = {z.id: view.alarms[z.id] if z.id in same else Alarm(self.settings.rule) for z in view.zones}
        self.tell({"kind": "zones", "source": view.number})

    def freeze(self, view: View, why: str = "asked for") -> int:
        """Store the frame that was counted last for labelling; return its id."""
        with self.lock:
            if view.count is None or view.shot is None:
                raise DataError("expected a frame; none has come in yet. Wait for the picture.")
            count, shot = view.count, view.shot
        return self._keep(view, _frame_name(view.name), why, count, shot)

    def label(self, view: View, frame: int, people: float | None, heads: Any = None) -> str:
        """Store a label and refit the counts; return a message about the fit. `people=None` deletes the label."""
        with self._labelling:
            row = self.store.frame(frame)
            if row is None or row["source"] != view.name:
                raise DataError("expected a stored frame of this source; this one was deleted. Label another one.")
            if people is not None:
                self.store.label(frame, people, heads)
            elif not self.store.unlabel(frame):
                raise DataError("expected a frame with a label; found one without. Reload the page.")
            calibration, message = _fitted(view.counter.trained, self.own, self.store, view.name)
            if calibration is not self.own or view.counter.calibration.recalibration is not None:
                number = len(self.store.frames(view.name, labelled=True))
                note = f"{'as it came' if calibration is self.own else 'fitted'}, {number} labels"
                with self.lock:
                    self.store.add_calibration(view.name, note, calibration.to_json())
                    view.counter.calibration = calibration
        before = "label taken back" if people is None else f"{people:g} people in a labelled frame"
        self.store.add_event(view.name, "label", f"{before}. {message}", view.zones[0].id)
        self.tell({"kind": "labels", "source": view.number})
        return message

    def restore(self, view: View, number: int) -> None:
        """Switch to an earlier calibration."""
        row = next((row for row in self.store.calibrations(view.name) if row["id"] == number), None)
        if row is None:
            raise DataError("expected a calibration of this source; found none with this number. Reload the page.")
        with self.lock:
            view.counter.calibration = CrowdCalibration.from_json(row["record"])
            self.store.use_calibration(view.name, number)
        self.store.add_event(view.name, "calibration", f"calibration restored: {row['note']}")
        self.tell({"kind": "labels", "source": view.number})

    def _noted(self, view: View) -> Callable[[str, str], object]:
        """Return a callback that stores and shows a change of state of the camera."""

        def noted(state: str, words: str) -> None:
            with suppress(FileError):  # a full disk must not stop the camera
                self.store.add_event(view.name, "source", words)
            self.tell({"kind": "state", "source": view.number, "camera": {"state": state, "words": words}})

        return noted

    def _run(self) -> None:
        """Count frames, write reports and send the state of the cameras until the console closes."""
        state_sent = reported = 0.0
        while not self._stop.is_set():
            busy = False
            for view in self.views:
                shot = view.camera.take() if view.camera is not None else None
                if shot is not None and not self._stop.is_set():
                    busy = True
                    self._tried(view, shot)
            if not busy:
                with self._arrived:
                    self._arrived.wait(0.5)
            if time.monotonic() > reported + _REPORTS_EVERY or not reported:
                reported = time.monotonic()
                self._report()
            if time.monotonic() > state_sent + 1:
                state_sent = time.monotonic()
                for view in self.views:
                    if view.camera is not None:
                        self.tell({"kind": "state", "source": view.number, "camera": view.camera.about()})

    def _report(self) -> None:
        """Write yesterday's reports if a folder is set and they do not exist yet."""
        if self.settings.reports is None:
            return
        try:
            sources = [(view.name, view.zones) for view in self.views]
            for path in write_reports(self.store, sources, self.settings.reports, self.settings.level):
                _logger.info("written: %s", path)
        except (LatedropError, OSError) as error:  # a full disk must not stop the counting
            self.tell({"kind": "bad", "source": 0, "text": f"no report was written: {error}"})

    def _tried(self, view: View, shot: Shot) -> None:
        """Count a frame; show any error on the page instead of raising it."""
        try:
            self._look(view, shot)
        except FileError as error:
            self.tell({"kind": "bad", "source": view.number, "text": f"results cannot be stored: {error}"})
        except Exception as error:  # a foreign counter can raise any error
            _logger.warning("a frame was not counted", exc_info=True)
            text = str(error) if isinstance(error, LatedropError) else f"{type(error).__name__} in a frame"
            self.tell({"kind": "bad", "source": view.number, "text": text})

    def _look(self, view: View, shot: Shot) -> None:
        """Count a frame. Requests wait for the lock, so it is taken only while the results are stored."""
        name, zones = _frame_name(view.name), view.zones
        count = view.counter.count(name, shot.pixels, [zone.points for zone in zones])
        if view.wants_maps():
            begun = time.monotonic()
            std = view.counter.deviations(count)
            view.mapped = None if std is None else (shot, count, std)
            view.map_took(time.monotonic() - begun)
        with self.lock:
            view.count, view.shot = count, shot
            current = {zone.id: zone for zone in view.zones}  # a request may have changed these
            judged = [
                self._judged(view, current[zone.id], amount, shot)
                for zone, amount in zip(zones, count.amounts, strict=True)
                if zone.id in current
            ]
            self.store.add_counts(
                (z["id"], shot.time, z["count"], z["low"], z["high"], count.reading.strangeness) for z in judged
            )
            if not count.reading.uncountable:
                view.heat.add(count.reading.density, shot.time)
        if not count.reading.uncountable:
            self._propose(view, name, count, shot)
        self._strange(view, count)
        view.message = {
            "kind": "count",
            "source": view.number,
            "frame": shot.number,
            "time": shot.time,
            "zones": judged,
            "strangeness": round(count.reading.strangeness, 2),
            "reasons": list(count.reading.reasons),
            "uncountable": count.reading.uncountable,
            "now": time.time(),
            "camera": view.camera.about() if view.camera is not None else {},
        }
        self.tell(view.message)

    def _propose(self, view: View, name: str, count: Count, shot: Shot) -> None:
        """Store one frame per stretch of time for labelling."""
        stretch = self.settings.stretch
        if view.propose_at is None:
            view.propose_at = shot.steady + stretch
        if shot.steady >= view.propose_at:
            view.propose_at = shot.steady + stretch
            self._keep(view, name, _why_label(count.reading.strangeness), count, shot)
            self.tell({"kind": "labels", "source": view.number})

    def _judged(self, view: View, zone: Zone, amount: Amount, shot: Shot) -> dict[str, Any]:
        """Return count and colour of one zone, and start or end its alarm."""
        assert view.count is not None
        low, high = amount.interval(view.count.ends)
        state: dict[str, Any] = {"id": zone.id, "count": None, "low": None, "high": None}
        unknown = bool(view.count.reading.uncountable)
        if not unknown:
            state |= {"count": round(max(0.0, amount.mean), 2), "low": round(low, 2), "high": round(high, 2)}
        if zone.limit is None:
            return {**state, "probability": None, "colour": None, "coming": None}
        probability = 0.5 if unknown else probability_above(amount, zone.limit)
        alarm = view.alarms[zone.id]
        before = alarm.colour
        changed = alarm.update(probability, shot.steady)
        if changed == "red":
            sure = "over 99" if probability > 0.99 else f"{100 * probability:.0f}"
            text = f"more than {zone.limit:g} people, {sure} % sure: {amount.mean:.0f} counted"
            event = self.store.add_event(view.name, "alarm", f"{zone.name}: {text}", zone.id, view.picture_of(shot))
            about = {"event": "alarm", "id": event, "source": view.name, "zone": zone.name, "limit": zone.limit}
            numbers = {name: state[name] for name in ("count", "low", "high")}
            self.notices.send({**about, "time": shot.time, **numbers, "probability": round(probability, 3)})
        elif changed is not None and before == "red":
            self.store.end_alarms(zone.id)
            self.store.add_event(view.name, "over", f"{zone.name}: no longer sure of too many people", zone.id)
            self.notices.send({"event": "over", "source": view.name, "zone": zone.name, "time": shot.time})
        if changed is not None:
            self.tell({"kind": "events", "source": view.number})
        shown = None if unknown else round(probability, 3)
        return {**state, "probability": shown, "colour": alarm.colour, "coming": alarm.coming}

    def _keep(self, view: View, name: str, why: str, count: Count, shot: Shot) -> int:
        """Store a counted frame for labelling; return its id."""
        amount = count.amounts[0]
        numbers = (max(0.0, amount.mean), *amount.interval(count.ends))
        pictures = _lossless(count.image), jpeg(shot.pixels)
        return self.store.add_frame(view.name, name, why, *pictures, numbers, shot.time)

    def _strange(self, view: View, count: Count) -> None:
        """Store an event when frames become unusual, and when they are usual again."""
        limit = STRANGE if not view.strange else 0.75 * STRANGE
        now = count.reading.strangeness >= limit
        if now != view.strange:
            view.strange = now
            why = "; ".join(count.reading.reasons) or "features unlike those of the calibration frames"
            text = f"frames are unlike those of the calibration: {why}" if now else "frames are usual again"
            self.store.add_event(view.name, "strange", text)
            self.tell({"kind": "events", "source": view.number})


def _why_label(strangeness: float) -> str:
    if strangeness >= STRANGE:
        return "unlike the frames seen before"
    return "a little unusual" if strangeness > 1 else "regular check"


def _lossless(image: Tensor) -> bytes:
    """Encode an input frame `(C, H, W)` in [0, 1] as PNG."""
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return png(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _fitted(trained: Trained, original: CrowdCalibration, store: Store, source: str) -> tuple[CrowdCalibration, str]:
    """Refit `original` to the labels of a source, or return it if they are too few; return a message, too."""
    rows = store.frames(source, labelled=True)
    if len(rows) < FEWEST:
        missing = FEWEST - len(rows)
        return original, f"With {missing} more label{'s' if missing > 1 else ''} the counts are fitted to this scene."
    frames = ((row["name"], _opened((store.frame(row["id"]) or row)["png"])) for row in rows)
    counts = {row["name"]: round(row["people"]) for row in rows}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only .* labelled frames", LatedropWarning)
        calibration = recalibrate_counter(trained, original, frames, counts)
    scene = calibration.recalibration
    assert scene is not None
    if scene.form == "as before":
        return calibration, (
            f"Intervals follow {len(rows)} labels. The count is unchanged, with a mean error of {scene.mae_before:.1f} "
            "people: on labels left out of the fit a refitted count was not better."
        )
    return calibration, (
        f"Recalibrated on {len(rows)} labels: the mean error on labels left out of the fit is {scene.mae_after:.1f} "
        f"people, before {scene.mae_before:.1f}."
    )


def _last_used(store: Store, source: str, original: CrowdCalibration) -> CrowdCalibration:
    """Load the calibration of the last session; return `original`, that of the weights, if there is none."""
    used = [row for row in store.calibrations(source) if row["used"]]
    if used:
        why = "belongs to another counter"
        try:
            last = CrowdCalibration.from_json(used[0]["record"])
            if (last.fingerprint, last.roi) == (original.fingerprint, original.roi):
                return last
        except DataError:  # of another version, or damaged: start without it
            why = "cannot be read"
        store.add_event(
            source, "calibration", f"the calibration of the last session {why}: that of the weights is used"
        )
    store.add_calibration(source, "as it came", original.to_json())
    return original


def _frame_name(source: str) -> str:
    return f"{source} {time.time():.3f}"


def _opened(content: bytes) -> Tensor:
    """Decode a stored picture to `(C, H, W)` in [0, 1]."""
    from PIL import Image

    try:
        with Image.open(BytesIO(content)) as image:
            pixels = np.atleast_3d(np.asarray(image))
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises these for damaged files
        raise DataError(
            f"expected the picture of a labelled frame; it is damaged: {error}. Start with another --memory."
        ) from error
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)
