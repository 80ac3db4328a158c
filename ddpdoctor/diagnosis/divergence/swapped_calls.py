"""One loop that ranks go through in different orders, so that each turn's collective mixes two things up."""

from __future__ import annotations

from collections import Counter

import msgspec

from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.next_calls import Lanes
from ddpdoctor.record.model import RunRecord

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
    """What the turns of one loop have in common; None where the rank did not get there."""
    row = lanes.row(rank, position)
    if row is None:
        return None
    track = lanes.tracks[rank]
    signature = record.signatures[track.signature[row]]
    return msgspec.structs.replace(signature, subject=""), track.step[row], lanes.line(rank, position)
