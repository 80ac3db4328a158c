"""``history.sqlite`` of a run directory: the course of a run, thinned, for reports, replays, and any SQL tool.

One monitor writes, whichever came first; others read. Tables (times in ns since the epoch, durations in ns):

* ``steps``: one row a rank and slice of time, with the means of the steps that ended in it;
* ``gpus``: one row a GPU and slice, the newest sample;
* ``findings``: what held, since when and until when (null while it holds);
* ``snapshots``: what was shown, as zlib-compressed JSON, for replays.

A table never holds more than ``MOST_ROWS`` (snapshots: ``MOST_SNAPSHOTS``): then moments are dropped where they lie
closest, but the newest, so that the whole course stays, evenly.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.files.untrusted import open_untrusted, quoted, reason_of
from ddpdoctor.monitor.snapshot import Snapshot

FILE = "history.sqlite"
LOCK = "history.lock"
VERSION = 1
_OF_DAMAGE = ("no such table", "malformed", "not a database", "corrupt")
_LOCKED = "database is locked"
"""What SQLite says while someone reads; that moment is left out."""
MOST_ROWS = 100_000
MOST_SNAPSHOTS = 600
_MOST_SNAPSHOT_BYTES = 64 << 20
"""Of one snapshot, unpacked: a job of 1,024 ranks has 8 MB."""
_MOST_OPERATIONS = 20_000_000
"""Of SQLite's machine for one question, which take it 2 s; the moments of a full history need 10,000."""
_DAMAGED = "Copy the run directory anew; without this file `ddpdoctor report` judges what the ranks wrote."
_TABLES = """
create table if not exists steps (
    at_ns integer not null, rank integer not null, step integer, step_p50_ns real, step_p95_ns real, data_wait_ns real,
    forward_ns real, backward_compute_ns real, exposed_waiting_ns real, exposed_transfer_ns real, explicit_ns real,
    optimizer_ns real, other_ns real, waiting_ns real, samples_per_s real, primary key (at_ns, rank)
) without rowid;
create table if not exists gpus (
    at_ns integer not null, gpu integer not null, name text, utilisation_percent real, memory_used_bytes integer,
    temperature_c real, power_w real, sm_clock_mhz integer, throttle_reasons text, primary key (at_ns, gpu)
) without rowid;
create table if not exists findings (
    since_ns integer not null, until_ns integer, code text not null, name text not null, severity text not null,
    title text not null, ranks text not null, place text not null, primary key (since_ns, code, ranks, place)
) without rowid;
create table if not exists snapshots (at_ns integer primary key, content blob not null) without rowid;
"""


class NeverWatched(RecordError):
    """The run has no history."""


class HistoryWriter:
    """Writes the history of one run; a fault of the disk ends the writing and nothing else."""

    def __init__(self, directory: Path) -> None:
        self.fault = ""
        """Why nothing is written any more; empty while all is well, or while another monitor writes."""
        self._directory = directory
        self._connection: sqlite3.Connection | None = None
        self._lock = -1
        try:
            self._lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            self.fault = f"the history is not written: {error.strerror or error}"
            return
        try:
            _refuse_foreign(directory)
            self._connection = sqlite3.connect(
                directory / FILE, isolation_level=None, timeout=0.2, check_same_thread=False
            )
            # A write-ahead log has a mapped file beside it, and who truncates that kills the monitor by SIGBUS.
            self._connection.execute("pragma journal_mode=truncate")
            self._connection.execute("pragma synchronous=off")
            self._make_tables(self._connection)
        except sqlite3.Error as error:
            self._give_up(error)
        except OSError as error:
            self.fault = f"the history is not written: {FILE}: {reason_of(error)}"
            self.close()

    def write(self, snapshot: Snapshot) -> None:
        """Add what one snapshot shows."""
        connection = self._connection
        if connection is None:
            return
        try:
            # Whoever puts a pipe in the place of the journal has SQLite, and the whole monitor, wait for a writer.
            _refuse_foreign(self._directory)
            if not connection.execute("select 1 from sqlite_master limit 1").fetchone():
                self._make_tables(connection)  # Another program has emptied the file.
            with connection:
                connection.execute("begin")
                connection.executemany(f"insert or replace into steps values ({_marks(15)})", _steps(snapshot))
                connection.executemany(f"insert or replace into gpus values ({_marks(9)})", _gpus(snapshot))
                connection.executemany(f"insert or replace into findings values ({_marks(8)})", _findings(snapshot))
                content = zlib.compress(msgspec.json.encode(snapshot), 1)
                connection.execute("insert or replace into snapshots values (?, ?)", (snapshot.now_ns, content))
                for table, most in (("steps", MOST_ROWS), ("gpus", MOST_ROWS), ("snapshots", MOST_SNAPSHOTS)):
                    _thin(connection, table, most)
        except sqlite3.Error as error:
            if _LOCKED not in str(error):
                self._give_up(error)
        except OSError as error:
            self.fault = f"the history is no longer written: {FILE}: {reason_of(error)}"
            self.close()

    def close(self) -> None:
        """Let go of the files."""
        try:
            if self._connection is not None:
                self._connection.close()
        except sqlite3.Error:
            pass
        self._connection = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        connection.executescript(_TABLES)
        connection.execute(f"pragma user_version={VERSION}")

    def _give_up(self, error: sqlite3.Error) -> None:
        is_damage = any(words in str(error) for words in _OF_DAMAGE)
        why = f"another program has damaged {FILE} ({error})" if is_damage else str(error)
        self.fault = f"the history is no longer written: {why}"
        self.close()


def recorded_moments(directory: Path) -> list[int]:
    """Return the times of the recorded snapshots, ascending; raises RecordError when the history cannot be read."""
    with _Reading(directory) as connection:
        rows = connection.execute("select at_ns from snapshots where typeof(at_ns) = 'integer' order by at_ns")
        return [row[0] for row in rows.fetchmany(MOST_ROWS)]


def recorded_snapshot(directory: Path, at_ns: int) -> Snapshot:
    """Return the newest recorded snapshot that is not younger than ``at_ns``, or else the oldest.

    Raises RecordError when the history cannot be read or holds none.
    """
    with _Reading(directory) as connection:
        row = (
            connection.execute(
                "select content from snapshots where at_ns <= ? order by at_ns desc limit 1", (at_ns,)
            ).fetchone()
            or connection.execute("select content from snapshots order by at_ns limit 1").fetchone()
        )
    if row is None:
        raise NeverWatched(f"{directory / FILE} holds no snapshots: the run was never watched")
    try:
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(row[0], _MOST_SNAPSHOT_BYTES)
        if not unpacking.eof:
            raise zlib.error("a snapshot is cut off, or too large")
        return msgspec.json.decode(content, type=Snapshot)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise _damage(directory / FILE, error) from error


def _damage(path: Path, error: Exception) -> RecordError:
    return RecordError(f"{path} is damaged: {quoted(error)}", _DAMAGED)


def _refuse_foreign(directory: Path) -> None:
    """Raise OSError where SQLite would open what is no file of the directory: it opens by name, and its own beside."""
    for ending in ("", "-journal", "-wal", "-shm"):
        try:
            os.close(open_untrusted(directory / f"{FILE}{ending}", directory))
        except FileNotFoundError:
            if os.path.lexists(directory / f"{FILE}{ending}"):
                raise


class _Reading:
    """A connection that only reads; what goes wrong becomes a RecordError."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> sqlite3.Connection:
        if not os.path.lexists(self._path):
            raise NeverWatched(f"{self._path.parent} holds no history: the run was never watched")
        try:
            _refuse_foreign(self._path.parent)
        except OSError as error:
            raise RecordError(f"{self._path} cannot be read: {reason_of(error)}", _DAMAGED) from error
        try:
            connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0)
            self._connection = connection
            connection.set_progress_handler(lambda: 1, _MOST_OPERATIONS)
            connection.execute("pragma trusted_schema=off")
            connection.execute("pragma cell_size_check=on")
            version = int(connection.execute("pragma user_version").fetchone()[0])
            kinds = connection.execute("select type from sqlite_master where name = 'snapshots'").fetchall()
        except sqlite3.Error as error:
            raise _damage(self._path, error) from error
        if kinds != [("table",)]:
            raise RecordError(f"{self._path} is damaged: it has no table of snapshots", _DAMAGED)
        if version > VERSION:
            raise RecordError(f"{self._path} was written by a newer ddpdoctor", "Read it with the version that did.")
        return connection

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._connection is not None:
            self._connection.close()
        if isinstance(error, sqlite3.Error):
            raise _damage(self._path, error) from error


def _thin(connection: sqlite3.Connection, table: str, most: int) -> None:
    """Drop some moments when a table has grown too long."""
    (rows,) = connection.execute(f"select count(*) from {table}").fetchone()
    if rows > most:
        moments = [row[0] for row in connection.execute(f"select distinct at_ns from {table} order by at_ns")]
        connection.executemany(f"delete from {table} where at_ns = ?", [(at_ns,) for at_ns in dropped(moments)])


def dropped(moments: Sequence[int]) -> list[int]:
    """Return which of the moments, ascending, to do without: an eighth of them, those closest to their neighbours.

    The first stays, and the newest eighth; of two neighbours one does, too.
    """
    wanted = max(1, len(moments) // 8)
    places = range(1, len(moments) - wanted)
    gone: set[int] = set()
    for place in sorted(places, key=lambda place: moments[place + 1] - moments[place - 1]):
        if len(gone) < wanted and not gone & {place - 1, place + 1}:
            gone.add(place)
    return [moments[place] for place in sorted(gone)]


def _steps(snapshot: Snapshot) -> Iterator[tuple[object, ...]]:
    for rank in snapshot.ranks:
        phases, times = rank.phases, rank.step_times
        if phases is None:
            continue
        yield (
            snapshot.now_ns,
            rank.rank,
            rank.step,
            times.p50_ns if times is not None else None,
            times.p95_ns if times is not None else None,
            *phases.parts_ns().values(),
            rank.waiting_ns,
            rank.samples_per_s,
        )


def _gpus(snapshot: Snapshot) -> Iterator[tuple[object, ...]]:
    for gpu in snapshot.gpus:
        if gpu.samples:
            sample = gpu.samples[-1]
            yield (
                sample.taken_at_ns,
                gpu.index,
                gpu.name,
                sample.utilisation_percent,
                sample.memory_used_bytes,
                sample.temperature_c,
                sample.power_w,
                sample.sm_clock_mhz,
                ", ".join(sample.throttle_reasons),
            )


def _findings(snapshot: Snapshot) -> Iterator[tuple[object, ...]]:
    for view in snapshot.findings:
        finding = view.finding
        place = finding.location
        yield (
            view.since_ns,
            view.until_ns,
            finding.code,
            finding.name,
            finding.severity.value,
            finding.title,
            " ".join(map(str, finding.ranks)),
            f"{place.file}:{place.line}" if place is not None else "",
        )


def _marks(number: int) -> str:
    return ", ".join("?" * number)
