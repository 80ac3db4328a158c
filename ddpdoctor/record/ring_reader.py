"""Reads a ring while it grows; see ``layout``."""

from __future__ import annotations

import os
import struct
import time
import zlib
from array import array
from bisect import bisect_left
from pathlib import Path

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.files.untrusted import open_untrusted
from ddpdoctor.record import layout

_SLOTS_AT_ONCE = 256
_LATEST_NS = 1 << 62
"""No moment since the epoch is later, in ns: that is in the year 2116."""
_LARGEST = 1 << 52
"""No length in ns, size or number of ours is larger: a row that has one was not written by a probe, and sums of it
would leave the 64 bits of a column."""
_TIMES = ("_at_ns", "started_ns", "completed_ns")
_TORN_S = 0.001
"""A row that is being written again may be torn for a moment."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest heartbeat of every kind of run has; without any field, of a process that never beat."""

    beat_at_ns: int = 0
    main_cpu_ns: int = 0
    stack_hash: int = 0
    waiting_row: int = -1
    """Number of the row that the main thread waits in; -1 when it does not wait, and in a live run."""
    unchanged_ms: int = 0
    """How long the main thread's stack has not changed."""
    forwards: int = 0
    backwards: int = 0
    optimizer_steps: int = 0
    answered: int = 0
    """Number of the newest request for stacks that was served."""
    sleeps_until_ns: int = 0
    """End of the ``time.sleep`` that the main thread is in; 0 when it is in none."""
    lost_events: int = 0
    """Events that the process could not write."""
    polling_since_ns: int = 0
    """Since when the main thread has only asked for a file, for nothing; 0 where it has not."""
    polled_at_ns: int = 0
    """When it asked last."""
    own_bytes: int = 0
    """What the probe itself has read and written by calls of the system, which is not the rank's work."""


class LiveHeartbeat(Heartbeat, frozen=True, kw_only=True):
    """The newest heartbeat of a live run in the process's own numbers; see ``layout.HEARTBEAT_FIELDS``."""

    phase: int
    phase_since_ns: int
    step: int
    kind: int
    sequence: int
    enqueued: int
    completed: int
    site: int
    lost_rows: int
    blocked: int


class RingTail:
    """The rows of one ring of one process.

    Raises ``RecordError`` for a file that another version wrote, ``OSError`` where it cannot be opened, and
    ``ValueError`` for one that has no identity (yet).
    """

    def __init__(self, path: Path, kind: layout.RingKind) -> None:
        self._path = path
        self._kind = kind
        self._row = layout.numbers(1 + len(kind.fields))
        self._row_bytes = self._row.size + layout.CHECKSUM_BYTES
        self._heartbeat_numbers = layout.numbers(len(kind.heartbeat_fields))
        self._descriptor = open_untrusted(path, path.parent)
        try:
            self.pid, self._created_ns = self._check()
        except (RecordError, ValueError):
            os.close(self._descriptor)
            raise
        self._most = [_LATEST_NS, *(_LATEST_NS if name.endswith(_TIMES) else _LARGEST for name in kind.fields)]
        self._finishing = kind.fields.index(kind.finished_by) if kind.finished_by else -1
        self.most_rows = kind.rows
        """So many of the newest rows are kept."""
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all rows, and read the file from its beginning."""
        self.columns: dict[str, array[int]] = {name: array("q") for name in self._kind.fields}
        self.numbers = array("q")
        """Number of each row that was read, ascending."""
        self.dropped = 0
        """Rows that were overwritten before they were read, or are missing."""
        self.missing = 0
        """Rows that were written and are not there: someone truncated the file, or wrote into it."""
        self._stuck_at = -1
        """Row that was not there at the last look although later ones had been written."""
        self._next = 0
        self._heartbeat = Heartbeat()
        self._unfinished: list[int] = []
        """Positions of rows that will be written again."""

    def read(self) -> None:
        """Take in new rows, and what happened to unfinished ones; all rows where the process has made the file anew."""
        created_ns = self._whole_since_ns()
        if created_ns not in (0, self._created_ns):
            self._created_ns = created_ns
            self.start_anew()
        self._unfinished = [position for position in self._unfinished if not self._finished_now(position)]
        written = self._written()
        self._read_on()
        if self._next < written:
            if self._kind.in_order:
                time.sleep(_TORN_S)
                self._read_on()
            # In other rings a row may be late: it waits in memory while the beginning of the next is written.
            if self._kind.in_order or self._stuck_at == self._next:
                self._catch_up()
                # The rows before ``written`` that are not there are passed over.
                gone = max(0, written - self._next)
                self.dropped += gone
                self.missing += gone
                self._next += gone
            self._stuck_at = self._next
        over = len(self.numbers) - self.most_rows
        if over > self.most_rows // 4:  # So a run of a month needs no more memory.
            self._forget(over)

    def position(self, number: int) -> int:
        """Return where in the columns the row of a number is; -1 where it was not read."""
        at = bisect_left(self.numbers, number)
        return at if at < len(self.numbers) and self.numbers[at] == number else -1

    def live_heartbeat(self) -> LiveHeartbeat | None:
        """Return the newest heartbeat of a live run; None while there is none, or when the file is damaged."""
        values = self._newest()
        return None if values is None else LiveHeartbeat(**values)

    def heartbeat(self) -> Heartbeat:
        """Return of the newest heartbeat what every kind of run has; the last that was read of a damaged file."""
        values = self._newest()
        if values is not None:
            known = {name: values[name] for name in Heartbeat.__struct_fields__ if name in values}
            self._heartbeat = Heartbeat(**known)
        return self._heartbeat

    def ask_for_stacks(self, number: int) -> None:
        """Ask the rank for its stacks and its newest collectives; ``OSError`` where the run belongs to another user."""
        # The file that is read, whatever has its name by now.
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, layout.COMMAND.pack(number), layout.COMMAND_OFFSET)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _check(self) -> tuple[int, int]:
        """Return the process that writes it, and when it was made."""
        head = self._bytes_at(0, layout.IDENTITY.size)
        if not any(head):
            raise ValueError(f"{self._path.name} is still empty")
        if len(head) < layout.IDENTITY.size or not head.startswith(self._kind.magic):
            raise RecordError(f"{self._path.name} is damaged", "its rows cannot be read")
        _, version, row_bytes, rows, pid, created_ns = layout.IDENTITY.unpack(head)
        if version > layout.VERSION or row_bytes != self._row_bytes or rows != self._kind.rows:
            raise RecordError(f"{self._path.name} was not written by this version", "use the version that wrote it")
        return int(pid), int(created_ns)

    def _read_on(self) -> None:
        while self._read_ahead() == _SLOTS_AT_ONCE:
            pass

    def _read_ahead(self) -> int:
        """Read the slots from the next expected row on; how many new rows there were."""
        start = self._next % self._kind.rows
        slots = min(_SLOTS_AT_ONCE, self._kind.rows - start)
        content = self._bytes_at(layout.HEAD_BYTES + start * self._row_bytes, slots * self._row_bytes)
        taken = 0
        for slot, offset in enumerate(range(0, len(content), self._row_bytes), start):
            row = self._parsed(content[offset : offset + self._row_bytes])
            # A row in a slot that is not its own was put there by no one.
            if row is None or row[0] % self._kind.rows != slot or row[0] < self._next:
                return taken
            if row[0] > self._next:
                return self._catch_up()
            self._append(row)
            taken += 1
        return _SLOTS_AT_ONCE if taken == slots else taken

    def _written(self) -> int:
        """Number of the first row that was not written yet, as the process says; 0 where the head is damaged."""
        content = self._bytes_at(layout.NEXT_OFFSET, layout.NEXT.size)
        return int(layout.NEXT.unpack(content)[0]) if len(content) == layout.NEXT.size and self._whole_since_ns() else 0

    def _whole_since_ns(self) -> int:
        """When the file was made; 0 where its head is damaged."""
        head = self._bytes_at(0, layout.IDENTITY.size)
        if len(head) < layout.IDENTITY.size:
            return 0
        _, *known, created_ns = layout.IDENTITY.unpack(head)
        expected = [layout.VERSION, self._row_bytes, self._kind.rows, self.pid]
        return int(created_ns) if known == expected else 0

    def _catch_up(self) -> int:
        """Take in the newest rows of the whole ring: some were overwritten before they were read."""
        content = self._bytes_at(layout.HEAD_BYTES, self._kind.rows * self._row_bytes)
        whole = content[: len(content) // self._row_bytes * self._row_bytes]
        slots = struct.iter_unpack(f"<q{self._row_bytes - 8}x", whole)
        newer = [(number, slot) for slot, (number,) in enumerate(slots) if number >= self._next]
        rows: list[tuple[int, ...]] = []
        for number, slot in sorted(newer, reverse=True):
            row = self._parsed(content[slot * self._row_bytes : (slot + 1) * self._row_bytes])
            # A row in a slot that is not its own was put there by no one.
            if row is not None and number % self._kind.rows == slot:
                rows.append(row)
            if len(rows) == self.most_rows:
                break
        oldest = rows[-1][0] if len(rows) == self.most_rows else (rows[0][0] if rows else 0) - self._kind.rows + 1
        for row in reversed(rows):
            self.dropped += row[0] - self._next
            self.missing += max(0, row[0] - max(self._next, oldest))
            self._append(row)
        return len(rows)

    def _append(self, row: tuple[int, ...]) -> None:
        self._next = row[0] + 1
        self.numbers.append(row[0])
        for column, value in zip(self.columns.values(), row[1:], strict=True):
            column.append(value)
        if self._finishing >= 0 and row[1 + self._finishing] == 0:
            self._unfinished.append(len(self.numbers) - 1)

    def _finished_now(self, position: int) -> bool:
        """Read a row again; whether it will not change any more."""
        number = self.numbers[position]
        slot = number % self._kind.rows
        row = self._parsed(self._bytes_at(layout.HEAD_BYTES + slot * self._row_bytes, self._row_bytes))
        if row is None:
            return False
        if row[0] != number:
            return row[0] > number
        for column, value in zip(self.columns.values(), row[1:], strict=True):
            column[position] = value
        return row[1 + self._finishing] != 0

    def forget_before(self, field: str, time_ns: int) -> None:
        """Forget the rows in front whose ``field``, which ascends, is smaller, once they are many."""
        before = bisect_left(self.columns[field], time_ns)
        if before > len(self.numbers) // 4:
            self._forget(before)

    def _forget(self, over: int) -> None:
        for column in (self.numbers, *self.columns.values()):
            del column[:over]
        self.dropped += over
        self._unfinished = [position - over for position in self._unfinished if position >= over]

    def _newest(self) -> dict[str, int] | None:
        """Return the newest heartbeat; None while there is none, or when the file is damaged."""
        content = self._bytes_at(layout.HEARTBEAT_OFFSET, self._heartbeat_numbers.size + layout.CHECKSUM_BYTES)
        packed = content[: self._heartbeat_numbers.size]
        if not _fits(packed, content[self._heartbeat_numbers.size :]):
            return None
        values = dict(zip(self._kind.heartbeat_fields, self._heartbeat_numbers.unpack(packed), strict=True))
        if any(abs(value) >= _LATEST_NS for name, value in values.items() if name != "stack_hash"):
            return None
        return values

    def _parsed(self, content: bytes) -> tuple[int, ...] | None:
        """Return the number and the fields of a row; None when the slot holds none."""
        packed = content[: self._row.size]
        if len(content) < self._row_bytes or not _fits(packed, content[self._row.size :]):
            return None
        row: tuple[int, ...] = self._row.unpack(packed)
        is_ours = row[0] >= 0 and all(-most < value < most for value, most in zip(row, self._most, strict=True))
        return row if is_ours else None

    def _bytes_at(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError:
            return b""


def _fits(packed: bytes, checksum: bytes) -> bool:
    return any(packed) and zlib.crc32(packed).to_bytes(layout.CHECKSUM_BYTES, "little") == checksum
