"""Which rank may be blamed for a parting: with two ranks, "extra here" and "missing there" are the same trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from ddpdoctor.diagnosis.divergence.next_calls import WALK_BOUND, Lanes, NextCall

Line = tuple[str, int] | None


def line_culprit(lanes: Lanes, turns: tuple[NextCall, ...], common: int) -> tuple[int | None, str]:
    """Name the rank that the majority of three or more ranks, or an earlier step, speaks against.

    ``common`` is the position of the last common entry. Returns the rank and the reason, or None and an empty text.
    """
    entries = {turn.rank: turn for turn in turns if turn.action != "elsewhere"}
    culprit, reason = _outvoted({rank: _what(turn) for rank, turn in entries.items()})
    if culprit is not None or len(entries) != 2:
        return culprit, reason
    one, other = sorted(entries)
    usual = [_usual(lanes, rank, common) for rank in (one, other)]
    next_lines = [lanes.line(rank, common + 1) for rank in (one, other)]
    if None in next_lines or next_lines[0] == next_lines[1]:
        return None, ""
    habits = [sum(line in seen for seen in usual) for line in next_lines]
    if sorted(habits) != [0, 2]:
        return None, ""
    deviant = one if habits[0] == 0 else other
    return deviant, "in earlier steps both ranks took the path that the other rank takes here"


def step_culprit(lanes: Lanes, turns: tuple[NextCall, ...], common: int) -> tuple[int | None, str]:
    """Name the rank whose step advanced, from one reduction of gradients to the next, unlike before and elsewhere."""
    advances: dict[int, int] = {}
    usual: set[int] = set()
    for turn in turns:
        if turn.row is None:
            continue
        track = lanes.tracks[turn.rank]
        steps = [turn.step]
        for position in range(common, max(common - WALK_BOUND, -1), -1):
            row = lanes.row(turn.rank, position)
            if row is None or len(steps) == 3:
                break
            if not lanes.reduces_gradients(turn.rank, row):
                continue
            if track.forward_site[row] == track.forward_site[turn.row] and track.step[row] != steps[-1]:
                steps.append(track.step[row])
        if len(steps) > 1:
            advances[turn.rank] = steps[0] - steps[1]
        if len(steps) > 2:
            usual.add(steps[1] - steps[2])
    culprit, reason = _outvoted(advances)
    if culprit is not None:
        return culprit, reason
    expected = usual if len(usual) == 1 else {1}
    deviants = [rank for rank, advance in advances.items() if advance not in expected]
    if len(advances) > 1 and len(deviants) == 1:
        rank = deviants[0]
        done = "skipped" if advances[rank] > max(expected) else "repeated"
        return rank, f"it {done} a backward, while the other ranks continued as before"
    return None, ""


def _outvoted(choices: Mapping[int, Hashable]) -> tuple[int | None, str]:
    counts = Counter(choices.values())
    if len(choices) < 3 or len(counts) != 2:
        return None, ""
    (_, majority), (choice, minority) = counts.most_common()
    if minority != 1 or majority < 2:
        return None, ""
    rank = next(rank for rank, chosen in choices.items() if chosen == choice)
    return rank, f"the other {majority} ranks agree"


def _what(turn: NextCall) -> Hashable:
    signature = turn.signature
    what = None if signature is None else (signature.kind, signature.numels, signature.dtype, signature.reduce_op)
    line = turn.line
    return turn.action, None if line is None else (line.file, line.line), what


def _usual(lanes: Lanes, rank: int, common: int) -> set[Line]:
    """Lines that came next on a rank when it had run the line of the last common entry before."""
    here = lanes.line(rank, common)
    start = max(lanes.lanes[rank].base, common - WALK_BOUND) if rank in lanes.lanes else common
    return {
        lanes.line(rank, position + 1)
        for position in range(start, common)
        if here is not None and lanes.line(rank, position) == here
    }
