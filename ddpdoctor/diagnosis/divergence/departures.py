"""The rank whose leaving the others suffer from."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.diagnosis.divergence.long_waits import timed_out_wait
from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.waiting import LEFT, Blocked, is_echo, left_on_their_own, was_ended_by_launcher
from ddpdoctor.record.model import Rank, RankException, RunRecord


def find_departed_rank(record: RunRecord, matcher: Matcher, blocked: Mapping[int, Blocked]) -> Rank | None:
    """Find the rank that left first and that others wait for, or failed or went ahead without.

    A rank that left without an exception is one only if another waits for it, or was ended for it. Exceptions that all
    ranks raised alike are a plain bug of the script and no divergence, and what the launcher ended after a timeout had
    struck was there until then.
    """
    if timed_out_wait(record, matcher) is not None or was_interrupted(record):
        return None
    for rank in left_on_their_own(record):
        waited_for = any(rank.rank in entry.missing for entry in blocked.values())
        raised = root_exception(rank)
        if raised is None:
            unmatched = unmatched_group(record, matcher, rank) is not None
            if waited_for or unmatched or _ended_the_others(record, rank) or _was_lost(record, rank):
                return rank
        elif not _raised_by_all(record, raised) and (waited_for or _others_went_on(record, matcher, rank)):
            return rank
    return None


def root_exception(rank: Rank) -> RankException | None:
    """Return the first exception of a rank that ended by one."""
    return min(rank.exceptions, key=lambda entry: entry.time_ns, default=None) if rank.end == "raised" else None


def was_interrupted(record: RunRecord) -> bool:
    """Return whether a live job ended by Ctrl-C: the first exception that is no echo of a lost peer is the
    keyboard's.
    """
    raised = [error for error in map(root_exception, record.ranks) if error is not None and not error.communication]
    first = min(raised, key=lambda error: error.time_ns, default=None)
    return record.job.kind == "run" and first is not None and first.type == "KeyboardInterrupt"


def unmatched_group(record: RunRecord, matcher: Matcher, rank: Rank) -> int | None:
    """Find a group in which another rank called a collective that this one, which ran to its end, never called.

    Only where every rank left by itself: then nothing is still to come, whoever swallowed the error of its collective.
    Groups in which `join()` is at work, or whose beginning is lost, say nothing.
    """
    if any(other.end not in LEFT for other in record.ranks):
        return None
    for group, lanes in sorted(matcher.lanes.items()):
        if rank.rank not in record.groups[group].ranks or not matcher.is_comparable(group):
            continue
        end = lanes[rank.rank].end if rank.rank in lanes else 0
        if any(lane.end > end for lane in lanes.values()):
            return group
    return None


def _ended_the_others(record: RunRecord, rank: Rank) -> bool:
    """Return whether a rank died or failed and the launcher ended all others before they could come to wait for it."""
    failed = rank.end == "left-by-exit" and rank.exit_code not in (0, None)
    died = rank.end == "signalled" and not rank.main_finished and not was_ended_by_launcher(rank)
    others = [other for other in record.ranks if other.rank != rank.rank]
    return (failed or died) and bool(others) and all(map(was_ended_by_launcher, others))


def _was_lost(record: RunRecord, rank: Rank) -> bool:
    """Return whether others failed because a rank was gone, if only in a collective that it had entered itself."""
    died = rank.end == "left-by-exit" or (rank.end == "signalled" and not rank.main_finished)
    others = [other for other in record.ranks if other.rank != rank.rank]
    lost = any(other.end == "raised" and is_echo(other) for other in others)
    return died and lost and not was_ended_by_launcher(rank)


def _raised_by_all(record: RunRecord, raised: RankException) -> bool:
    alike = [
        other is not None and other.type == raised.type and other.frames[:1] == raised.frames[:1]
        for other in map(root_exception, record.ranks)
    ]
    return all(alike)


def _others_went_on(record: RunRecord, matcher: Matcher, rank: Rank) -> bool:
    if any(is_echo(other) for other in record.ranks if other.rank != rank.rank):
        return True
    for lanes in matcher.lanes.values():
        own = lanes.get(rank.rank)
        if own is not None and any(lane.end > own.end for lane in lanes.values()):
            return True
    return False
