"""Store counts, maps, zones, events, labels, calibrations and pictures of the console in one SQLite file.

The file has the console's `application_id`. Any other file is refused before SQLite opens it for writing, so that it
is not changed; a damaged one is refused by SQLite's `quick_check`. Errors of SQLite are raised as `FileError`.

Only one console can use a file at a time. The file is in WAL mode. Counts are committed twice a second, changes by an
operator at once, so a killed process loses at most a second of counts. Counts older than an hour are averaged over ten
seconds. If the file gets too large, the oldest counts, maps, events and pictures are deleted; zones, labels and
calibrations are not.

`Heat` adds up the density maps of a source, in steps of five minutes.
"""

import json
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop.errors import ArgumentError, FileError
from latedrop_crowd.console.zones import Zone, checked_points, drawn_points

__all__ = ["STEP", "Heat", "Store"]

_OURS, _FORMAT = int.from_bytes(b"ldcn", "big"), 1  # `application_id` and `user_version` of the file
_TABLES = """
CREATE TABLE zones (id INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL,
    points TEXT NOT NULL, people REAL, gone INTEGER NOT NULL DEFAULT 0);
CREATE TABLE counts (zone INTEGER NOT NULL, time REAL NOT NULL, count REAL, low REAL, high REAL,
    strangeness REAL, thinned INTEGER NOT NULL DEFAULT 0);
CREATE INDEX counts_by_time ON counts (zone, time);
CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL NOT NULL, source TEXT NOT NULL, zone INTEGER,
    kind TEXT NOT NULL, text TEXT NOT NULL, acknowledged REAL, ended REAL, picture INTEGER);
CREATE TABLE pictures (id INTEGER PRIMARY KEY, time REAL NOT NULL, jpeg BLOB NOT NULL);
CREATE TABLE frames (id INTEGER PRIMARY KEY, source TEXT NOT NULL, time REAL NOT NULL, name TEXT NOT NULL,
    why TEXT NOT NULL, png BLOB NOT NULL, jpeg BLOB NOT NULL, count REAL, low REAL, high REAL, people REAL, heads TEXT,
    labelled REAL);
CREATE TABLE calibrations (id INTEGER PRIMARY KEY, source TEXT NOT NULL, time REAL NOT NULL,
    note TEXT NOT NULL, record TEXT NOT NULL, used REAL NOT NULL DEFAULT 0);
CREATE TABLE maps (source TEXT NOT NULL, time REAL NOT NULL, frames INTEGER NOT NULL,
    height INTEGER NOT NULL, width INTEGER NOT NULL, cells BLOB NOT NULL);
CREATE INDEX maps_by_time ON maps (source, time);
"""
_PATIENCE = 5.0  # seconds to wait for another console that is closing, as in a restart
_FINE, _STEP = 3600.0, 10.0  # seconds: age up to which every count is kept, and averaging step beyond
_TIMES, _LATEST = (
    ("time", "acknowledged", "ended", "labelled", "used"),
    1e11,
)  # latest valid time in seconds, some thousand years
_TOGETHER = (
    ("counts", "count", "low"),
    ("counts", "low", "high"),
    ("frames", "people", "labelled"),
)  # both NULL or neither
_MOST_PICTURES, _MOST_EVENTS, _MOST_PROPOSED, _MOST_CALIBRATIONS = 200, 5000, 12, 20


class Store:
    """Open or create a file of at most `most_bytes`; its methods may be called from several threads."""

    def __init__(self, path: Path, most_bytes: float = 5e8) -> None:
        if not most_bytes >= 5e6:
            raise ArgumentError(f"expected --keep of at least 5 MB; found {most_bytes / 1e6:g} MB. The default is 500.")
        self.path, self.most_bytes = path, most_bytes
        self._lock = RLock()
        self._due = self._tidy = 0.0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_ours(path)
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_PATIENCE)
        except (sqlite3.Error, OSError) as error:
            raise self._refused(error) from error
        try:
            with self._opened():
                self._open()
        except BaseException:
            self._db.close()
            raise
        self._db.row_factory = sqlite3.Row

    def _open(self) -> None:
        """Lock the file until it is closed; check an existing file, or create the tables of a new one."""
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        if self._db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("it is damaged")
        is_new = not _fields(self._db)
        if not is_new:
            _check_tables(self._db)
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        if not self._db.execute("PRAGMA application_id").fetchone()[
            0
        ]:  # before WAL starts, so that it is in the file itself
            self._db.execute(f"PRAGMA application_id = {_OURS}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        if is_new:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Lend the database to one thread at a time; raise its errors as `FileError`."""
        with self._lock:
            try:
                yield self._db
            except (sqlite3.Error, UnicodeError) as error:  # UnicodeError: a message quotes damaged text
                raise self._refused(error) from error

    def _refused(self, error: Exception) -> FileError:
        """Turn an error of SQLite into a `FileError` with the cause."""
        why = "another console uses it" if "locked" in str(error) else str(error).rstrip(".")
        return FileError(f"expected a usable --memory file {self.path}; {why}. Pass another --memory.")

    def close(self) -> None:
        """Commit, and close the file."""
        with self._opened():
            self._commit()
            self._db.close()

    def zones(self, source: str) -> list[Zone]:
        """Return the zones of a source, the whole picture first; create that one if it is missing."""
        rows = self._rows("SELECT * FROM zones WHERE source = ? AND gone = 0 ORDER BY id", source)
        if not rows:
            self._do("INSERT INTO zones (source, name, points) VALUES (?, 'Whole picture', '[]')", source)
            return self.zones(source)
        return [Zone(r["id"], r["source"], r["name"], checked_points(r["points"]), r["people"]) for r in rows]

    def add_zone(self, source: str, name: str, points: Any, limit: float | None) -> int:
        """Add a zone; return its id."""
        corners = json.dumps([list(point) for point in drawn_points(points)])
        return self._do(
            "INSERT INTO zones (source, name, points, people) VALUES (?, ?, ?, ?)", source, name, corners, limit
        )

    def change_zone(self, zone: int, name: str, limit: float | None, points: Any = ()) -> None:
        """Change name and limit of a zone, and its corners if any are given; the whole picture keeps none."""
        self._do("UPDATE zones SET name = ?, people = ? WHERE id = ?", name, limit, zone)
        if points:
            corners = json.dumps([list(point) for point in drawn_points(points)])
            self._do("UPDATE zones SET points = ? WHERE id = ? AND points != '[]'", corners, zone)

    def remove_zone(self, zone: int) -> None:
        """Hide a zone but keep its counts; the whole picture cannot be removed."""
        self._do("UPDATE zones SET gone = 1 WHERE id = ? AND points != '[]'", zone)

    def add_counts(self, rows: Iterable[Sequence[float]]) -> None:
        """Add rows of zone, time, count, low, high and strangeness; commit about twice a second."""
        with self._opened() as db:
            self._begin()
            db.executemany(
                "INSERT INTO counts (zone, time, count, low, high, strangeness) VALUES (?, ?, ?, ?, ?, ?)", rows
            )
            if time.monotonic() > self._due:
                self._commit()
            if time.monotonic() > self._tidy:
                self.tidy()

    def timeline(self, zone: int, since: float, until: float, most: int = 600) -> list[tuple[float, ...]]:
        """Return time, count, low, high and strangeness of a zone, averaged to about `most` rows."""
        step = max((until - since) / most, 1e-3)
        rows = self._rows(
            "SELECT AVG(time) t, AVG(count) c, AVG(low) l, AVG(high) h, MAX(strangeness) s FROM counts WHERE zone = ? "
            "AND time >= ? AND time <= ? GROUP BY CAST(time / ? AS INTEGER) ORDER BY t",
            zone, since, until, step,
        )  # fmt: skip
        return [tuple(row) for row in rows]

    def all_counts(self, zone: int, since: float) -> list[sqlite3.Row]:
        """Return every stored count of a zone since a time, for a CSV file."""
        return self._rows("SELECT * FROM counts WHERE zone = ? AND time >= ? ORDER BY time", zone, since)

    def add_map(self, source: str, begin: float, frames: int, shape: tuple[int, ...], cells: bytes) -> None:
        """Add the mean density map of a source over some frames; see `Heat`."""
        self._do(
            "INSERT INTO maps (source, time, frames, height, width, cells) VALUES (?, ?, ?, ?, ?, ?)",
            source, begin, frames, *shape, cells,
        )  # fmt: skip

    def maps(self, source: str, since: float, until: float) -> list[sqlite3.Row]:
        """Return the maps of a source that begin between two times, newest first."""
        where = "source = ? AND time > ? AND time <= ?"
        return self._rows(f"SELECT * FROM maps WHERE {where} ORDER BY time DESC", source, since, until)

    def add_event(
        self, source: str, kind: str, text: str, zone: int | None = None, picture: bytes | None = None
    ) -> int:
        """Add an event, with a picture if given; return its id."""
        number = None
        if picture is not None:
            number = self._do("INSERT INTO pictures (time, jpeg) VALUES (?, ?)", time.time(), picture)
        return self._do(
            "INSERT INTO events (time, source, zone, kind, text, picture) VALUES (?, ?, ?, ?, ?, ?)",
            time.time(), source, zone, kind, text, number,
        )  # fmt: skip

    def end_alarms(self, zone: int) -> None:
        """Set the end of the open alarms of a zone."""
        self._do("UPDATE events SET ended = ? WHERE zone = ? AND kind = 'alarm' AND ended IS NULL", time.time(), zone)

    def acknowledge(self, event: int) -> bool:
        """Mark an alarm as acknowledged; return False if there is none to acknowledge."""
        before = self._rows("SELECT id FROM events WHERE id = ? AND kind = 'alarm' AND acknowledged IS NULL", event)
        self._do("UPDATE events SET acknowledged = ? WHERE id = ? AND acknowledged IS NULL", time.time(), event)
        return bool(before)

    def events(self, most: int = 200) -> list[dict[str, Any]]:
        """Return the newest events, newest first."""
        return [dict(row) for row in self._rows("SELECT * FROM events ORDER BY id DESC LIMIT ?", most)]

    def open_alarms(self) -> list[dict[str, Any]]:
        """Return alarms that have not ended or are not acknowledged, newest first."""
        where = "kind = 'alarm' AND (ended IS NULL OR acknowledged IS NULL)"
        return [dict(row) for row in self._rows(f"SELECT * FROM events WHERE {where} ORDER BY id DESC LIMIT 50")]

    def picture(self, number: int) -> bytes | None:
        """Return a stored picture as JPEG; None if there is none with this number."""
        rows = self._rows("SELECT jpeg FROM pictures WHERE id = ?", number)
        return bytes(rows[0]["jpeg"]) if rows else None

    def add_frame(
        self,
        source: str,
        name: str,
        why: str,
        png: bytes,
        jpeg: bytes,
        numbers: tuple[float, float, float],
        when: float,
    ) -> int:
        """Store a frame for labelling; return its id. Beyond a maximum the oldest unlabelled frame is deleted."""
        number = self._do(
            "INSERT INTO frames (source, time, name, why, png, jpeg, count, low, high) VALUES (?, ?, ?, ?, ?, ?, ?, ?, "
            "?)",
            source, when, name, why, png, jpeg, *numbers,
        )  # fmt: skip
        self._do(
            "DELETE FROM frames WHERE people IS NULL AND source = ? AND id NOT IN (SELECT id FROM frames WHERE people "
            "IS NULL AND source = ? ORDER BY id DESC LIMIT ?)",
            source, source, _MOST_PROPOSED,
        )  # fmt: skip
        return number

    def frame(self, number: int) -> dict[str, Any] | None:
        """Return a stored frame with its pictures; None if there is none."""
        rows = self._rows("SELECT * FROM frames WHERE id = ?", number)
        return dict(rows[0]) if rows else None

    def frames(self, source: str, *, labelled: bool) -> list[dict[str, Any]]:
        """Return unlabelled frames, newest first; or labelled ones in order of time."""
        test, order = ("NOT NULL", "time") if labelled else ("NULL", "time DESC")
        fields = "id, source, time, name, why, count, low, high, people, heads, labelled"
        query = f"SELECT {fields} FROM frames WHERE source = ? AND people IS {test} ORDER BY {order}"
        return [dict(row) for row in self._rows(query, source)]

    def label(self, number: int, people: float, heads: Any) -> None:
        """Store the label of a frame: the number of people, and their heads if marked."""
        self._do(
            "UPDATE frames SET people = ?, heads = ?, labelled = ? WHERE id = ?",
            people, None if heads is None else json.dumps(heads), time.time(), number,
        )  # fmt: skip

    def unlabel(self, number: int) -> bool:
        """Delete a label; return False if there is none."""
        labelled = self._rows("SELECT id FROM frames WHERE id = ? AND people IS NOT NULL", number)
        self._do("UPDATE frames SET people = NULL, heads = NULL, labelled = NULL WHERE id = ?", number)
        return bool(labelled)

    def drop_frame(self, number: int) -> None:
        """Delete an unlabelled frame."""
        self._do("DELETE FROM frames WHERE id = ? AND people IS NULL", number)

    def add_calibration(self, source: str, note: str, record: str) -> int:
        """Store a calibration and use it; beyond a maximum delete old ones, but never the first. Return its id."""
        number = self._do(
            "INSERT INTO calibrations (source, time, note, record) VALUES (?, ?, ?, ?)",
            source,
            time.time(),
            note,
            record,
        )
        self.use_calibration(source, number)
        newest = "SELECT id FROM calibrations WHERE source = ? ORDER BY id DESC LIMIT ?"
        first = "SELECT MIN(id) FROM calibrations WHERE source = ?"
        self._do(
            f"DELETE FROM calibrations WHERE source = ? AND id NOT IN ({newest}) AND id != ({first})",
            source, source, _MOST_CALIBRATIONS, source,
        )  # fmt: skip
        return number

    def use_calibration(self, source: str, number: int) -> None:
        """Mark a calibration as the one in use, with the present time."""
        self._do("UPDATE calibrations SET used = (id = ?) * ? WHERE source = ?", number, time.time(), source)

    def calibrations(self, source: str) -> list[dict[str, Any]]:
        """Return the calibrations of a source, newest first."""
        return [dict(row) for row in self._rows("SELECT * FROM calibrations WHERE source = ? ORDER BY id DESC", source)]

    def tidy(self) -> None:
        """Average old counts, and delete old rows until the file is below its maximum size."""
        with self._opened():
            self._tidy = time.monotonic() + 60
            self._begin()
            before = (int(time.time() - _FINE) // int(_STEP)) * _STEP
            self._db.execute(
                "INSERT INTO counts (zone, time, count, low, high, strangeness, thinned) SELECT zone, AVG(time), "
                "AVG(count), AVG(low), AVG(high), MAX(strangeness), 1 FROM counts WHERE thinned = 0 AND time < ? "
                "GROUP BY zone, CAST(time / ? AS INTEGER)",
                (before, _STEP),
            )
            self._db.execute("DELETE FROM counts WHERE thinned = 0 AND time < ?", (before,))
            for table, most in (("pictures", _MOST_PICTURES), ("events", _MOST_EVENTS)):
                newest = f"(SELECT id FROM {table} ORDER BY id DESC LIMIT {most})"
                self._db.execute(f"DELETE FROM {table} WHERE id NOT IN {newest}")
            self._commit()
            for _ in range(20):
                if self.size() <= 0.9 * self.most_bytes:
                    break
                self._forget_some()

    def size(self) -> int:
        """Return the size of the file in bytes, without its free pages."""
        with self._opened():
            pages, free, size = (
                int(self._db.execute(f"PRAGMA {name}").fetchone()[0])
                for name in ("page_count", "freelist_count", "page_size")
            )
        return (pages - free) * size

    def _forget_some(self) -> None:
        """Delete the oldest twentieth of counts, pictures, events and maps."""
        self._begin()
        for table in ("counts", "pictures", "events", "maps"):
            some = f"SELECT rowid FROM {table} ORDER BY time LIMIT 1 + (SELECT COUNT(*) / 20 FROM {table})"
            self._db.execute(f"DELETE FROM {table} WHERE rowid IN ({some})")
        self._commit()
        self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._opened() as db:
            return db.execute(query, values).fetchall()

    def _do(self, query: str, *values: Any) -> int:
        """Run a statement and commit at once; return the id of the inserted row."""
        with self._opened() as db:
            self._begin()
            number = db.execute(query, values).lastrowid or 0
            self._commit()
            return number

    def _begin(self) -> None:
        if not self._db.in_transaction:
            self._db.execute("BEGIN")

    def _commit(self) -> None:
        if self._db.in_transaction:
            self._db.execute("COMMIT")
        self._due = time.monotonic() + 0.5


def _check_ours(path: Path) -> None:
    """Raise `FileError` if the file exists but was not made by the console, without changing it."""
    if path.exists() and not path.is_file():
        raise FileError(f"expected a file for --memory; {path} is not a file. Pass another --memory.")
    if not path.exists() or not path.stat().st_size:
        return
    # Immutable: SQLite neither locks the file nor writes one beside it. To close a file that Python opened would drop
    # the locks of this process.
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        application, version = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
    except (sqlite3.Error, UnicodeError):
        application, version = 0, 0  # not an SQLite file
    finally:
        db.close()
    if application != _OURS:
        raise FileError(
            f"expected a file that the console made, or none; {path} is another file, and was not changed. Pass "
            "another --memory."
        )
    if version not in (0, _FORMAT):
        raise FileError(
            f"expected a console file of format {_FORMAT} in {path}; found format {version}. Pass another --memory."
        )


def _check_tables(db: sqlite3.Connection) -> None:
    """Raise if a column is missing or holds values of a wrong type, which SQLite itself does not check."""
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(_TABLES)
        wanted = _fields(fresh)
    if {field[:2] for field in wanted} - {field[:2] for field in _fields(db)}:
        raise sqlite3.DatabaseError("its tables have other columns")
    wrong: dict[str, list[str]] = {table: [f"({one} IS NULL) != ({other} IS NULL)"] for table, one, other in _TOGETHER}
    for table, column, kind, needed in wanted:
        kinds = f"'{kind.lower()}'" + ("" if needed else ", 'null'")
        wrong.setdefault(table, []).append(f"typeof({column}) NOT IN ({kinds})")
        if column in _TIMES:
            wrong[table].append(f"abs({column}) > {_LATEST}")
    for table, conditions in wrong.items():
        if db.execute(f"SELECT 1 FROM {table} WHERE {' OR '.join(conditions)} LIMIT 1").fetchone():
            raise sqlite3.DatabaseError(f"its table {table} holds invalid values")


def _fields(db: sqlite3.Connection) -> set[tuple[Any, ...]]:
    """Return table, name, type and NOT NULL flag of every column."""
    query = 'SELECT m.name, p.name, p.type, p."notnull" FROM sqlite_master m, pragma_table_info(m.name) p '
    return {tuple(row) for row in db.execute(f"{query} WHERE m.type = 'table'")}


STEP = 300.0  # seconds
_WIDEST = 64  # maximum width of stored maps in cells, so that a week of maps takes a few MB

Cells = npt.NDArray[np.float64]


class Heat:
    """Add up the density maps of one source; maps of finished steps are in the store."""

    def __init__(self, store: Store, source: str) -> None:
        self._store, self._source = store, source
        self._begin, self._frames, self._sum = 0.0, 0, np.zeros((0, 0))

    def add(self, density: Cells, time: float) -> None:
        """Add the density map `(h, w)` of a frame at a time in seconds."""
        side = -(-density.shape[1] // _WIDEST)
        coarse = density
        for axis in (0, 1):
            coarse = np.add.reduceat(coarse, np.arange(0, coarse.shape[axis], side), axis=axis)
        begin = time // STEP * STEP
        if begin != self._begin or coarse.shape != self._sum.shape:
            self.flush()
            self._begin, self._frames, self._sum = begin, 0, np.zeros(coarse.shape)
        self._sum = self._sum + np.clip(coarse, 0, None)
        self._frames += 1

    def flush(self) -> None:
        """Store the sum of the current step."""
        if self._frames:
            cells = zlib.compress((self._sum / self._frames).astype("<f2").tobytes())
            self._store.add_map(self._source, self._begin, self._frames, self._sum.shape, cells)
        self._frames = 0

    def mean(self, since: float, until: float) -> tuple[Cells, int]:
        """Return the mean map in people per cell over all steps that overlap a time, and the number of frames.

        If maps have several sizes, only those of the newest size are used.
        """
        under_way = self._frames > 0 and since < self._begin + STEP and self._begin <= until
        maps = [(self._sum, self._frames)] if under_way else []
        for row in self._store.maps(self._source, since - STEP, until):
            shape = (row["height"], row["width"])
            cells = np.frombuffer(zlib.decompress(row["cells"]), "<f2").astype(np.float64).reshape(shape)
            maps.append((cells * row["frames"], row["frames"]))
        alike = [(cells, frames) for cells, frames in maps if cells.shape == maps[0][0].shape]
        frames = sum(number for _, number in alike)
        total = np.sum([cells for cells, _ in alike], axis=0) if alike else np.zeros((0, 0))
        return total / max(1, frames), frames
