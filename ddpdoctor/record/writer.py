"""Writes events and collectives from inside a training process; stdlib only, never raises into the training."""

from __future__ import annotations

import json
import os
import threading
import zlib
from array import array
from typing import Any

from . import layout
from .clock import epoch_ns
from .descriptors import private_descriptor

MOST_EVENT_BYTES = 1 << 28
"""No event is written once the file of a process is so large …"""
TELL_THE_END = frozenset({"exit", "os_exit", "raised", "ended"})
"""… but for the few that tell how it ended."""


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
            self._descriptor = private_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:
            self._broken = True

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``fields`` must be JSON values."""
        if self._unopened:
            self.open()
        if self._broken or (self.moved_bytes > MOST_EVENT_BYTES and event not in TELL_THE_END):
            self.lost += 1
            return
        fields["event"] = event
        fields.setdefault("time_ns", epoch_ns())
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
        except Exception:  # what a __str__ of the user's raises, too
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
    """The log of collectives with the heartbeat in its head; ``OSError`` where it cannot be made."""

    def __init__(self, run_directory: str) -> None:
        path = os.path.join(run_directory, layout.ring_name(os.getpid()))
        self._descriptor = private_descriptor(path, os.O_RDWR | os.O_CREAT)
        size = layout.HEAD_BYTES + layout.RING_ROWS * layout.ROW_BYTES
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # The rows have room when the disk is full later.
        except AttributeError:
            pass
        self._identity = layout.IDENTITY.pack(
            layout.MAGIC, layout.VERSION, layout.ROW_BYTES, layout.RING_ROWS, os.getpid(), epoch_ns()
        ).ljust(layout.COUNT_OFFSET, b"\0")
        self._count = 0
        self._lock = threading.Lock()
        self._bytes = self._beat_bytes = 0
        """Moved by the collectives, and by the heartbeat: two threads."""
        self._lost = 0
        self._polling = (0, 0)
        self.beat(0, 0, -1, 0, 0, 0, 0, 0, 0)

    @property
    def count(self) -> int:
        """Rows ever written."""
        return self._count

    def append(self, group: int, sequence: int, signature: int, site: int, step: int, forward_site: int) -> int:
        """Log a collective that is about to start, which may end the process; its index."""
        with self._lock:
            index, now_ns = self._count, epoch_ns()
            rest = group, sequence, signature, site, step, forward_site
            checksum = zlib.crc32(layout.CHECKED.pack(index + 1, now_ns, *rest))
            self._bytes += self._put(layout.ROW.pack(index + 1, now_ns, 0, *rest, checksum), self._offset(index))
            self._count = index + 1  # Not before: the head says how many are there.
        return index

    def complete(self, index: int) -> None:
        """Note that the collective has ended."""
        with self._lock:
            if index + layout.RING_ROWS > self._count:
                content = layout.COMPLETED.pack(epoch_ns())
                self._bytes += self._put(content, self._offset(index) + layout.COMPLETED_OFFSET)

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
        """Write the heartbeat, and the rest of the head anew but for the reader's request."""
        # Between the two lies what the reader writes.
        self._beat_bytes += self._put(self._identity + layout.COUNT.pack(self._count), 0)
        head = bytearray(layout.HEARTBEAT_OFFSET + layout.HEARTBEAT.size)
        layout.LOST.pack_into(head, layout.LOST_OFFSET, self._lost)
        layout.POLLING.pack_into(head, layout.POLLING_OFFSET, *self._polling)
        written = len(head) - layout.LOST_OFFSET
        layout.HEARTBEAT.pack_into(
            head,
            layout.HEARTBEAT_OFFSET,
            epoch_ns(),
            main_cpu_ns,
            stack_hash,
            waiting_row,
            min(unchanged_ms, 0xFFFFFFFF),
            forwards,
            backwards,
            optimizer_steps,
            answered,
            sleeps_until_ns,
            self._bytes + self._beat_bytes + written,
        )
        self._beat_bytes += self._put(bytes(head[layout.LOST_OFFSET :]), layout.LOST_OFFSET)

    def note_lost(self, events: int) -> None:
        """Say how many events could not be written: this place was reserved while there was room."""
        self._lost = events
        with self._lock:
            self._bytes += self._put(layout.LOST.pack(events), layout.LOST_OFFSET)

    def note_polling(self, since_ns: int, asked_ns: int) -> None:
        """Say since when a file has been asked for in vain, and when it was last; zeros when it is over."""
        if (since_ns, asked_ns) == self._polling:
            return
        self._polling = since_ns, asked_ns
        with self._lock:
            self._bytes += self._put(layout.POLLING.pack(since_ns, asked_ns), layout.POLLING_OFFSET)

    def requested(self) -> int:
        """Number of the newest request for stacks; 0 when there is none."""
        try:
            content = os.pread(self._descriptor, layout.COMMAND.size, layout.COMMAND_OFFSET)
        except OSError:
            return 0
        self._beat_bytes += len(content)
        return int(layout.COMMAND.unpack(content)[0]) if len(content) == layout.COMMAND.size else 0

    def _put(self, content: bytes, offset: int) -> int:
        """Write; how many bytes that were. What could not be written is missed by the reader."""
        try:
            return os.pwrite(self._descriptor, content, offset)
        except OSError:
            return 0

    def _offset(self, index: int) -> int:
        return layout.HEAD_BYTES + (index % layout.RING_ROWS) * layout.ROW_BYTES
