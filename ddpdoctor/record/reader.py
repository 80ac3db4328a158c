"""Reads a run directory, also while it grows, and makes a ``RunRecord`` of it.

Every file in it is hostile input: a line or a head that does not parse is counted and passed over.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.files.untrusted import open_untrusted, quoted, read_untrusted, reason_of
from ddpdoctor.record import layout
from ddpdoctor.record.model import Job, RunKind
from ddpdoctor.record.ring_reader import RingTail

_DECODER = msgspec.json.Decoder()
_MOST_HELD_OPEN = 256
"""Files of events that are held open, those of the ranks among the first: workers come and go by the hundred."""


_PIECE_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20
"""A description of 100,000 parameters has 10 MB; as lists of nothing 16 MiB become 0.4 GB."""
_MOST_LINES = 150_000
"""Of all files at one look, which take 3 s: those of a rank grow by some thousands in a month."""
_MOST_BYTES = 1 << 29
"""Of one file at one look, twice what a process writes."""
_MOST_PROCESSES = 10_000
"""Of one look, those with a ring first: what the workers of a loader wrote is the least to be missed."""
_LONGEST_PID = 10


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
        self._is_in_long_line = False
        self._newest_ns = 0
        """Time of the newest event that was read."""
        self._known_ns = -1
        """Events that are not newer have been read before."""
        self.lines = 0
        """Lines that were read."""
        self.damaged = 0
        """Lines that did not parse."""
        self.shortened = 0
        """How often the file was shorter than what had been read of it."""
        self.refused = ""
        """Why it cannot be read, or not to its end."""

    def read(self, most_lines: int = _MOST_LINES) -> Iterator[dict[str, Any]]:
        """Yield the events that were added since the last call, of at most so many lines or a few more."""
        self.refused = ""
        try:
            if self._descriptor < 0:
                self._descriptor = open_untrusted(self._path, self._path.parent)
            if os.fstat(self._descriptor).st_size < self._offset:
                # Someone truncated it; the process appends behind what is left, which was read before.
                self.shortened += 1
                self._offset, self._rest, self._known_ns = 0, b"", self._newest_ns
            until = self._offset + _MOST_BYTES
            while content := os.pread(self._descriptor, _PIECE_BYTES, self._offset):
                if most_lines <= 0:
                    break
                if self._offset >= until:
                    self.refused = f"{self._path.name} holds more than is read at once; the rest is left out"
                    break
                self._offset += len(content)
                lines = self._lines(content)
                most_lines -= len(lines)
                self.lines += len(lines)
                yield from self._events(lines)
        except OSError as error:
            if not os.path.lexists(self._path):
                return  # Someone has deleted the run directory.
            self.refused = f"{self._path.name} cannot be read: {reason_of(error)}"
        finally:
            if not self._holds_open:
                self.close()

    def _lines(self, content: bytes) -> list[bytes]:
        """Return the lines that end in the newest piece of the file; one without end is damaged, and not kept."""
        if self._is_in_long_line:
            _, found, content = content.partition(b"\n")
            self._is_in_long_line = not found
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest, self._is_in_long_line = b"", True
            self.damaged += 1
        return lines

    def _events(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
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
                yield event
            else:
                self.damaged += 1

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _decoded(line: bytes) -> Any:
    """Decode what a rank wrote. Raises ValueError, and RecursionError for what is nested without end.

    File names that are no UTF-8 hold halves of characters, which only the library that wrote them takes back.
    """
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        if not line:
            raise
        return json.loads(line)


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
        self._crowd = ""

    def poll(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Bring the rings up to date; new events with the process that wrote them, oldest first within a process."""
        self._crowd = ""
        self.find_processes()
        # Rings first: an event that a row refers to was written before the row.
        for ring in self.rings.values():
            ring.read()
        return self._new_events()

    def _new_events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        left = _MOST_LINES
        for pid, tail in self._tails.items():
            before = tail.lines
            yield from ((pid, event) for event in tail.read(left))
            left -= tail.lines - before
        if left <= 0:
            self._crowd = f"it has more than {_MOST_LINES:,} lines, and the rest is left out"

    def find_processes(self) -> set[int]:
        """Return the processes that have written events."""
        for pid, kind in self._processes():
            if kind == "events" and pid not in self._tails:
                holds_open = len(self._tails) < _MOST_HELD_OPEN
                self._tails[pid] = EventTail(self._directory / layout.EVENTS_FILE.format(pid), holds_open=holds_open)
            elif kind == "ring" and pid not in self.rings and pid not in self.refused:
                self._open_ring(pid)
        return set(self._tails)

    @property
    def damaged_lines(self) -> int:
        """Event lines that did not parse."""
        return sum(tail.damaged for tail in self._tails.values())

    @property
    def unread(self) -> list[str]:
        """Why events cannot be read, or not all, as clauses."""
        return [*filter(None, (self._crowd, *(tail.refused for tail in self._tails.values())))]

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
        except OSError:  # someone has deleted the run directory
            return []
        found, with_ring = [], set()
        for entry in entries:
            name, _, ending = entry.name.rpartition(".")
            stem, _, pid = name.rpartition("-")
            if not pid.isdecimal() or len(pid) > _LONGEST_PID or int(pid) in self._without:
                continue
            if (stem, ending) == ("events", "jsonl"):
                found.append((int(pid), "events"))
            elif (stem, ending) == ("collectives", "ring"):
                found.append((int(pid), "ring"))
            if ending == "ring":
                with_ring.add(int(pid))
        if len(found) > _MOST_PROCESSES:
            self._crowd = f"it is of more than {_MOST_PROCESSES:,} processes, and the rest is left out"
            found.sort(key=lambda one: one[0] not in with_ring)
        return found[:_MOST_PROCESSES]

    def _open_ring(self, pid: int) -> None:
        path = self._directory / layout.COLLECTIVES_FILE.format(pid)
        try:
            self.rings[pid] = ring = RingTail(path, layout.COLLECTIVES)
            ring.most_rows = sys.maxsize
        except RecordError as error:
            self.refused[pid] = error.message
        except OSError as error:
            # Others may be let go of.
            if error.errno != errno.EMFILE and os.path.lexists(path):
                self.refused[pid] = f"{path.name} cannot be read: {reason_of(error)}"
        except ValueError:
            return


# Reads ``job.json``, the first file of a run directory: what is run, and by whom.

_LARGEST_BYTES = 8 << 20
"""Of a plan: a command line and the environment of a job have at most 2 MiB."""
_RECORDED = "`ddpdoctor runs` lists the kept runs by their names."
_ANEW = "Copy the run directory anew, or record the run again with `ddpdoctor profile`."


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was known of a run before it started."""

    version: int = layout.VERSION
    kind: RunKind = "run"
    supervisor_pid: int | None = None
    """Process that started the job and watches it; None when the job was started without the doctor."""
    launcher_pid: int | None = None
    """Process that the supervisor started."""
    project_root: str = ""
    name: str = ""
    """What people call the run: the file name of its script."""
    job: Job = Job(kind="run")
    clock: Mapping[str, Any] | None = None
    """What ``record.clock`` keeps for the processes of the run; None in plans of other versions."""


class _Version(msgspec.Struct, frozen=True):
    version: int = layout.VERSION


def read_plan(directory: Path) -> RunPlan:
    """Read the plan of a run.

    Raises RecordError, with a sentence that says what is wrong, when ``directory`` is no run directory, belongs to
    someone else, is damaged, or was written by a newer version.
    """
    path = directory / layout.JOB_FILE
    try:
        content = read_untrusted(path, _LARGEST_BYTES, directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not directory.is_dir():
            raise RecordError(f"there is no run directory {directory}", _RECORDED) from error
        raise RecordError(f"{directory} is not a run directory: it has no {layout.JOB_FILE}", _RECORDED) from error
    except PermissionError as error:
        raise _of_another_user(directory) from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {reason_of(error)}", _ANEW) from error
    if any(file.is_file() and not os.access(file, os.R_OK) for file in directory.glob("*-[0-9]*.*")):
        raise _of_another_user(directory)
    try:
        version = msgspec.json.decode(content, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {quoted(error)}", _ANEW) from error
    if version > layout.VERSION:
        raise RecordError(
            f"{directory} was recorded by a newer ddpdoctor (format {version}; this one reads up to {layout.VERSION})",
            "Read it with the version that recorded it.",
        )
    try:
        return msgspec.json.decode(content, type=RunPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {quoted(error)}", _ANEW) from error


def _of_another_user(directory: Path) -> RecordError:
    return RecordError(
        f"{directory} belongs to {owner_of(directory)} and cannot be read",
        "Run ddpdoctor as that user, or ask for a copy of the directory.",
    )


def owner_of(directory: Path) -> str:
    """Name the user whom a directory belongs to."""
    try:
        import pwd

        user_id = os.stat(directory).st_uid
        return pwd.getpwuid(user_id).pw_name
    except (OSError, KeyError, ImportError):
        return "another user"
