"""Which ranks of a live run do nothing: their processes are looked at once some rank makes no step for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ddpdoctor.launch.pid_namespaces import OuterPids
from ddpdoctor.monitor.processes.liveness import LONGEST_SLEEP_NS, SILENT_AFTER_NS, LivenessSampler
from ddpdoctor.monitor.processes.loops import patience_of, usual_interval_ns
from ddpdoctor.monitor.processes.stacks import SignalledStacks, users_stacks, with_training_thread
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.model import Rank, RunRecord
from ddpdoctor.record.ring_reader import RingTail

STALL_AFTER_S = 4.0
"""A rank without any sign of life for so long, while others wait for it, is stuck; its processes are looked at from the
second on in which it has made no step."""
STOPPED_AFTER_NS = 5_300_000_000
"""A process that a signal has stopped is stuck after so long: some continue after five seconds."""
HELD_AFTER_NS = 2 * SILENT_AFTER_NS
"""A rank that has said nothing for so long cannot, because a call holds its interpreter."""
LONGEST_USUAL_NS = 30_000_000_000
"""A job whose steps usually take longer than this has no usual pause that is as long."""


class StuckRanks:
    """Knows of each rank of a run whether it is stuck, stopped, or stands while its process does a little."""

    def __init__(self, directory: Path, outer: OuterPids, trains_in_main: Callable[[int], bool]) -> None:
        """``trains_in_main`` returns whether the training thread of a process is its main one."""
        self._outer = outer
        self._signalled = SignalledStacks(directory, outer)
        self._liveness = LivenessSampler(
            STALL_AFTER_S,
            outer,
            heeds_clocks=True,
            written_for_us=self._signalled.written,
            trains_in_main=trains_in_main,
        )
        self._stuck: frozenset[int] = frozenset()
        self._restless: frozenset[int] = frozenset()
        """Processes whose training thread stands while the rest of them does a little."""
        self._child_wakes_ns: dict[int, int] = {}
        """Of processes that have been restless for too long: when a child that slept then wakes."""
        self._stopped_since_ns: dict[int, int] = {}
        self._looked_ns = 0
        """When the processes were looked at last."""

    def look(self, rings: Mapping[int, RingTail], book: RankBook, record: RunRecord, now_ns: int) -> None:
        """See which ranks do nothing, which are stopped, and ask those for their stacks that cannot say where they are.

        ``rings`` are the steps of each process, ``record`` what is known of all.
        """
        timeouts = [group.timeout_ns for group in record.groups if group.timeout_ns]
        self._liveness.longest_sleep_ns = min([LONGEST_SLEEP_NS, *timeouts])
        tracks = {book.pids().get(track.rank): track for track in record.step_tracks if len(track)}
        # Where steps usually take long, as those that wait for a GPU without computing, a pause as long is no sign.
        usual = {
            pid
            for pid, track in tracks.items()
            if now_ns - track.ended_at_ns[-1] < 2 * min(LONGEST_USUAL_NS, usual_interval_ns(track))
        }
        stuck = self._liveness.look(rings) - usual
        stopped = {pid for pid in book.pids().values() if pid in rings and self._outer.is_stopped(pid)}
        # It continued for no longer than a beat after its last one, nor was it stopped at the look before.
        since_ns = {pid: max(rings[pid].heartbeat().beat_at_ns, self._looked_ns) for pid in stopped}
        self._stopped_since_ns = {pid: self._stopped_since_ns.get(pid, since_ns[pid]) for pid in stopped}
        self._looked_ns = now_ns
        long = {pid for pid, since_ns in self._stopped_since_ns.items() if now_ns - since_ns >= STOPPED_AFTER_NS}
        restless = self._liveness.restless()
        self._restless = frozenset(restless) - stopped
        long_restless = {pid for pid in self._restless if restless[pid] >= patience_of(tracks.get(pid))}
        # A child that sleeps then is awaited once: one that reports every minute sleeps again and again.
        self._child_wakes_ns = {
            pid: self._child_wakes_ns.get(pid, self._liveness.woken_at_ns(pid)) for pid in long_restless
        }
        spent = {pid for pid, wakes_ns in self._child_wakes_ns.items() if now_ns >= wakes_ns}
        self._stuck = frozenset((stuck - stopped) | (stuck & long) | spent)
        for pid, ring in rings.items():
            entry = book.processes.get(pid)
            if entry is None or pid in stopped or not self._outer.is_alive(pid):
                continue
            beat_ns = ring.heartbeat().beat_at_ns
            if 0 < beat_ns < now_ns - HELD_AFTER_NS:
                self._signalled.ask(pid, entry.heartbeat_thread, now_ns)

    def judged(self, record: RunRecord, training_threads: Mapping[int, int], looping: int | None) -> RunRecord:
        """Return a record with what is known of its ranks, and the stacks that they wrote at a signal.

        ``training_threads`` by process, 0 for the main one; ``looping`` is a process in an endless loop.
        """
        by_signal = [
            dump
            for rank in record.ranks
            for dump in with_training_thread(
                self._signalled.take(rank.pid, rank.rank), training_threads.get(rank.pid, 0)
            )
        ]
        if by_signal or record.stacks:
            record = msgspec.structs.replace(record, stacks=users_stacks((*record.stacks, *by_signal)))
        stuck = self._stuck | ({looping} if looping is not None else set())
        if not stuck | self._restless:
            return record

        def judged(rank: Rank) -> Rank:
            return msgspec.structs.replace(
                rank,
                stuck=rank.pid in stuck,
                restless=rank.pid in self._restless,
                stopped=rank.pid in stuck & self._stopped_since_ns.keys(),
                loops=rank.pid == looping,
            )

        known = stuck | self._restless
        return msgspec.structs.replace(
            record, ranks=tuple(judged(rank) if rank.pid in known else rank for rank in record.ranks)
        )
