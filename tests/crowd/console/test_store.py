"""The console's memory survives a kill, stays small, and a foreign file is refused."""

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from latedrop.errors import ArgumentError, DataError, FileError
from latedrop_crowd.console.store import Store

TRIANGLE = [[0, 0], [1, 0], [0, 1]]
WRITER = """
import sys, time
from pathlib import Path
from latedrop_crowd.console.store import Store
store = Store(Path(sys.argv[1]))
zone = store.zones("door")[0]
store.add_zone("door", "Stairs", [[0, 0], [1, 0], [0, 1]], 7)
frame = store.add_frame("door", "f1", "asked for", b"png", b"jpeg", (3.0, 2.0, 4.0), 1e9)
store.label(frame, 5, None)
event = store.add_event("door", "alarm", "too many", zone.id, b"picture")
store.acknowledge(event)
number = 0
while True:
    number += 1
    store.add_counts([(zone.id, time.time(), number, 0.0, 1.0, 0.5)])
    print(time.time(), flush=True)
    time.sleep(0.02)
"""


def test_a_kill_loses_less_than_a_second(tmp_path: Path) -> None:
    path = tmp_path / "console.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        begun = None
        for line in writer.stdout:
            last = float(line)
            begun = last if begun is None else begun
            if last - begun > 2:
                break
        writer.kill()
    store = Store(path)
    whole, stairs = store.zones("door")
    assert (stairs.name, stairs.limit, len(stairs.points)) == ("Stairs", 7, 3)
    rows = store.timeline(whole.id, 0, time.time())
    counts = store.all_counts(whole.id, 0)
    assert last - counts[-1]["time"] < 1
    assert [row["count"] for row in counts] == list(range(1, len(counts) + 1))
    assert rows
    (label,) = store.frames("door", labelled=True)
    assert label["people"] == 5
    (alarm,) = store.events()
    assert alarm["acknowledged"] is not None
    assert store.picture(alarm["picture"]) == b"picture"
    store.close()


def test_old_counts_are_averaged(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    zone = store.zones("door")[0].id
    old = int(time.time() - 7200) // 10 * 10
    store.add_counts((zone, old + i / 10, float(i), 0.0, 200.0, 0.1) for i in range(100))
    store.add_counts((zone, time.time() - i, 1.0, 0.0, 2.0, 0.1) for i in range(5))
    store.tidy()
    rows = store.all_counts(zone, 0)
    assert [row["thinned"] for row in rows] == [1] + [0] * 5
    assert rows[0]["count"] == pytest.approx(49.5)
    store.tidy()
    assert len(store.all_counts(zone, 0)) == 6
    store.close()


def test_the_file_stays_below_its_size(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite", most_bytes=5_000_000)
    zone = store.zones("door")[0].id
    frame = store.add_frame("door", "f", "asked for", b"p" * 1000, b"j", (1.0, 0.0, 2.0), 1e9)
    store.label(frame, 3, [[0.5, 0.5]])
    for batch in range(12):
        store.add_counts((zone, time.time() + i / 1000, 1.0, 0.0, 2.0, 0.0) for i in range(batch, batch + 20_000))
        store.tidy()
        assert store.size() <= 5_000_000
    store.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * 5_000_000
    again = Store(tmp_path / "a.sqlite")
    assert len(again.frames("door", labelled=True)) == 1  # what people did stays
    again.close()


def test_frames_that_nobody_labels_do_not_pile_up(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    for number in range(40):
        store.add_frame("door", f"f{number}", "regular check", b"p", b"j", (1.0, 0.0, 2.0), 1e9 + number)
    assert [row["name"] for row in store.frames("door", labelled=False)][:2] == ["f39", "f38"]
    assert len(store.frames("door", labelled=False)) == 12
    store.close()


def database(path: Path, script: str) -> Path:
    other = sqlite3.connect(path)
    other.executescript(script)
    other.close()
    return path


FOREIGN = {
    "empty database": "PRAGMA user_version = 0; VACUUM;",
    "same names": "CREATE TABLE events (id INTEGER PRIMARY KEY, text TEXT); CREATE TABLE pictures (id INTEGER);"
    + "INSERT INTO events (text) VALUES ('mine');" * 20,
    "write-ahead": "PRAGMA journal_mode = WAL; CREATE TABLE counts (time REAL); INSERT INTO counts VALUES (1);",
    "another application": "PRAGMA application_id = 1234; CREATE TABLE a (b);",
    "same format": "PRAGMA user_version = 1; CREATE TABLE zones (id INTEGER PRIMARY KEY, name TEXT);",
}


@pytest.mark.parametrize("kind", ["text", *FOREIGN])
def test_a_file_of_others_is_refused_and_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    if kind == "text":
        path.write_text("no database" * 100)
    else:
        database(path, FOREIGN[kind])
    before, files = path.read_bytes(), sorted(tmp_path.iterdir())
    with pytest.raises(FileError, match=r"is another file, and was not changed\. Pass another --memory"):
        Store(path)
    assert (path.read_bytes(), sorted(tmp_path.iterdir())) == (before, files)


def filled(path: Path) -> Path:
    store = Store(path)
    zone = store.zones("door")[0].id
    store.add_counts((zone, time.time() - i, 1.0, 0.0, 2.0, 0.1) for i in range(2000))
    store.add_event("door", "alarm", "too many", zone, b"picture" * 900)
    store.close()
    return path


def test_files_of_another_version_or_with_other_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="format 99"):
        Store(database(filled(tmp_path / "newer"), "PRAGMA user_version = 99"))
    other = database(filled(tmp_path / "other"), "DROP TABLE events; CREATE TABLE events (id INTEGER)")
    before = other.read_bytes()
    with pytest.raises(FileError, match=r"other columns\. Pass another --memory"):
        Store(other)
    assert other.read_bytes() == before
    with pytest.raises(FileError, match="is not a file"):
        Store(tmp_path)
    with pytest.raises(ArgumentError, match="5 MB"):
        Store(tmp_path / "small", most_bytes=10)
    again = Store(tmp_path / "after")  # no connection is left that locks the file
    again.close()


CELLS = (
    *("zones SET people = 'x'", "zones SET name = x'ff'", "counts SET time = 1e308", "counts SET count = '[]'"),
    *("counts SET low = NULL", "events SET ended = 9e999", "events SET text = x'ff'", "pictures SET jpeg = 5"),
)


@pytest.mark.parametrize("cells", CELLS)
def test_cells_of_other_kinds_are_refused_and_stay_as_they_are(cells: str, tmp_path: Path) -> None:
    path = database(filled(tmp_path / "a.sqlite"), f"UPDATE {cells}")  # which SQLite takes in any column
    before = path.read_bytes()
    with pytest.raises(FileError, match=f"its table {cells.split()[0]} holds invalid values. Pass another"):
        Store(path)
    assert path.read_bytes() == before


def test_a_damaged_index_is_noticed_when_the_file_is_opened(tmp_path: Path) -> None:
    path = filled(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'counts_by_time'").fetchone()
    content = bytearray(path.read_bytes())
    content[4096 * (page - 1) : 4096 * page] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"it is damaged\. Pass another --memory"):
        Store(path)


def test_zones_are_checked_and_the_whole_picture_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    whole = store.zones("door")[0].id
    with pytest.raises(DataError, match="corners"):
        store.add_zone("door", "bad", [[0, 0], [9, 9], [0, 1]], None)
    added = store.add_zone("door", "'; DROP TABLE zones; --", TRIANGLE, 3)
    store.remove_zone(whole)
    assert [zone.name for zone in store.zones("door")] == ["Whole picture", "'; DROP TABLE zones; --"]
    store.remove_zone(added)
    assert len(store.zones("door")) == 1
    store.close()


def test_one_console_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop_crowd.console.store._PATIENCE", 0.1)
    first = Store(tmp_path / "a.sqlite")
    with pytest.raises(FileError, match=r"another console uses it\. Pass another --memory"):
        Store(tmp_path / "a.sqlite")
    code = "import sys; from pathlib import Path; from latedrop_crowd.console import store; store._PATIENCE = 0.1; "
    code += "store.Store(Path(sys.argv[1]))"
    words = [sys.executable, "-c", code, str(tmp_path / "a.sqlite")]
    other = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "another console uses it" in other.stderr
    first.add_event("door", "alarm", "still writes")
    first.close()
    again = Store(tmp_path / "a.sqlite")
    assert again.events()[0]["text"] == "still writes"
    again.close()
