"""Forwards of a DDP model that some ranks run alone, and whose broadcast of buffers met another one by luck."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, takewhile

import msgspec

from ddpdoctor.check import Verdict
from ddpdoctor.diagnosis.divergence.aborted import is_in_backward
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.matching import matched
from ddpdoctor.diagnosis.divergence.next_calls import Lanes
from ddpdoctor.diagnosis.sync_points import replica_sets
from ddpdoctor.diagnosis.wording import count, location_of, place, rank_list, verb
from ddpdoctor.finding import Frame, Location, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import UnfollowedForward

# Backwards that a rank of a live run left out: since when the ranks average gradients of different steps.

LASTING_STEPS = 20
"""A lead that has lasted for so many steps stays: ranks that leave a step out in turns do so within a few."""
USUAL_SHARE = 0.1
"""A rank that leaves out more of its steps does so by design."""
RANKS_SHOWN = 8


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that left out more backwards than those they average with."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    step: int
    """The first step from which on they were ahead."""
    newest: int
    """The newest step in which any rank left one out."""
    extra: tuple[tuple[int, int], ...]
    """Rank, and how many more backwards than the others it has left out by now."""
    made: tuple[tuple[int, int], ...]
    """Rank, and how many training forwards it made in that first step for one backward."""
    line: Frame | None
    """Of the forward."""

    @property
    def location(self) -> Location | None:
        """Where the forward is."""
        return location_of(self.line)

    @property
    def sentence(self) -> str:
        """Who left out what, and when, in words."""
        made = dict(self.made)
        most = max(made[rank] for rank in self.others)
        first = [rank for rank in self.ranks if made[rank] > most] or self.ranks
        more = max(made[rank] for rank in first) - most
        return (
            f"in step {self.step:,} {rank_list(first)} ran the training forward at {place(self.line)} "
            f"{'once' if more == 1 else f'{more:,} times'} more than {rank_list(self.others)}, without its backward"
        )

    @property
    def facts(self) -> Iterator[tuple[int | None, str, int]]:
        """A rank, or None for the others together, what it did, and the number in that."""
        extra, made = dict(self.extra), dict(self.made)
        for rank in self.ranks[:RANKS_SHOWN]:
            did = f"rank {rank} made {count(made[rank], 'training forward')} and one backward in step {self.step:,}"
            yield rank, f"{did}, and by now has left out {count(extra[rank], 'backward')} more than others", extra[rank]
        most = max(made[rank] for rank in self.others)
        did = f"made {count(most, 'training forward')} for one backward there"
        yield None, f"{rank_list(self.others)} {did}", most


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


def lasting(record: RunRecord) -> Iterator[LeftOut]:
    """Yield those that no rank has made up for in a good many steps, while the job continues."""
    for found in left_out_backwards(record):
        reached = [beat.step for beat in record.heartbeats if beat.rank in found.ranks + found.others]
        if reached and min(reached) - found.newest >= LASTING_STEPS:
            yield found


def left_out_before(record: RunRecord, divergence: Divergence) -> LeftOut | None:
    """Find what made ranks diverge: those that are ahead do not come to a backward which the others are in."""
    turns = divergence.turns + divergence.proof
    in_backward = {turn.rank for turn in turns if is_in_backward(turn)}
    for found in left_out_backwards(record):
        if in_backward & set(found.others) and not in_backward & set(found.ranks):
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
    return LeftOut(
        ranks=ahead,
        others=tuple(rank for rank in members if rank not in ahead),
        step=since,
        newest=rows[-1].step,
        extra=tuple((rank, totals[rank] - fewest) for rank in ahead),
        made=tuple((rank, 1 + (at_first[rank].forwards if rank in at_first else 0)) for rank in members),
        line=record.site(site).innermost,
    )


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
        rows = [lanes.row(rank, start + offset) for rank in (one, other)]
        origins = {
            record.signatures[lanes.tracks[rank].signature[row]].origin
            for rank, row in zip((one, other), rows, strict=True)
            if row is not None
        }
        alone = ran.get((frame.file, frame.line), frozenset())
        both = ran.get((met.file, met.line), frozenset())
        if origins == {"ddp-forward"} and one in alone and other not in alone and {one, other} <= both:
            ranks, there = tuple(sorted(alone)), location_of(frame)
            pairing = (
                f"entry {start + offset:,} of the group is the broadcast from {place(frame)} on rank {ranks[0]} and "
                f"that from {place(met)} on rank {other}"
            )
            yield (
                (frame.file, frame.line),
                Verdict(
                    sentence=f"only {rank_list(ranks)} {verb(ranks, 'runs', 'run')} the forward of the DDP model at "
                    f"{place(frame)}; it did not hang because its buffer broadcast was paired with that of training at "
                    f"{place(met)}",
                    locations=(there, location_of(met)),
                    ranks=ranks,
                    because=((pairing, there),),
                    severity=Severity.WARNING,
                ),
            )
