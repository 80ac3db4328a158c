"""Says what the one divergence of a run is, the most specific first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from signal import SIGABRT

from ddpdoctor.check import Check
from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence, find_divergence, root_exception
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.failures import asks_for_global_rank, failed_rendezvous, lack_behind, trouble_of
from ddpdoctor.diagnosis.files import races
from ddpdoctor.diagnosis.stacks import worker_stacks
from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.diagnosis.training.lone_forwards import forward_ranks, left_out_before
from ddpdoctor.diagnosis.training.pass_lengths import SkippedBatch, skipped_batches, uneven_passes
from ddpdoctor.diagnosis.training.replicas import blocked_in_backward, drifts, skipped_backward
from ddpdoctor.finding import Finding, Frame, Severity, Trouble
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import SharedGroup

# Puts what the diagnosis knows of a divergence, a path or a load into the findings of the check that reports it.


def divergence_finding(
    check: Check, record: RunRecord, divergence: Divergence, remedy: str, severity: Severity | None = None
) -> Finding:
    """Return the finding of a check about the divergence of a run, with the check's severity unless one is given."""
    return check.finding(
        describe.title(divergence),
        basis=record.job.kind,
        remedy=remedy,
        locations=describe.locations(divergence),
        ranks=describe.ranks(divergence),
        evidence=(*describe.facts(divergence, record.job.kind), *worker_stacks(record)),
        severity=severity,
    )


def diverged(check: Check, record: RunRecord, remedy: Callable[[Divergence], str]) -> Iterator[Finding]:
    """Yield the divergence of a run, if this check reports it."""
    divergence = divergence_of(record, check.stands_for)
    if divergence is not None:
        yield divergence_finding(check, record, divergence, remedy(divergence))


def met_calls(record: RunRecord) -> Iterator[tuple[tuple[Frame, ...], int]]:
    """Yield the call chains by which all ranks of a run came to the same calls of their user, and how often.

    Only where each call was the same one in the order of the ranks, and all of them came to the end of the script.
    """
    ranks = record.rank_numbers()
    if len(ranks) < 2 or find_divergence(record) is not None or not all(one.main_finished for one in record.ranks):
        return
    met: dict[tuple[Frame, ...], dict[int, list[tuple[int, int]]]] = {}
    for track in record.collectives:
        for row in range(len(track)):
            user = record.signatures[track.signature[row]].origin == "user" and track.site[row] >= 0
            if user and track.completed_ns[row] and record.groups[track.group[row]].ranks == ranks:
                calls = met.setdefault(record.site(track.site[row]).frames, {}).setdefault(track.rank, [])
                calls.append((track.group[row], track.sequence[row]))
    for chain, by_rank in met.items():
        first = by_rank.get(ranks[0])
        if first and len(by_rank) == len(ranks) and all(calls == first for calls in by_rank.values()):
            yield chain, len(first)


def classify(divergence: Divergence, record: RunRecord) -> Trouble:
    """Return what a divergence is.

    A desync stays one even when passes differ in length later: it came first. A rank that failed or was killed
    is a cause of its own, whatever the others wait in.
    """
    if any(turn.handling is not None and turn.rank == divergence.culprit for turn in divergence.turns):
        return "caught-exception"
    if any(parts_in(divergence, use.ranks) for use in shared_groups(record)):
        return "shared-group"
    if divergence.form in ("desync", "crossed", "swapped"):
        return "desync"
    ends = {turn.action for turn in divergence.turns + divergence.proof if turn.rank == divergence.culprit}
    if divergence.form == "absentee" and "finished" not in ends and ends & {"raised", "signalled", "left-by-exit"}:
        if "raised" in ends:
            return _of_exception(divergence, record)
        if "signalled" in ends:
            if record.job.stop_reason == "memory":
                return "lacking-machine"
            return "killed" if record.job.kind != "rehearsal" else "early-exit"
        return "desync" if _drifted(divergence, record) else "early-exit"
    if divergence.form == "stuck":
        # A rank that stands after a step that it left out would not have come either, had it gone on.
        return "desync" if _drifted(divergence, record) else "hang"
    if _builds_on_subset(divergence, record):
        return "ddp-on-subset"
    if any(turn.wait is not None and turn.wait.kind == "new_group" for turn in divergence.turns):
        return "subset-group"
    if lone_turns(divergence, record):
        return "lone-forward"
    left = divergence.form == "absentee"
    if any(uneven.overrun for uneven in uneven_passes(record, one_left=left)):
        return "uneven-passes"
    if skip_behind(divergence, record) is not None:
        return "data-branch"
    if _drifted(divergence, record):
        return "desync"
    if left:
        return "early-exit" if skipped_backward(record, divergence) is None else "desync"
    if divergence.difference == "group":
        return "mismatch"
    if divergence.form == "aborted":
        return "mismatch" if divergence.difference else "rank-branch"
    called = [turn.frames for turn in divergence.turns if turn.action in ("collective", "store") and turn.frames]
    if len({tuple((frame.file, frame.line) for frame in frames) for frames in called}) < 2:
        return "hang" if divergence.form == "standstill" else "mismatch"
    # Dumps hold no forwards: that each rank decides by its own data looks like a rank test.
    apart = record.job.kind != "log" and _did_before_what_they_do_apart(divergence, record)
    return "data-branch" if apart else "rank-branch"


def shared_groups(record: RunRecord) -> Iterator[SharedGroup]:
    """Yield the groups that two threads used at once.

    One with several backends has for each kind of device an order of its own: a thread may use the one, and one the
    other.
    """
    several = (wait.kind == "init_process_group" and (not wait.backend or ":" in wait.backend) for wait in record.waits)
    if not any(several):
        yield from record.shared_groups


def parts_in(divergence: Divergence, ranks: tuple[int, ...]) -> bool:
    """Return whether the ranks part in the group of some ranks, or wait in it for one that a call of it has aborted."""
    groups = [divergence.group]
    if any(turn.rank == divergence.culprit and turn.signal == SIGABRT for turn in divergence.turns):
        # Gloo ends a process so that reads what another thread was sent: then no call of its own is left open.
        groups += [turn.group for turn in divergence.turns]
    return any(group is not None and group.ranks == ranks for group in groups)


def _drifted(divergence: Divergence, record: RunRecord) -> bool:
    """Return whether a rank had left out a backward, so that it is ahead of the others at the end."""
    in_passes = any(drifts(record, blocked_in_backward(divergence, record)))
    return in_passes or left_out_before(record, divergence) is not None


def divergence_of(record: RunRecord, trouble: Trouble | None) -> Divergence | None:
    """Find the divergence of a run if it is this one."""
    found = _found(record)
    return found[0] if found is not None and found[1] == trouble else None


@once_per_record()
def _found(record: RunRecord) -> tuple[Divergence, Trouble] | None:
    divergence = find_divergence(record)
    return None if divergence is None else (divergence, classify(divergence, record))


def _of_exception(divergence: Divergence, record: RunRecord) -> Trouble:
    """Return what the message of the culprit's exception names, or that it comes of the machine of the rehearsal."""
    culprit = None if divergence.culprit is None else record.of_rank(divergence.culprit)
    raised = root_exception(culprit) if culprit is not None else None
    if culprit is None or raised is None:
        return "exception"
    if asks_for_global_rank(culprit, raised):
        return "wrong-rank-kind"
    if record.job.kind != "rehearsal" and any(failed_rendezvous(record)):
        return "no-rendezvous"
    named = trouble_of(raised) or next((race.trouble for race in races(record) if race.died == raised), None)
    lacks = record.job.kind == "rehearsal" and lack_behind(raised, record) is not None
    return named or ("lacking-machine" if lacks else "exception")


def skip_behind(divergence: Divergence, record: RunRecord) -> SkippedBatch | None:
    """Find the skipped batch that made the ranks diverge; None when none was skipped."""
    ranks = {turn.rank for turn in divergence.turns}
    found = (skip for skip in skipped_batches(record) if ranks & set(skip.skipped_on) and ranks & set(skip.trained_on))
    return next(found, None)


def _builds_on_subset(divergence: Divergence, record: RunRecord) -> bool:
    """Return whether some ranks stand in DDP's constructor and the others have ended, or trained, without one."""
    building = {turn.rank for turn in divergence.turns if _origin(turn) == "ddp-construct"}
    others = [turn for turn in divergence.turns if turn.rank not in building]
    trained = {backward.rank for backward in record.backwards if not backward.wraps}
    wrapped = {wrap.rank for wrap in record.wraps}
    return (
        bool(building and others)
        and not any(turn.rank in wrapped for turn in others)
        and all(turn.action == "finished" or turn.rank in trained for turn in others)
    )


def lone_turns(divergence: Divergence, record: RunRecord) -> tuple[NextCall, ...]:
    """Find the ranks that talk to the others in a forward of the model whose line those did not run.

    Where the others call something that is new to that rank as well, either may be the one too many: the forward is
    named, as it is by far the more frequent. One of a sharded model counts without gradients only: with them it is
    training, which the others have left.
    """
    ran, ranks = forward_ranks(record), {turn.rank for turn in divergence.turns}
    found = []
    for turn in divergence.turns:
        if _origin(turn) in ("ddp-forward", "fsdp-eval") and turn.line is not None:
            alone = ran.get((turn.line.file, turn.line.line), frozenset())
            if turn.rank in alone and ranks - alone:
                found.append(turn)
    return tuple(found)


def _did_before_what_they_do_apart(divergence: Divergence, record: RunRecord) -> bool:
    """Return whether every rank had run, in earlier steps, each of the lines at which they now part.

    Then no rank test parts them: each decides by something of its own that changes from step to step.
    """
    turns = [turn for turn in divergence.turns if turn.row is not None and turn.line is not None]
    lines, tracks = {turn.line for turn in turns}, [record.track(turn.rank) for turn in turns]
    before = [set(track.site[: turn.row]) for turn, track in zip(turns, tracks, strict=True) if track is not None]
    ran = all(lines <= {record.site(site).innermost for site in sites} for sites in before)
    return len(lines) > 1 and len(before) == len(turns) and ran


def _origin(turn: NextCall) -> str:
    return "" if turn.signature is None else turn.signature.origin
