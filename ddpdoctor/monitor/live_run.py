"""A run directory as it grows: reads it, notes which ranks are gone, and looks for the proof that the job hangs."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.live_verdict import CONFIRM_NS, LastingWait, VerdictMemory, live_verdict
from ddpdoctor.diagnosis.stacks import waits_for_a_worker
from ddpdoctor.diagnosis.wording import count
from ddpdoctor.files.untrusted import read_start
from ddpdoctor.launch.pid_namespaces import OuterPids
from ddpdoctor.monitor.gpus import NodeGpus, environment_of
from ddpdoctor.monitor.nodes.nodes import Nodes
from ddpdoctor.monitor.processes.hosts import Hosts, UnseenRanks
from ddpdoctor.monitor.processes.liveness import (
    LONGEST_SLEEP_NS,
    SILENT_AFTER_NS,
    LivenessSampler,
    LoopDetector,
    patience_of,
    probe_logs,
    usual_interval_ns,
)
from ddpdoctor.monitor.processes.stacks import (
    AwaitedWorkers,
    SignalledStacks,
    parse_faulthandler,
    users_stacks,
    with_training_thread,
)
from ddpdoctor.monitor.processes.why_no_data import Silence, missing_ranks, two_runs
from ddpdoctor.probe.environment import recorded_environment
from ddpdoctor.probe.free_port import network_interfaces
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.assembly.completeness import rival_launchers, superseded
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.model import Rank, RunRecord, StreamState
from ddpdoctor.record.reader import RunPlan
from ddpdoctor.record.ring_reader import RingTail
from ddpdoctor.record.streams.setup import StackDump
from ddpdoctor.record.writer import epoch_ns

# What `faulthandler` wrote of a rank that a signal ended: where it was, and of a crash which signal it was.

_HEAD = re.compile(r"^Fatal Python error: (?P<what>[^\n]+)$", re.MULTILINE)
_SIGNALS = {
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
}
_MOST_BYTES = 1 << 20
_TERMINATED = "Stack (most recent call first):"
"""What is written of the main thread at a SIGTERM."""
_FORKED = "popen_fork.py"
"""A child that a rank forked has the rank's file, and this module of Python's in its main thread's stack."""


class CrashDump(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process."""

    signal: int | None
    """None of a SIGTERM: it says who ended the process, and nothing of why."""
    stacks: tuple[StackDump, ...]


def read_crash_dump(directory: Path, pid: int) -> CrashDump | None:
    """Return what a process wrote at its end; None where it did not, or had no time to."""
    try:
        path = directory / layout.CRASH_DUMP_FILE.format(pid)
        text = read_start(path, _MOST_BYTES, directory).decode(errors="replace")
    except OSError:
        return None
    for head in reversed(list(_HEAD.finditer(text))):
        number = _SIGNALS.get(head["what"].strip())
        told, cut, _ = text[head.end() :].partition("Fatal Python error: ")
        if number is not None and _FORKED not in told:
            native = "Current thread" not in told
            stacks = users_stacks(parse_faulthandler(told, -1))
            if cut:
                # The stack of a thread that ran on could not be read; the main thread's would have come after it.
                stacks = (StackDump(rank=-1, thread="main", main=True),)
            ended = (msgspec.structs.replace(stack, native_end=native, of_the_end=True) for stack in stacks)
            return CrashDump(signal=number, stacks=tuple(ended))
    _, terminated, told = text.rpartition(_TERMINATED)
    if terminated and _FORKED not in told:
        main = users_stacks(parse_faulthandler(f"Thread 0x0:\n{told}", -1))
        return CrashDump(signal=None, stacks=tuple(msgspec.structs.replace(one, of_the_end=True) for one in main))
    return None


def with_crash_dumps(
    record: RunRecord, words: Mapping[int, CrashDump | None], training_threads: Mapping[int, int]
) -> RunRecord:
    """Return the record with the stacks of the ranks that a signal ended.

    ``training_threads``: by process the thread that trains, where that is not the main thread.
    """
    stacks = list(record.stacks)
    for rank in record.ranks:
        said = words.get(rank.pid)
        if said is not None and rank.end == "signalled" and not rank.main_finished:
            of_rank = [msgspec.structs.replace(stack, rank=rank.rank) for stack in said.stacks]
            stacks += with_training_thread(of_rank, training_threads.get(rank.pid, 0))
    return msgspec.structs.replace(record, stacks=tuple(stacks))


# Which ranks of a live run do nothing: their processes are looked at once some rank makes no step for a while.

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
        self._workers = AwaitedWorkers(outer)
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
        stuck = self._liveness.look(rings, book.own_threads()) - usual
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
        pids = {rank.rank: rank.pid for rank in record.ranks if rank.pid in stuck}
        mains = [one for one in record.stacks if one.main and one.rank in pids]
        waiting = {one.rank for one in mains if waits_for_a_worker(one.frames)}
        workers = self._workers.of({rank: pids[rank] for rank in waiting}, epoch_ns())
        if workers:
            record = msgspec.structs.replace(record, stacks=(*record.stacks, *workers))
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


FRESH_WITHIN_NS = 800_000_000
"""For so long a verdict waits for the stacks of its moment."""
WAIT_LOOKED_AT_NS = 8_000_000_000
WAIT_ASKED_EVERY_NS = 5_000_000_000
WAIT_ASKED_SELDOM_NS = 30_000_000_000
"""A wait that lasts so long is looked into: the ranks are asked for their stacks every few seconds, later seldom."""
QUIET_AFTER_NS = 1_000_000_000
"""Ranks whose newest step is no older are at work: no one looks at their processes or asks them for evidence."""
LATE_AFTER_NS = 400_000_000
"""Ranks write their steps five times a second: where the newest step is older none may come, which is looked into as
soon as they count as quiet."""
WATCHED_ROWS = 80_000
"""Steps of all ranks together that are kept in memory while a run is watched, twice what the checks look at; …"""
WHOLE_ROWS = 400_000
"""… and that are read again for its end: of up to 97 ranks all that the rings hold."""
FEWEST_ROWS = 256
NODES_CONFIRM_NS = 2_000_000_000
"""Nodes report once a second: with several a standstill has to look the same for so long, and each has to report."""
ANSWER_WITHIN_NS = 300_000_000
"""A rank that is asked for its evidence writes it with its next beat, five times a second."""
ASK_AGAIN_NS = 1_000_000_000
"""Ranks that stand still are asked for their evidence again after so long, then after twice that, and so on."""
NEEDLESS = 5
"""Ranks that continued so often after they were asked take longer for a step than they count as at work, and are asked
once a step takes longer than usual."""

_UNREAD_SHOWN = 8


class LiveRun:
    """One run while it is watched, or when it is over: then no one looks at processes, nor at the GPUs of today."""

    def __init__(
        self, directory: Path, plan: RunPlan, *, is_over: bool = False, head_at: tuple[str, int] | None = None
    ) -> None:
        """``head_at`` is where the monitor listens that sees all nodes, where the user says it."""
        self._directory = directory
        self._plan = plan
        self._is_over = is_over
        self._assembly = Assembly(directory)
        self._superseded: frozenset[int] = frozenset()
        """Processes in whose place others are ranks now."""
        self._rivals: frozenset[int] = frozenset()
        """Launchers of other jobs that run at the same time."""
        self._two_runs = ""
        self.own_record = RunRecord(job=plan.job)
        """What this node's ranks wrote, as of the newest look."""
        self._memory = VerdictMemory()
        self._epoch: tuple[tuple[str, int], ...] = ()
        """Of what other nodes sent, as it was compared last."""
        self._outer = OuterPids(directory)
        self._unseen = UnseenRanks(self._outer)
        self._stuck_ranks = StuckRanks(directory, self._outer, lambda pid: not self._assembly.book.training_thread(pid))
        self._gpus = None if is_over else NodeGpus()
        self._hosts = Hosts()
        self._environment = plan.job.environment
        self._asked = 0
        """How often the ranks were asked for evidence in this standstill."""
        self._asked_ns = 0
        self._foreseen_ns = 0
        """When another node said that its ranks stand, and no look has come since; 0 where none did."""
        self._needless = 0
        """How often the ranks made another step after they were asked."""
        self._requests = time.time_ns() // 1_000_000_000 % (1 << 31)
        """Above every number that an earlier reader of the same run may have used."""
        self.divergence: Divergence | None = None
        """The proof that the job will not continue, once there is one."""
        self.wait: LastingWait | None = None
        """What ranks wait for now that is no standstill."""
        self._wait_asked_ns = 0
        self._fresh_request: tuple[int, int] | None = None
        """Number and time of the request for the stacks that a verdict needs."""
        self._loops = LoopDetector(self._outer)
        self._looping: int | None = None
        self._told_to_end = False
        self._has_gaps = False
        self.is_quiet = False
        """Some rank has made no step for a while."""
        self.quiet_at_ns = 0
        """When it will be quiet if no step comes; 0 where steps come."""
        self._crash_dumps: dict[int, CrashDump | None] = {}
        """Of each process that is gone; None where it left none."""
        self.nodes = Nodes(directory, self._ask_own_rank, head_at)
        self._window_ns = 0
        self._silence = Silence(None if is_over else plan.launcher_pid, plan.job.command, plan.job.script)

    def look(self, now_ns: int, window_ns: int = 0, *, told_to_end: bool = False, ended_well: int = 0) -> RunRecord:
        """Take in what was written since the last look; the record of what is known so far.

        With ``window_ns`` steps and explicit collectives reach so far back from the newest step, and no further. What
        happens to the processes of a job that was told to end is not its fault. ``ended_well`` is the launcher, once it
        has ended with code 0.
        """
        self._told_to_end = self._told_to_end or told_to_end
        assembly = self._up_to_date(whole=not window_ns)
        assembly.book.ended_well = ended_well
        assembly.live.window_ns = self._window_ns = window_ns
        for pid in assembly.book.pids().values():
            if self._is_over or not (self._outer.is_alive(pid) or self._unseen.may_live(pid, now_ns)):
                words = self._words_of(pid)
                assembly.book.gone(pid, now_ns, None if words is None or words.signal is None else -words.signal)
        self._silence.look(assembly.book, now_ns)
        if not self._is_over:
            self.nodes.look(assembly.book, self._job_environment().get("MASTER_ADDR", ""), now_ns)
        newest_ns = min(assembly.live.newest_ends_ns(), default=0)
        own_quiet = not self._is_over and now_ns - newest_ns > QUIET_AFTER_NS
        self.is_quiet = own_quiet or self.nodes.are_quiet
        is_late = not self._is_over and not self.is_quiet and now_ns - newest_ns > LATE_AFTER_NS
        self.quiet_at_ns = newest_ns + QUIET_AFTER_NS if is_late else 0
        assembly.live.makes_collectives = self.is_quiet or not window_ns or assembly.book.any_ended()
        self.own_record = self._own_record(now_ns)
        if assembly.has_gaps and not self._has_gaps:
            self._has_gaps, self._memory = True, VerdictMemory()  # It knows rows that are not shown any more.
        if self._asked and (newest_ns > self._asked_ns or not self.is_quiet):
            # What is recorded of the next standstill need not join on to this one's.
            self._needless += newest_ns > self._asked_ns
            self._forget_standstill()
            assembly.live.flights.keep_newest()
        if self.is_quiet:
            self._ask_for_evidence(newest_ns, now_ns)
            self._stuck_ranks.look(assembly.live.steps, assembly.book, self.own_record, now_ns)
            self.own_record = self._own_record(now_ns)
            record = self._joined(now_ns)
            if self.nodes.epoch != self._epoch:
                # A node has come, gone or forgotten: what was compared may be of other rows.
                self._epoch, self._memory = self.nodes.epoch, VerdictMemory()
            self._memory.confirm_ns = NODES_CONFIRM_NS if self.nodes.is_head else CONFIRM_NS
            found = live_verdict(self._memory, record, now_ns)
            is_new = found is not None and self.divergence is None
            if is_new and not self.nodes.have_reported(self._memory.confirmed_since_ns, now_ns):
                found = None
            self.wait = self._memory.wait
            # A rank in a loop is stuck, so that no one waits for one that works any more.
            still = self._looping if self.divergence is not None and self.wait is None else None
            self._looping = self._loops.look(self.wait, self.own_record, now_ns) or still
            self._ask_what_is_waited_for(now_ns)
            if found is None or self._has_fresh_stacks(found, now_ns):
                self.divergence = found
        else:
            record = self._joined(now_ns)
            self.wait = self._looping = None
        return record

    def _ask_what_is_waited_for(self, now_ns: int) -> None:
        wait = self.wait
        waited_ns = 0 if wait is None else now_ns - wait.since_ns
        often = waited_ns < 3 * WAIT_ASKED_SELDOM_NS
        every_ns = WAIT_ASKED_EVERY_NS if often else WAIT_ASKED_SELDOM_NS
        if wait is None or waited_ns < WAIT_LOOKED_AT_NS or now_ns - self._wait_asked_ns < every_ns:
            return
        self._wait_asked_ns = now_ns
        for rank in (wait.late, wait.waiting[0]):
            self.ask_for_stacks(rank)

    def _has_fresh_stacks(self, found: Divergence, now_ns: int) -> bool:
        """Return whether the stacks are of this moment; ask for them where they are not, and wait a little."""
        living = self.living()
        asked = (turn for turn in found.turns if turn.action == "elsewhere" and turn.rank in living)
        if self.divergence is not None or next(asked, None) is None:
            self._fresh_request = None
            return True
        rings = [ring for pid, ring in self._assembly.live.steps.items() if pid in living.values()]
        if self._fresh_request is None:
            for ring in rings:
                self._request(ring)
            self._fresh_request = self._requests - len(rings) + 1, now_ns
            return not rings
        number, asked_ns = self._fresh_request
        beating = [ring for ring in rings if now_ns - ring.heartbeat().beat_at_ns < SILENT_AFTER_NS]
        answered = all(ring.heartbeat().answered >= number for ring in beating)
        if not answered and now_ns - asked_ns < FRESH_WITHIN_NS:
            return False
        self._fresh_request = None
        return True

    def _up_to_date(self, *, whole: bool) -> Assembly:
        """Return what was written until now, of the newest process of each rank; ``whole``: as far back as it goes."""
        live = self._assembly.live
        ranks = len(live.steps) or len(self._assembly.files.find_processes()) or 1
        shared = WHOLE_ROWS if whole else WATCHED_ROWS
        before, live.most_rows = live.most_rows, min(layout.LIVE_ROWS, max(FEWEST_ROWS, shared // ranks))
        if whole and before < live.most_rows:
            live.reopen()
        book = self._assembly.book
        lives = book.lives
        self._assembly.poll()
        self._unseen.look(live.steps, book, epoch_ns())
        if book.lives > lives:
            self._forget_standstill()
        if not self._is_over:
            self._rivals |= rival_launchers(book, self._outer.is_alive)
        newly = superseded(
            book,
            self._rivals,
            lambda pid: live.steps[pid].heartbeat().beat_at_ns if pid in live.steps else 0,
            lambda pid: not self._is_over and self._lives(pid),
        )
        if newly:
            self._two_runs = two_runs(book, at_once=bool(self._rivals)) or self._two_runs
            self._leave_out(self._superseded | newly)
        elif self._rivals and not self.living() and any(map(self._outer.is_alive, self._superseded)):
            # Of jobs that ran at once the one that was shown is over: from now on it is the other.
            self._rivals = frozenset(book.processes[pid].parent for pid in book.pids().values())
            self._leave_out(frozenset(book.processes))
        return self._assembly

    def _leave_out(self, processes: frozenset[int]) -> None:
        """Know all processes but these, from their first row on."""
        self._superseded = processes
        self._close_files()
        self._assembly = Assembly(self._directory, processes)
        self._assembly.poll()
        self._forget_standstill()

    def _forget_standstill(self) -> None:
        """What was compared is of rows that are not there any more, or of a standstill that is over."""
        self.divergence, self._memory, self._asked = None, VerdictMemory(), 0

    def foresees_standstill(self, now_ns: int) -> bool:
        """Return whether another node has said that its ranks stand, once ours had time to say where they are.

        A look at thousands of ranks takes seconds: it shall find what they are asked for.
        """
        if self.is_quiet or self._is_over or not self.nodes.are_quiet:
            self._foreseen_ns = 0
            return False
        if not self._foreseen_ns:
            self._foreseen_ns = now_ns
            for ring in self._assembly.live.steps.values() if self._needless < NEEDLESS else ():
                self._request(ring)
        return now_ns - self._foreseen_ns >= ANSWER_WITHIN_NS

    def _ask_for_evidence(self, newest_ns: int, now_ns: int) -> None:
        """Have the ranks write what they have of torch's flight recorder, again after twice the time."""
        if now_ns - self._asked_ns < ASK_AGAIN_NS << min(self._asked, 8):
            return
        if not self._asked and self._needless >= NEEDLESS:
            usual_ns = min(LONGEST_USUAL_NS, max(map(usual_interval_ns, self.own_record.step_tracks), default=0))
            if now_ns - newest_ns < usual_ns * 5 // 4 + QUIET_AFTER_NS:
                return
        self._asked, self._asked_ns = self._asked + 1, now_ns
        for ring in self._assembly.live.steps.values():
            self._request(ring)

    def ask_for_stacks(self, rank: int) -> None:
        """Have one rank write its stacks; one that is gone, or another user's, stays silent."""
        if rank in self.living():
            self._ask_own_rank(rank)
        else:
            self.nodes.ask_for_stacks(rank)

    def _ask_own_rank(self, rank: int) -> None:
        ring = self._assembly.live.steps.get(self.living().get(rank, 0))
        if ring is not None:
            self._request(ring)

    def _request(self, ring: RingTail) -> None:
        """Ask with a number that the rank has not answered: others may watch the same run, or have watched it."""
        with suppress(OSError):  # another user's run, or a directory that is gone
            self._requests = max(self._requests, ring.heartbeat().answered) + 1
            ring.ask_for_stacks(self._requests)

    def living(self) -> dict[int, int]:
        """Process id of each rank that lives."""
        pids = {} if self._is_over else self._assembly.book.pids()
        return {rank: pid for rank, pid in pids.items() if self._lives(pid)}

    def _lives(self, pid: int) -> bool:
        return self._outer.is_alive(pid) or self._unseen.live(pid, epoch_ns())

    def why_nothing(self, record: RunRecord, *, ended: bool) -> str:
        """Return why no step was measured, as a sentence; empty while that may yet change, and where some were."""
        if ended and self._assembly.live.mute() and not any(map(len, record.step_tracks)):
            return f"the ranks could not write their events: check whether the disk of {self._directory} is full"
        return self._silence.reason(self._assembly.book, record, ended=ended)

    def faults(self, record: RunRecord) -> tuple[str, ...]:
        """Return what could not be observed or read, in sentences."""
        notes = [*self.nodes.notes(epoch_ns())]
        told = self.nodes.tells_elsewhere or (self.nodes.may_yet_come and bool(self.living()))
        unseen = "" if self._is_over else self._unseen.note(self._assembly.book)
        notes += [note for note in (self._two_runs, unseen, "" if told else missing_ranks(record)) if note]
        notes += probe_logs(self._directory)[:1]
        if self._assembly.faults:
            notes.append(f"part of the observation failed: {self._assembly.faults[0]}")
        return (*notes, *self.unread())

    def unread(self) -> tuple[str, ...]:
        """Return what of the record is missing or cannot be read, in sentences."""
        files, live = self._assembly.files, self._assembly.live
        empty = [f"{name} is empty" for name in live.empty] if self._is_over else []
        refused = dict.fromkeys((*files.refused.values(), *live.refused.values(), *files.unread, *empty))
        notes = [f"part of the record cannot be read: {reason}" for reason in [*refused][:_UNREAD_SHOWN]]
        if (more := len(refused) - _UNREAD_SHOWN) > 0:
            notes.append(f"{count(more, 'more file')} of the record cannot be read")
        if missing := live.missing():
            rows = count(missing, "step or collective", "steps and collectives")
            notes.append(f"{rows} are missing: another program truncated or overwrote the record")
        if files.shortened:
            notes.append("events are missing: another program truncated the record")
        if self._assembly.has_gaps:
            notes.append("where the ranks diverge is unknown: part of the record is missing")
        if files.damaged_lines:
            lines = count(files.damaged_lines, "line")
            notes.append(f"of the record {lines} could not be read")
        return tuple(notes)

    def gpus_note(self) -> str:
        """Return why there are no figures of GPUs, or no new ones; empty when all is well."""
        return self._gpus.note() if self._gpus is not None else ""

    def close(self) -> None:
        """Let go of every file."""
        if self._gpus is not None:
            self._gpus.close()
        self.nodes.close()
        self._close_files()

    def _close_files(self) -> None:
        self._assembly.files.close()
        self._assembly.live.close()

    def _words_of(self, pid: int) -> CrashDump | None:
        if pid not in self._crash_dumps:
            self._crash_dumps[pid] = read_crash_dump(self._directory, pid)
        return self._crash_dumps[pid]

    def _joined(self, now_ns: int) -> RunRecord:
        """Return what is known of all ranks, those of other nodes included."""
        return self.nodes.joined(self.own_record, self._window_ns, now_ns)

    def _own_record(self, now_ns: int) -> RunRecord:
        book = self._assembly.book
        threads = {pid: entry.training_thread for pid, entry in book.processes.items()}
        told = book.added_to(self._plan.job)
        job = msgspec.structs.replace(
            told,
            kind="run",
            environment=self._job_environment(),
            interfaces=told.interfaces or network_interfaces(),
            ranks_expected=told.world_size or book.launched_for,
            stop_reason="interrupted" if self._told_to_end else "",
            ended_ns=now_ns,
        )
        record = with_crash_dumps(self._assembly.record(job), self._crash_dumps, threads)
        if self._gpus is not None:
            record = self._with_hosts(self._gpus.added_to(record), now_ns)
        return self._stuck_ranks.judged(record, threads, self._looping)

    def _with_hosts(self, record: RunRecord, now_ns: int) -> RunRecord:
        """Return the record with what the ranks get of this machine."""
        uses = self._hosts.look(self._outer.of_ranks(self._assembly.book.pids()), now_ns)
        if not uses:
            return record
        streams = {**record.streams, "host_uses": StreamState("complete")}
        return msgspec.structs.replace(record, host_uses=uses, streams=streams)

    def _job_environment(self) -> Mapping[str, str]:
        """Return the variables that the ranks were started with, where whoever started them did not say."""
        if not self._environment and not self._is_over:
            found = (environment_of(pid) for pid in self._outer.of_ranks(self._assembly.book.pids()).values())
            self._environment = recorded_environment(next((one for one in found if one), {}))
        return self._environment
