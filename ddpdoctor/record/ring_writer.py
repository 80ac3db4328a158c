"""Writes the rings of a live run from inside a training process; stdlib only, never raises into the training.

The training's own threads put rows into memory and the heartbeat's thread takes them to the file. Only the beginning
of a row that the process may not survive is written at once.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque

from . import layout
from .clock import epoch_ns
from .descriptors import private_descriptor

_CHECKSUM_BYTES = 4


class NumberedRing:
    """One file of numbered rows; see ``layout``."""

    def __init__(self, path: str, magic: bytes, fields: int) -> None:
        self._row = layout.numbered_row(fields)
        self._row_bytes = self._row.size + _CHECKSUM_BYTES
        self._waiting: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=layout.NUMBERED_ROWS)
        self.next = 0
        """Number of the next row."""
        self._head = layout.IDENTITY.pack(
            magic, layout.VERSION, self._row_bytes, layout.NUMBERED_ROWS, os.getpid(), epoch_ns()
        )
        self.moved_bytes = 0
        """Bytes that were read from and written to the file."""
        self.begun_bytes = 0
        """The same for what ``begin`` wrote, counted apart because another thread does it."""
        self.lost = 0
        """Rows that could not be written."""
        self._written = 0
        """Number of the first row that was not written yet."""
        self._descriptor = private_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        size = layout.HEAD_BYTES + layout.NUMBERED_ROWS * self._row_bytes
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # The rows have room when the disk is full later.
        except (OSError, AttributeError):
            pass
        self.write_head()

    def put(self, fields: tuple[int, ...]) -> None:
        """Have the next row written; touches no file."""
        if len(self._waiting) == layout.NUMBERED_ROWS:
            self.lost += 1
        self._waiting.append((self.next, fields))
        self.next += 1

    def flush(self, unfinished: tuple[int, tuple[int, ...]] | None = None) -> None:
        """Write what waits, after a row that is not finished and may be among what waits; for one thread at a time."""
        if unfinished is not None:
            self.moved_bytes += self._put_down(unfinished[0], self._packed(*unfinished))
        first = 0
        rows: list[bytes] = []
        while self._waiting:
            number, fields = self._waiting.popleft()
            # Rows that lie side by side are written at once: each write may cost the training thread a turn.
            if rows and (number != first + len(rows) or number % layout.NUMBERED_ROWS == 0):
                self.moved_bytes += self._put_down(first, b"".join(rows), len(rows))
                rows = []
            if not rows:
                first = number
            rows.append(self._packed(number, fields))
        if rows:
            self.moved_bytes += self._put_down(first, b"".join(rows), len(rows))

    def begin(self, fields: tuple[int, ...]) -> None:
        """Write the next row at once, unfinished: what it stands for may end the process."""
        self.begun_bytes += self._put_down(self.next, self._packed(self.next, fields))

    def _packed(self, number: int, fields: tuple[int, ...]) -> bytes:
        """A row as it lies in the file; one of zeros, which no reader takes for a row, where a number is too large."""
        try:
            row = self._row.pack(number, *fields)
        except struct.error:
            self.lost += 1
            return bytes(self._row_bytes)
        return row + zlib.crc32(row).to_bytes(_CHECKSUM_BYTES, "little")

    def _put_down(self, first: int, content: bytes, rows: int = 1) -> int:
        """Write rows that lie side by side; how many bytes that were."""
        if self._written < first + rows:
            self._written = first + rows
        offset = layout.HEAD_BYTES + first % layout.NUMBERED_ROWS * self._row_bytes
        try:
            written = os.pwrite(self._descriptor, content, offset)
        except (OSError, ValueError):
            written = 0
        if written != len(content):
            self.lost += rows - written // self._row_bytes
        return written

    @property
    def pulse_bytes(self) -> int:
        """How many bytes the writing of a pulse moves."""
        return layout.PULSE_OFFSET + layout.PULSE.size + _CHECKSUM_BYTES

    def write_head(self, pulse: tuple[int, ...] | None = None) -> None:
        """Write the identity, and the newest pulse where there is one."""
        head = self._head.ljust(layout.NEXT_OFFSET, b"\0") + layout.NEXT.pack(self._written)
        head = head.ljust(layout.PULSE_OFFSET, b"\0")
        try:
            if pulse is not None:
                packed = layout.PULSE.pack(*pulse)
                head += packed + zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES, "little")
            self.moved_bytes += os.pwrite(self._descriptor, head, 0)
        except (OSError, struct.error):
            self.lost += 1

    def requested(self) -> int:
        """Number of the newest request of a reader; 0 when there is none."""
        try:
            content = os.pread(self._descriptor, layout.COMMAND.size, layout.NUMBERED_COMMAND_OFFSET)
        except OSError:
            return 0
        self.moved_bytes += len(content)
        return int(layout.COMMAND.unpack(content)[0]) if len(content) == layout.COMMAND.size else 0

    def close(self) -> None:
        """Let go of the file without writing: in a forked child it is the parent's."""
        self._waiting.clear()
        try:
            os.close(self._descriptor)
        except OSError:
            pass
