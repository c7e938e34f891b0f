"""The console over HTTP, without a browser: who may ask, zones, alarms, labels, files, and a restart."""

import gc
import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any

import numpy as np
import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the console is an extra")
pytest.importorskip("fastapi", reason="the console is an extra")

from counters import shipped_counter  # noqa: E402
from latedrop_crowd.console.counter import Count  # noqa: E402
from latedrop_crowd.console.notices import Notices  # noqa: E402
from latedrop_crowd.console.server import make_app  # noqa: E402
from latedrop_crowd.console.sources import Camera, Pixels, Shot, Source  # noqa: E402
from latedrop_crowd.console.store import Store  # noqa: E402
from latedrop_crowd.console.watch import Settings, View, Watch  # noqa: E402
from latedrop_crowd.console.zones import Amount, Rule  # noqa: E402
from latedrop_crowd.scenes import make_scenes  # noqa: E402
from waiting import waited  # noqa: E402

TOKEN = "a-long-enough-token"
TOKENS = {"view": "only-to-look", "label": "to-label-frames", "configure": TOKEN}
SQUARE = [[0.0, 0.0], [0.6, 0.0], [0.6, 1.0], [0.0, 1.0]]
SCENES = [frame.pixels for frame in make_scenes(0, 6, 0).frames]


def walking() -> Iterator[Pixels]:
    while True:
        for pixels in SCENES:
            assert pixels is not None
            yield pixels
            time.sleep(0.05)


def watching(path: Path, frames: Callable[[], Iterator[Pixels]] = walking, **settings: Any) -> tuple[Watch, View]:
    """One camera, `door`, behind the shipped counter of scenes; nothing runs yet."""
    store = Store(path, most_bytes=5_000_000)
    watch = Watch([Source("door", False, frames)], *shipped_counter(), store, Settings(**settings), Notices([]))
    return watch, watch.views[0]


class Console:
    """A console that runs in a thread."""

    def __init__(self, path: Path) -> None:
        settings = Settings(rule=Rule(hold=0.0), stretch=0.5)
        self.watch = Watch([Source("=door", True, walking)], *shipped_counter(), Store(path), settings, Notices([]))
        config = uvicorn.Config(make_app(self.watch, TOKENS), port=0, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = Thread(target=self.server.run, daemon=True)
        self.thread.start()
        waited(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        wire = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {TOKEN}",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        wire.request(method, path, None if body is None else json.dumps(body), sent)
        answer = wire.getresponse()
        content, actual = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        wire.close()
        return answer.status, json.loads(content) if "json" in actual.get("content-type", "") else content, actual

    def state(self) -> dict[str, Any]:
        actual: dict[str, Any] = self.ask("/api/state")[1]
        return actual

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    running = Console(tmp_path_factory.mktemp("console") / "a.sqlite")
    waited(lambda: running.state()["sources"][0]["message"])
    yield running
    running.close()


CHANGES = [
    ("POST", "/api/alarms/999/acknowledge", "label"),
    ("POST", "/api/sources/0/freeze", "label"),
    ("POST", "/api/sources/0/snapshot", "label"),
    ("POST", "/api/sources/0/frames/999/label", "label"),
    ("DELETE", "/api/sources/0/frames/999/label", "label"),
    ("DELETE", "/api/sources/0/frames/999", "label"),
    ("POST", "/api/sources/0/zones", "configure"),
    ("PUT", "/api/sources/0/zones/1", "configure"),
    ("DELETE", "/api/sources/0/zones/999", "configure"),
    ("POST", "/api/sources/0/calibrations/999/restore", "configure"),
    ("POST", "/api/alarms/../sources/0/zones", "configure or nothing"),
]


@pytest.mark.parametrize(("method", "path", "wanted"), CHANGES, ids=lambda value: str(value).replace("/", "."))
def test_a_token_allows_what_its_role_does(console: Console, method: str, path: str, wanted: str) -> None:
    for role in ("view", "label"):
        status, said, _ = console.ask(path, method, {"points": []}, Authorization=f"Bearer {TOKENS[role]}")
        if role == "label" and wanted != "configure":
            assert status != 403
            assert wanted == "label" or status in (404, 405)
        else:
            assert status == 403
            assert f"this one is to {role}" in said["error"]
        assert console.ask("/api/state", Authorization=f"Bearer {TOKENS[role]}")[1]["role"] == role


def test_every_route_that_changes_something_is_in_the_table(console: Console) -> None:
    """A new one is refused to all but `configure`, unless the table says otherwise."""
    routes = {
        (method, "/".join("{}" if part.startswith("{") or part.isdigit() else part for part in path.split("/")))
        for route in make_app(console.watch).routes
        for path, methods in [(getattr(route, "path", ""), getattr(route, "methods", None) or set())]
        for method in methods - {"GET", "HEAD"}
    }
    listed = {(m, "/".join("{}" if part.isdigit() else part for part in p.split("/"))) for m, p, _ in CHANGES[:-1]}
    assert routes == listed


def test_the_report_of_a_day_and_counts_as_a_file(console: Console) -> None:
    status, page, headers = console.ask("/api/sources/0/report.html")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/html")
    assert headers["content-disposition"].startswith("attachment")
    assert b"Whole picture" in page
    assert console.ask("/api/sources/0/report.csv?day=2020-01-01")[1].startswith(b"day,zone,limit,hour,mean,peak,")
    assert console.ask("/api/sources/0/report.csv?day=yesterday")[0] == 422
    assert console.ask("/api/sources/0/report.exe")[0] == 422
    counts = console.ask("/api/sources/0/counts.csv")[1].decode().splitlines()
    assert counts[0] == "time,zone,count,low,high,strangeness,averaged"
    assert len(counts) > 2


def test_every_change_leaves_a_line(console: Console) -> None:
    def lines() -> list[str]:
        return [event["text"] for event in console.state()["events"] if event["kind"] == "change"]

    zone = console.ask("/api/sources/0/zones", "POST", {"name": "audit", "points": SQUARE, "limit": 7})[1]["id"]
    assert lines()[0] == "zone 'audit' added, limit 7 (by configure from 127.0.0.1)"
    console.ask(f"/api/sources/0/zones/{zone}", "PUT", {"name": "audited", "points": [], "limit": None})
    assert lines()[0].startswith("zone 'audited' changed, limit none (by")
    frame = console.ask("/api/sources/0/freeze", "POST")[1]["id"]
    for method, body, said in (("POST", {"people": 3}, f"frame {frame} labelled, 3 people"),
                               ("DELETE", None, f"label of frame {frame} deleted")):  # fmt: skip
        sent = {"Authorization": f"Bearer {TOKENS['label']}"}
        assert console.ask(f"/api/sources/0/frames/{frame}/label", method, body, **sent)[0] == 200
        assert lines()[0] == f"{said} (by label from 127.0.0.1)"
    console.ask(f"/api/sources/0/frames/{frame}", "DELETE")
    assert lines()[0].startswith(f"frame {frame} dropped (by configure")
    console.ask(f"/api/sources/0/zones/{zone}", "DELETE")
    assert lines()[0].startswith("zone 'audited' removed (by configure")
    before = lines()
    console.ask("/api/sources/0/zones", "POST", {"name": "none", "points": SQUARE}, Authorization="Bearer only-to-look")
    assert lines() == before


@pytest.mark.parametrize("host", ["console.example", "192.168.0.7:8765", "127.0.0.1:8765", "localhost", "[", ""])
def test_where_there_is_a_token_everybody_needs_it(console: Console, host: str) -> None:
    """Also at the local address: a proxy on this machine may send it, for anybody."""
    for path in ("/api/state", "/", "/api/stream", "/page/main.js"):
        assert console.ask(path, Host=host, Authorization="")[0] == 401
    assert console.ask("/api/state", Host=host, Authorization="Bearer wrong")[0] == 401
    assert console.ask("/api/state", Host=host)[0] == 200
    status, _, headers = console.ask(f"/?token={TOKEN}", Host=host, Authorization="")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert console.ask("/api/state", Host=host, Authorization="", Cookie=cookie)[0] == 200


def test_other_pages_are_refused(console: Console) -> None:
    for other in ("http://evil.example", "null", "http://[", ""):
        assert console.ask("/api/sources/0/snapshot", "POST", Origin=other)[0] == 403
    assert console.ask("/api/sources/0/snapshot", "POST", Origin=f"http://127.0.0.1:{console.port}")[0] == 200


def test_headers_keep_the_page_to_itself(console: Console) -> None:
    assert console.ask("/", "HEAD")[:2] == (200, b"")
    status, page, headers = console.ask("/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert b"http" not in page.replace(b"http-equiv", b"")


def test_nothing_that_is_asked_for_becomes_a_path(console: Console) -> None:
    for name in ("..%2fserver.py", "%2e%2e/server.py", "/etc/passwd", "..", "server.py", "index.html%00.js"):
        assert console.ask(f"/page/{name}")[0] in (404, 400)
    assert console.ask("/page/main.js")[2]["content-type"].startswith("text/javascript")


def test_wrong_words_are_refused(console: Console) -> None:
    at = "/api/sources/0/zones"
    for body in ({"name": ""}, {"name": "a", "points": [[0, 0]]}, {"name": "a", "points": [[0, 0], [5, 0], [0, 1]]},
                 {"name": "a", "points": SQUARE, "limit": -1}, {"name": "a" * 1000}, []):  # fmt: skip
        assert console.ask(at, "POST", body)[0] in (400, 422)
    small = [[0.5, 0.5], [0.505, 0.5], [0.5, 0.505]]
    assert "at least one cell" in console.ask(at, "POST", {"name": "a", "points": small})[1]["error"]
    assert "an area" in console.ask(at, "POST", {"name": "a"})[1]["error"]  # the whole picture is there already
    assert console.ask("/api/sources/9/snapshot", "POST")[0] == 400
    assert console.ask(at, "POST", {"name": "x" * 300_000})[0] == 413
    assert console.ask("/api/sources/0/layers/else")[0] == 204
    assert len(console.state()["sources"][0]["zones"]) == 1


def test_a_body_without_a_length_is_counted_as_it_comes(console: Console) -> None:
    wire = http.client.HTTPConnection("127.0.0.1", console.port, timeout=20)
    parts = (b'{"name": "' if number == 0 else b"x" * 50_000 for number in range(8))
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    wire.request("POST", "/api/sources/0/zones", parts, headers, encode_chunked=True)
    answer = wire.getresponse()
    assert (answer.status, json.loads(answer.read())) == (
        413,
        {"error": "expected a request of at most 262144 bytes; found a larger one. Send less."},
    )
    wire.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "sources/0/zones", {"name": "a", "points": SQUARE, "limit": float("inf")}),
        ("POST", "sources/0/zones", {"name": "\ud800", "points": SQUARE}),
        ("POST", f"alarms/{10**20}/acknowledge", None),
        ("GET", f"zones/{10**20}/timeline", None),
        ("GET", "zones/1/timeline?seconds=nan", None),
        ("GET", "sources/0/counts.csv?seconds=nan", None),
        ("GET", f"frames/{10**20}", None),
        ("GET", f"pictures/{10**20}", None),
        ("DELETE", f"sources/0/frames/{10**20}", None),
        ("POST", f"sources/0/frames/{10**20}/label", {"people": 3}),
        ("POST", "sources/0/frames/1/label", {}),
        ("POST", "sources/0/frames/1/label", {"heads": [[5, 5]]}),
    ],
)
def test_odd_requests_are_refused_in_words(console: Console, method: str, path: str, body: Any) -> None:
    status, said, _ = console.ask(f"/api/{path}", method, body)
    assert status in (400, 422)
    assert said["error"].startswith("expected")


def test_pictures_and_layers(console: Console) -> None:
    before = time.time() - 60
    status, content, headers = console.ask("/api/sources/0/picture")
    assert (status, content[:2]) == (200, b"\xff\xd8")
    assert before < float(headers["x-frame-time"]) <= time.time()  # every picture says when it was taken
    assert console.ask("/api/sources/0/layers/density")[1][:4] == b"\x89PNG"
    assert waited(lambda: console.ask("/api/sources/0/layers/doubt")[1][:4] == b"\x89PNG")
    assert console.ask("/api/sources/0/layers/faint")[1][:4] == b"\x89PNG"


def test_a_zone_its_alarm_and_the_end_of_it(console: Console) -> None:
    status, added, _ = console.ask("/api/sources/0/zones", "POST", {"name": "Stairs", "points": SQUARE, "limit": 0})
    assert status == 200
    zone = added["id"]
    (alarm,) = waited(lambda: [a for a in console.state()["alarms"] if a["zone"] == zone])
    assert "Stairs: more than 0 people" in alarm["text"]
    assert console.ask(f"/api/pictures/{alarm['picture']}")[1][:2] == b"\xff\xd8"
    assert console.ask(f"/api/alarms/{alarm['id']}/acknowledge", "POST")[1]["done"] is True
    assert console.ask(f"/api/alarms/{alarm['id']}/acknowledge", "POST")[1]["done"] is False
    seen = console.state()["sources"][0]["message"]["zones"][1]
    assert seen["colour"] == "red"
    assert seen["low"] <= seen["count"] <= seen["high"]
    console.ask(f"/api/sources/0/zones/{zone}", "PUT", {"name": "Stairs", "limit": 500})
    waited(lambda: console.state()["sources"][0]["colours"][str(zone)] == "green")
    assert not [a for a in console.state()["alarms"] if a["zone"] == zone]
    waited(lambda: len(console.ask(f"/api/zones/{zone}/timeline?seconds=60")[1]["rows"]) > 1)


def test_labels_recalibrate_and_can_be_taken_back(console: Console) -> None:
    waited(lambda: console.ask("/api/sources/0/labels")[1]["proposed"])  # one was picked by the console
    for number in range(5):
        frame = console.ask("/api/sources/0/freeze", "POST")[1]
        seen = next(f for f in frame["proposed"] if f["id"] == frame["id"])
        people = round(seen["count"]) + 20
        heads = [[0.1, 0.1]] * people
        at = f"/api/sources/0/frames/{frame['id']}/label"
        if number == 0:
            for said, one in ((people, heads[:1]), (1, [])):
                status, actual, _ = console.ask(at, "POST", {"people": said, "heads": one})
                assert status == 400
                assert f"found {said} people and {len(one)} heads" in actual["error"]
        body = {"heads": heads} if number == 0 else {"people": people}
        status, actual, _ = console.ask(at, "POST", body)
        assert status == 200
        assert actual["labelled"][-1]["people"] == people
        assert ("Recalibrated" in actual["said"]) == (number == 4)
    old, new = actual["calibrations"][-1], actual["calibrations"][0]
    assert (old["note"], old["used"], new["used"]) == ("as it came", False, True)
    counter = console.watch.views[0].counter
    recalibration = counter.calibration.recalibration
    assert recalibration is not None
    assert recalibration.offset > 10  # five labels said that 20 people were missing
    console.ask(f"/api/sources/0/calibrations/{old['id']}/restore", "POST")
    assert counter.calibration.recalibration is None
    extra = console.ask("/api/sources/0/freeze", "POST")[1]["id"]
    at = f"/api/sources/0/frames/{extra}/label"
    assert "6 labels" in console.ask(at, "POST", {"people": 30})[1]["said"]
    assert counter.calibration.recalibration.frames == 6
    assert len(console.ask(at, "DELETE")[1]["labelled"]) == counter.calibration.recalibration.frames == 5
    few = console.ask(f"/api/sources/0/frames/{frame['id']}/label", "DELETE")[1]
    assert few["said"] == "With 1 more label the counts are fitted to this scene."
    assert counter.calibration.recalibration is None
    assert few["calibrations"][0]["used"]
    status, answer, _ = console.ask(at, "DELETE")
    assert status >= 400
    assert "a frame with a label" in answer["error"]


def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    first = Console(tmp_path / "a.sqlite")
    waited(lambda: first.state()["sources"][0]["message"])
    zone = first.ask("/api/sources/0/zones", "POST", {"name": "Stairs", "points": SQUARE, "limit": 0})[1]["id"]
    waited(lambda: first.state()["alarms"])
    frame = first.ask("/api/sources/0/freeze", "POST")[1]["id"]
    first.ask(f"/api/sources/0/frames/{frame}/label", "POST", {"people": 90})
    first.close()
    again = Console(tmp_path / "a.sqlite")
    try:
        state = again.state()
        assert [z["name"] for z in state["sources"][0]["zones"]] == ["Whole picture", "Stairs"]
        assert state["sources"][0]["colours"][str(zone)] == "red"  # the alarm goes on, and is not raised again
        assert len([a for a in state["alarms"] if a["zone"] == zone]) == 1
        assert again.ask("/api/sources/0/labels")[1]["labelled"][0]["people"] == 90
    finally:
        again.close()


@pytest.mark.parametrize("record", ["{", "other"], ids=["damaged", "of another counter"])
def test_a_calibration_that_does_not_fit_is_no_reason_not_to_start(tmp_path: Path, record: str) -> None:
    trained, calibration = shipped_counter()
    store = Store(tmp_path / "a.sqlite")
    other = replace(calibration, fingerprint="other").to_json() if record == "other" else record
    store.add_calibration("door", "from 9 labels", other)
    watch = Watch([Source("door", True, walking)], trained, calibration, store, Settings(), Notices([]))
    assert watch.views[0].counter.calibration.fingerprint == calibration.fingerprint
    assert "last session" in store.events()[0]["text"]
    store.close()


def test_a_frame_that_cannot_be_counted_stops_nothing(tmp_path: Path) -> None:
    def frames() -> Iterator[Pixels]:
        for pixels in (np.zeros((8, 8), np.uint8), np.zeros((5,), np.uint8), SCENES[0]):
            assert pixels is not None
            yield pixels
            waited(lambda: len(message_now) or seen)
            seen.append(len(message_now))
            message_now.clear()

    message_now: list[dict[str, Any]] = []
    seen: list[int] = []
    watch, _ = watching(tmp_path / "a.sqlite", frames)
    said: list[str] = []

    def tell(message: dict[str, Any]) -> None:
        if message["kind"] in ("bad", "count"):
            said.append(message.get("text", "counted"))
            message_now.append(message)

    watch.tell = tell
    watch.start()
    waited(lambda: "counted" in said)
    watch.close()
    assert "receptive field" in said[0]
    assert said[-1] == "counted"


def test_requests_do_not_wait_for_a_frame_that_is_being_counted(tmp_path: Path) -> None:
    watch, view = watching(tmp_path / "a.sqlite")
    store = watch.store
    gone = store.add_zone("door", "Stairs", SQUARE, 3)
    watch.zones_changed(view)
    assert SCENES[0] is not None
    watch._look(view, Shot(1, time.time(), SCENES[0], 0.0))
    counting, go_on, count = Event(), Event(), view.counter.count

    def slow(*arguments: Any) -> Any:
        counting.set()
        assert go_on.wait(60)
        return count(*arguments)

    view.counter.count = slow  # type: ignore[method-assign]
    counts = Thread(target=watch._look, args=(view, Shot(2, time.time(), SCENES[0], 1.0)), daemon=True)
    counts.start()
    assert counting.wait(30)

    def requests() -> None:
        store.remove_zone(gone)
        watch.zones_changed(view)
        watch.restore(view, store.calibrations("door")[0]["id"])
        watch.label(view, watch.freeze(view), 90, None)

    asking = Thread(target=requests, daemon=True)
    asking.start()
    asking.join(30)
    answered = not asking.is_alive()
    go_on.set()
    counts.join(30)
    assert answered
    assert [zone["id"] for zone in view.message["zones"]] == [view.zones[0].id]  # of the zones that are left
    assert len(store.all_counts(gone, 0)) == 1
    store.close()


def few_and_many(view: View) -> tuple[Count, Count]:
    assert SCENES[0] is not None
    counted = view.counter.count("a", SCENES[0])
    few, many = (replace(counted, amounts=[Amount(mean, 4.0)]) for mean in (3.0, 60.0))
    return few, many


def test_a_clock_that_is_set_back_delays_no_alarm(tmp_path: Path) -> None:
    watch, view = watching(tmp_path / "a.sqlite", rule=Rule(hold=2.0), stretch=5.0)
    store = watch.store
    store.change_zone(view.zones[0].id, "Whole picture", 20.0)
    watch.zones_changed(view)
    view.camera = Camera(view.source, Condition())
    few, many = few_and_many(view)
    now, small = time.time(), np.zeros((32, 32), np.uint8)
    for second in range(9):
        view.counter.count = lambda *_, second=second: many if second > 1 else few  # type: ignore[method-assign,misc]
        set_back = 3600 if second > 2 else 0
        watch._look(view, Shot(second, now + second - set_back, small, float(second)))
    assert [alarm["zone"] for alarm in store.open_alarms()] == [view.zones[0].id]
    (proposed,) = store.frames("door", labelled=False)
    assert proposed["time"] == now + 5 - 3600  # of the frame; the stretch is by the other clock
    store.close()


def test_a_day_of_frames_leaves_memory_and_disk_flat(tmp_path: Path) -> None:
    """An accelerated soak: a frame each four seconds of a day, whose count is always the same."""
    watch, view = watching(tmp_path / "a.sqlite", stretch=300.0, rule=Rule(hold=0.0))
    store = watch.store
    store.change_zone(view.zones[0].id, "Whole picture", 20.0)
    watch.zones_changed(view)
    view.camera = Camera(view.source, Condition())
    few, many = few_and_many(view)
    small = np.zeros((32, 32), np.uint8)
    begun = time.time() - 86400

    def look(first: int, last: int) -> int:
        for i in range(first, last):
            view.counter.count = lambda *_, i=i: many if i % 900 < 100 else few  # type: ignore[method-assign,misc]
            watch._look(view, Shot(i, begun + 4 * i, small, 4.0 * i))
        store.tidy()
        gc.collect()
        return len(gc.get_objects())

    before = look(0, 7200)
    after = look(7200, 21600)
    assert after - before < 0.01 * before
    assert store.size() < 5_000_000
    assert len([event for event in store.events(100) if event["kind"] == "alarm"]) == 24
    store.close()


def test_a_zone_can_be_edited(console: Console) -> None:
    zone = console.ask("/api/sources/0/zones", "POST", {"name": "Door", "points": SQUARE, "limit": 3})[1]["id"]
    at, other = f"/api/sources/0/zones/{zone}", [[0.5, 0.0], [1.0, 0.0], [1.0, 1.0], [0.5, 1.0]]
    actual = console.ask(at, "PUT", {"name": "Gate", "points": other, "limit": 4})[1]["zones"]
    changed = next(z for z in actual if z["id"] == zone)
    assert (changed["name"], changed["points"], changed["limit"]) == ("Gate", other, 4)
    remaining = console.ask(at, "PUT", {"name": "Gate", "limit": 5})[1]["zones"]  # without corners they stay
    assert next(z for z in remaining if z["id"] == zone)["points"] == other
    assert console.ask(at, "PUT", {"name": "Gate", "points": [[0, 0], [1, 1]], "limit": 5})[0] >= 400
    whole = console.state()["sources"][0]["zones"][0]["id"]
    moved = console.ask(f"/api/sources/0/zones/{whole}", "PUT", {"name": "All", "points": other, "limit": None})
    assert moved[1]["zones"][0]["points"] == []  # the whole picture stays whole
    console.ask(at, "DELETE")


def test_a_dark_frame_is_not_counted(tmp_path: Path) -> None:
    watch, view = watching(tmp_path / "dark.sqlite", stretch=0.0)
    store = watch.store
    message_now: list[dict[str, Any]] = []
    watch.tell = message_now.append
    store.change_zone(view.zones[0].id, "All", 1000.0)
    watch.zones_changed(view)
    assert SCENES[0] is not None
    watch._look(view, Shot(1, 1.0, SCENES[0], 1.0))
    watch._look(view, Shot(2, 5.0, np.zeros_like(SCENES[0]), 5.0))
    light, dark = (message for message in message_now if message["kind"] == "count")
    assert light["uncountable"] == ""
    assert light["zones"][0]["colour"] == "green"
    assert dark["uncountable"].startswith("too dark")
    assert (dark["zones"][0]["count"], dark["zones"][0]["probability"]) == (None, None)
    assert dark["zones"][0]["coming"] == "amber"
    watch._look(view, Shot(3, 9.0, np.zeros_like(SCENES[0]), 9.0))
    assert view.message["zones"][0]["colour"] == "amber"  # nobody can tell
    assert store.timeline(view.zones[0].id, 0.0, 20.0)[-1][1] is None
    assert len(store.frames("door", labelled=False)) == 1  # dark frames are not worth a label
    store.close()


def test_the_heat_map_of_a_time(console: Console) -> None:
    now = time.time()
    status, _, headers = console.ask(f"/api/sources/0/heat?since={now - 60}&until={now}")
    assert status == 200
    assert int(headers["x-frames"]) >= 1
    assert console.ask("/api/sources/0/heat?since=0&until=1")[0] == 204
    assert console.ask("/api/sources/0/heat?since=nan&until=1")[0] == 422
