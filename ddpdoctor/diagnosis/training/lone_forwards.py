"""Forwards of a DDP model that some ranks run alone, and whose broadcast of buffers met another one by luck."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.divergence.matching import matched
from ddpdoctor.diagnosis.divergence.next_calls import Lanes
from ddpdoctor.diagnosis.wording import location_of, place, rank_list, verb
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import RunRecord

Line = tuple[str, int]


class LuckyBroadcast(msgspec.Struct, frozen=True, kw_only=True):
    """A broadcast of buffers that was taken for the one of another line."""

    ranks: tuple[int, ...]
    """Ranks that run the forward."""
    frame: Frame
    """Its line."""
    other_rank: int
    other: Frame
    """The line whose broadcast it was paired with."""
    sequence: int
    """Position in their group."""

    @property
    def sentence(self) -> str:
        """What was seen, in words."""
        return (
            f"only {rank_list(self.ranks)} {verb(self.ranks, 'runs', 'run')} the forward of the DDP model at "
            f"{place(self.frame)}; it did not hang because its buffer broadcast was paired with that of training at "
            f"{place(self.other)}"
        )

    @property
    def pairing(self) -> str:
        """The proof, in words."""
        return (
            f"entry {self.sequence:,} of the group is the broadcast from {place(self.frame)} on rank "
            f"{self.ranks[0]} and that from {place(self.other)} on rank {self.other_rank}"
        )

    @property
    def locations(self) -> tuple[Location, ...]:
        """The line of the forward, then the other."""
        return tuple(location for location in map(location_of, (self.frame, self.other)) if location is not None)


def forward_ranks(record: RunRecord) -> dict[Line, frozenset[int]]:
    """Return the ranks that ran a forward of a DDP module from each line."""
    found: dict[Line, set[int]] = {}
    for forward in record.forwards:
        frame = record.site(forward.site).innermost
        if forward.wrapped and frame is not None:
            found.setdefault((frame.file, frame.line), set()).add(forward.rank)
    return {line: frozenset(ranks) for line, ranks in found.items()}


def lucky_broadcasts(record: RunRecord) -> Iterator[LuckyBroadcast]:
    """Yield each line whose forward not all ranks ran and whose broadcast was paired with another line's."""
    matcher = matched(record)
    ran = forward_ranks(record)
    told: set[Line] = set()
    for group in sorted(matcher.lanes):
        lanes = Lanes(record, matcher, group)
        members = sorted(lanes.lanes)
        for one in members:
            for other in members:
                for found in _between(record, lanes, one, other, ran):
                    line = (found.frame.file, found.frame.line)
                    if line not in told:
                        told.add(line)
                        yield found


def _between(
    record: RunRecord, lanes: Lanes, one: int, other: int, ran: dict[Line, frozenset[int]]
) -> Iterator[LuckyBroadcast]:
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
            yield LuckyBroadcast(
                ranks=tuple(sorted(alone)), frame=frame, other_rank=other, other=met, sequence=start + offset
            )
