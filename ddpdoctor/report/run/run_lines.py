"""A watched job in plain lines: how fast it goes, what is wrong with it, and when it stands still."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.files import regex
from ddpdoctor.finding import in_user_code, rank_list, shown_path
from ddpdoctor.report.layout import added, in_milliseconds, percent, rate, seconds, share_of
from ddpdoctor.report.streams import one_line

if TYPE_CHECKING:
    from ddpdoctor.finding import Finding
    from ddpdoctor.monitor.snapshot import FindingView, Snapshot, StallSide, StallView

PREFIX = "ddpdoctor: "
PROGRESS_EVERY_NS = 5_000_000_000
WAITING_EVERY_NS = 30_000_000_000
SHARES = (0.5, 0.8)
"""A wait is shown again when so much of the group's timeout is over."""
_LENGTH = regex(r"\d[\d.,]* ?(ms|s|min|h|d)\b")
STALLED_EVERY_NS = 30_000_000_000
"""A job that is known to stand still has nothing new to tell."""
ENDED_AFTER_NS = 3_000_000_000
"""A launcher usually ends that soon after its ranks."""
ENDED_EVERY_NS = 30_000_000_000


class RunLines:
    """Remembers what was said of a run, so that each thing is said once."""

    def __init__(self, root: str) -> None:
        self._root = root
        """Paths are shown relative to it."""
        self._progress_at_ns = 0
        self._progress = ""
        self._ended_ns = 0
        """When it was seen that no rank runs any more; 0 while one does."""
        self._stall: StallView | None = None
        self._stood_ns = 0
        self._steps_at_stall = 0
        self._notes: set[str] = set()
        self._said: set[str] = set()
        """Titles of findings: a rank that has raised is no news again as what the others wait for."""
        self._wait: tuple[int, int] | None = None
        """The late rank of the wait that was shown, and since when the others wait."""
        self._wait_told_ns = 0
        self._shares_told = 0
        self._holding: dict[tuple[str, str, int], FindingView] = {}

    def news(self, snapshot: Snapshot) -> list[str]:
        """Return what is worth saying since the last call, in order."""
        lines = [*self._new_notes(snapshot), *self._findings(snapshot), *self._stalled(snapshot)]
        lines += self._waiting(snapshot)
        every_ns = STALLED_EVERY_NS if snapshot.stall is not None else PROGRESS_EVERY_NS
        since_ns = snapshot.now_ns - self._progress_at_ns
        if snapshot.state not in ("running", "stalled"):
            return [PREFIX + line for line in lines]
        if snapshot.ranks and not any(rank.alive for rank in snapshot.ranks):
            return [PREFIX + line for line in (*lines, *self._outlived(snapshot))]
        self._ended_ns = 0
        said = progress(snapshot) if since_ns >= every_ns else ""
        if said and (said != self._progress or since_ns >= STALLED_EVERY_NS):
            self._progress_at_ns, self._progress = snapshot.now_ns, said
            lines.append(said)
        return [PREFIX + line for line in lines]

    def _outlived(self, snapshot: Snapshot) -> list[str]:
        """Return who still runs where all ranks have ended, now and then; the figures of their last steps are over."""
        if not self._ended_ns:
            self._ended_ns, self._progress_at_ns = snapshot.now_ns, 0
        ago_ns = snapshot.now_ns - self._ended_ns
        if ago_ns < ENDED_AFTER_NS or snapshot.now_ns - self._progress_at_ns < ENDED_EVERY_NS:
            return []
        self._progress_at_ns, self._progress = snapshot.now_ns, ""
        launcher = f"the launcher, PID {snapshot.launcher_pid}," if snapshot.launcher_pid else "the launcher"
        made = f", after step {snapshot.steps:,}" if snapshot.steps is not None else ""
        return [f"all ranks ended {seconds(ago_ns)} ago{made}; {launcher} is still running"]

    def _new_notes(self, snapshot: Snapshot) -> list[str]:
        new = [note for note in snapshot.notes if note not in self._notes]
        self._notes.update(new)
        return [one_line(note) for note in new]

    def _findings(self, snapshot: Snapshot) -> list[str]:
        holding = {_key(view): view for view in snapshot.findings if view.until_ns is None}
        ended = {_key(view) for view in snapshot.findings if view.until_ns is not None}
        lines = []
        for key, view in holding.items():
            stall = snapshot.stall
            if key not in self._holding and (stall is None or view.finding.title != stall.title):
                lines += finding_lines(view.finding, self._root)
                self._said.add(view.finding.title)
        for key, view in self._holding.items():
            # That a standstill is over is shown when the job continues.
            stood = self._stall is not None and view.finding.title == self._stall.title
            if key not in holding and key in ended and not stood:
                lines.append(f"over: {view.finding.name} ({view.finding.code}): {one_line(view.finding.title)}")
        self._holding = holding
        return lines

    def _waiting(self, snapshot: Snapshot) -> list[str]:
        """Ranks that wait for one that works: soon, then seldom, and when the timeout comes near."""
        wait = snapshot.wait
        if wait is None or snapshot.state not in ("running", "waiting"):
            self._wait = None
            return []
        if self._wait != (wait.late, wait.since_ns):
            self._wait, self._wait_told_ns, self._shares_told = (wait.late, wait.since_ns), 0, 0
        said = ""
        if wait.timeout_at_ns is not None:
            share = (snapshot.now_ns - wait.since_ns) / (wait.timeout_at_ns - wait.since_ns)
            passed = sum(share >= limit for limit in SHARES)
            if passed > self._shares_told:
                whole = seconds(wait.timeout_at_ns - wait.since_ns)
                said = f"; {SHARES[passed - 1]:.0%} of the group's timeout of {whole} has passed"
            self._shares_told = max(passed, self._shares_told)
        if not said and snapshot.now_ns - self._wait_told_ns < WAITING_EVERY_NS:
            return []
        self._wait_told_ns = snapshot.now_ns
        return [f"waiting: {one_line(wait.text)}{said}"]

    def _stalled(self, snapshot: Snapshot) -> list[str]:
        known, stall = self._stall, snapshot.stall
        if stall is not None:
            self._stall, self._stood_ns = stall, snapshot.now_ns - stall.since_ns
            self._steps_at_stall = snapshot.steps or 0
            if known is not None and _same_stall(known, stall):
                return _more_sides(known, stall, self._root)
            return [] if stall.title in self._said else stall_lines(stall, self._root)
        if known is None or (snapshot.steps or 0) <= self._steps_at_stall:
            return []
        self._stall = None
        return [f"the job continues; it stalled for {seconds(self._stood_ns)}"]


def _more_sides(known: StallView, stall: StallView, root: str) -> list[str]:
    """Return what has become known of ranks of which something was told: where a worker is that one waits for."""
    before = Counter(side.ranks for side in known.sides)
    lines = []
    for ranks, number in Counter(side.ranks for side in stall.sides).items():
        if 0 < before[ranks] < number:
            lines += [_side_line(side, root) for side in stall.sides if side.ranks == ranks][before[ranks] :]
    return lines


def _same_stall(known: StallView, stall: StallView) -> bool:
    """Return whether a standstill is the one that was shown; the time that a rank still sleeps shrinks meanwhile."""
    titles = [_LENGTH.sub("", view.title) for view in (known, stall)]
    return titles[0] == titles[1] and known.may_go_on == stall.may_go_on


def progress(snapshot: Snapshot) -> str:
    """Return one line: where the job is, how fast, and what its steps are spent on."""
    parts = [f"step {snapshot.steps:,}" if snapshot.steps is not None else "no step yet"]
    if snapshot.stall is not None:
        stands_ns = snapshot.now_ns - snapshot.stall.since_ns
        return ", ".join([*parts, f"stalled for {seconds(stands_ns)}", one_line(snapshot.meanwhile)])
    if snapshot.overdue_ns is not None:
        return ", ".join([*parts, f"no step for {seconds(snapshot.overdue_ns)}", one_line(snapshot.meanwhile)])
    if snapshot.steps_per_s is not None:
        parts.append(f"{rate(snapshot.steps_per_s)} steps/s")
    if snapshot.samples_per_s is not None:
        parts.append(f"{rate(snapshot.samples_per_s)} samples/s")
    if snapshot.step_times is not None:
        times = snapshot.step_times
        parts.append(f"p50 {in_milliseconds(times.p50_ns)}, p95 {in_milliseconds(times.p95_ns)}")
    phases = snapshot.phases
    if phases is not None:
        exposed = added(phases.exposed_waiting_ns, phases.exposed_transfer_ns)
        parts.append(f"data wait {percent(share_of(phases.data_wait_ns, phases.step_ns))}")
        parts.append(f"exposed {percent(share_of(exposed, phases.step_ns))}")
        if phases.exposed_waiting_ns is not None:
            parts[-1] += f" ({percent(share_of(phases.exposed_waiting_ns, phases.step_ns))} waiting for ranks)"
    late = [rank for rank in snapshot.ranks if rank.culprit and rank.late_phase]
    for rank in late:
        parts.append(f"rank {rank.rank} late by {in_milliseconds(rank.late_ns)} ({rank.late_phase.replace('_', ' ')})")
    return ", ".join(parts)


def finding_lines(finding: Finding, root: str) -> list[str]:
    """Return a finding that has arisen: what, where, and what to do."""
    place = finding.location
    where = f" at {one_line(shown_path(place.file, root))}:{place.line}" if place is not None else ""
    ranks = f" on {rank_list(finding.ranks)}" if finding.ranks else ""
    head = f"{finding.severity.value}: {finding.name} ({finding.code}){ranks}{where}: {one_line(finding.title)}"
    return [head, f"  do: {one_line(finding.advice)}"]


def stall_lines(stall: StallView, root: str) -> list[str]:
    """Return the verdict on a standstill: what, who, where, and what to do."""
    lines = [f"STALLED: {one_line(stall.title)}{' (it may recover)' if stall.may_go_on else ''}"]
    lines += [_side_line(side, root) for side in stall.sides]
    if stall.remedy:
        lines.append(f"  do: {one_line(stall.remedy)}")
    return lines


def _side_line(side: StallSide, root: str) -> str:
    mark = "culprit: " if side.culprit else ""
    return f"  {mark}{rank_list(side.ranks)} {one_line(side.text)}{_at(side, root)}"


def _at(side: StallSide, root: str) -> str:
    """Return the user's line, unless the text says it."""
    frame = next((frame for frame in side.stack if in_user_code(frame.file)), None)
    if frame is None or f"{frame.file.rpartition('/')[2]}:{frame.line}" in side.text:
        return ""
    return f" (at {one_line(shown_path(frame.file, root))}:{frame.line})"


def _key(view: FindingView) -> tuple[str, str, int]:
    return view.finding.code, view.finding.fingerprint, view.since_ns
