"""Watches a run: reads what its ranks write, runs the checks on it, and hands out snapshots for a face to show.

::

    from ddpdoctor.profile.watch import live_source

    source = live_source(Path.home() / ".local/state/ddpdoctor/runs/run-20260101-120000-abcd")
    print(source.snapshot().verdict.text)

``live_source`` raises RecordError for a directory that cannot be read. ``ddpdoctor.monitor.replay`` shows a run that
is over.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.catalogue.registry import CatalogueEntry, load, read_catalogue, standing_for
from ddpdoctor.catalogue.run_checks import run_live_checks
from ddpdoctor.catalogue.select import Suppression, chosen_checks, suppress, suppressions_in, unignored
from ddpdoctor.config import find_settings
from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence_kind import classify
from ddpdoctor.diagnosis.failures import may_yet_be_known
from ddpdoctor.diagnosis.live_verdict import LastingWait, with_last_steps
from ddpdoctor.diagnosis.performance.stragglers import FEWEST_STEPS
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary, RunVerdict
from ddpdoctor.diagnosis.performance.verdict import SEE_ALL, run_verdict
from ddpdoctor.diagnosis.steps import WARM_UP_STEPS, recent
from ddpdoctor.diagnosis.wording import only_lost_their_peers, placed
from ddpdoctor.files.untrusted import source_of
from ddpdoctor.finding import Fact, Finding, Severity, Trouble, with_fingerprints
from ddpdoctor.findings import merge
from ddpdoctor.launch.job import LaunchedJob
from ddpdoctor.monitor.build_snapshot import LastWait, Look, accused, build_snapshot, stall_view, steps_made
from ddpdoctor.monitor.finding_hold import (
    OF_THE_MOMENT,
    FindingHold,
    LastStandstill,
    is_of_the_end,
    is_suspicion,
    ran_to_their_ends,
)
from ddpdoctor.monitor.history import HistoryWriter
from ddpdoctor.monitor.live_run import LiveRun
from ddpdoctor.monitor.replay import Series
from ddpdoctor.monitor.snapshot import FindingView, Listener, RunState, Snapshot, StallView
from ddpdoctor.record.joining import NodePart
from ddpdoctor.record.model import RunRecord, StreamState
from ddpdoctor.record.reader import RunPlan, read_plan
from ddpdoctor.record.writer import epoch_ns, share_clock
from ddpdoctor.what_if.answer import Gains

# Keeps work that recurs from taking more than its share of a core, however many ranks there are.


class Pace:
    """When one kind of work is due again: the dearer it was, the later."""

    def __init__(self, every_ns: int, at_most_ns: int, share: float, most_share: float = 1.0) -> None:
        """``every_ns`` apart, and further while the work takes more than ``share`` of a core; ``at_most_ns`` apart.

        Further than that only while it would take more than ``most_share``, as with thousands of ranks. What the first
        time costs tells nothing of the next: it pays for what is imported then.
        """
        self._most_share = most_share
        self._every_ns = every_ns
        self._at_most_ns = at_most_ns
        self._share = share
        self._due_at_ns = 0
        self.cost_ns = 0
        """What it cost last."""
        self._is_first = True

    def is_due(self, now_ns: int) -> bool:
        """Return whether it is time for the work."""
        return now_ns >= self._due_at_ns

    @contextmanager
    def work(self, now_ns: int) -> Iterator[None]:
        """Note what the work in the body costs."""
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            cost_ns = 0 if self._is_first else time.thread_time_ns() - began_ns
            self._is_first = False
            self.cost_ns = cost_ns
            wanted_ns = min(self._at_most_ns, max(self._every_ns, int(cost_ns / self._share)))
            self._due_at_ns = now_ns + max(wanted_ns, int(cost_ns / self._most_share))


# Asks the checks about a watched job: those that the project wants, less what its comments suppress.


class LiveChecks:
    """The checks of one watched job."""

    def __init__(self, root: str) -> None:
        """Read the settings of the project that ``root`` is in; raises ConfigurationError for wrong ones."""
        self._root = root
        self._settings = find_settings(Path(root))
        self._catalogue = read_catalogue()
        self._chosen = chosen_checks(self._catalogue, (), (), self._settings)
        self._codes = {entry.code: entry.code for entry in self._catalogue.entries}
        self._codes |= {entry.name: entry.code for entry in self._catalogue.entries}
        self._comments: dict[str, tuple[Suppression, ...]] = {}
        self._gains = Gains()

    def findings(self, record: RunRecord, *, stands: bool = False, whole: bool = False) -> tuple[Finding, ...]:
        """Return what the checks find in a record, the most urgent first; a check that fails costs its own finding
        only.

        ``stands``: those are not asked that judge by measured steps how fast the job is, which takes seconds with
        thousands of ranks, while a hang has to be reported. ``whole``: the run is over, and what mending a finding
        brings is what ``what-if`` says of all of it.
        """
        if whole:
            self._gains = Gains()
        if self._settings.thresholds:
            job = msgspec.structs.replace(record.job, thresholds=self._settings.thresholds)
            record = msgspec.structs.replace(record, job=job)
        chosen = [entry for entry in self._chosen if not _judges_speed(entry)] if stands else self._chosen
        results = unignored(run_live_checks(chosen, record), self._settings, self._catalogue)
        seen = [finding for result in results for finding in result.from_run]
        for finding in seen:
            if finding.location is not None and finding.location.file not in self._comments:
                self._comments[finding.location.file] = _comments_in(finding.location.file)
        kept = suppress(merge((), seen), self._comments, self._codes).kept
        named = self._gains.added_to(with_fingerprints(kept, self._root), record)
        return tuple(
            msgspec.structs.replace(finding, title=placed(finding.title, record))
            for finding in sorted(named, key=lambda finding: finding.urgency)
        )

    def of_divergence(self, divergence: Divergence, record: RunRecord, holding: Sequence[Finding]) -> Finding:
        """Return the finding of a divergence among those that hold; made of it where no check reports it (yet).

        So a standstill that is shown always has a code, ranks and a place.
        """
        trouble = classify(divergence, record)
        told = [finding for finding in holding if finding.trouble == trouble]
        errors = [finding for finding in holding if finding.severity is Severity.ERROR]
        told += [finding for finding in errors if finding.family in _CAN_PART_RANKS]
        if told:
            return told[0]
        return self._made(
            trouble,
            severity=Severity.ERROR,
            title=placed(describe.title(divergence), record),
            ranks=describe.ranks(divergence),
            locations=describe.locations(divergence),
            evidence=describe.facts(divergence, "run"),
            remedy=_REMEDY,
        )

    def _made(self, trouble: Trouble, **told: Any) -> Finding:
        entry = standing_for(self._catalogue, trouble)
        finding = Finding(code=entry.code, name=entry.name, trouble=trouble, basis=frozenset({"run"}), **told)
        return with_fingerprints((finding,), self._root)[0]

    def with_wait(
        self, views: tuple[FindingView, ...], ended_in: tuple[LastingWait, str], record: RunRecord
    ) -> tuple[FindingView, ...]:
        """Return the findings of a job that was ended while ranks waited for a busy one: that wait is among them."""
        finding = self.of_wait(ended_in, record)
        others = [view for view in views if view.finding.code != finding.code and not is_of_the_end(view.finding)]
        return (FindingView(finding=finding, since_ns=ended_in[0].since_ns), *others)

    def of_wait(self, ended_in: tuple[LastingWait, str], record: RunRecord) -> Finding:
        """Return the finding of a wait in which a job was ended."""
        wait, said = ended_in
        heard = bool(wait.unseen) or any(rank.rank == wait.late for rank in record.ranks)
        return self._made(
            "long-wait" if heard else "no-rendezvous",
            severity=Severity.WARNING if heard else Severity.ERROR,
            title=placed(said, record),
            ranks=wait.unseen or (wait.late,),
            locations=wait.locations,
            evidence=tuple(
                Fact(text=f"the stack of rank {rank} then", basis="run", rank=rank, stack=stack)
                for rank, stack in wait.stacks
            ),
            remedy=_UNSEEN_REMEDY if wait.unseen else _WAIT_REMEDY if heard else _MISSING_REMEDY,
        )


_CAN_PART_RANKS = ("data", "gradients", "collectives", "death")
"""Families of the errors that can make ranks part."""
_WAIT_REMEDY = (
    "Check whether that work should take so long: divide it between the ranks or do it before the job, or give the "
    "group a timeout that covers it. If it never ends, check what its loop waits for."
)
_UNSEEN_REMEDY = f"Check these ranks on the nodes where they run. {SEE_ALL}"
_MISSING_REMEDY = "Check that this rank was started at all, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."
_REMEDY = "Compare what the ranks do at these lines: all of them must reach the same collectives."


def _judges_speed(entry: CatalogueEntry) -> bool:
    """Return whether a check judges measured steps, and neither proves that something is wrong nor reports a wait."""
    check = load(entry).check
    is_error = check.severity.get("run") is Severity.ERROR
    return "step_tracks" in check.needs_of("run") and not is_error and check.stands_for not in OF_THE_MOMENT


def _comments_in(file: str) -> tuple[Suppression, ...]:
    try:
        return suppressions_in(file, source_of(file))
    except (OSError, ValueError):
        return ()


_SECOND_NS = 1_000_000_000
SHOWN_WINDOW_NS = 30_000_000_000
SHOWN_STEPS = 120
SHOWN_AT_LEAST = FEWEST_STEPS + WARM_UP_STEPS
"""The figures of a live run are those of the steps in this window, and of at least so many however long they take."""
SHOWN_ROWS = 10_000
JUDGED_ROWS = 40_000
"""Steps of all ranks together that are looked at: of hundreds of ranks a few dozen each."""
JUDGED_WINDOW_NS = 60_000_000_000
"""The checks see the steps in this window, which is a little longer, and at least ``JUDGED_STEPS``."""
JUDGED_STEPS = 60
DEAR_NS = 500_000_000
HANG_FIRST_NS = 15_000_000_000
"""Where the checks take longer than ``DEAR_NS``, they wait for so long while the job may turn out to hang."""
RECORD_EVERY_NS = 2_000_000_000
"""A recorded run is shown again in moments that are so far apart, where it was short."""
TIMED_OUT = "timeout"
_FAILED = ("raised", "signalled", "left-by-exit")
_SIGNALS = 128
"""A higher exit code is that of a shell for a process that a signal has killed."""
_NO_VERDICT = RunVerdict(state="unknown", text="no data yet")


def live_source(
    directory: Path,
    job: LaunchedJob | None = None,
    *,
    one_rank_samples_per_s: float | None = None,
    head_at: tuple[str, int] | None = None,
) -> RunSource:
    """Watch a run that continues; ``job`` is given when this program started it.

    ``one_rank_samples_per_s`` is what the same training does on one rank, where the run itself does not know.
    """
    plan = read_plan(directory)
    share_clock(plan.clock)
    if one_rank_samples_per_s is not None:
        told = msgspec.structs.replace(plan.job, one_rank_samples_per_s=one_rank_samples_per_s)
        plan = msgspec.structs.replace(plan, job=told)
    return RunSource(directory, plan, job, head_at=head_at)


class RunSource:
    """A run directory as a source of snapshots; fulfils ``SnapshotSource``."""

    def __init__(
        self,
        directory: Path,
        plan: RunPlan,
        job: LaunchedJob | None,
        *,
        is_over: bool = False,
        keeps_history: bool = True,
        head_at: tuple[str, int] | None = None,
        others: Sequence[NodePart] = (),
        exit_code: int | None = None,
    ) -> None:
        """``is_over``: nothing of it runs any more; only with ``keeps_history`` is its directory written to.

        ``head_at`` is where the monitor listens that sees all nodes, where the user says it. Of a run that is over,
        ``others`` are what other nodes of the job have recorded, and ``exit_code`` is how it ended.
        """
        self._exit_code = exit_code
        self._is_over = is_over
        self._whole: RunRecord | None = None
        """Of a run that is over, what there is to know of it, once that is known."""
        self._directory = directory
        self._plan = plan
        self._job = job
        self._run = LiveRun(directory, plan, is_over=is_over, head_at=head_at)
        self._run.nodes.recorded = tuple(others)
        self._checks = LiveChecks(plan.project_root or str(Path.cwd()))
        self._history = HistoryWriter(directory) if keeps_history else None
        self._series = Series()
        self._finding_hold = FindingHold()
        self._last_standstill = LastStandstill()
        self._last_wait = LastWait()
        self._look_pace = Pace(_SECOND_NS, 4 * _SECOND_NS, share=0.04, most_share=0.35)
        # While some rank makes no steps: a hang has to be named within seconds.
        self._stall_pace = Pace(_SECOND_NS // 4, _SECOND_NS, share=0.2)
        self._check_pace = Pace(3 * _SECOND_NS, 10 * _SECOND_NS, share=0.006, most_share=0.3)
        self._judged_ns = JUDGED_WINDOW_NS
        self._measured: tuple[object, ...] = ()
        """What the newest figures are made of."""
        self._summary = self._newest_slice = RunSummary()
        self._sliced = False
        self._checked_steps = 0
        self._quiet_since_ns = self._speed_cost_ns = 0
        self._recorded_at_ns = 0
        self._stalled_since_ns = 0
        self._is_suspicion = False
        """The newest standstill is refuted by whatever the ranks do next."""
        self._newest: Snapshot | None = None
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._deaf: list[str] = []
        """What happened to listeners that failed, which are reported nothing more."""

    def tell(self, listener: Listener) -> None:
        """Pass it each new snapshot from now on."""
        self._listeners.append(listener)

    def snapshot(self) -> Snapshot:
        """Return the newest one; looks at the files once a second, and more often while the job may stand still."""
        with self._lock:
            now_ns = epoch_ns()
            pace = self._stall_pace if self._run.is_quiet else self._look_pace
            stands = 0 < self._run.quiet_at_ns < now_ns or self._run.foresees_standstill(now_ns)
            if self._newest is None or pace.is_due(now_ns) or stands:
                with pace.work(now_ns):
                    # Of a job that has ended a screen shows what the report will say: warnings need not hold any more.
                    self._newest = self._look(now_ns, whole=self._has_ended)
            return self._newest

    def final_snapshot(self) -> Snapshot:
        """Return the figures and findings of the whole run, and its exit code; called once the job has ended."""
        with self._lock:
            if not self._run.living():  # Else it continues, and only this monitor leaves.
                self._run.nodes.await_ends()
            self._recorded_at_ns = 0
            self._newest = self._look(epoch_ns(), whole=True)
            self._run.nodes.finish()
            return self._newest

    @property
    def _has_ended(self) -> bool:
        return self._newest is not None and self._newest.state == "ended"

    def record(self) -> RunRecord:
        """Return what is known of the run now, for a trace."""
        with self._lock:
            return self._whole or self._run.look(epoch_ns())

    def unread(self) -> tuple[str, ...]:
        """Return what of the record is missing or cannot be read, in sentences."""
        return self._run.unread()

    def ask_for_stacks(self, rank: int) -> None:
        """Have the stack of one rank taken."""
        with self._lock:
            self._run.ask_for_stacks(rank)

    def end_job(self) -> None:
        """End the job if this program started it; the second call kills it."""
        if self._job is not None:
            self._job.forward(signal.SIGTERM)

    def close(self) -> None:
        """Let go of files; the job continues."""
        self._run.close()
        if self._history is not None:
            self._history.close()

    def _look(self, now_ns: int, *, whole: bool = False) -> Snapshot:
        """Look at the run; without the nodes whose data make that fail, where there are such."""
        while True:
            try:
                return self._looked(now_ns, whole=whole)
            except Exception as error:
                if not self._run.nodes.leave_out_one(error):
                    raise

    def _looked(self, now_ns: int, *, whole: bool) -> Snapshot:
        told_to_end = self._job is not None and self._job.told_to_end
        exit_code = self._job.exit_code() if self._job is not None else self._exit_code
        ended_well = self._job.pid if self._job is not None and exit_code == 0 else 0
        window_ns = 0 if whole else self._judged_ns
        record = self._run.look(now_ns, window_ns, told_to_end=told_to_end, ended_well=ended_well)
        self._quiet_since_ns = (self._quiet_since_ns or now_ns) if self._run.is_quiet else 0
        self._whole = record if whole and self._is_over else None
        summary = self._summarised(record, now_ns, whole=whole)
        state = self._state(record, exit_code)
        self._run.nodes.offer(
            self._run.own_record,
            is_quiet=self._run.is_quiet,
            ended=state == "ended",
            exit_code=exit_code,
            now_ns=now_ns,
        )
        views = self._findings(record, now_ns, whole=whole)
        stall, finding = self._stall(record, views, now_ns)
        stall = self._last_standstill.look(
            stall, finding, self._run.divergence, record, told_to_end=told_to_end, ended=state == "ended"
        )
        views = self._last_standstill.as_cause(views)
        stands = stall is not None
        wait = self._last_wait.look(None if stands else self._run.wait, record, told_to_end=told_to_end)
        ended_in = self._last_wait.at_end(record, exit_code) if state == "ended" and not stands else None
        if any(view.finding.trouble == TIMED_OUT for view in views):
            ended_in = None  # It says more of the same wait.
        if ended_in is not None:
            views = self._checks.with_wait(views, ended_in, record)
        cause = self._last_standstill.cause if stands else None
        if wait is not None and (told := self._last_wait.ended_in) is not None:
            cause = self._checks.of_wait(told, record)
        look = Look(
            now_ns=now_ns,
            record=record,
            summary=summary,
            verdict=_NO_VERDICT,
            state="stalled" if state != "ended" and stall is not None else state,
            findings=views,
            stall=stall,
            wait=wait,
            cause=None if state == "ended" else cause,
            culprit=self._culprit(),
            gpus_note=self._run.gpus_note(),
            notes=self._notes(record),
            launched=self._job is not None,
            launcher_pid=0 if self._job is None else self._job.pid,
            told_to_end=told_to_end,
            exit_code=exit_code,
        )
        waited = views[0].finding if ended_in is not None else None
        look = msgspec.structs.replace(look, verdict=self._verdict(look, waited, whole=whole))
        self._run.nodes.tell(look.verdict)
        snapshot = build_snapshot(look, self._series, self._plan.name, str(self._directory))
        self._run.nodes.show(snapshot)
        if self._history is not None and now_ns - self._recorded_at_ns >= RECORD_EVERY_NS:
            self._recorded_at_ns = now_ns
            self._history.write(snapshot)
        for listener in tuple(self._listeners):
            try:
                listener.take(snapshot)
            except Exception as error:
                self._listeners.remove(listener)
                self._deaf.append(f"{type(listener).__name__} failed: {type(error).__name__}: {error}")
        return snapshot

    def _summarised(self, record: RunRecord, now_ns: int, *, whole: bool) -> RunSummary:
        """Return the figures to show, and those of the newest slice; as they were where nothing was measured since."""
        measured = _measured(record)
        if whole or (measured != self._measured and not self._may_yet_hang(now_ns)):
            self._measured = measured
            self._summary = self._newest_slice = summarise(record if whole else _shown(record))
            if self._summary.step_times is not None:
                self._judged_ns = _judged_ns(self._summary.step_times.p50_ns, len(record.step_tracks))
            self._sliced = False
        if self._series.is_due(now_ns) and not self._has_ended:
            if not self._sliced:
                self._newest_slice, self._sliced = summarise(recent(record, self._series.slice_ns)), True
            self._series.add(self._newest_slice, now_ns)
        return self._summary

    def _verdict(self, look: Look, ended_in: Finding | None, *, whole: bool) -> RunVerdict:
        """Return the verdict on what is shown, or on the whole run; where nothing was measured, why."""
        ended = look.state == "ended"
        holding = [view.finding for view in look.findings if view.until_ns is None]
        code = look.exit_code
        if code is None or self._is_excused(look.record):
            code = None
        elif code > _SIGNALS:
            code = _SIGNALS - code
        verdict = run_verdict(
            look.summary,
            holding,
            stall=look.stall,
            exit_code=code,
            pending=() if whole else self._finding_hold.pending,
            settled=whole or self._finding_hold.is_settled,
            ended_in=ended_in,
            cut_off=only_lost_their_peers(look.record),
        )
        if ended and look.stall is None and ended_in is None:
            usual_ns = look.summary.step_times.p95_ns if look.summary.step_times is not None else 0
            verdict = with_last_steps(verdict, look.record, usual_ns)
        why_nothing = self._run.why_nothing(look.record, ended=ended)
        if not why_nothing:
            return verdict
        if verdict.state == "unknown":
            return msgspec.structs.replace(verdict, text=why_nothing)
        return msgspec.structs.replace(verdict, why=(*verdict.why, why_nothing))

    def _is_excused(self, record: RunRecord) -> bool:
        """Return whether the exit code means nothing: the job was told to end, or its scripts had all finished."""
        told = self._job is not None and self._job.told_to_end
        finished = bool(record.ranks) and all(rank.main_finished for rank in record.ranks)
        return told or (finished and len(record.ranks) == record.job.world_size)

    def _notes(self, record: RunRecord) -> tuple[str, ...]:
        fault = self._history.fault if self._history is not None else ""
        why_nothing = self._run.why_nothing(record, ended=False)
        told = (*(listener.note for listener in self._listeners), *self._deaf)
        notes = (why_nothing, self._end_note(record), *self._run.faults(record), fault, *told)
        return tuple(note for note in notes if note)

    def _end_note(self, record: RunRecord) -> str:
        """Return what an exit code that does not count means."""
        code = self._job.exit_code() if self._job is not None else None
        if not code or not self._is_excused(record):
            return ""
        if self._job is not None and self._job.told_to_end:
            return "the job was asked to stop"
        return (
            f"the scripts of all ranks had finished; the exit code {code} comes from the shutdown after that, in "
            "which torch with gloo sometimes aborts"
        )

    def _findings(self, record: RunRecord, now_ns: int, *, whole: bool) -> tuple[FindingView, ...]:
        """Return what holds now; of the whole run what the checks say of all its steps, and what held for a while."""
        stalled = self._run.divergence is not None
        if self._run.divergence is not None:
            self._is_suspicion = is_suspicion(self._run.divergence)
        if not stalled and not any(rank.end in _FAILED for rank in record.ranks):
            # Ranks write of their collectives at different moments, which is for no check unless it proves something.
            absent = StreamState("absent", "the job continues, so the flight recorders of the ranks were not read")
            streams = {**record.streams, "collectives": absent}
            record = msgspec.structs.replace(record, collectives=(), streams=streams)
        if whole or not stalled:
            newest = [track.ended_at_ns[-1] if len(track) else 0 for track in record.step_tracks]
            self._finding_hold.end_standstill(min(newest, default=0), refuted=self._is_suspicion)
        if whole and self._is_suspicion and ran_to_their_ends(record) and not record.job.stop_reason:
            self._finding_hold.end_standstill(now_ns, refuted=True)
        if whole:
            final = self._checks.findings(record, whole=True)
            held = tuple(view for view in self._finding_hold.views() if not _ended_well_after_all(view.finding, record))
            return _with_final(final, held, record.job.started_ns)
        steps = sum(track.step[-1] for track in record.step_tracks if len(track))
        unexplained = stalled and not self._stalled_since_ns
        moved = steps != self._checked_steps and not stalled
        is_due = self._check_pace.is_due(now_ns) and not self._may_yet_hang(now_ns)
        if unexplained or ((stalled or self._run.is_quiet or moved) and is_due):
            with self._check_pace.work(now_ns):
                found = self._checks.findings(record, stands=not moved)
                if any(may_yet_be_known(record, rank) for rank in record.ranks):
                    found = tuple(finding for finding in found if not is_of_the_end(finding))
                judged = moved and summarise(record).steps >= FEWEST_STEPS
                self._finding_hold.take(found, now_ns, moved=moved, judged=judged)
            if moved:
                self._checked_steps, self._speed_cost_ns = steps, self._check_pace.cost_ns
        return self._finding_hold.views()

    def _may_yet_hang(self, now_ns: int) -> bool:
        """Return whether it has to be seen whether the job hangs before all else is judged, where that takes long."""
        is_new = self._quiet_since_ns > 0 and now_ns - self._quiet_since_ns < HANG_FIRST_NS
        # While the figures were made, which takes seconds, a node may have said that its ranks stand.
        is_coming = not self._run.is_quiet and self._run.nodes.are_quiet
        return (is_new or is_coming) and self._speed_cost_ns > DEAR_NS

    def _stall(
        self, record: RunRecord, views: Sequence[FindingView], now_ns: int
    ) -> tuple[StallView | None, Finding | None]:
        """Return what the job stands in now, and its finding."""
        divergence = self._run.divergence
        if divergence is None:
            self._stalled_since_ns = 0
            return None, None
        self._stalled_since_ns = self._stalled_since_ns or now_ns
        holding = [view.finding for view in views if view.until_ns is None]
        finding = self._checks.of_divergence(divergence, record, holding)
        return stall_view(divergence, finding, record, self._stalled_since_ns), finding

    def _culprit(self) -> int | None:
        divergence = self._last_standstill.divergence or self._run.divergence
        return accused(divergence, self._last_standstill.cause) if divergence is not None else None

    def _state(self, record: RunRecord, exit_code: int | None) -> RunState:
        if exit_code is not None or (self._job is None and record.ranks and not self._run.living()):
            return "ended"
        if self._run.divergence is not None:
            return "stalled"
        return "running" if steps_made(record) else "waiting"


def _measured(record: RunRecord) -> tuple[object, ...]:
    """Return what the figures of a record are made of, so that the same means the same figures."""
    newest = [(track.rank, len(track), track.ended_at_ns[-1] if len(track) else 0) for track in record.step_tracks]
    calls = sum(map(len, record.call_tracks))
    return newest, calls, len(record.ranks), len(record.groups), len(record.wraps), record.job.world_size


def _shown(record: RunRecord) -> RunRecord:
    """Return the steps whose figures are shown."""
    affordable = SHOWN_ROWS // (len(record.step_tracks) or 1)
    return recent(record, SHOWN_WINDOW_NS, min(SHOWN_STEPS, max(affordable, SHOWN_AT_LEAST)), SHOWN_AT_LEAST)


def _judged_ns(step_ns: float, ranks: int) -> int:
    """Return how far back the checks look, where a step takes so long."""
    wanted_ns = max(JUDGED_WINDOW_NS, JUDGED_STEPS * step_ns)
    return int(min(wanted_ns, max(JUDGED_STEPS, JUDGED_ROWS // ranks) * step_ns))


def _ended_well_after_all(finding: Finding, record: RunRecord) -> bool:
    """Return whether a rank that was called killed, because it was gone silently, is known to have ended well."""
    finished = {rank.rank for rank in record.ranks if rank.end == "finished"}
    return finding.trouble == "killed" and bool(finding.ranks) and finished.issuperset(finding.ranks)


def _with_final(final: tuple[Finding, ...], held: tuple[FindingView, ...], started_ns: int) -> tuple[FindingView, ...]:
    """Return what the checks say of the whole run, since when as far as that was seen; then what held for a while
    only, without the gain, which is of another stretch than the one that ``what-if`` looks at.
    """
    fingerprints = {finding.fingerprint for finding in final}
    since_ns = {view.finding.fingerprint: view.since_ns for view in reversed(held)}
    views = [FindingView(finding=finding, since_ns=since_ns.get(finding.fingerprint, started_ns)) for finding in final]
    past = (view for view in held if view.finding.fingerprint not in fingerprints)
    replace = msgspec.structs.replace
    return (*views, *(replace(view, finding=replace(view.finding, gain=None)) for view in past))
