"""Samples what the ranks' process trees do, so that a busy rank is distinguished from one that is stuck."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from ddpdoctor.diagnosis.live_verdict import LastingWait
from ddpdoctor.diagnosis.stacks import ProcessSample, Standing, at_rest, judge_liveness, stands_on
from ddpdoctor.files.untrusted import read_start
from ddpdoctor.launch.pid_namespaces import thread_outside
from ddpdoctor.monitor.processes.hosts import scheduled_of, scheduled_threads
from ddpdoctor.probe.live.clocks import clock_of
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.ring_reader import Heartbeat, RingTail
from ddpdoctor.record.streams.measured import StepTrack
from ddpdoctor.record.writer import epoch_ns

SAMPLE_EVERY_S = 0.5
LONGEST_SLEEP_NS = 1_800_000_000_000
"""A sleep with a later end wakes no one in time, where no group has a shorter timeout: gloo's own is so long."""
SILENT_AFTER_NS = 2_000_000_000
LONGEST_POLL_NS = 6_000_000_000
"""Whoever wakes itself at least so often got nothing by that; a loader's idle worker does every five seconds."""
DISK_PATIENCE_MS = 60_000
"""A thread that the kernel holds for a disk is at work for so long."""


class LivenessSampler:
    """Keeps the last seconds of samples of every rank's process."""

    def __init__(
        self,
        stall_after_s: float,
        outer_pid: Callable[[int], int | None] = lambda pid: pid,
        *,
        heeds_clocks: bool = False,
        written_for_us: Callable[[int], int] = lambda pid: 0,
        trains_in_main: Callable[[int], bool] = lambda pid: False,
    ) -> None:
        """``outer_pid`` gives the number out here of a process that knows itself by another one.

        ``heeds_clocks``: what runs, or will be woken by a clock that it set itself, is not stuck. ``written_for_us``
        gives the bytes that a process has written because it was asked, beside those that it counts itself. Of a
        process that ``trains_in_main`` its main thread, it is known how long that stands while others work.
        """
        self._trains_in_main = trains_in_main
        self._written_for_us = written_for_us
        self._heeds_clocks = heeds_clocks
        self._stall_after_s = stall_after_s
        self._outer_pid = outer_pid
        self._samples: dict[int, deque[ProcessSample]] = {}
        self._standings: dict[int, Standing] = {}
        self._own_threads: dict[tuple[int, int], int] = {}
        """By process and its name for a thread of ours: the number of that out here, 0 where it is not seen."""
        self._sampled_s = 0.0
        self.longest_sleep_ns = LONGEST_SLEEP_NS
        """The shortest timeout of the job's groups."""

    def look(self, rings: Mapping[int, RingTail], threads: Mapping[int, int]) -> frozenset[int]:
        """Take a sample when one is due; the processes that are stuck.

        One whose training thread stands on stays so, whatever another of its threads writes to a log. ``threads`` are
        those of ours in each process, by the numbers that they know themselves by; 0 where it has none.
        """
        now_s = time.monotonic()
        if now_s - self._sampled_s >= SAMPLE_EVERY_S:
            self._sampled_s = now_s
            for pid, ring in rings.items():
                self._take(pid, ring, threads.get(pid, 0))
        stuck = {pid for pid in self._samples if self._does_nothing(pid)}
        for pid in stuck & self._standings.keys():
            self._standings[pid] = msgspec.structs.replace(self._standings[pid], stuck=True)
        return frozenset(stuck | {pid for pid, standing in self._standings.items() if standing.stuck})

    def restless(self) -> dict[int, int]:
        """Return for how long, in ns, the training thread of a process has stood while the rest of it did a little.

        One that does nothing any more, whatever it did before, is stuck and not restless.
        """
        return {
            pid: standing.lasted_ns
            for pid, standing in self._standings.items()
            if standing.restless and standing.lasted_ns >= self._stall_after_s * 1e9 and not self._does_nothing(pid)
        }

    def woken_at_ns(self, pid: int) -> int:
        """Return when the clock by which a child of a process sleeps now ends; 0 without one."""
        samples = self._samples.get(pid)
        return samples[-1].woken_at_ns if samples else 0

    def _does_nothing(self, pid: int) -> bool:
        return judge_liveness(tuple(self._samples.get(pid, ())), self._stall_after_s) == "stuck"

    def at_rest(self, pids: Iterable[int]) -> bool:
        """Return whether none of the processes has done anything for the stall time but ask for something and sleep."""
        return all(at_rest(tuple(self._samples.get(pid, ())), self._stall_after_s) for pid in pids)

    def _take(self, pid: int, ring: RingTail, thread: int) -> None:
        import psutil

        outer = self._outer_pid(pid)
        if outer is None:
            self._forget(pid)
            return
        try:
            beat = ring.heartbeat()
            use = self._use(outer, beat)
            if ring.heartbeat().own_bytes != beat.own_bytes:
                beat = ring.heartbeat()
                use = self._use(outer, beat)
        except (psutil.Error, AttributeError, OSError):
            self._forget(pid)
            return
        samples = self._samples.setdefault(pid, deque(maxlen=int(4 * self._stall_after_s / SAMPLE_EVERY_S) + 4))
        sample = ProcessSample(
            time_ns=time.monotonic_ns(),
            # Five beats a second took 0.4 to 0.9% of a core where a process that does less than 1% does nothing.
            cpu_ns=int(use.cpu_s * 1e9) - self._own_cpu_ns(outer, thread),
            io_bytes=use.io_bytes - beat.own_bytes - self._written_for_us(pid),
            stack_hash=f"{beat.stack_hash:x}",
            wakes=use.wakes,
            woken_at_ns=use.woken_at_ns,
            main_cpu_ns=beat.main_cpu_ns,
            main_runs=_runs(outer) if self._trains_in_main(pid) else -1,
            is_held=_is_silent(beat),
            child_runs=use.child_runs,
            progress=beat.forwards + beat.backwards + beat.optimizer_steps,
            main_wakes=self._is_in_time(beat.sleeps_until_ns),
        )
        samples.append(sample)
        if sample.main_runs >= 0:
            self._standings[pid] = stands_on(self._standings.get(pid), sample)

    def _forget(self, pid: int) -> None:
        self._samples.pop(pid, None)
        self._standings.pop(pid, None)

    def _own_cpu_ns(self, outer: int, thread: int) -> int:
        """Return for how long the thread of ours has run; 0 where the system does not tell."""
        if thread and (outer, thread) not in self._own_threads:
            self._own_threads[outer, thread] = thread_outside(outer, thread) or 0
        number = self._own_threads.get((outer, thread), 0)
        scheduled = scheduled_of(outer, number) if number else None
        return 0 if scheduled is None else scheduled.ran_ns

    def _use(self, pid: int, beat: Heartbeat) -> _Use:
        """Return what a process and all its children have used, and whether anything wakes one of them."""
        import psutil

        cpu_s, io_bytes, woken_at_ns, process, child_runs = 0.0, 0, 0, psutil.Process(pid), dict[int, int]()
        wakes = self._is_in_time(beat.sleeps_until_ns)
        for member in (process, *process.children(recursive=True)):
            with member.oneshot():
                times, status = member.cpu_times(), member.status()
            cpu_s += times.user + times.system
            counters = member.io_counters()
            io_bytes += counters.read_chars + counters.write_chars
            if not self._heeds_clocks:
                continue
            wakes |= status == psutil.STATUS_RUNNING
            wakes |= status == psutil.STATUS_DISK_SLEEP and beat.unchanged_ms < DISK_PATIENCE_MS
            if not wakes and (member is not process or _is_silent(beat)):
                clock = clock_of(member.pid, member.pid)
                # A child that waits for work looks up every few seconds as well.
                if clock is not None and clock.sleeps and self._is_in_time(clock.ends_at_ns):
                    wakes, woken_at_ns = True, clock.ends_at_ns
                elif member is not process and (clock is None or clock.ends_at_ns > epoch_ns() + LONGEST_POLL_NS):
                    child_runs[member.pid] = _runs(member.pid)
        return _Use(cpu_s, io_bytes, wakes and self._heeds_clocks, woken_at_ns, child_runs)

    def _is_in_time(self, ends_at_ns: int) -> bool:
        now_ns = epoch_ns()
        return now_ns - SAMPLE_EVERY_S * 1e9 < ends_at_ns < now_ns + self.longest_sleep_ns


class _Use(NamedTuple):
    cpu_s: float
    io_bytes: int
    wakes: bool
    woken_at_ns: int
    child_runs: dict[int, int]


def _runs(pid: int) -> int:
    """Return how often the main thread of a process was given a core; -1 where that is not known."""
    scheduled = scheduled_of(pid)
    return -1 if scheduled is None else scheduled.runs


def _is_silent(beat: Heartbeat) -> bool:
    """Return whether a rank cannot say itself what it sleeps by."""
    return epoch_ns() - beat.beat_at_ns > SILENT_AFTER_NS


# What the ranks and their launcher printed.

TAIL_BYTES = 8_000
LONGEST_LINE = 400
_PROBE_LOGS = 16
_OUTPUTS = 8
"""Files that are looked at: each launcher has a directory, and a script rarely starts several."""
_EXIT_STATUS = re.compile(r"exitcode\s*:?\s*(-?\d+)\)?\s*\(?.*?pid:\s*(\d+)\)")
_LAUNCHER_NOISE = re.compile(r"^[WIE]\d{4} |^\*{5,}|torch/distributed/(run|elastic)")


def launcher_output(directory: Path) -> Path:
    """File that takes what the launcher prints, and a script that starts its own ranks."""
    return directory / "launcher.out"


def rank_outputs(directory: Path) -> Path:
    """Directory for the output of ranks that torch's launcher redirects."""
    return directory / "output"


def tail_of_rank(directory: Path, local_rank: int) -> str:
    """Return the last lines that a rank wrote: its stderr, or its stdout when that is empty."""
    for stream in ("stderr.log", "stdout.log"):
        for path in sorted(rank_outputs(directory).glob(f"*/attempt_0/{local_rank}/{stream}"))[:_OUTPUTS]:
            text = tail(path, directory)
            if text.strip():
                return text
    return ""


def tail(path: Path, inside: Path | None = None) -> str:
    """Return the last lines of a file in the directory ``inside``, by default its own, whatever bytes are in it."""
    try:
        content = read_start(path, 2 * TAIL_BYTES, inside or path.parent, -TAIL_BYTES - 1)
    except OSError:
        return ""
    text = content[-TAIL_BYTES:].decode("utf-8", "replace")
    whole = text if len(content) <= TAIL_BYTES else text.partition("\n")[2]
    return "\n".join(map(_shortened, whole.split("\n")))


def _shortened(line: str) -> str:
    """Return a line that can be read; progress bars are drawn over each other in one line."""
    last = line.rstrip("\r").rpartition("\r")[2]
    return last if len(last) <= LONGEST_LINE else f"{last[: LONGEST_LINE // 2]} … {last[-LONGEST_LINE // 2 :]}"


def script_output(directory: Path) -> str:
    """Return what a script that starts its own ranks printed, without the launcher's own lines."""
    lines = tail(launcher_output(directory)).splitlines()
    return "\n".join(line for line in lines if not _LAUNCHER_NOISE.search(line))


def exit_statuses(directory: Path) -> dict[int, int]:
    """Exit status by process as torch's launcher reports it; negative for a signal."""
    statuses: dict[int, int] = {}
    for match in _EXIT_STATUS.finditer(tail(launcher_output(directory))):
        statuses[int(match[2])] = int(match[1])
    return statuses


def probe_logs(directory: Path) -> list[str]:
    """Return one text for each such process."""
    logs = sorted(directory.glob("probe-*.log"))[:_PROBE_LOGS]
    return [text.strip() for text in map(tail, logs) if text.strip()]


# Suspects an endless loop of a rank that others wait for: it works in one function, longer than ever before.

SHORTEST_NS = 60_000_000_000
PAUSES = 20
"""A loop has to last for so many of the longest pauses that the rank has made, and for a minute."""
_WARM_UP = 2
_NEWEST = 32
_WORKING_SHARE = 0.7
"""Share of the time for which a thread in a loop runs or waits for a core; one that reads or waits is in none."""


class _Place(msgspec.Struct, frozen=True):
    pid: int
    file: str
    function: str
    step: int


class LoopDetector:
    """Remembers since when the late rank has been in one function."""

    def __init__(self, outer_pid: Callable[[int], int | None] = lambda pid: pid) -> None:
        """``outer_pid`` gives the number out here of a process that knows itself by another one."""
        self._outer_pid = outer_pid
        self._place: _Place | None = None
        self._since_ns = self._seen_ns = self._wanted_ns = 0
        self._stood_ns = self._stood_in = 0
        """The longest that a rank was in one function in the newest such step, and that step …"""
        self._longest_ns = 0
        """… and in any step that was followed by others: the evaluation of the epoch before."""

    def look(self, wait: LastingWait | None, record: RunRecord, now_ns: int) -> int | None:
        """Return the process that seems to be in an endless loop; None while none does."""
        rank = next((rank for rank in record.ranks if wait is not None and rank.rank == wait.late), None)
        if wait is None or wait.place is None or rank is None:
            self._leave()
            return None
        steps = next((track for track in record.step_tracks if track.rank == rank.rank), None)
        step = steps.step[-1] if steps is not None and len(steps) else 0
        if step > self._stood_in:
            self._longest_ns, self._stood_ns = max(self._longest_ns, self._stood_ns), 0
        place = _Place(rank.pid, wait.place.file, wait.place.function, step)
        outer = self._outer_pid(rank.pid)
        wanted_ns = None if outer is None else _wanted_core_ns(outer)
        if place != self._place or wanted_ns is None:
            self._leave()
            self._place, self._since_ns, self._seen_ns, self._wanted_ns = place, now_ns, now_ns, wanted_ns or 0
            return None
        self._seen_ns, lasted_ns = now_ns, now_ns - self._since_ns
        if lasted_ns < max(patience_of(steps), PAUSES * self._longest_ns):
            return None
        return rank.pid if wanted_ns - self._wanted_ns >= _WORKING_SHARE * lasted_ns else None

    def _leave(self) -> None:
        if self._place is not None:
            self._stood_in, self._stood_ns = self._place.step, max(self._stood_ns, self._seen_ns - self._since_ns)
        self._place = None


def patience_of(steps: StepTrack | None) -> int:
    """Return for how long, in ns, a rank with these steps may be at one place before that is no usual pause."""
    return max(SHORTEST_NS, PAUSES * _longest_pause_ns(steps))


def usual_interval_ns(steps: StepTrack) -> int:
    """Return the median time in ns from one of the newest steps to the next; 0 where there are not two."""
    ended = steps.ended_at_ns[-_NEWEST:]
    return int(median(after - before for before, after in pairwise(ended))) if len(ended) > 1 else 0


def _longest_pause_ns(steps: StepTrack | None) -> int:
    """Return the longest time for a step, or between two, of a rank, its first ones apart; 0 where it has made none."""
    if steps is None:
        return 0
    started, ended = steps.started_at_ns[_WARM_UP:], steps.ended_at_ns[_WARM_UP:]
    lengths = [end - start for start, end in zip(started, ended, strict=True)]
    return max([*lengths, *(start - end for start, end in zip(started[1:], ended, strict=False))], default=0)


def _wanted_core_ns(pid: int) -> int | None:
    """Return for how long any thread of a process has run or waited for a core; None where not known."""
    return max((scheduled.ran_ns + scheduled.waited_ns for _, scheduled in scheduled_threads(pid)), default=None)
