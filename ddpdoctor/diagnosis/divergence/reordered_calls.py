"""Ranks that call the same in another order."""

from __future__ import annotations

from collections import Counter

import msgspec

from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.next_calls import Lanes
from ddpdoctor.record.model import RunRecord

_NEIGHBOURS = 8
"""Entries before and after that must not come from the two lines in the same step."""


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """Two positions, one after the other, whose lines are exchanged between two ranks."""

    group: int
    position: int
    """The first of the two."""
    ranks: tuple[int, int]


def find_crossing(record: RunRecord, matcher: Matcher) -> Crossing | None:
    """Find the first crossing of the user's own collectives.

    Only neighbours in one step with one signature count, and only lines that are run once in the step: branches that
    each reduce the same quantity, in a loop, cross legally.
    """
    for group in sorted(matcher.lanes):
        lanes = Lanes(record, matcher, group)
        first, *others = sorted(lanes.lanes)
        for other in others:
            position = _first_crossing(record, lanes, first, other)
            if position is not None:
                return Crossing(group=group, position=position, ranks=(first, other))
    return None


def _first_crossing(record: RunRecord, lanes: Lanes, one: int, other: int) -> int | None:
    start = max(lanes.lanes[one].base, lanes.lanes[other].base)
    stop = min(lanes.lanes[one].end, lanes.lanes[other].end)
    if stop - start < 2:
        return None
    sites = [lanes.lanes[rank].column(lanes.tracks[rank].site, start, stop) for rank in (one, other)]
    if sites[0] == sites[1]:
        return None
    for offset in range(stop - start - 1):
        if sites[0][offset] == sites[1][offset]:
            continue
        lines = [[lanes.line_of(column[offset + ahead]) for ahead in (0, 1)] for column in sites]
        if lines[0] != lines[1][::-1] or lines[0][0] == lines[0][1] or None in lines[0]:
            continue
        if _alike(record, lanes, (one, other), start + offset) and _alone(lanes, (one, other), start + offset):
            return start + offset
    return None


def _alike(record: RunRecord, lanes: Lanes, ranks: tuple[int, int], position: int) -> bool:
    kinds = set()
    for rank in ranks:
        for entry in (position, position + 1):
            row, track = lanes.row(rank, entry), lanes.tracks[rank]
            assert row is not None
            kinds.add((track.signature[row], track.step[row], track.forward_site[row]))
    return len(kinds) == 1 and record.signatures[next(iter(kinds))[0]].origin == "user"


def _alone(lanes: Lanes, ranks: tuple[int, int], position: int) -> bool:
    for rank in ranks:
        track, row = lanes.tracks[rank], lanes.row(rank, position)
        assert row is not None
        pair = {lanes.line(rank, position), lanes.line(rank, position + 1)}
        for entry in (*range(position - _NEIGHBOURS, position), *range(position + 2, position + 2 + _NEIGHBOURS)):
            near = lanes.row(rank, entry)
            if near is not None and track.step[near] == track.step[row] and lanes.line(rank, entry) in pair:
                return False
    return True


_MOST_TURNS = 64
"""Entries in a row among which the same things have to come up on both ranks."""


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """The first entry that is about one thing on one rank and about another on the other."""

    group: int
    position: int
    ranks: tuple[int, int]


def find_swap(record: RunRecord, matcher: Matcher) -> Swap | None:
    """Find the first such entry, where entries in a row of one line and one step are about the same things in all."""
    if not any(signature.subject for signature in record.signatures):
        return None
    for group in sorted(matcher.lanes):
        lanes = Lanes(record, matcher, group)
        first, *others = sorted(lanes.lanes)
        for other in others:
            position = _first_swap(record, lanes, (first, other))
            if position is not None:
                return Swap(group=group, position=position, ranks=(first, other))
    return None


def _first_swap(record: RunRecord, lanes: Lanes, ranks: tuple[int, int]) -> int | None:
    start = max(lanes.lanes[rank].base for rank in ranks)
    stop = min(lanes.lanes[rank].end for rank in ranks)
    if stop - start < 2:
        return None
    one, other = (lanes.lanes[rank].column(lanes.tracks[rank].signature, start, stop) for rank in ranks)
    for offset in range(stop - start):
        subjects = [record.signatures[column[offset]].subject for column in (one, other)]
        if all(subjects) and subjects[0] != subjects[1] and _come_up_on_both(record, lanes, ranks, start + offset):
            return start + offset
    return None


def _come_up_on_both(record: RunRecord, lanes: Lanes, ranks: tuple[int, int], position: int) -> bool:
    balance: Counter[str] = Counter()
    for ahead in range(_MOST_TURNS):
        entries = [_entry(record, lanes, rank, position + ahead) for rank in ranks]
        if None in entries or any(entry != _entry(record, lanes, ranks[0], position) for entry in entries):
            return False
        for rank, sign in zip(ranks, (1, -1), strict=True):
            row, track = lanes.row(rank, position + ahead), lanes.tracks[rank]
            assert row is not None
            subject = record.signatures[track.signature[row]].subject
            if not subject:
                return False
            balance[subject] += sign
        if not any(balance.values()):
            return True
    return False


def _entry(record: RunRecord, lanes: Lanes, rank: int, position: int) -> tuple[object, ...] | None:
    """Return what the turns of one loop have in common; None where the rank did not get there."""
    row = lanes.row(rank, position)
    if row is None:
        return None
    track = lanes.tracks[rank]
    signature = record.signatures[track.signature[row]]
    return msgspec.structs.replace(signature, subject=""), track.step[row], lanes.line(rank, position)
