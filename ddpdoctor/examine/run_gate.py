"""Runs a gate: examines each target, compares it with a baseline or with another revision, within one time limit.

Every target yields an ``Examination``, whatever happens: one that could not be examined says why, and is never clean.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Literal

import msgspec

from ddpdoctor.errors import DdpDoctorError, ExitCode, UnreadableScript, UsageError
from ddpdoctor.examination import (
    Examination,
    GateSection,
    RehearsalSection,
    SourceSection,
    TimeComparison,
    not_rehearsed,
)
from ddpdoctor.examine.one_script import ExamineRequest, OnProgress, examine_and_record, unchecked, unreadable
from ddpdoctor.finding import plain
from ddpdoctor.gate.baseline import Entry, read_baseline, refuse_unwritable, write_entries
from ddpdoctor.gate.budget import Budget, windows_of
from ddpdoctor.gate.judge import Wanted, entry_of, judged, may_be_agreed_on, pruned
from ddpdoctor.launch.interpreter import other_revision, working_in
from ddpdoctor.launch.request import LaunchLine

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

# Compares step times of pairs of rehearsals: how much slower one side is, and how far that is certain. Pure.

FEWEST_PAIRS = 3
_T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)
"""Student's t of the two-sided 95% interval, by degrees of freedom from 1; later ones are taken for 1.96 and more."""


def step_times_ms(record: RunRecord) -> tuple[float, ...]:
    """Return the duration in ms of each step of the slowest rank but the first, in which DDP settles its buckets."""
    ranks = [windows_of(record, rank) for rank in record.rank_numbers()]
    fewest = min(map(len, ranks), default=0)
    rows = [[(window.end_ns - window.begin_ns) / 1e6 for window in windows[1:fewest]] for windows in ranks]
    return tuple(map(max, zip(*rows, strict=True))) if rows else ()


def compare_times(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], allowed: float) -> TimeComparison:
    """Compare pairs of (before, now), each the step times of one rehearsal.

    The change is the geometric mean of the pairs' ratios of medians, with the t interval of their logarithms: what the
    machine does to both sides of a pair cancels out, what it does between pairs widens the interval. Slower is only
    what has its whole interval above ``allowed``.
    """
    usable = [(before, now) for before, now in pairs if before and now]
    befores, nows = [median(before) for before, _ in usable], [median(now) for _, now in usable]
    logs = [math.log(now / before) for before, now in zip(befores, nows, strict=True) if before > 0 and now > 0]
    steps = sum(len(now) for _, now in usable)
    before_ms, now_ms = (median(befores), median(nows)) if usable else (0.0, 0.0)
    if len(logs) < FEWEST_PAIRS:
        note = f"{len(logs)} pairs were timed, and {FEWEST_PAIRS} are needed to tell a change from noise"
        return TimeComparison(
            pairs=len(logs), steps=steps, before_ms=before_ms, now_ms=now_ms, change=0.0, low=-1.0, high=math.inf,
            allowed=allowed, slower=False, note=note,
        )  # fmt: skip
    centre = mean(logs)
    index = len(logs) - 2
    half = (_T_95[index] if index < len(_T_95) else 2.13) * stdev(logs) / math.sqrt(len(logs))
    low, high = math.expm1(centre - half), math.expm1(centre + half)
    return TimeComparison(
        pairs=len(logs),
        steps=steps,
        before_ms=before_ms,
        now_ms=now_ms,
        change=math.expm1(centre),
        low=low,
        high=high,
        allowed=allowed,
        slower=low > allowed,
    )


TIMED_BATCHES = 16
"""Batches of a pass where steps are timed: a median of a few steps is none."""
REHEARSAL_S = 120.0
"""A rehearsal may take so long, and longer when the gate's limit leaves more for each."""
LEAST_S = 3.0
"""With less time left nothing is started any more: two ranks need as much to import torch."""
GRACE_S = 5.0
"""What is waited for beyond the limit until everything is stopped: it ends rehearsals by itself."""
Mode = Literal["compare", "update", "prune"]


class GateTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A script and how it is launched."""

    name: str
    """What it is called in the baseline: its command line."""
    line: LaunchLine

    def command(self, options: Sequence[str]) -> str:
        """Return the command, to be pasted, that gates this target alone with some options."""
        line = self.line
        if line.launch.starter:
            return plain(shlex.join(["ddpdoctor", "gate", *options, "--"])) + f" {self.name}"
        script = [*(("-m",) if line.launch.module else ()), line.target]
        after = ["--", *line.arguments] if line.arguments else []
        return plain(shlex.join(["ddpdoctor", "gate", *script, *options, *after]))


class GateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare with what."""

    targets: tuple[GateTarget, ...]
    how: ExamineRequest
    """How each target is examined; its own target and arguments do not count."""
    baseline: Path
    shown_baseline: str
    options: tuple[str, ...] = ()
    """What the command line says of all this but ``mode``, to be said again in commands that are to be pasted."""
    mode: Mode = "compare"
    against: str = ""
    """A git revision to compare with, instead of the baseline."""
    allowed_growth: float = 0.0
    allowed_time_growth: float | None = None
    """With ``against``: by what share a step may become slower."""
    pairs: int = 5
    time_limit_s: float = 600.0
    ignored: frozenset[str] = frozenset()

    def again(self, target: GateTarget) -> str:
        """Return the command that gates one target as this does."""
        return target.command(self.options)

    def accepting(self, target: GateTarget) -> str:
        """Return the command that writes the baseline's entry of a target; empty where a revision is compared."""
        return "" if self.against else target.command(("--update", *self.options))


class TimeIsUp(BaseException):
    """Raised when the timeout has passed, wherever we are; no handler of ``Exception`` may swallow it."""


def target_of(line: LaunchLine, words: Sequence[str] = ()) -> GateTarget:
    """Name a target by the words of its command line."""
    module = ("-m",) if line.launch.module else ()
    return GateTarget(name=plain(shlex.join(words or (*module, line.target, *line.arguments))), line=line)


def run_gate(request: GateRequest, on_progress: OnProgress = lambda progress: None) -> tuple[Examination, ...]:
    """Examine and compare every target.

    Raises UsageError for a baseline that is missing, lacks a target or cannot be read, before anything is started.
    An interruption ends everything that was started and makes the verdict of what is left inconclusive, with the
    exit code 130.
    """
    _demand_scripts(request.targets)
    baseline = _baseline(request)
    clock = _Clock(request.time_limit_s)
    found: list[Examination] = []
    entries: dict[str, Entry | None] = {}
    interruption = ""
    try:
        with clock.enforced(), _other_revision(request) as other:
            for number, target in enumerate(request.targets):
                left = (len(request.targets) - number) * (2 if other is not None else 1)
                result = _one(request, target, baseline, other, clock, left, on_progress)
                found.append(result.examination)
                if result.entry is not None:
                    entries[target.name] = result.entry
    except TimeIsUp:
        interruption = clock.sentence
    except KeyboardInterrupt:
        interruption = "it was interrupted"
    for target in request.targets[len(found) :]:
        code = ExitCode.INCONCLUSIVE if interruption == clock.sentence else ExitCode.INTERRUPTED
        found.append(_not_examined(request, target, interruption, code))
    if entries:
        write_entries(request.baseline, entries)
    return tuple(found)


class _Result(msgspec.Struct, frozen=True):
    examination: Examination
    entry: Entry | None = None
    """For the baseline, where it is to be written."""


class _OtherRevision:
    """The revision that is compared with, checked out."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def examined(
        self, request: GateRequest, target: GateTarget, limit_s: float, on_progress: OnProgress, batches: int | None
    ) -> tuple[Examination, RunRecord | None]:
        """Examine a target there; raises UsageError where that revision does not have it."""
        line = target.line
        if os.path.isabs(line.target):
            line = msgspec.structs.replace(line, target=os.path.relpath(line.target))
        with working_in(self._directory):
            if not line.launch.module and not Path(line.target).is_file():
                raise UsageError(f"{line.target} does not exist in the revision {request.against}")
            return _examined(request, GateTarget(name=target.name, line=line), limit_s, on_progress, batches)

    def entry(
        self, request: GateRequest, target: GateTarget, limit_s: float, on_progress: OnProgress
    ) -> tuple[Entry | None, str]:
        """Return what a baseline of that revision would hold, and why it lacks a budget, if it does."""
        examination, record = self.examined(request, target, limit_s, on_progress, None)
        if record is None:
            return None, examination.rehearsal.reason
        with working_in(self._directory):
            entry = entry_of(examination, record)
        if examination.rehearsal.status == "completed":
            return entry, ""
        return msgspec.structs.replace(entry, budget=Budget(), reach=None), examination.rehearsal.reason

    def times(self, request: GateRequest, target: GateTarget, clock: _Clock, on_progress: OnProgress) -> TimeComparison:
        """Time pairs of rehearsals, that revision and this one by turns first, as many as the time allows."""
        assert request.allowed_time_growth is not None
        pairs: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
        longest_s = 0.0
        for number in range(request.pairs):
            began_s = time.monotonic()
            if clock.left_s < max(LEAST_S, 1.2 * longest_s):
                break
            sides: dict[bool, tuple[float, ...]] = {}
            for here in (False, True) if number % 2 == 0 else (True, False):
                examine_side = _examined if here else self.examined
                _, record = examine_side(request, target, clock.share_s(2), on_progress, TIMED_BATCHES)
                sides[here] = step_times_ms(record) if record is not None else ()
            pairs.append((sides[False], sides[True]))
            longest_s = max(longest_s, time.monotonic() - began_s)
        return compare_times(pairs, request.allowed_time_growth)


@contextmanager
def _other_revision(request: GateRequest) -> Iterator[_OtherRevision | None]:
    if not request.against:
        yield None
        return
    with other_revision(request.against) as directory:
        yield _OtherRevision(directory)


def _against(
    request: GateRequest,
    target: GateTarget,
    other: _OtherRevision,
    wanted: Wanted,
    clock: _Clock,
    rehearsals: int,
    on_progress: OnProgress,
) -> Wanted:
    """Return what the other revision says, instead of a baseline."""
    before, gap = other.entry(request, target, clock.share_s(rehearsals), on_progress)
    note = f"{wanted.against} could not be rehearsed to its end, so no budget was compared: {gap}"
    return msgspec.structs.replace(wanted, before=before, notes=(note,) if gap else ())


class _Clock:
    """The time that a gate has."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self._until_s - time.monotonic()

    @property
    def sentence(self) -> str:
        """Why something was not done."""
        return f"the time limit of the gate, {self._limit_s:g} s, was reached; raise it with `--time-limit`"

    def share_s(self, rehearsals: int) -> float:
        """Seconds that the next of so many rehearsals may take; raises TimeIsUp when it is not worth starting."""
        left_s = self.left_s
        if left_s < LEAST_S:
            raise TimeIsUp
        return min(left_s, max(REHEARSAL_S, left_s / rehearsals))

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Raise TimeIsUp when the limit is well over, for what has no limit of its own; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, max(self.left_s, 0.0) + GRACE_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)


def _time_is_up(number: int, frame: object) -> None:
    raise TimeIsUp


def _baseline(request: GateRequest) -> dict[str, Entry]:
    if request.against:
        return {}
    if request.mode == "update":
        refuse_unwritable(request.baseline)
        return {}
    entries = read_baseline(request.baseline)
    shown = request.shown_baseline
    if entries is None:
        raise UsageError(
            f"there is no baseline {shown}",
            f"`{request.accepting(request.targets[0])}` writes it; commit it with the script.",
        )
    for target in request.targets:
        if target.name not in entries:
            known = ", ".join(f"`{name}`" for name in entries) or "none"
            raise UsageError(
                f"{shown} has no entry for `{target.name}`, only for {known}",
                f"`{request.accepting(target)}` adds one; a target is identified by its command"
                " line, including arguments.",
            )
    return entries


def _demand_scripts(targets: Sequence[GateTarget]) -> None:
    for target in targets:
        path = Path(target.line.target)
        if not target.line.launch.module and not path.is_file():
            raise UsageError(f"{path} is a directory" if path.is_dir() else f"{path} does not exist")


def _one(
    request: GateRequest,
    target: GateTarget,
    baseline: dict[str, Entry],
    other: _OtherRevision | None,
    clock: _Clock,
    rehearsals: int,
    on_progress: OnProgress,
) -> _Result:
    """Examine one target; what goes wrong is what the examination says."""
    wanted = Wanted(
        against=f"the revision {request.against}" if request.against else request.shown_baseline,
        before=baseline.get(target.name),
        allowed_growth=request.allowed_growth,
        ignored=request.ignored,
        update=request.accepting(target),
        again=request.again(target),
    )
    try:
        if other is not None:
            wanted = _against(request, target, other, wanted, clock, rehearsals, on_progress)
            rehearsals -= 1
        if wanted.before is not None and wanted.before.equivalence is not msgspec.UNSET:
            request = msgspec.structs.replace(request, how=msgspec.structs.replace(request.how, equivalence=True))
        examination, record = _examined(request, target, clock.share_s(rehearsals), on_progress)
        if (
            other is not None
            and request.allowed_time_growth is not None
            and examination.rehearsal.status == "completed"
        ):
            times = other.times(request, target, clock, on_progress)
            wanted = msgspec.structs.replace(wanted, times=times)
    except UnreadableScript as error:
        asked = msgspec.structs.replace(request.how, target=target.line.target)
        return _Result(unreadable(asked, error))
    except DdpDoctorError as error:
        return _Result(_not_examined(request, target, error.message, error.exit_code, error.hint))
    now = entry_of(examination, record) if record is not None else None
    if request.mode == "update":
        return _updated(examination, now, wanted)
    result = judged(examination, now, wanted)
    comparable = examination.rehearsal.status == "completed" and result.gate is not None and not result.gate.doubt
    if request.mode == "prune" and comparable and now is not None and wanted.before is not None:
        assert result.gate is not None
        return _Result(_written(result), pruned(wanted.before, now, result.gate.figures))
    return _Result(result)


def _updated(examination: Examination, now: Entry | None, wanted: Wanted) -> _Result:
    if now is None or not may_be_agreed_on(examination):
        why = "nothing was written: a baseline needs a rehearsal that runs to its end, without hang or mismatch"
        return _Result(judged(examination, now, msgspec.structs.replace(wanted, before=None, notes=(why,))))
    accepted = tuple(f"accepted: {one.code} {one.shown}" for one in now.findings)
    kept = msgspec.structs.replace(wanted, before=now, notes=accepted)
    return _Result(_written(judged(examination, now, kept)), now)


def _written(examination: Examination) -> Examination:
    assert examination.gate is not None
    return msgspec.structs.replace(examination, gate=msgspec.structs.replace(examination.gate, written=True))


def _examined(
    request: GateRequest, target: GateTarget, limit_s: float, on_progress: OnProgress, batches: int | None = None
) -> tuple[Examination, RunRecord | None]:
    own_s = request.how.time_limit_s
    asked = msgspec.structs.replace(
        request.how,
        equivalence=request.how.equivalence if batches is None else False,
        target=target.line.target,
        arguments=target.line.arguments,
        launch=target.line.launch,
        time_limit_s=limit_s if own_s is None else min(own_s, limit_s),
        batches=request.how.batches if batches is None else batches,
    )
    return examine_and_record(asked, on_progress)


def _not_examined(request: GateRequest, target: GateTarget, reason: str, code: ExitCode, hint: str = "") -> Examination:
    source = SourceSection(status="read", files=0, seconds=0.0)
    rehearsal = RehearsalSection(status="failed", reason=reason, hint=hint) if reason else not_rehearsed()
    examination = unchecked(target.line.target, request.how.fail_on, code, source, rehearsal)
    gate = GateSection(against=request.against or request.shown_baseline, reproduce=request.again(target))
    return msgspec.structs.replace(examination, gate=gate)
