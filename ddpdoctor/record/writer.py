"""Writes events and collectives from inside a training process; stdlib only, never raises into the training."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from array import array
from typing import Any

from . import layout

MOST_EVENT_BYTES = 1 << 28
"""No event is written once the file of a process is so large."""


class EventWriter:
    """Appends events of one process, each with one ``write``; goes quiet for good when the disk does not take them."""

    def __init__(self, run_directory: str, *, lazily: bool = False) -> None:
        self._run_directory = run_directory
        self._descriptor = -1
        self._broken = False
        self.lost = 0
        """Events that could not be written; told by the next one that can."""
        self._told = 0
        self.moved_bytes = 0
        """Bytes that were written to the file."""
        self._unopened = True
        if not lazily:
            self.open()

    def open(self) -> None:
        """Open the file of this process; called again in a forked child."""
        self._unopened = False
        path = os.path.join(self._run_directory, layout.events_name(os.getpid()))
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            self._broken = True

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``fields`` must be JSON values."""
        if self._unopened:
            self.open()
        if self._broken or self.moved_bytes > MOST_EVENT_BYTES:
            self.lost += 1
            return
        fields["event"] = event
        fields.setdefault("time_ns", time.time_ns())
        try:
            line = json.dumps(fields, separators=(",", ":"), default=str) + "\n"
            if self.lost > self._told:
                line = json.dumps({"event": "lost", "events": self.lost}) + "\n" + line
            content = line.encode("utf-8", "backslashreplace")
            self.moved_bytes += len(content)
            if os.write(self._descriptor, content) == len(content):
                self._told = self.lost
            else:
                self.lost += 1
        except (OSError, ValueError, TypeError):
            self.lost += 1

    def write_indices(self, number: int, indices: array[int]) -> str:
        """Write the sample indices of a pass to a file of their own; the name, or an empty string when it failed."""
        name = layout.indices_name(os.getpid(), number)
        try:
            with open(os.path.join(self._run_directory, name), "wb") as file:
                file.write(indices.tobytes())
        except OSError:
            return ""
        return name


class CollectiveRing:
    """The mapped log of collectives with the heartbeat in its head."""

    def __init__(self, run_directory: str) -> None:
        path = os.path.join(run_directory, layout.ring_name(os.getpid()))
        size = layout.HEAD_BYTES + layout.RING_ROWS * layout.ROW_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                # Reserve the blocks: a store into a hole of a full disk would kill the job with SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._count = 0
        self._lock = threading.Lock()
        layout.COUNT.pack_into(self._map, layout.COUNT_OFFSET, 0)
        layout.HEARTBEAT.pack_into(self._map, layout.HEARTBEAT_OFFSET, time.time_ns(), 0, 0, -1, 0, 0, 0, 0, 0, 0)
        layout.IDENTITY.pack_into(
            self._map, 0, layout.MAGIC, layout.VERSION, layout.ROW_BYTES, layout.RING_ROWS, os.getpid(), time.time_ns()
        )

    @property
    def count(self) -> int:
        """Rows ever written."""
        return self._count

    def append(self, group: int, sequence: int, signature: int, site: int, step: int, forward_site: int) -> int:
        """Log a collective that is about to start; its index."""
        with self._lock:
            index = self._count
            layout.ROW.pack_into(
                self._map, self._offset(index), time.time_ns(), 0, group, sequence, signature, site, step, forward_site
            )
            self._count = index + 1
            layout.COUNT.pack_into(self._map, layout.COUNT_OFFSET, self._count)
        return index

    def complete(self, index: int) -> None:
        """Note that the collective has ended."""
        if index + layout.RING_ROWS > self._count:
            layout.COUNT.pack_into(self._map, self._offset(index) + 8, time.time_ns())

    def beat(
        self,
        main_cpu_ns: int,
        stack_hash: int,
        waiting_row: int,
        unchanged_ms: int,
        forwards: int,
        backwards: int,
        optimizer_steps: int,
        answered: int,
        sleeps_until_ns: int,
    ) -> None:
        """Write the heartbeat."""
        layout.HEARTBEAT.pack_into(
            self._map,
            layout.HEARTBEAT_OFFSET,
            time.time_ns(),
            main_cpu_ns,
            stack_hash,
            waiting_row,
            min(unchanged_ms, 0xFFFFFFFF),
            forwards,
            backwards,
            optimizer_steps,
            answered,
            sleeps_until_ns,
        )

    def note_lost(self, events: int) -> None:
        """Say how many events could not be written: this memory was reserved while there was room."""
        layout.LOST.pack_into(self._map, layout.LOST_OFFSET, events)

    def note_polling(self, since_ns: int, asked_ns: int) -> None:
        """Say since when a file has been asked for in vain, and when it was last; zeros when it is over."""
        layout.POLLING.pack_into(self._map, layout.POLLING_OFFSET, since_ns, asked_ns)

    def requested(self) -> int:
        """Number of the newest request for stacks."""
        return int(layout.COMMAND.unpack_from(self._map, layout.COMMAND_OFFSET)[0])

    def _offset(self, index: int) -> int:
        return layout.HEAD_BYTES + (index % layout.RING_ROWS) * layout.ROW_BYTES
