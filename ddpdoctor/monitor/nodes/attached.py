"""A run that a head shows, shown elsewhere: read only, with the key that the head keeps beside its record."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ddpdoctor.diagnosis.clocks import Bound, ClockBounds
from ddpdoctor.errors import RecordError, UsageError
from ddpdoctor.files.untrusted import read_start, reason_of
from ddpdoctor.launch.kept_runs import kept_runs, named_run
from ddpdoctor.monitor.nodes import messages
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint, host_and_port, reach, read_meeting
from ddpdoctor.monitor.nodes.messages import PROTOCOL
from ddpdoctor.monitor.nodes.screens import MOST_SNAPSHOT_BYTES, unpack_shown
from ddpdoctor.monitor.snapshot import OnlyShown, Snapshot
from ddpdoctor.record import layout
from ddpdoctor.record.joining import Clock, NodePart
from ddpdoctor.record.model import Job, RunRecord, shared_fields
from ddpdoctor.record.streams.collectives import CollectiveTrack
from ddpdoctor.record.streams.measured import CallTrack, StepTrack

# What the head holds of one other node: its streams as they were sent last, and the newest rows of its ranks.

_HOLD_RANKS = frozenset({"groups", "wraps"})
"""Streams whose rows name all ranks of a group: with 4,096 ranks that is a third of a gigabyte, told by each anew."""
MOST_FIELD_BYTES = 1 << 20
"""Of all streams of a node in one update, for each of its ranks and twice more: a model of 5,000 parameters has half
of it."""
LOST_AFTER_NS = 10_000_000_000
"""A node that has sent nothing for so long is lost: nothing is concluded of its ranks any more."""


class HeldNode:
    """One agent's news, put together."""

    def __init__(self, session: str, host: str, source: str = "") -> None:
        self.session = session
        self.host = host
        self.source = source
        """The address that it sends from; empty where that is not known."""
        self.number = 0
        """Of the newest update that was taken in."""
        self.received_ns = 0
        """When that was, by the head's clock."""
        self._sent_ns = 0
        """When it was sent, by the node's own."""
        self.state = "running"
        self.exit_code: int | None = None
        self.is_quiet = False
        self.asks: tuple[int, ...] = ()
        """Ranks whose stacks the head's user wants."""
        self.bytes = 0
        """Received so far."""
        self.ranks: tuple[int, ...] = ()
        """Its ranks, ascending."""
        self.epoch = 0
        """Raised whenever its collectives do not join on to those before: what was made of these is void."""
        self._job = messages.JobFacts()
        self._fields: dict[str, Any] = {}
        self._steps: dict[int, dict[str, array[int]]] = {}
        self._calls: dict[int, dict[str, array[int]]] = {}
        self._collectives: tuple[CollectiveTrack, ...] = ()
        self._bounds = ClockBounds()

    def takes(self, update: messages.Update) -> bool:
        """Return whether an update joins on to what is held; one that was taken in before does, too."""
        return update.number in (1, self.number, self.number + 1)

    def take(self, update: messages.Update, now_ns: int, most_rows: int) -> None:
        """Take in an update; raises RecordError for one that is damaged, of which nothing is taken in then."""
        fields = {name: messages.unpack_field(name, content) for name, content in update.fields.items()}
        ranks = {rank.rank for rank in fields["ranks"]} if "ranks" in fields else set(self.ranks)
        if sum(map(len, update.fields.values())) > MOST_FIELD_BYTES * (len(ranks) + 2):
            raise RecordError(f"streams of more than {len(ranks) + 2} MiB for {len(ranks)} ranks")
        for name, rows in fields.items():
            # A node speaks for its own ranks.
            if name != "streams" and any(getattr(row, "rank", -1) not in ranks for row in rows):
                fields[name] = tuple(row for row in rows if getattr(row, "rank", -1) in {-1, *ranks})
        for name in fields.keys() & _HOLD_RANKS:
            fields[name] = tuple(msgspec.structs.replace(row, ranks=_shared(row.ranks)) for row in fields[name])
        steps = [(rows, messages.unpack_rows(rows, StepTrack)) for rows in update.steps if rows.rank in ranks]
        calls = [(rows, messages.unpack_rows(rows, CallTrack)) for rows in update.calls if rows.rank in ranks]
        if update.collectives is not None:
            collectives = tuple(
                _track(CollectiveTrack, rows.rank, messages.unpack_rows(rows, CollectiveTrack))
                for rows in update.collectives
                if rows.rank in ranks
            )
            self.epoch += not _extends(collectives, self._collectives)
            self._collectives = collectives
        self._fields.update(fields)
        _add(self._steps, steps, "ended_at_ns", most_rows)
        _add(self._calls, calls, "entered_at_ns", most_rows)
        if "ranks" in fields:
            self.ranks = tuple(sorted(ranks))
            for held in (self._steps, self._calls):
                for gone in held.keys() - set(self.ranks):  # The job was started again with others here.
                    del held[gone]
        self.number, self.received_ns, self._sent_ns = update.number, now_ns, update.sent_at_ns
        self._job = update.job
        self.state, self.exit_code, self.is_quiet = update.state, update.exit_code, update.is_quiet
        if update.clock is not None:
            self._bounds.add(Bound(*update.clock))

    def reported_ns(self) -> int:
        """Return the moment of the newest update, by the head's clock: it may have been long under way."""
        clock = self.clock()
        return self.received_ns if clock is None else min(self.received_ns, clock.moved(self._sent_ns))

    def is_lost(self, now_ns: int) -> bool:
        """Return whether nothing has come from it for long, although it had not ended."""
        return self.state != "ended" and now_ns - self.received_ns > LOST_AFTER_NS

    def is_silent(self, now_ns: int) -> bool:
        """Return whether nothing more is expected of it: it has ended, or is lost."""
        return self.state == "ended" or self.is_lost(now_ns)

    def clock(self, narrowing: Sequence[Bound] = ()) -> Clock | None:
        """Return how its clock differs from ours; None while that is not known."""
        return self._bounds.clock(narrowing)

    def part(self, clock: Clock, since_ns: int = 0) -> NodePart:
        """Its record, with steps and calls since a time of the head's clock."""
        own_since_ns = since_ns - (clock.moved(since_ns) - since_ns) if since_ns else 0
        record = RunRecord(
            job=Job(kind="run", ranks_expected=self._job.world_size, **shared_fields(self._job, Job)),
            step_tracks=tuple(
                _track(StepTrack, rank, _since(columns, "ended_at_ns", own_since_ns))
                for rank, columns in sorted(self._steps.items())
            ),
            call_tracks=tuple(
                _track(CallTrack, rank, _since(columns, "entered_at_ns", own_since_ns), kinds=layout.CALL_KINDS)
                for rank, columns in sorted(self._calls.items())
            ),
            collectives=self._collectives,
            **self._fields,
        )
        return NodePart(name=self.session, record=record, clock=clock)


def _add(
    held: dict[int, dict[str, array[int]]],
    news: Iterable[tuple[messages.Rows, dict[str, array[int]]]],
    time: str,
    most_rows: int,
) -> None:
    """Put new rows behind the held ones, or in the place of those that they tell anew."""
    for rows, columns in news:
        known = held.get(rows.rank)
        if rows.anew or known is None:
            held[rows.rank] = columns
            continue
        if rows.count:
            keep = bisect_left(known[time], columns[time][0])
            for name, column in columns.items():
                del known[name][keep:]
                known[name].extend(column)
        over = len(known[time]) - most_rows
        if over > most_rows // 4:
            for column in known.values():
                del column[:over]


def _extends(tracks: Iterable[CollectiveTrack], before: Iterable[CollectiveTrack]) -> bool:
    """Return whether every track of before is there still, with all of its rows, and none but new ones behind them."""
    newer = {track.rank: track for track in tracks}
    for old in before:
        new = newer.get(old.rank)
        if new is None or any(
            getattr(new, name)[: len(old)] != getattr(old, name)
            for name in ("group", "sequence", "signature", "started_ns")
        ):
            return False
    return True


@lru_cache(maxsize=256)
def _shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """One object for the same ranks."""
    return ranks


def _since(columns: dict[str, array[int]], time: str, since_ns: int) -> dict[str, array[int]]:
    start = bisect_left(columns[time], since_ns) if since_ns else 0
    return {name: column[start:] for name, column in columns.items()}


def _track(kind: Any, rank: int, columns: dict[str, array[int]], **more: Any) -> Any:
    return kind(rank=rank, **columns, **more)


PATIENCE_S = 8.0
"""For the greeting of the head; a handshake over a slow link takes a second."""
SNAPSHOT_WITHIN_S = 60.0
"""After that for the first snapshot, of which a slow link carries a part a second."""
ANSWERED_WITHIN_S = 0.25
AGAIN_AFTER_S = 5.0
"""A request that was not answered for so long is sent again: it may have been lost with a connection."""
_LINGER_MS = 200
"""The head gets what was seen last, and waits no longer then."""
SILENT_AFTER_S = 6.0
"""The head answers every two seconds, whether there is news or not."""


class HeadLeft(RecordError):
    """The monitor that was looked at has ended, and the job may continue."""


def find_key(where: str, key_file: str | None) -> Meeting:
    """Return where the head of ``--attach`` is, and what lets a screen in there.

    ``where`` is a run of this user, the key file of one, or ``HOST:PORT``, whose key is in ``key_file`` or beside a run
    of this user. Raises UsageError.
    """
    if Path(where).is_file():
        return _here_at_last(_read(Path(where)))
    if Path(where).is_dir() or ":" not in where:
        directory = named_run(where)
        if not directory.is_dir():
            raise UsageError(f"--attach {where}: not HOST:PORT, and there is no run or key file of that name")
        if not (directory / layout.ATTACH_FILE).is_file():
            raise UsageError(
                f"the monitor of {directory} does not listen",
                "It listens if the job has several nodes, or with `--head HOST:PORT`; on its own machine "
                "`ddpdoctor profile --run-dir RUN` attaches to any run.",
            )
        return _here_at_last(_read(directory / layout.ATTACH_FILE))
    host, port = host_and_port(where, "--attach")
    if key_file is not None:
        return msgspec.structs.replace(_read(Path(key_file)), addresses=(host,), port=port)
    for directory in kept_runs():
        try:
            known = read_meeting(_key_in(directory / layout.ATTACH_FILE))
        except (OSError, ValueError):
            continue
        if known is not None and known.port == port:
            return msgspec.structs.replace(known, addresses=(host,))
    raise UsageError(
        f"none of your runs on this machine has a key for port {port}",
        f"Copy `{layout.ATTACH_FILE}` from the run's directory on the machine of rank 0, and pass it with `--key`.",
    )


_WHAT_IT_IS = f"The key of a run is called `{layout.ATTACH_FILE}` in its directory."


def _key_in(path: Path) -> str:
    return read_start(path, layout.MOST_HEAD_BYTES).decode("ascii").strip()


def _read(path: Path) -> Meeting:
    try:
        meeting = read_meeting(_key_in(path))
    except ValueError:
        meeting = None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason_of(error)}", _WHAT_IT_IS) from error
    if meeting is None:
        raise UsageError(f"{path} does not hold the key of a run", _WHAT_IT_IS)
    if meeting.protocol != PROTOCOL:
        raise UsageError(
            f"{path} is another version's: {messages.differing(meeting.protocol, 'its machine', 'this one')}"
        )
    return meeting


def _here_at_last(meeting: Meeting) -> Meeting:
    """No one said where it is: with a tunnel, or where no address of the head leads to it, it is this machine."""
    return msgspec.structs.replace(meeting, addresses=(*meeting.addresses, "127.0.0.1"))


class AttachedRun(OnlyShown):
    """Fulfils ``SnapshotSource``; may be used by one thread after the other."""

    def __init__(self, meeting: Meeting) -> None:
        """Waits for the first snapshot; raises UsageError where there is none to be had."""
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._numbers = itertools.count(1)
        self._number = 0
        """Of the request that is not answered yet; 0 when there is none."""
        self._requested_s = self._received_s = time.monotonic()
        self._newest: Snapshot | None = None
        self._lines: Mapping[str, Mapping[int, str]] = {}
        self._left = self._has_ended = False
        self._is_greeted = False
        """Its key is right."""
        self._refused = ""
        """Why the head shows nothing here any more."""
        self.trouble = ""
        """Why nothing comes any more, or not now, as a sentence; empty while all is well."""
        self.where = ""
        """Where the head listens, as ``HOST:PORT``."""
        try:
            self._connect(meeting)
        except BaseException:
            self.close()
            raise

    def snapshot(self) -> Snapshot:
        """Return the newest one; raises HeadLeft where none will come any more, RecordError where none comes now."""
        try:
            newest = self._newer()
        except RecordError as error:
            self.trouble = error.message
            raise
        self.trouble = ""
        return newest

    def _newer(self) -> Snapshot:
        with self._lock:
            if self._has_ended:
                return self.last_snapshot()
            self._exchange(ANSWERED_WITHIN_S)  # After one that has left another may take its place.
            newest = self.last_snapshot()
            self._has_ended = newest.state == "ended"
            if self._refused:
                raise HeadLeft(f"the monitor at {self.where} no longer serves this screen: {self._refused}")
            if self._left and not self._has_ended:
                raise HeadLeft(f"the monitor at {self.where} has ended; the job may continue without it")
            silent_s = time.monotonic() - self._received_s
            if silent_s > SILENT_AFTER_S:
                raise RecordError(
                    f"no message from {self.where} for {silent_s:.0f} s: its monitor, link or machine is down; the "
                    "job may still be running"
                )
            return newest

    def last_snapshot(self) -> Snapshot:
        """Return what came last, however long ago."""
        assert self._newest is not None
        return self._newest

    def line_of(self, file: str, line: int) -> str:
        """Return a source line as it is on the head's machine; empty where it was not sent."""
        return self._lines.get(file, {}).get(line, "")

    def close(self) -> None:
        """Look on no longer."""
        with self._lock:
            self._context.destroy(linger=_LINGER_MS)

    def _connect(self, meeting: Meeting) -> None:
        address, refused = reach(meeting.addresses, meeting.port)
        if not address:
            raise UsageError(
                f"no monitor can be reached at port {meeting.port} ({refused})",
                "It may have ended; or give another address or a tunnel with `--attach HOST:PORT --key FILE`.",
            )
        self.where = endpoint(address, meeting.port).removeprefix("tcp://")
        where = endpoint(address, meeting.port)
        self._socket = messages.connected(self._context, meeting, where, MOST_SNAPSHOT_BYTES, immediate=False)
        began_s = time.monotonic()
        while self._newest is None and not self._left:
            self._exchange(ANSWERED_WITHIN_S)
            if time.monotonic() - began_s > (SNAPSHOT_WITHIN_S if self._is_greeted else PATIENCE_S):
                break
        if self._newest is None:
            if self._is_greeted:
                raise UsageError(f"the monitor at {self.where} has nothing to show", "Try again in a few seconds.")
            raise UsageError(
                f"{self.where}: the port is open, but does not answer to the run's key",
                f"It may belong to another run: copy `{layout.ATTACH_FILE}` from the run's directory anew.",
            )

    def _exchange(self, patience_s: float) -> None:
        """Take in what comes; something is always asked for, so that the last word of a head that ends comes, too."""
        own = self._socket
        assert own is not None
        self._ask(own)
        if not own.poll(int(1_000 * patience_s)):
            return
        try:
            shown, picture = unpack_shown([frame.bytes for frame in messages.received(own, 2)[0]])
        except (zmq.ZMQError, RecordError):
            return
        self._take(shown, picture)
        self._ask(own)

    def _ask(self, own: zmq.Socket[bytes]) -> None:
        now_s = time.monotonic()
        if self._number and now_s - self._requested_s <= AGAIN_AFTER_S:
            return
        number, has_ns = next(self._numbers), 0 if self._newest is None else self._newest.now_ns
        request = messages.Request(protocol=PROTOCOL, number=number, host=socket.gethostname()[:255], has_ns=has_ns)
        with suppress(zmq.Again):  # There is no connection yet, or none any more.
            own.send(messages.pack(request), zmq.NOBLOCK)
            self._number, self._requested_s = number, now_s

    def _take(self, shown: messages.Shown, picture: messages.Picture | None) -> None:
        if shown.refused and self._newest is None:
            raise UsageError(f"the monitor at {self.where} does not serve this screen: {shown.refused}")
        self._received_s, self._left, self._refused = time.monotonic(), shown.has_left, shown.refused
        self._is_greeted = True
        if shown.number == self._number:
            self._number = 0
        if picture is not None:
            snapshot, self._lines = picture.snapshot, picture.lines
            directory = f"{shown.host}:{snapshot.run_directory}"
            self._newest = msgspec.structs.replace(snapshot, source="attached", launched=False, run_directory=directory)
