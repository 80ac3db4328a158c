"""Reads a run directory, also while it grows, and makes a ``RunRecord`` of it.

Every file in it is hostile input: a line or a head that does not parse is counted and passed over.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.record import layout

_DECODER = msgspec.json.Decoder()
_SLOTS_AT_ONCE = 256
_MOST_OVERTAKEN = layout.RING_ROWS << 6
"""A row whose number is further ahead was written by somebody else."""
_MOST_HELD_OPEN = 256
"""Files of events that are held open, those of the ranks among the first: workers come and go by the hundred."""


class EventTail:
    """The events of one process, read as they come.

    The file is held open, as the process holds it: whoever deletes it takes nothing of what is still written.
    """

    def __init__(self, path: Path, *, holds_open: bool = True) -> None:
        self._path = path
        self._holds_open = holds_open
        self._descriptor = -1
        self._offset = 0
        self._rest = b""
        self._newest_ns = 0
        """Time of the newest event that was read."""
        self._known_ns = -1
        """Events that are not newer have been read before."""
        self.damaged = 0
        """Lines that did not parse."""
        self.shortened = 0
        """How often the file was shorter than what had been read of it."""

    def read(self) -> list[dict[str, Any]]:
        """Events that were added since the last call."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            content = self._added()
            if not self._holds_open:
                self.close()
        except OSError:
            return []
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        events = []
        for line in lines:
            try:
                event = _decoded(line)
            except (ValueError, RecursionError):
                self.damaged += 1
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                time_ns = event.get("time_ns")
                if isinstance(time_ns, int):
                    if time_ns <= self._known_ns:
                        continue
                    self._newest_ns = max(self._newest_ns, time_ns)
                events.append(event)
            else:
                self.damaged += 1
        return events

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _added(self) -> bytes:
        """What the file holds behind what was read of it."""
        size = os.fstat(self._descriptor).st_size
        if size < self._offset:
            # Somebody truncated it; the process appends behind what is left, which was read before.
            self.shortened += 1
            self._offset, self._rest, self._known_ns = 0, b"", self._newest_ns
        parts, offset = [], self._offset
        while part := os.pread(self._descriptor, 1 << 20, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)


def _decoded(line: bytes) -> Any:
    """Decode what a rank wrote. Raises ValueError, and RecursionError for what is nested without end.

    File names that are no UTF-8 hold halves of characters, which only the library that wrote them takes back.
    """
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The newest heartbeat of a rank."""

    beat_ns: int
    main_cpu_ns: int
    stack_hash: int
    waiting_row: int
    """Row that the main thread waits in; -1 when it does not wait."""
    unchanged_ms: int
    """How long the main thread's stack has not changed."""
    forwards: int
    backwards: int
    optimizer_steps: int
    answered: int
    """Number of the newest request for stacks that was served."""
    sleeps_until_ns: int
    """End of the ``time.sleep`` that the main thread is in; 0 when it is in none."""
    own_bytes: int = 0
    """What the probe itself has read and written by calls of the system, which is not the rank's work."""


NO_HEARTBEAT = Heartbeat(
    beat_ns=0,
    main_cpu_ns=0,
    stack_hash=0,
    waiting_row=-1,
    unchanged_ms=0,
    forwards=0,
    backwards=0,
    optimizer_steps=0,
    answered=0,
    sleeps_until_ns=0,
)


class Beating(Protocol):
    """The ring of one process, of a rehearsal or of a live run: it has a heartbeat, and its process can be asked."""

    def heartbeat(self) -> Heartbeat:
        """Return the newest heartbeat."""
        ...

    def ask_for_stacks(self, number: int) -> None:
        """Ask the process for its stacks."""
        ...


class RingTail:
    """The collectives of one process, read as they come; RecordError for a file that cannot be read as a ring."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._identity = head = self._bytes_at(0, layout.IDENTITY.size)
        if len(head) < layout.IDENTITY.size:
            os.close(self._descriptor)
            raise RecordError(f"{path.name} is shorter than its format", "the record is damaged")
        magic, version, row_bytes, rows, self.pid, _ = layout.IDENTITY.unpack(head)
        if (
            magic != layout.MAGIC
            or version > layout.VERSION
            or row_bytes != layout.ROW_BYTES
            or rows != layout.RING_ROWS
        ):
            os.close(self._descriptor)
            raise RecordError(f"{path.name} was not written by this version", "use the version that wrote it")
        self.columns = tuple(array("q") for _ in range(8))
        """started_ns, completed_ns, group, sequence, signature, site, step, forward_site: the ring's own numbers."""
        self.truncated = False
        """Rows were overwritten before they were read."""
        self.missing = 0
        """Rows that were written and are not there: somebody truncated the file, or wrote into it."""
        self._numbers = array("q")
        """Number of each row that was read, ascending."""
        self._next = 1
        self._overtaken_by = 0
        """Number of the row that lies where the next one was expected."""
        self._incomplete: list[int] = []
        self._heartbeat = NO_HEARTBEAT

    def read(self) -> None:
        """Take in new rows, and completions of old ones."""
        written = self._written()
        self._incomplete = [position for position in self._incomplete if not self._completed_now(position)]
        while self._read_ahead():
            pass
        if self._next <= max(written, self._overtaken_by):
            # More were written than are there, or so many that the oldest were overwritten.
            self._pass_over(max(written, self._overtaken_by))

    def position(self, index: int) -> int:
        """Return where in the columns the row is that the process gave this index; -1 where it was not read."""
        at = bisect_left(self._numbers, index + 1)
        return at if at < len(self._numbers) and self._numbers[at] == index + 1 else -1

    def heartbeat(self) -> Heartbeat:
        """Return the newest heartbeat; the last that was read where the file is too short to hold one."""
        content = self._bytes_at(layout.HEARTBEAT_OFFSET, layout.HEARTBEAT.size)
        if len(content) == layout.HEARTBEAT.size and any(content):
            values = layout.HEARTBEAT.unpack(content)
            self._heartbeat = Heartbeat(**dict(zip(Heartbeat.__struct_fields__, values, strict=True)))
        return self._heartbeat

    def polling(self) -> tuple[int, int]:
        """Since when the main thread has only asked for a file, in vain (0: it has not); when it did last."""
        content = self._bytes_at(layout.POLLING_OFFSET, layout.POLLING.size)
        since_ns, asked_ns = layout.POLLING.unpack(content.ljust(layout.POLLING.size, b"\0"))
        return int(since_ns), int(asked_ns)

    def lost(self) -> int:
        """Events that the process could not write."""
        return self._number_at(layout.LOST_OFFSET, layout.LOST)

    def ask_for_stacks(self, number: int) -> None:
        """Ask the rank's heartbeat thread to write every stack; one whose file is gone stays silent."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.pwrite(descriptor, layout.COMMAND.pack(number), layout.COMMAND_OFFSET)
        except OSError:
            return
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _read_ahead(self) -> bool:
        """Take in rows from the next expected one on; whether there may be more."""
        start = (self._next - 1) % layout.RING_ROWS
        slots = min(_SLOTS_AT_ONCE, layout.RING_ROWS - start)
        content = self._bytes_at(layout.HEAD_BYTES + start * layout.ROW_BYTES, slots * layout.ROW_BYTES)
        taken = 0
        for row in layout.ROW.iter_unpack(content[: len(content) // layout.ROW_BYTES * layout.ROW_BYTES]):
            if row[0] != self._next:
                if (row[0] - self._next) % layout.RING_ROWS == 0 and row[0] < self._next + _MOST_OVERTAKEN:
                    self._overtaken_by = row[0]
                return False
            if not _is_whole(row):
                return False
            self._append(row)
            taken += 1
        return taken == slots

    def _pass_over(self, written: int) -> None:
        """Take in those of the rows up to ``written`` that are there, and count the others."""
        content = self._bytes_at(layout.HEAD_BYTES, layout.RING_ROWS * layout.ROW_BYTES)
        slots = layout.ROW.iter_unpack(content[: len(content) // layout.ROW_BYTES * layout.ROW_BYTES])
        there = (
            row
            for slot, row in enumerate(slots)
            if row[0] and (row[0] - 1) % layout.RING_ROWS == slot and _is_whole(row)
        )
        rows = sorted((row for row in there if self._next <= row[0] <= written), key=lambda row: row[0])
        oldest = written - layout.RING_ROWS + 1
        self.truncated |= oldest > self._next
        self.missing += written - max(oldest, self._next) + 1 - sum(row[0] >= oldest for row in rows)
        for row in rows:
            self._append(row)
        self._next = written + 1

    def _append(self, row: tuple[int, ...]) -> None:
        self._next = row[0] + 1
        self._numbers.append(row[0])
        for column, value in zip(self.columns, row[1:-1], strict=True):
            column.append(value)
        if not row[2]:
            self._incomplete.append(len(self._numbers) - 1)

    def _completed_now(self, position: int) -> bool:
        """Look again at a row; whether it will not change any more."""
        number = self._numbers[position]
        content = self._bytes_at(
            layout.HEAD_BYTES + (number - 1) % layout.RING_ROWS * layout.ROW_BYTES, layout.ROW_BYTES
        )
        if len(content) < layout.ROW_BYTES:
            return False
        row = layout.ROW.unpack(content)
        if row[0] == number:
            self.columns[1][position] = row[2]
            return bool(row[2])
        if not row[0]:  # Of a row that was lost the completion may be there all the same.
            self.columns[1][position] = row[2]
        return bool(row[0] > number or row[2])

    def _written(self) -> int:
        """Rows that were written, as the process says; 0 while its head is gone."""
        if self._bytes_at(0, layout.IDENTITY.size) != self._identity:
            return 0
        return self._number_at(layout.COUNT_OFFSET, layout.COUNT)

    def _number_at(self, offset: int, kind: struct.Struct) -> int:
        content = self._bytes_at(offset, kind.size)
        return int(kind.unpack(content)[0]) if len(content) == kind.size else 0

    def _bytes_at(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError:
            return b""


def _is_whole(row: tuple[int, ...]) -> bool:
    """Tell whether a row was written to its end."""
    number, started_ns, _, *rest, checksum = row
    return zlib.crc32(layout.CHECKED.pack(number, started_ns, *rest)) == checksum


class RunFiles:
    """The growing files of a run directory, by process."""

    def __init__(self, directory: Path, without: Set[int] = frozenset()) -> None:
        """The files of the processes in ``without`` are left alone."""
        self._directory = directory
        self._without = without
        self._tails: dict[int, EventTail] = {}
        self.rings: dict[int, RingTail] = {}
        self.refused: dict[int, str] = {}
        """Rings that could not be read, and why."""

    def poll(self) -> list[tuple[int, dict[str, Any]]]:
        """New events with the process that wrote them, oldest first within a process; rings are brought up to date."""
        self.find_processes()
        events: list[tuple[int, dict[str, Any]]] = []
        # Rings first: an event that a row refers to was written before the row.
        for ring in self.rings.values():
            ring.read()
        for pid, tail in self._tails.items():
            events.extend((pid, event) for event in tail.read())
        return events

    def find_processes(self) -> set[int]:
        """Return the processes that have written events."""
        for pid, kind in self._processes():
            if kind == "events" and pid not in self._tails:
                holds_open = len(self._tails) < _MOST_HELD_OPEN
                self._tails[pid] = EventTail(self._directory / layout.events_name(pid), holds_open=holds_open)
            elif kind == "ring" and pid not in self.rings and pid not in self.refused:
                self._open_ring(pid)
        return set(self._tails)

    @property
    def damaged_lines(self) -> int:
        """Event lines that did not parse."""
        return sum(tail.damaged for tail in self._tails.values())

    @property
    def shortened(self) -> int:
        """How often a file of events was truncated while it was read."""
        return sum(tail.shortened for tail in self._tails.values())

    def close(self) -> None:
        """Let go of every file."""
        for ring in self.rings.values():
            ring.close()
        for tail in self._tails.values():
            tail.close()

    def _processes(self) -> list[tuple[int, str]]:
        try:
            entries = list(os.scandir(self._directory))
        except OSError:  # somebody has deleted the run directory
            return []
        found = []
        for entry in entries:
            name, _, ending = entry.name.rpartition(".")
            stem, _, pid = name.rpartition("-")
            if not pid.isdigit() or int(pid) in self._without:
                continue
            if (stem, ending) == ("events", "jsonl"):
                found.append((int(pid), "events"))
            elif (stem, ending) == ("collectives", "ring"):
                found.append((int(pid), "ring"))
        return found

    def _open_ring(self, pid: int) -> None:
        path = self._directory / layout.ring_name(pid)
        try:
            with path.open("rb") as file:
                started = file.read(len(layout.MAGIC)) == layout.MAGIC
            if started:
                self.rings[pid] = RingTail(path)
        except RecordError as error:
            self.refused[pid] = error.message
        except OSError:
            return
