"""The ranks of a rehearsal or of a test while they run: what they write, who is stuck, and the proof that they hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.live_verdict import VerdictMemory, live_verdict
from ddpdoctor.launch.pid_namespaces import is_alive, is_stopped
from ddpdoctor.monitor.processes.liveness import LivenessSampler
from ddpdoctor.monitor.processes.stacks import ask_for_stacks, signal_for_stacks, users_stacks
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.assembly.completeness import starts_of
from ddpdoctor.record.model import Job, Rank, RunRecord
from ddpdoctor.record.streams.setup import StackDump
from ddpdoctor.record.writer import epoch_ns

QUERIES_WITHIN_NS = 1_000_000_000
"""A rank that has not asked for a file for so long, and does not sleep, does something else."""


class RehearsedRanks:
    """Looks at the processes of a run directory, again and again, and makes records of it."""

    def __init__(
        self, directory: Path, stall_after_s: float, exit_statuses: Callable[[], Mapping[int, int]] = dict
    ) -> None:
        """``exit_statuses`` gives the launcher's word on how processes ended: negative for a signal."""
        self._directory = directory
        self._stall_after_s = stall_after_s
        self._exit_statuses = exit_statuses
        self.assembly = Assembly(directory)
        self.outer_pid: Callable[[int], int | None] = lambda pid: pid
        """The number out here of a process that knows itself by another one; None when it is gone."""
        self._memory = VerdictMemory()
        self._liveness = LivenessSampler(stall_after_s, lambda pid: self.outer_pid(pid))
        self._stuck: frozenset[int] = frozenset()
        self._polling: frozenset[int] = frozenset()
        self._earlier: tuple[frozenset[int], ...] = ()
        """The processes of each set of ranks that had ended when the script started others."""

    def look(self, ends_ns: int) -> None:
        """Take in what was written, and see who is gone and who is stuck.

        What wakes by itself before ``ends_ns``, when no one will wait any longer, is not stuck.
        """
        self.note_the_gone()
        self.assembly.poll()
        self._leave_earlier_starts()
        self._stuck = self._liveness.look(self.assembly.files.rings, self.assembly.book.own_threads())
        self._stuck -= self._waking(ends_ns)
        self._polling = self._asking_in_vain()

    def _leave_earlier_starts(self) -> None:
        """Look at the newest ranks only, where the script has started ranks again after others had ended."""
        starts = starts_of(self.assembly.book)
        if len(starts) < 2:
            return
        self._earlier += starts[:-1]
        former, self.assembly = self.assembly, self._assembled_without(frozenset().union(*self._earlier))
        self.assembly.take_over(former)
        former.files.close()
        self._memory = VerdictMemory()

    def _assembled_without(self, pids: frozenset[int]) -> Assembly:
        assembly = Assembly(self._directory, pids)
        assembly.poll()
        return assembly

    def records_of_earlier_starts(self, job: Job) -> tuple[RunRecord, ...]:
        """Return a record of each set of ranks that had ended when the script started others."""
        records = []
        newest = frozenset().union(*starts_of(self.assembly.book))
        for start in self._earlier:
            others = newest.union(*(one for one in self._earlier if one != start))
            assembly = self._assembled_without(others)
            for pid in start:
                assembly.book.gone(pid, job.ended_ns or epoch_ns(), None)
            records.append(_recorded(assembly, job))
            assembly.files.close()
        return tuple(records)

    def shows_proof(self, record: RunRecord) -> bool:
        """Return whether the job is proved to hang or to compute something else; nothing after our ending counts."""
        if self.assembly.book.first_ending_ns():
            return False
        return live_verdict(self._memory, record, epoch_ns()) is not None

    def record(self, job: Job) -> RunRecord:
        """Return the record of what is known so far; what the ranks say of their world and torch goes into the job."""
        record = _recorded(self.assembly, job)
        if not self._stuck and not self._polling and not record.endless_loops:
            return record
        return msgspec.structs.replace(record, ranks=tuple(self._judged(rank, record) for rank in record.ranks))

    def note_the_gone(self) -> None:
        """Take down which ranks' processes are no more, with the launcher's word on how they ended."""
        statuses: Mapping[int, int] | None = None
        for pid in self.assembly.book.pids().values():
            if not self._is_alive(pid):
                if statuses is None:
                    statuses = self._exit_statuses()
                self.assembly.book.gone(pid, epoch_ns(), statuses.get(pid))

    def collect_stacks(self, job: Job) -> tuple[StackDump, ...]:
        """Return the stacks of every living rank, written by itself or by its signal handler."""
        book = self.assembly.book
        # A stopped process answers nothing, not even its signal handler.
        rings = self.assembly.files.rings
        living = {pid: ring for pid, ring in rings.items() if self._is_alive(pid) and not self._is_stopped(pid)}
        silent = ask_for_stacks(living, 1)
        self.assembly.poll()
        answered = self.record(job).stacks
        ranks = {pid: rank for pid in silent if (rank := book.rank_of(pid)) is not None}
        return users_stacks((*answered, *signal_for_stacks(self._directory, ranks, self.outer_pid)))

    def close(self) -> None:
        """Let go of every file."""
        self.assembly.files.close()

    def _waking(self, ends_ns: int) -> frozenset[int]:
        """Processes in a sleep that ends in time: what comes after it is worth waiting for."""
        rings = self.assembly.files.rings
        return frozenset(pid for pid, ring in rings.items() if 0 < ring.heartbeat().sleeps_until_ns < ends_ns)

    def _asking_in_vain(self) -> frozenset[int]:
        """Processes that do nothing but ask for a file for nothing, while no rank does anything at all."""
        rings = self.assembly.files.rings
        long_ns, now_ns = int(self._stall_after_s * 1e9), epoch_ns()
        asking = []
        for pid, ring in rings.items():
            beat = ring.heartbeat()
            asks_still = now_ns - beat.polled_at_ns < QUERIES_WITHIN_NS or beat.sleeps_until_ns > now_ns
            if beat.polling_since_ns and now_ns - beat.polling_since_ns >= long_ns and asks_still:
                asking.append(pid)
        return frozenset(asking if asking and self._liveness.at_rest(rings) else ())

    def _judged(self, rank: Rank, record: RunRecord) -> Rank:
        """A rank with what its process was seen to do, or not to do."""
        # A program that a rank has started may make the file, and sleep meanwhile.
        children = any(event.action in ("child-process", "held-child") for event in record.files)
        if rank.pid in self._polling and not children:
            own = (entry for entry in record.accesses if entry.rank == rank.rank and entry.action in ("check", "read"))
            newest = max(own, key=lambda entry: entry.time_ns, default=None)
            return msgspec.structs.replace(rank, stuck=True, polls_for="" if newest is None else newest.path)
        if record.endless_loop(rank.rank) is not None:
            return msgspec.structs.replace(rank, stuck=True, loops=True)
        if rank.pid in self._stuck:
            return msgspec.structs.replace(rank, stuck=True, stopped=self._is_stopped(rank.pid))
        return rank

    def _is_alive(self, pid: int) -> bool:
        outer = self.outer_pid(pid)
        return outer is not None and is_alive(outer)

    def _is_stopped(self, pid: int) -> bool:
        outer = self.outer_pid(pid)
        return outer is not None and is_stopped(outer)


def _recorded(assembly: Assembly, job: Job) -> RunRecord:
    job = assembly.book.added_to(job)
    return assembly.record(msgspec.structs.replace(job, stressed=assembly.stressed, ended_ns=epoch_ns()))
