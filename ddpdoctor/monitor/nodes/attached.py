"""A run that a head shows, shown elsewhere: read only, with the key that the head keeps beside its record."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from ddpdoctor.errors import RecordError, UsageError
from ddpdoctor.files.untrusted import read_start, reason_of
from ddpdoctor.launch.runs.kept_runs import kept_runs, named_run
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint, host_and_port, reach, read_meeting
from ddpdoctor.monitor.nodes.messages import PROTOCOL, Picture, Request, Shown, connected, differing, pack, received
from ddpdoctor.monitor.nodes.screens import MOST_SNAPSHOT_BYTES, unpack_shown
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.record import layout

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
        raise UsageError(f"{path} is another version's: {differing(meeting.protocol, 'its machine', 'this one')}")
    return meeting


def _here_at_last(meeting: Meeting) -> Meeting:
    """No one said where it is: with a tunnel, or where no address of the head leads to it, it is this machine."""
    return msgspec.structs.replace(meeting, addresses=(*meeting.addresses, "127.0.0.1"))


class AttachedRun:
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
        """Return the newest one; raises HeadLeft where none will come any more, and RecordError where none comes
        now.
        """
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

    def ask_for_stacks(self, rank: int) -> None:
        """Nothing is asked of the ranks of a run that is only looked at."""

    def end_job(self) -> None:
        """A job that others started is never ended."""

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
        self._socket = connected(self._context, meeting, where, MOST_SNAPSHOT_BYTES, immediate=False)
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
            shown, picture = unpack_shown([frame.bytes for frame in received(own, 2)[0]])
        except (zmq.ZMQError, RecordError):
            return
        self._take(shown, picture)
        self._ask(own)

    def _ask(self, own: zmq.Socket[bytes]) -> None:
        now_s = time.monotonic()
        if self._number and now_s - self._requested_s <= AGAIN_AFTER_S:
            return
        number, has_ns = next(self._numbers), 0 if self._newest is None else self._newest.now_ns
        request = Request(protocol=PROTOCOL, number=number, host=socket.gethostname()[:255], has_ns=has_ns)
        with suppress(zmq.Again):  # There is no connection yet, or none any more.
            own.send(pack(request), zmq.NOBLOCK)
            self._number, self._requested_s = number, now_s

    def _take(self, shown: Shown, picture: Picture | None) -> None:
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
