"""Reads a run directory, also while it grows, and makes a ``RunRecord`` of it.

Every file in it is hostile input: a line or a head that does not parse is counted and passed over.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.record import layout

_DECODER = msgspec.json.Decoder()


class EventTail:
    """The events of one process, read as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.damaged = 0
        """Lines that did not parse."""

    def read(self) -> list[dict[str, Any]]:
        """Events that were added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        events = []
        for line in lines:
            try:
                event = _DECODER.decode(line)
            except msgspec.DecodeError:
                self.damaged += 1
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
            else:
                self.damaged += 1
        return events


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


class Beating(Protocol):
    """The ring of one process, of a rehearsal or of a live run: it has a heartbeat, and its process can be asked."""

    def heartbeat(self) -> Heartbeat:
        """The newest heartbeat."""
        ...

    def ask_for_stacks(self, number: int) -> None:
        """Ask the process for its stacks."""
        ...


class RingTail:
    """The collectives of one process, read as they come."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size < layout.HEAD_BYTES + layout.RING_ROWS * layout.ROW_BYTES:
                raise RecordError(f"{path.name} is shorter than its format", "the record is damaged")
            self._map = mmap.mmap(file.fileno(), size)
        magic, version, row_bytes, rows, self.pid, _ = layout.IDENTITY.unpack_from(self._map, 0)
        if (
            magic != layout.MAGIC
            or version > layout.VERSION
            or row_bytes != layout.ROW_BYTES
            or rows != layout.RING_ROWS
        ):
            self._map.close()
            raise RecordError(f"{path.name} was not written by this version", "use the version that wrote it")
        self.columns = tuple(array("q") for _ in range(8))
        """started_ns, completed_ns, group, sequence, signature, site, step, forward_site: the ring's own numbers."""
        self.truncated = False
        """Rows were overwritten before they were read."""
        self._incomplete: list[int] = []

    def read(self) -> None:
        """Take in new rows, and completions of old ones."""
        count = int(layout.COUNT.unpack_from(self._map, layout.COUNT_OFFSET)[0])
        known = len(self.columns[0])
        still = []
        for index in self._incomplete:
            completed = int(layout.COUNT.unpack_from(self._map, self._offset(index) + 8)[0])
            if completed:
                self.columns[1][index] = completed
            elif index + layout.RING_ROWS > count:
                still.append(index)
        for index in range(known, count):
            if index + layout.RING_ROWS <= count:
                self.truncated = True
            row = layout.ROW.unpack_from(self._map, self._offset(index))
            for column, value in zip(self.columns, row, strict=True):
                column.append(value)
            if not row[1]:
                still.append(index)
        self._incomplete = still

    def heartbeat(self) -> Heartbeat:
        """The newest heartbeat."""
        values = layout.HEARTBEAT.unpack_from(self._map, layout.HEARTBEAT_OFFSET)
        return Heartbeat(**dict(zip(Heartbeat.__struct_fields__, values, strict=False)))

    def polling(self) -> tuple[int, int]:
        """Since when the main thread has only asked for a file, in vain (0: it has not); when it did last."""
        since_ns, asked_ns = layout.POLLING.unpack_from(self._map, layout.POLLING_OFFSET)
        return int(since_ns), int(asked_ns)

    def lost(self) -> int:
        """Events that the process could not write."""
        return int(layout.LOST.unpack_from(self._map, layout.LOST_OFFSET)[0])

    def ask_for_stacks(self, number: int) -> None:
        """Ask the rank's heartbeat thread to write every stack."""
        layout.COMMAND.pack_into(self._map, layout.COMMAND_OFFSET, number)

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()

    def _offset(self, index: int) -> int:
        return layout.HEAD_BYTES + (index % layout.RING_ROWS) * layout.ROW_BYTES


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
        """The processes that have written events."""
        for pid, kind in self._processes():
            if kind == "events" and pid not in self._tails:
                self._tails[pid] = EventTail(self._directory / layout.events_name(pid))
            elif kind == "ring" and pid not in self.rings and pid not in self.refused:
                self._open_ring(pid)
        return set(self._tails)

    @property
    def damaged_lines(self) -> int:
        """Event lines that did not parse."""
        return sum(tail.damaged for tail in self._tails.values())

    def close(self) -> None:
        """Let go of every file."""
        for ring in self.rings.values():
            ring.close()

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
