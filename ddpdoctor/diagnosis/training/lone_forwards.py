"""Forwards of a DDP model that some ranks run alone, and whose broadcast of buffers met another one by luck."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, takewhile
from typing import TypeAlias

from ddpdoctor.check import Reason, Verdict
from ddpdoctor.diagnosis.divergence.aborted import is_in_backward
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.matching import matched
from ddpdoctor.diagnosis.divergence.next_calls import Lanes
from ddpdoctor.diagnosis.sync_points import replica_sets
from ddpdoctor.diagnosis.wording import count, location_of, place, rank_list, verb
from ddpdoctor.finding import Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import UnfollowedForward

# Backwards that a rank of a live run left out: since when the ranks average gradients of different steps.

LASTING_STEPS = 20
"""A lead that has lasted for so many steps stays: ranks that leave a step out in turns do so within a few."""
USUAL_SHARE = 0.1
"""A rank that leaves out more of its steps does so by design."""
RANKS_SHOWN = 8


LeftOut: TypeAlias = "tuple[Verdict, tuple[int, ...], int]"
"""Ranks that left out more backwards, those that they average with, and the newest step in which any left one out."""


def left_out_backwards(record: RunRecord) -> Iterator[LeftOut]:
    """Yield for each set of ranks and each module the backwards that keep the ranks out of step."""
    if not record.unfollowed_forwards:
        return
    wraps = sorted({row.wrap for row in record.unfollowed_forwards})
    for members in replica_sets(record):
        for wrap in wraps:
            rows = [row for row in record.unfollowed_forwards if row.wrap == wrap and row.rank in members]
            found = _of_set(record, members, rows)
            if found is not None:
                yield found


def lasting(record: RunRecord) -> Iterator[Verdict]:
    """Yield those that no rank has made up for in a good many steps, while the job continues."""
    for found, others, newest in left_out_backwards(record):
        reached = [beat.step for beat in record.heartbeats if beat.rank in found.ranks + others]
        if reached and min(reached) - newest >= LASTING_STEPS:
            yield found


def left_out_before(record: RunRecord, divergence: Divergence) -> Verdict | None:
    """Find what made ranks diverge: those that are ahead do not come to a backward which the others are in."""
    turns = divergence.turns + divergence.proof
    in_backward = {turn.rank for turn in turns if is_in_backward(turn)}
    for found, others, _ in left_out_backwards(record):
        if in_backward & set(others) and not in_backward & set(found.ranks):
            return found
    return None


def _of_set(record: RunRecord, members: tuple[int, ...], rows: list[UnfollowedForward]) -> LeftOut | None:
    # Of a rank that writes no more of them nothing is known from there on.
    known_until = min((row.step for row in rows if row.last), default=None)
    rows = sorted((row for row in rows if known_until is None or row.step <= known_until), key=lambda row: row.step)
    if not rows or len(members) < 2:
        return None
    steps = {row.step for row in rows}
    reached = max((beat.step for beat in record.heartbeats if beat.rank in members), default=0)
    if len(steps) > max(1.0, USUAL_SHARE * max(reached, rows[-1].step)):
        return None
    totals = dict.fromkeys(members, 0)
    leads: list[tuple[int, set[int]]] = []
    for step, at_step in groupby(rows, key=lambda row: row.step):
        for row in at_step:
            totals[row.rank] += row.forwards
        fewest = min(totals.values())
        leads.append((step, {rank for rank in members if totals[rank] > fewest}))
    leaders = leads[-1][1]
    if not leaders:
        return None
    since = min(step for step, _ in takewhile(lambda lead: lead[1] & leaders, reversed(leads)))
    ahead = tuple(rank for rank in members if rank in leaders)
    at_first = {row.rank: row for row in rows if row.step == since}
    site = next((row.site for row in at_first.values()), -1)
    others = tuple(rank for rank in members if rank not in ahead)
    made = {rank: 1 + (at_first[rank].forwards if rank in at_first else 0) for rank in members}
    most = max(made[rank] for rank in others)
    first = [rank for rank in ahead if made[rank] > most] or ahead
    more = max(made[rank] for rank in first) - most
    line = record.site(site).innermost
    because: list[Reason] = []
    for rank in ahead[:RANKS_SHOWN]:
        extra = totals[rank] - fewest
        did = f"rank {rank} made {count(made[rank], 'training forward')} and one backward in step {since:,}"
        did += f", and by now has left out {count(extra, 'backward')} more than others"
        because.append((did, None, {"count": extra, "step": since}, rank))
    did = f"{rank_list(others)} made {count(most, 'training forward')} for one backward there"
    because.append((did, None, {"count": most, "step": since}))
    verdict = Verdict(
        sentence=f"in step {since:,} {rank_list(first)} ran the training forward at {place(line)} "
        f"{'once' if more == 1 else f'{more:,} times'} more than {rank_list(others)}, without its backward",
        locations=location_of(line),
        ranks=ahead,
        because=tuple(because),
    )
    return verdict, others, rows[-1].step


Line = tuple[str, int]


def forward_ranks(record: RunRecord) -> dict[Line, frozenset[int]]:
    """Return the ranks that ran a forward of a DDP module from each line."""
    found: dict[Line, set[int]] = {}
    for forward in record.forwards:
        frame = record.site(forward.site).innermost
        if forward.wrapped and frame is not None:
            found.setdefault((frame.file, frame.line), set()).add(forward.rank)
    return {line: frozenset(ranks) for line, ranks in found.items()}


def lucky_broadcasts(record: RunRecord) -> Iterator[Verdict]:
    """Yield each line whose forward not all ranks ran and whose broadcast was paired with another line's."""
    matcher = matched(record)
    ran = forward_ranks(record)
    told: set[Line] = set()
    for group in sorted(matcher.lanes):
        lanes = Lanes(record, matcher, group)
        members = sorted(lanes.lanes)
        for one in members:
            for other in members:
                for line, verdict in _between(record, lanes, one, other, ran):
                    if line not in told:
                        told.add(line)
                        yield verdict


def _between(
    record: RunRecord, lanes: Lanes, one: int, other: int, ran: dict[Line, frozenset[int]]
) -> Iterator[tuple[Line, Verdict]]:
    start = max(lanes.lanes[one].base, lanes.lanes[other].base)
    stop = min(lanes.lanes[one].end, lanes.lanes[other].end)
    if stop <= start:
        return
    sites = [lanes.lanes[rank].column(lanes.tracks[rank].site, start, stop) for rank in (one, other)]
    if sites[0] == sites[1]:
        return
    for offset in range(stop - start):
        frames = [record.site(column[offset]).innermost for column in sites]
        if None in frames or frames[0] == frames[1]:
            continue
        frame, met = frames
        assert frame is not None and met is not None
        rows = [(lanes.tracks[rank], lanes.row(rank, start + offset)) for rank in (one, other)]
        origins = {record.signatures[track.signature[row]].origin for track, row in rows if row is not None}
        alone = ran.get((frame.file, frame.line), frozenset())
        both = ran.get((met.file, met.line), frozenset())
        if origins == {"ddp-forward"} and one in alone and other not in alone and {one, other} <= both:
            ranks, there = tuple(sorted(alone)), location_of(frame)
            pairing = (
                f"entry {start + offset:,} of the group is the broadcast from {place(frame)} on rank {ranks[0]} and "
                f"that from {place(met)} on rank {other}"
            )
            verdict = Verdict(
                sentence=f"only {rank_list(ranks)} {verb(ranks, 'runs', 'run')} the forward of the DDP model at "
                f"{place(frame)}; it did not hang because its buffer broadcast was paired with that of training at "
                f"{place(met)}",
                locations=(there, location_of(met)),
                ranks=ranks,
                because=(pairing, there),
                severity=Severity.WARNING,
            )
            yield (frame.file, frame.line), verdict
