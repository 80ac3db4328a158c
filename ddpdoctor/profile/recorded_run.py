"""What a recorded run shows: as its monitor wrote it, or as it is found now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.clocks import bounds_of_steps
from ddpdoctor.diagnosis.performance.stragglers import FEWEST_STEPS
from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.diagnosis.performance.verdict import run_verdict
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.errors import RecordError, UsageError
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.launch.kept_runs import QUIET_FOR_S, live_processes, named_run, written_ago_s
from ddpdoctor.monitor.finding_hold import is_of_the_end, raised_its_own, same_cause
from ddpdoctor.monitor.history import NeverWatched
from ddpdoctor.monitor.replay import final_snapshot
from ddpdoctor.monitor.snapshot import FindingView, Snapshot
from ddpdoctor.profile.watch import RunSource
from ddpdoctor.record import layout
from ddpdoctor.record.joining import Clock, NodePart
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.reader import read_plan
from ddpdoctor.record.writer import kept_elsewhere, share_clock


def recorded(directory: Path) -> tuple[Snapshot, RunRecord]:
    """Return what was shown last of a run, and its record.

    A run that continued when no one watched it any more, or that no one watched, is looked at now, once it is over; its
    GPUs are those of what was shown, and so is what it stood in, if it came no further. Raises RecordError when the
    directory cannot be read.
    """
    plan = read_plan(directory)
    share_clock(plan.clock)
    is_over = not live_processes(directory)
    source = RunSource(directory, plan, None, is_over=is_over, keeps_history=False)
    try:
        shown: Snapshot | None = None
        damage = ""
        try:
            shown = final_snapshot(directory)
        except NeverWatched:
            pass
        except RecordError as error:
            damage = f"{error.message}; the run is judged by what its ranks wrote"
        snapshot = shown
        if snapshot is None or (is_over and snapshot.state != "ended"):
            snapshot = source.final_snapshot()
            if shown is not None and shown.cause is not None and not _came_further(shown, snapshot, source.record()):
                snapshot = _ended_in(shown, shown.cause, snapshot)
        if shown is not None:
            snapshot = msgspec.structs.replace(snapshot, gpus=shown.gpus, gpus_note=shown.gpus_note)
        host = kept_elsewhere(plan.clock)
        if host and (shown is None or shown.state != "ended") and written_ago_s(directory) < QUIET_FOR_S:
            may_go_on = f"the run was started on {host}; if it is still running there, this report is not final"
            snapshot = msgspec.structs.replace(snapshot, notes=(may_go_on, *snapshot.notes))
        record = source.record()
        unread = (*filter(None, (damage,)), *source.unread())
        snapshot = msgspec.structs.replace(snapshot, notes=tuple(dict.fromkeys((*unread, *snapshot.notes))))
        job = msgspec.structs.replace(record.job, notes=unread)
        return snapshot, msgspec.structs.replace(record, job=job, gpus=snapshot.gpus)
    finally:
        source.close()


def _came_further(shown: Snapshot, now: Snapshot, record: RunRecord) -> bool:
    """Return whether what a run stood in when it was seen last is not what it ended in."""
    before = {view.rank: view for view in shown.ranks}
    culprits = set(_culprits(shown))
    for view in now.ranks:
        known = before.get(view.rank)
        if known is None or (view.step or 0) > (known.step or 0):
            return True
        places = (known.where, view.where)
        if view.rank in culprits and all(places) and len({(at.file, at.function) for at in places if at}) > 1:
            return True
    finished = bool(record.ranks) and all(rank.main_finished for rank in record.ranks)
    return finished or any(raised_its_own(rank) for rank in record.ranks if rank.rank in culprits)


def _culprits(shown: Snapshot) -> Iterator[int]:
    """Yield the ranks that others waited for."""
    if shown.stall is not None:
        yield from (rank for side in shown.stall.sides if side.culprit for rank in side.ranks)
    elif shown.wait is not None:
        yield shown.wait.late


def _ended_in(shown: Snapshot, cause: Finding, now: Snapshot) -> Snapshot:
    """The end of a run as one that was ended in what it was seen in last."""
    stall = shown.stall
    since_ns = shown.wait.since_ns if shown.wait is not None else shown.now_ns
    if stall is not None:
        since_ns, cause = stall.since_ns, msgspec.structs.replace(cause, severity=Severity.ERROR)
        stall = msgspec.structs.replace(stall, may_go_on=False, cut_short=stall.may_go_on)
    others = tuple(
        view for view in now.findings if not is_of_the_end(view.finding) and not same_cause(view.finding, cause)
    )
    findings = (FindingView(finding=cause, since_ns=since_ns), *others)
    holding = [view.finding for view in findings if view.until_ns is None]
    culprits = set(_culprits(shown))
    return msgspec.structs.replace(
        now,
        stall=stall,
        findings=findings,
        verdict=run_verdict(RunSummary(), holding, stall=stall, ended_in=cause),
        ranks=tuple(msgspec.structs.replace(view, culprit=view.rank in culprits) for view in now.ranks),
    )


_HOW = "`ddpdoctor profile --nproc 1 train.py` records one and prints its path at the end."


def one_rank_samples_per_s(name: str) -> float:
    """Return the throughput of a run on one rank: a run directory, or the name of a kept run.

    Raises RecordError when it cannot be read, and UsageError when it is no finished run on one rank of which enough was
    measured.
    """
    directory = named_run(name)
    if live_processes(directory):
        raise UsageError(f"the run in {name} is still going on", "Wait until it ends: both would share this machine.")
    snapshot, _ = recorded(directory)
    if (snapshot.world_size or 0) > 1:
        raise UsageError(
            f"the run in {name} has {snapshot.world_size} ranks, and one with a single rank is needed", _HOW
        )
    measured = min((rank.measured_steps for rank in snapshot.ranks), default=0)
    if measured < FEWEST_STEPS:
        raise UsageError(
            f"{measured} steps of the run in {name} were measured, and at least {FEWEST_STEPS} are needed", _HOW
        )
    if not snapshot.samples_per_s:
        raise UsageError(
            f"the samples per second of the run in {name} are unknown",
            "Samples are counted where batches come from a DataLoader.",
        )
    return snapshot.samples_per_s


# The runs that the nodes of one job recorded, each on its own disk, put together afterwards.

_NUMBERS_OF_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_NO_NUMBER = ("", "none")


def recorded_together(directories: Sequence[Path]) -> tuple[Snapshot, RunRecord]:
    """Return what there is to say of all ranks, and their record; the run with the lowest rank is the first.

    Raises UsageError for runs that are no nodes of one job, or that continue, and RecordError for what cannot be read.
    """
    found = []
    for directory in directories:
        if live_processes(directory):
            raise UsageError(f"the run in {directory} is still going on", "Wait until it ends.")
        snapshot, record = recorded(directory)
        if not record.ranks:
            raise UsageError(f"{directory} holds no rank", "Omit it.")
        found.append((directory, snapshot, record))
    found.sort(key=lambda entry: entry[2].rank_numbers())
    first, _, first_record = found[0]
    for directory, _, record in found[1:]:
        _refuse_others(first, first_record, directory, record)
    for (one, _, record), (other, _, next_record) in pairwise(found):
        if twice := set(record.rank_numbers()) & set(next_record.rank_numbers()):
            raise UsageError(
                f"{one} and {other} both have {rank_list(twice)}", "Give runs of different nodes of one job."
            )
    codes = [snapshot.exit_code for _, snapshot, _ in found if snapshot.exit_code]
    parts = [
        NodePart(name=str(directory), record=record, clock=_clock(directory, first_record, record))
        for directory, _, record in found[1:]
    ]
    source = RunSource(
        first,
        read_plan(first),
        None,
        is_over=True,
        keeps_history=False,
        others=parts,
        exit_code=codes[0] if codes else found[0][1].exit_code,
    )
    try:
        shown = found[0][1]
        if len(shown.ranks) == first_record.job.world_size:
            # Its monitor saw all of them while the job ran, and what a standstill was is not to be seen any more.
            return shown, source.record()
        return source.final_snapshot(), source.record()
    finally:
        source.close()


def _refuse_others(first: Path, record: RunRecord, other: Path, other_record: RunRecord) -> None:
    sizes = (record.job.world_size, other_record.job.world_size)
    began, other_began = (
        min((wait.started_ns for wait in one.waits), default=one.job.started_ns) for one in (record, other_record)
    )
    ended, other_ended = record.job.ended_ns, other_record.job.ended_ns
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{first} belongs to a job of {sizes[0]} ranks, {other} to one of {sizes[1]}",
            "Give runs of different nodes of one job.",
        )
    met, other_met = _meeting_place(record), _meeting_place(other_record)
    if _are_of_two_jobs(record, other_record):
        raise UsageError(
            f"{first} and {other} belong to two jobs: one has its rendezvous at {met}, the other at {other_met}",
            "Give runs of different nodes of one job.",
        )
    if (began > other_ended or other_began > ended) and not (other / layout.CLOCK_FILE).exists():
        raise UsageError(
            f"{first} and {other} were recorded at different times", "Give runs of different nodes of one job."
        )


def _meeting_place(record: RunRecord) -> str:
    return f"{_variable(record, 'MASTER_ADDR')}:{_variable(record, 'MASTER_PORT')}"


def _are_of_two_jobs(record: RunRecord, other: RunRecord) -> bool:
    """Return whether the launchers say so, or, where they gave the job no number, the places where the ranks met.

    A machine may be called by several names and numbers, so that only two plain names tell two machines apart.
    """
    for name in _NUMBERS_OF_JOBS:
        one, another = _variable(record, name), _variable(other, name)
        if one not in _NO_NUMBER and another not in _NO_NUMBER:
            return one != another
    ports = _variable(record, "MASTER_PORT"), _variable(other, "MASTER_PORT")
    names = _host_name(_variable(record, "MASTER_ADDR")), _host_name(_variable(other, "MASTER_ADDR"))
    return (all(ports) and ports[0] != ports[1]) or (all(names) and names[0] != names[1])


def _variable(record: RunRecord, name: str) -> str:
    """Return a variable of a record's ranks; empty where it is not known."""
    return next((node.environment[name] for node in record.nodes if node.environment.get(name)), "")


def _host_name(address: str) -> str:
    """Return the first part of a machine's name; empty for a number, and for what every machine calls itself."""
    label = address.lower().partition(".")[0]
    return "" if label.isdigit() or ":" in address or label.endswith("localhost") else label


def _clock(directory: Path, first: RunRecord, record: RunRecord) -> Clock:
    """Return how a node's clock differed, as its monitor noted; or about, by the steps that all nodes made."""
    try:
        return msgspec.json.decode(read_untrusted(directory / layout.CLOCK_FILE, 1 << 16, directory), type=Clock)
    except (OSError, ValueError, RecursionError):
        bounds = list(bounds_of_steps(first, record))
    if not bounds:
        return Clock()
    low_ns, high_ns = max(bound.low_ns for bound in bounds), min(bound.high_ns for bound in bounds)
    return Clock(offset_ns=(low_ns + high_ns) // 2)
