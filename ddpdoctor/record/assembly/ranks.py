"""Keeps the book of a job's processes: which of them is which rank, and how each one ended."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec

from ddpdoctor.finding import grouped
from ddpdoctor.record import events
from ddpdoctor.record.events import Event, Row, frames_of
from ddpdoctor.record.model import Job, Rank, RankEnd, RankException, shared_fields
from ddpdoctor.record.streams.setup import Node


class ProcessEntry:
    """What is known of one process."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.local_rank = 0
        self.place: int | None = None
        """Its number among the ranks that its launcher started here, where the launcher said it."""
        self.node = 0
        self.parent = 0
        self.owner = 0
        """The rank's process that has started it, perhaps by programs that are not known; 0 for none."""
        self.started_ns = 0
        self.newest_event_ns = 0
        """When it wrote an event last."""
        self.heartbeat_thread = 0
        """The thread of ours in it, by the number that the system knows."""
        self.training_thread = 0
        """The thread that trains, by Python's number, where that is not the main thread; else 0."""
        self.torch = ""
        """Version of torch, once its hooks were installed."""
        self.exceptions: list[events.Raised] = []
        self.exit: events.Exit | None = None
        self.os_exit: events.OsExit | None = None
        self.ended_ns = 0
        """When the rehearsal ended it; 0 when it did not."""
        self.gone_ns = 0
        """When its absence was noticed."""
        self.exit_status: int | None = None
        """As the launcher said: negative for a signal."""
        self.host = ""
        self.interfaces: tuple[str, ...] = ()
        self.environment: Mapping[str, str] = {}
        self.cores: tuple[int, ...] = ()


class LastSign(msgspec.Struct, frozen=True, kw_only=True):
    """What the last heartbeat of a process says of its end."""

    mute: bool = False
    """It could not write any."""
    finished: bool = False
    """Its script was over."""
    lost_events: int = 0
    """Events that it could not write: that of its end may be among them."""


class RankBook:
    """All processes of a job by their process id."""

    def __init__(self) -> None:
        self.processes: dict[int, ProcessEntry] = {}
        self.launched_for = 0
        """Ranks by the launcher's variables; 0 where there are none."""
        self.worlds: dict[int, tuple[int, str]] = {}
        """World size and backend as each rank's process group says, by process."""
        self.lives = 0
        """How often a process has made itself anew by ``exec``."""
        self.ended_well = 0
        """The launcher, where it is ours and has ended with code 0; else 0."""
        self.head = ""
        """Where the monitor is that sees the ranks of all nodes, as it came over the job's store."""

    def is_reborn(self, pid: int, event: Event | Row) -> bool:
        """Return whether an event is the first of a process that has made itself anew by ``exec``."""
        entry = self.processes.get(pid)
        begins = isinstance(event, events.Process) and event.kind == "start"
        return begins and entry is not None and 0 < entry.started_ns < event.time_ns

    def take(self, pid: int, event: Event | Row) -> None:
        """Take in one event."""
        if self.is_reborn(pid, event):
            forget(pid, self.processes, self.worlds)
            self.lives += 1
        entry = self.processes.setdefault(pid, ProcessEntry())
        entry.newest_event_ns = max(entry.newest_event_ns, event.time_ns)
        match event:
            case events.Process():
                self._begin(entry, event)
            case events.World():
                entry.rank, entry.local_rank = event.rank, event.local_rank
                self.worlds[pid] = event.world_size, event.backend
            case events.Host():
                entry.host, entry.interfaces, entry.environment = event.name, event.interfaces, event.environment
                entry.cores = event.cores
            case events.Head():
                self.head = event.told
            case events.HeartbeatBegun():
                entry.heartbeat_thread = event.thread
            case events.TrainingThread():
                entry.training_thread = event.thread
            case events.Torch():
                entry.torch = event.version
            case events.Raised():
                entry.exceptions.append(event)
            case events.Exit():
                entry.exit = event
            case events.OsExit():
                entry.os_exit = event
            case events.Ended():
                entry.ended_ns = entry.ended_ns or event.time_ns

    def _begin(self, entry: ProcessEntry, event: events.Process) -> None:
        entry.parent, entry.owner, entry.started_ns = event.parent, event.owner or 0, event.time_ns
        if event.kind == "start" and event.rank is not None:
            entry.rank, entry.place = event.rank, event.local_rank
            entry.local_rank, entry.node = event.local_rank or 0, event.node or 0
            self.launched_for = max(self.launched_for, event.world_size or 0)

    def rank_of(self, pid: int) -> int | None:
        """Return the rank that a process is."""
        entry = self.processes.get(pid)
        return entry.rank if entry is not None else None

    def training_thread(self, pid: int) -> int:
        """Return the thread of a process that trains, by Python's number; 0 for the main thread."""
        entry = self.processes.get(pid)
        return 0 if entry is None else entry.training_thread

    def rank_or_parent(self, pid: int) -> int | None:
        """Return the rank that a process is or works for."""
        for _ in range(8):
            entry = self.processes.get(pid)
            if entry is None:
                return None
            if entry.rank is not None:
                return entry.rank
            pid = entry.parent
        return None

    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return {entry.rank: pid for pid, entry in self.processes.items() if entry.rank is not None}

    def own_threads(self) -> dict[int, int]:
        """Return the thread of ours in each process, by the number that it knows itself by; 0 where it has none."""
        return {pid: entry.heartbeat_thread for pid, entry in self.processes.items()}

    def added_to(self, job: Job) -> Job:
        """Return the job with what its ranks say of their world and of torch."""
        world_size, backend = max(self.worlds.values(), default=(0, ""))
        entries = [entry for entry in self.processes.values() if entry.torch]
        return msgspec.structs.replace(
            job,
            world_size=world_size,
            backend=backend,
            torch_version=entries[0].torch if entries else job.torch_version,
            ranks_reported=tuple(sorted({entry.rank for entry in entries if entry.rank is not None})),
        )

    def nodes(self) -> tuple[Node, ...]:
        """Return the machines that the ranks say they are on, the one with the lowest rank first."""
        entries = sorted((e for e in self.processes.values() if e.rank is not None and e.host), key=_rank_of_entry)
        return tuple(
            Node(
                host=host,
                ranks=tuple(dict.fromkeys(map(_rank_of_entry, here))),
                interfaces=here[0].interfaces,
                environment=here[0].environment,
                cores=len({core for entry in here for core in entry.cores}),
            )
            for host, here in grouped(entries, lambda entry: entry.host).items()
        )

    def any_ended(self) -> bool:
        """Return whether some rank has ended, or has raised what will end it."""
        ranks = (entry for entry in self.processes.values() if entry.rank is not None)
        return any(entry.exceptions or entry.exit or entry.os_exit or entry.gone_ns for entry in ranks)

    def early_exceptions(self) -> tuple[RankException, ...]:
        """Return what was raised in processes that neither are ranks nor work for one, first in time first."""
        early = (entry for pid, entry in self.processes.items() if self.rank_or_parent(pid) is None)
        raised = [exception_of(event) for entry in early for event in entry.exceptions]
        return tuple(sorted(raised, key=lambda error: error.time_ns))

    def gone(self, pid: int, time_ns: int, exit_status: int | None) -> None:
        """Note that a process is no more."""
        entry = self.processes.get(pid)
        if entry is not None:
            entry.gone_ns = entry.gone_ns or time_ns
            if exit_status is not None:
                entry.exit_status = exit_status

    def first_ending_ns(self) -> int:
        """When the rehearsal first ended a rank; 0 when it has not."""
        times = [entry.ended_ns for entry in self.processes.values() if entry.ended_ns and entry.rank is not None]
        return min(times, default=0)

    def ranks(
        self,
        waiting_rows: Mapping[int, int],
        sleeping: Mapping[int, int],
        without: Container[int] = (),
        last_signs: Mapping[int, LastSign] | None = None,
    ) -> tuple[Rank, ...]:
        """Return the ranks of the record, ascending; nothing that came after our own ending counts.

        ``without``: processes that say to be a rank and are none. ``last_signs``: of a live run, by process.
        """
        first_ending_ns = self.first_ending_ns()
        ranks = []
        for pid, entry in self.processes.items():
            if entry.rank is None or pid in without:
                continue
            is_over = entry.exit is not None or entry.os_exit is not None or entry.gone_ns > 0
            raised = [
                event
                for event in entry.exceptions
                if not 0 < first_ending_ns < event.time_ns and (is_over or not event.of_a_thread)
            ]
            end, ended_ns = self._end(entry, raised)
            if end == "signalled" and last_signs is not None and entry.exit_status is None:
                end = self._end_untold(pid, last_signs)
            status = entry.exit_status
            waiting = waiting_rows.get(pid, -1)
            ranks.append(
                Rank(
                    rank=entry.rank,
                    local_rank=entry.local_rank,
                    node=entry.node,
                    host=entry.host,
                    pid=pid,
                    end=end,
                    exit_code=_exit_code(entry),
                    signal=-status if status is not None and status < 0 else None,
                    main_finished=(entry.exit is not None and entry.exit.finished)
                    or (end == "finished" and self.ended_well > 0),
                    ended_ns=ended_ns,
                    exceptions=tuple(map(exception_of, raised)),
                    waiting_in=waiting if waiting >= 0 and end in ("running", "signalled") else None,
                    sleeps_until_ns=sleeping.get(pid, 0) if end == "running" else 0,
                )
            )
        return tuple(sorted(ranks, key=lambda rank: rank.rank))

    def _end(self, entry: ProcessEntry, raised: list[events.Raised]) -> tuple[RankEnd, int]:
        first_ending_ns = self.first_ending_ns()
        if entry.ended_ns:
            return "ended-by-rehearsal", entry.ended_ns
        if raised:
            return "raised", raised[0].time_ns
        if entry.exit is not None:
            time_ns = entry.exit.time_ns
            if 0 < first_ending_ns < time_ns:
                return "ended-by-rehearsal", time_ns
            return ("finished" if entry.exit.finished else "left-by-exit"), time_ns
        if entry.os_exit is not None:
            return "left-by-exit", entry.os_exit.time_ns
        if entry.gone_ns:
            return ("ended-by-rehearsal" if 0 < first_ending_ns < entry.gone_ns else "signalled"), entry.gone_ns
        return "running", 0

    def _end_untold(self, pid: int, last_signs: Mapping[int, LastSign]) -> RankEnd:
        """Return how a process ended of whose end no event is there: it was killed, or the event could not be written.

        The disk was full, or someone has deleted the run directory.
        """
        sign = last_signs.get(pid)
        if sign is not None and sign.finished:
            return "finished"
        if sign is not None and sign.mute and not self.ended_well:
            return "unknown"
        has_lost = sign is not None and (sign.mute or sign.lost_events > 0)
        # A script around the launcher may swallow its exit code; the launcher of the rank itself does not.
        is_own = self.ended_well in (pid, self.processes[pid].parent)
        if self.ended_well and (is_own or has_lost or sign is None):
            return "finished"
        others = (entry for entry in self.processes.values() if entry.rank is not None)
        over = all(entry.gone_ns or entry.exit is not None or entry.os_exit is not None for entry in others)
        return "unknown" if has_lost and over else "signalled"


def forget(process: int, *tables: dict[Any, Any]) -> None:
    """Remove what is known of a process from tables by process, or by process and what it numbers."""
    for table in tables:
        for key in [key for key in table if process in (key, key[0] if isinstance(key, tuple) else key)]:
            del table[key]


def _rank_of_entry(entry: ProcessEntry) -> int:
    return -1 if entry.rank is None else entry.rank


def _exit_code(entry: ProcessEntry) -> int | None:
    for event in (entry.exit, entry.os_exit):
        if event is not None and isinstance(event.code, int):
            return event.code
    status = entry.exit_status
    return status if status is not None and status >= 0 else None


def exception_of(event: events.Raised) -> RankException:
    """Return an exception as a process wrote it."""
    return RankException(**{**shared_fields(event, RankException), "frames": frames_of(event.frames)})


_OF_A_RANK = (events.DatasetSample, events.PassEnded, events.PassTrained, events.PassProgress, events.StateLoaded)
_WAITS = (events.WaitBegun, events.Led, events.WaitEnded)
"""A process that waits for its world has no rank yet, and may never have one: these count at once, and again later."""


class EarlyEvents:
    """Hands out events that mean something of a rank only, in their order, once the rank of their process is known."""

    def __init__(self, rows: Container[str]) -> None:
        """``rows``: names of the rows that mean something of a rank only."""
        self._rows = rows
        self._held: dict[int, list[Event | Row]] = {}

    def due(self, pid: int, event: Event | Row, *, is_rank: bool) -> Iterable[Event | Row]:
        """Return what is to be taken in now that ``event`` was read."""
        if is_rank:
            return (*self._held.pop(pid, ()), event)
        if isinstance(event, _OF_A_RANK) or (isinstance(event, Row) and event.kind in self._rows):
            self._held.setdefault(pid, []).append(event)
            return ()
        if isinstance(event, _WAITS):
            self._held.setdefault(pid, []).append(event)
        return (event,)
