"""Makes tracks and heartbeats of the rings of a live run."""

from __future__ import annotations

import errno
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, get_args

from ddpdoctor.errors import RecordError
from ddpdoctor.files.untrusted import reason_of
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.ranks import LastSign
from ddpdoctor.record.events import Flight
from ddpdoctor.record.model import shared_fields
from ddpdoctor.record.ring_reader import LiveHeartbeat, RingTail
from ddpdoctor.record.streams.collectives import CollectiveTrack
from ddpdoctor.record.streams.measured import CallTrack, Phase, RankHeartbeat, StepTrack

# Makes collective tracks of what the ranks of a live run wrote of torch's flight recorder.

MOST_KEPT = 2_000
"""As many as torch's own recorder holds."""
MOST_HELD = 20 * MOST_KEPT
"""More are not held of a process, though what is compared with others must not be forgotten meanwhile: 17 MB."""
COLUMNS = ("record", "group", "sequence", "signature", "site", "started_ns", "over")


class FlightTracks:
    """The entries of each process, in the process's own numbers.

    Where a recorder overflowed between two dumps its earlier entries are dropped: the rest must be without a gap.
    """

    def __init__(self) -> None:
        self._entries: dict[int, dict[tuple[int, int], dict[str, int]]] = {}
        """By process, then by recorder and number in it."""
        self.newest_ns: dict[int, int] = {}
        """When each process wrote its newest dump."""
        self._columns: dict[int, dict[str, array[int]]] = {}
        """Of each process, until it writes more."""

    def take(self, pid: int, event: Flight) -> None:
        """Take in one dump."""
        recorder, time_ns = event.recorder, event.time_ns
        entries = self._entries.setdefault(pid, {})
        self._columns.pop(pid, None)
        self.newest_ns[pid] = max(time_ns, self.newest_ns.get(pid, 0))
        if not event.continues:
            for key in [key for key in entries if key[0] == recorder]:
                del entries[key]
        for number in event.completed:
            if (recorder, number) in entries:
                entries[recorder, number]["completed_ns"] = time_ns
        for row in event.rows:
            entry = dict(zip(COLUMNS, row, strict=True))
            entry["completed_ns"] = time_ns if entry.pop("over") else 0
            entries[recorder, entry["record"]] = entry
        if len(entries) > MOST_HELD:
            self._forget(pid)

    def processes(self) -> set[int]:
        """Processes of which something is known."""
        return {pid for pid, entries in self._entries.items() if entries}

    def columns(self, pid: int) -> dict[str, array[int]]:
        """Return the columns of a track, in order of start, in the process's own numbers; not to be changed."""
        if pid not in self._columns:
            self._columns[pid] = self._made(pid)
        return dict(self._columns[pid])

    def keep_newest(self) -> None:
        """Forget all but the newest ``MOST_KEPT`` entries of each process."""
        for pid, entries in self._entries.items():
            if len(entries) > MOST_KEPT:
                self._forget(pid)

    def forget(self, pid: int) -> None:
        """Forget all entries of a process."""
        for table in (self._entries, self._columns, self.newest_ns):
            table.pop(pid, None)

    def _forget(self, pid: int) -> None:
        entries = self._entries[pid]
        self._entries[pid] = {key: entries[key] for _, key in self._in_order(pid)[-MOST_KEPT:]}
        self._columns.pop(pid, None)

    def _in_order(self, pid: int) -> list[tuple[int, tuple[int, int]]]:
        """When each entry began, and its key: by time, and in each recorder by number.

        A stamp may come late: seen 0.2 s behind the stamps of later entries (torch 2.13, PowerSGD's hook, which calls
        from two threads, on a loaded machine). Collectives in another order would be paired with the wrong ones.
        """
        entries, ordered, next_ns = self._entries[pid], list[tuple[int, tuple[int, int]]](), dict[int, int]()
        for key in sorted(entries, reverse=True):
            started_ns = entries[key]["started_ns"]
            next_ns[key[0]] = min(started_ns, next_ns.get(key[0], started_ns))
            ordered.append((next_ns[key[0]], key))
        return sorted(ordered)

    def _made(self, pid: int) -> dict[str, array[int]]:
        ordered = self._in_order(pid)
        entries = [self._entries[pid][key] for _, key in ordered]
        columns = {
            name: array("q", [entry[name] for entry in entries])
            for name in ("group", "sequence", "signature", "site", "completed_ns")
        }
        return columns | {
            "started_ns": array("q", [started_ns for started_ns, _ in ordered]),
            "step": array("q", [0] * len(entries)),
            "forward_site": array("q", [-1] * len(entries)),
        }

    def oldest_open(self, pid: int) -> int:
        """Position of the first entry that is not over; -1 when there is none."""
        if pid not in self._entries:
            return -1
        completed = self.columns(pid)["completed_ns"]
        return completed.index(0) if 0 in completed else -1


Held = TypeVar("Held")
NumberOf = Callable[[int, str, int], int]
"""The record's number for a process's own: process, kind, number there."""
RankOf = Callable[[int], "int | None"]
_PHASES = get_args(Phase)
_FINISHED = _PHASES.index("finished")
CALLS_A_STEP = 4
"""Explicit collectives that are kept of each step, where not all steps of the rings are."""
SAME_WAIT_NS = 500_000_000
"""The beat that first sees a stack comes so much later than the wait begins, and than an answer is written."""
WAITING_AFTER_MS = 500
"""A training thread waits in a collective that is under way once its stack has stood for so long."""


class LiveRings:
    """The rings of a run directory, by process."""

    def __init__(self, directory: Path, rank_of: RankOf, number_of: NumberOf) -> None:
        self._directory = directory
        self._rank_of = rank_of
        self._number_of = number_of
        self.steps: dict[int, RingTail] = {}
        self.calls: dict[int, RingTail] = {}
        self.window_ns = 0
        """How far back from the newest step the tracks reach; 0 for as far as the rings do."""
        self.most_rows = layout.LIVE_ROWS
        """Steps of each rank that are kept, the newest; of the explicit collectives those since the first of them."""
        self.makes_collectives = True
        """What the ranks wrote of torch's flight recorder is made into tracks, which takes a while for many ranks."""
        self.refused: dict[int, str] = {}
        """Processes whose rings could not be read, and why."""
        self.empty: dict[str, int] = {}
        """Rings to which their process has written nothing, as on a disk that is full."""
        self.lacks: dict[str, str] = {}
        """Names that the job's torch does not have, and what that means for the user."""
        self.flights = FlightTracks()

    def poll(self, processes: set[int]) -> None:
        """Take in new rows of these processes."""
        for pid in processes:
            self._open(pid, layout.STEPS_FILE.format(pid), layout.STEPS, self.steps)
            self._open(pid, layout.CALLS_FILE.format(pid), layout.CALLS, self.calls)
        for tail in self.steps.values():
            tail.most_rows = self.most_rows
            tail.read()
        for pid, tail in self.calls.items():
            tail.most_rows = min(layout.LIVE_ROWS, CALLS_A_STEP * self.most_rows)
            tail.read()
            steps = self.steps.get(pid)
            if self.most_rows < layout.LIVE_ROWS and steps is not None and len(steps.numbers):
                tail.forget_before("entered_at_ns", steps.columns["started_at_ns"][0])

    def reopen(self) -> None:
        """Forget all rows, so that the next look takes in as many as there are and as are wanted by then."""
        for tail in (*self.steps.values(), *self.calls.values()):
            tail.start_anew()

    def missing(self) -> int:
        """Rows that the ranks have written and that are not in their files."""
        return sum(tail.missing for tail in (*self.steps.values(), *self.calls.values()))

    def newest_ends_ns(self) -> list[int]:
        """When the newest step of each rank ended; 0 where it has made none."""
        ends = [tail.columns["ended_at_ns"] for pid, tail in self.steps.items() if self._rank_of(pid) is not None]
        return [column[-1] if column else 0 for column in ends]

    def step_tracks(self) -> tuple[StepTrack, ...]:
        """One track a rank, ascending."""
        since_ns, tails = self._since_ns(), self._ranked(self.steps)
        return tuple(StepTrack(rank=rank, **_rows_since(tail, "ended_at_ns", since_ns)) for rank, _, tail in tails)

    def call_tracks(self) -> tuple[CallTrack, ...]:
        """One track a rank, ascending."""
        tracks, since_ns = [], self._since_ns()
        for rank, pid, tail in self._ranked(self.calls):
            columns = _rows_since(tail, "entered_at_ns", since_ns)
            for kind in ("group", "site"):
                columns[kind] = self.translated(pid, kind, columns[kind])
            columns["peer"] = array("q", [max(-1, -2 - number) for number in columns["sequence"]])
            columns["sequence"] = array("q", [max(-1, number) for number in columns["sequence"]])
            tracks.append(CallTrack(rank=rank, kinds=layout.CALL_KINDS, **columns))
        return tuple(tracks)

    def collectives(self) -> tuple[CollectiveTrack, ...]:
        """Return what the ranks wrote of torch's flight recorder: one track a rank, ascending."""
        tracks = []
        flights = {pid: self.flights.columns(pid) for pid in self.flights.processes()} if self.makes_collectives else {}
        for rank, pid, columns in self._ranked(flights):
            for kind in ("group", "signature", "site"):
                columns[kind] = self.translated(pid, kind, columns[kind])
            columns["step"] = self._steps_at(pid, columns["started_ns"])
            tracks.append(CollectiveTrack(rank=rank, **columns))
        return tuple(tracks)

    def waiting_rows(self) -> dict[int, int]:
        """By process the position in its track of what its training thread waits in; -1 for none.

        What was open when the recorder was read before the thread came to stand is what an earlier wait was in.
        """
        rows = {}
        for pid, beat in self._beats():
            waits = False
            if beat is not None and beat.unchanged_ms >= WAITING_AFTER_MS and (beat.kind >= 0 or beat.blocked):
                # The thread stands, and a collective is under way.
                stands_since_ns = beat.beat_at_ns - beat.unchanged_ms * 1_000_000
                waits = self.flights.newest_ns.get(pid, 0) > stands_since_ns - SAME_WAIT_NS
            rows[pid] = self.flights.oldest_open(pid) if waits else -1
        return rows

    def sleeping(self) -> dict[int, int]:
        """By process when the sleep ends that its training thread is in; 0 for none."""
        return {pid: beat.sleeps_until_ns for pid, beat in self._beats() if beat is not None}

    def lost_events(self) -> dict[int, int]:
        """Events that each process could not write."""
        return {pid: beat.lost_events for pid, beat in self._beats() if beat is not None}

    def _beats(self) -> Iterator[tuple[int, LiveHeartbeat | None]]:
        return ((pid, tail.live_heartbeat()) for pid, tail in self.steps.items())

    def mute(self) -> set[int]:
        """Processes that have made a ring and could not write one heartbeat to it, as on a disk that is full."""
        return {pid for pid, sign in self.last_signs().items() if sign.mute}

    def last_signs(self) -> dict[int, LastSign]:
        """Return what the newest heartbeat of each process that has a ring says of its end."""
        signs = dict.fromkeys(self.empty.values(), LastSign(mute=True))
        for pid, beat in self._beats():
            signs[pid] = LastSign(mute=True)
            if beat is not None:
                signs[pid] = LastSign(finished=beat.phase == _FINISHED, lost_events=beat.lost_events)
        return signs

    def heartbeats(self) -> tuple[RankHeartbeat, ...]:
        """Return the newest heartbeat of each rank, ascending."""
        beats = self._ranked(dict(self._beats()))
        return tuple(self._heartbeat(pid, rank, raw) for rank, pid, raw in beats if raw is not None)

    def _ranked(self, of: Mapping[int, Held]) -> list[tuple[int, int, Held]]:
        """Return rank, process and what is held of it, of each process that is a rank; by rank."""
        known = [(self._rank_of(pid), pid, held) for pid, held in of.items()]
        ranked = [(rank, pid, held) for rank, pid, held in known if rank is not None]
        return sorted(ranked, key=lambda entry: entry[0])

    def close(self) -> None:
        """Let go of every file."""
        for tail in (*self.steps.values(), *self.calls.values()):
            tail.close()

    def _since_ns(self) -> int:
        """Return since when rows are taken into the tracks."""
        if not self.window_ns:
            return 0
        ends = (tail.columns["ended_at_ns"] for tail in self.steps.values())
        return max((column[-1] for column in ends if column), default=0) - self.window_ns

    def _steps_at(self, pid: int, times_ns: array[int]) -> array[int]:
        """The step that each time lies in, or that came next after it; 0 before the first that is known."""
        tail = self.steps.get(pid)
        if tail is None or not len(tail.numbers):
            return array("q", [0] * len(times_ns))
        steps, started, ended = (tail.columns[name] for name in ("step", "started_at_ns", "ended_at_ns"))
        found = array("q")
        for time_ns in times_ns:
            at = bisect_right(started, time_ns) - 1
            found.append(0 if at < 0 else steps[at] + (time_ns > ended[at]))
        return found

    def _heartbeat(self, pid: int, rank: int, raw: LiveHeartbeat) -> RankHeartbeat:
        in_words = {
            "rank": rank,
            "phase": _PHASES[raw.phase] if 0 <= raw.phase < len(_PHASES) else "other",
            "collective": layout.CALL_KINDS[raw.kind] if 0 <= raw.kind < len(layout.CALL_KINDS) else "",
            "sequence": max(-1, raw.sequence),
            "site": self._number_of(pid, "site", raw.site),
        }
        return RankHeartbeat(**shared_fields(raw, RankHeartbeat) | in_words)

    def _open(self, pid: int, name: str, kind: layout.RingKind, tails: dict[int, RingTail]) -> None:
        if pid in tails or pid in self.refused:
            return
        try:
            tails[pid] = RingTail(self._directory / name, kind)
        except RecordError as error:
            self.refused[pid] = error.message
        except ValueError:
            self.empty[name] = pid
        except OSError as error:
            if error.errno == errno.EMFILE or not os.path.lexists(self._directory / name):
                return  # Others may be let go of; a process without such calls has no ring of them.
            self.refused[pid] = f"{name} cannot be read: {reason_of(error)}"
        else:
            self.empty.pop(name, None)

    def translated(self, pid: int, kind: str, column: array[int]) -> array[int]:
        """Return the record's numbers for a column of a process's own."""
        known = {number: self._number_of(pid, kind, number) for number in set(column)}
        return array("q", [known[number] for number in column])


def _rows_since(tail: RingTail, time: str, since_ns: int) -> dict[str, array[int]]:
    """Return the columns of a ring from the first row on whose ``time`` is not before."""
    start = bisect_left(tail.columns[time], since_ns)
    return {name: column[start:] for name, column in tail.columns.items()}
