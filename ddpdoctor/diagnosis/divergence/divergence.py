"""The one divergence of a run: where its ranks part, what each did next, and whether the job hangs for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, TypeAlias

import msgspec

from ddpdoctor.diagnosis.divergence.aborted import Aborted, aborted_culprit, aborted_turns, find_aborted
from ddpdoctor.diagnosis.divergence.long_waits import timed_out_wait
from ddpdoctor.diagnosis.divergence.matching import FirstMismatch, Matcher, matched
from ddpdoctor.diagnosis.divergence.next_calls import (
    WALK_BOUND,
    Lanes,
    NextCall,
    elsewhere,
    last_common_position,
    turns,
    what_keeps,
)
from ddpdoctor.diagnosis.divergence.unused_parameters import explains
from ddpdoctor.diagnosis.divergence.waiting import (
    LEFT,
    Blocked,
    blocked_ranks,
    is_echo,
    left_ns,
    left_on_their_own,
    standing_still,
    was_ended_by_launcher,
)
from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.diagnosis.wording import frame_of, place
from ddpdoctor.finding import Frame
from ddpdoctor.record.model import Rank, RankException, RunRecord
from ddpdoctor.record.streams.collectives import Group

# The rank whose leaving the others suffer from.


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
    """Return whether a live job ended by Ctrl-C: the first exception that echoes no lost peer is the keyboard's."""
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
    others = [(one.type, one.frames[:1]) if one else None for one in map(root_exception, record.ranks)]
    return set(others) == {(raised.type, raised.frames[:1])}


def _others_went_on(record: RunRecord, matcher: Matcher, rank: Rank) -> bool:
    echoed = any(is_echo(other) for other in record.ranks if other.rank != rank.rank)
    known = (lanes for lanes in matcher.lanes.values() if rank.rank in lanes)
    return echoed or any(lane.end > lanes[rank.rank].end for lanes in known for lane in lanes.values())


# Ranks that call the same in another order.

_NEIGHBOURS = 8
"""Entries before and after that must not come from the two lines in the same step."""


Exchange: TypeAlias = "tuple[int, tuple[int, int], int]"
"""A group, two of its ranks, and the first position at which they do in another order what both do."""


def _first_exchange(
    record: RunRecord, matcher: Matcher, first_of: Callable[[RunRecord, Lanes, tuple[int, int]], int | None]
) -> Exchange | None:
    for group in sorted(matcher.lanes):
        lanes = Lanes(record, matcher, group)
        first, *others = sorted(lanes.lanes)
        for other in others:
            position = first_of(record, lanes, (first, other))
            if position is not None:
                return group, (first, other), position
    return None


def _first_crossing(record: RunRecord, lanes: Lanes, ranks: tuple[int, int]) -> int | None:
    """Return the first of two positions, one after the other, whose lines are exchanged between two ranks.

    Of the user's own collectives only neighbours in one step with one signature count, and only lines that are run once
    in the step: branches that each reduce the same quantity, in a loop, cross legally.
    """
    start = max(lanes.lanes[rank].base for rank in ranks)
    stop = min(lanes.lanes[rank].end for rank in ranks)
    if stop - start < 2:
        return None
    sites = [lanes.lanes[rank].column(lanes.tracks[rank].site, start, stop) for rank in ranks]
    if sites[0] == sites[1]:
        return None
    for offset in range(stop - start - 1):
        if sites[0][offset] == sites[1][offset]:
            continue
        lines = [[lanes.line_of(column[offset + ahead]) for ahead in (0, 1)] for column in sites]
        if lines[0] != lines[1][::-1] or lines[0][0] == lines[0][1] or None in lines[0]:
            continue
        if _alike(record, lanes, ranks, start + offset) and _alone(lanes, ranks, start + offset):
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


def _first_swap(record: RunRecord, lanes: Lanes, ranks: tuple[int, int]) -> int | None:
    """Return the first position that is about one thing on one rank and about another on the other.

    Where entries in a row of one line and one step are about the same things in all.
    """
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


# Which rank may be blamed for a parting: with two ranks, "extra here" and "missing there" are the same trace.


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
    coming = [lanes.place(rank, common + 1) for rank in (one, other)]
    if None in coming or coming[0] == coming[1]:
        return None, ""
    habits = [sum(place in seen for seen in usual) for place in coming]
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
            if lanes.record.signatures[track.signature[row]].origin != "ddp-backward":
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


def _usual(lanes: Lanes, rank: int, common: int) -> set[object]:
    """Places that came next on a rank when it had run that of the last common entry before."""
    here = lanes.place(rank, common)
    start = max(lanes.lanes[rank].base, common - WALK_BOUND) if rank in lanes.lanes else common
    return {
        lanes.place(rank, position + 1)
        for position in range(start, common)
        if here is not None and lanes.place(rank, position) == here
    }


Form = Literal["mismatch", "desync", "crossed", "swapped", "absentee", "standstill", "stuck", "aborted"]

STANDSTILL_NS = 1_000_000_000
"""How long ranks must have waited before a standstill is believed."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of a job part."""

    form: Form
    group: Group | None = None
    """The process group of the collective at which they part; None for a wait in the store or none at all."""
    sequence: int | None = None
    """Position in that group, from 0, of the first entry that they do not have in common."""
    last_common: NextCall | None = None
    """The entry before it, as the first rank ran it; None when there is none."""
    turns: tuple[NextCall, ...]
    """What each rank of the group did next, by rank."""
    proof: tuple[NextCall, ...] = ()
    """The entries that prove it, where they come later than ``turns``."""
    difference: str = ""
    """What differs between the entries of a mismatch or a desync."""
    callers_alone: frozenset[int] = frozenset()
    """Ranks whose next line no other rank ever ran a collective from, while they ran the others' line too."""
    world_size: int = 0
    """Ranks of the job."""
    died: int | None = None
    """The rank whose process a collective ended."""
    culprit: int | None = None
    """The rank that may be blamed; None when that cannot be known."""
    culprit_reason: str = ""
    """Why it may be blamed."""
    times: tuple[tuple[Frame, dict[int, int]], ...] = ()
    """Lines of explicit calls that ranks came to a different number of times, and how often each did."""


@once_per_record()
def find_divergence(record: RunRecord) -> Divergence | None:
    """Find the first place where the ranks of a run part, or the standstill that they ended in.

    It takes a record for complete: how ranks ended counts, so that a rank which had left explains the calls after that,
    and so do calls that ended a process, swapped and crossed calls, which are a proof only once nothing follows. While
    ranks run, ``live_verdict`` decides, on what can be believed already. Twenty functions ask for it in one
    examination: it is found once for a record.
    """
    matcher = matched(record)
    parting = matcher.parting
    blocked = blocked_ranks(record, matcher)
    absentee = find_departed_rank(record, matcher, blocked)
    if absentee is not None and parting is not None and left_ns(absentee) < parting.time_ns:
        parting = None
    found: Divergence | None
    if parting is not None:
        found = from_parting(record, matcher, parting, blocked)
    elif (aborted := find_aborted(record, matcher)) is not None:
        found = from_aborted(record, aborted, blocked)
    elif absentee is not None:
        found = from_absentee(record, matcher, absentee, blocked)
    else:
        started = (track.started_ns[len(track) - 1] for track in record.collectives if len(track))
        last_ns = max((*started, *(dump.time_ns for dump in record.stacks)), default=0)
        found = (
            from_standstill(record, matcher, blocked, record.job.ended_ns or last_ns)
            or from_idle(record)
            or _from_exchange(record, matcher)
        )
    if found is None or explains(record, found.turns + found.proof):
        return None
    return _with_reasons(record, matcher, found)


def _with_reasons(record: RunRecord, matcher: Matcher, found: Divergence) -> Divergence:
    """Return the divergence with what the run shows of why the ranks part."""
    turns = found.turns + found.proof
    handling = {turn.rank: turn.handling for turn in turns if turn.handling is not None}
    # What ended another rank is the cause: a handler that looks something up first handles the same on every rank.
    ended = any(turn.exception is not None and not turn.exception.communication for turn in turns)
    if len(handling) == 1 and not ended and len({turn.rank for turn in turns}) > 1:
        ((rank, handled),) = handling.items()
        reason = f"it handles the {handled.type} that it raised at {place(frame_of(handled))}"
        return msgspec.structs.replace(found, culprit=rank, culprit_reason=reason)
    lanes = None if found.group is None else Lanes(record, matcher, record.groups.index(found.group))
    lines = {turn.line: None for turn in turns if turn.line and turn.signature and turn.signature.origin == "user"}
    times = {line: lanes.times((line.file, line.line)) for line in lines if lanes is not None}
    # Once, and not at all, is no loop.
    told = ((line, counts) for line, counts in times.items() if len({*counts.values()}) > 1 < min(counts.values()))
    return msgspec.structs.replace(found, times=tuple(told))


def from_parting(
    record: RunRecord, matcher: Matcher, parting: FirstMismatch, blocked: Mapping[int, Blocked]
) -> Divergence:
    """Describe entries that do not belong together, from the place where the ranks' lines part."""
    lanes = Lanes(record, matcher, parting.group)
    group = record.groups[parting.group]
    present = [rank for rank in group.ranks if lanes.row(rank, parting.position) is not None]
    form, common = parting.form, last_common_position(lanes, present, parting.position)
    if form == "desync":
        parted = _parted_before(lanes, present, parting.position)
        # Where lines parted just before the steps did, a call of one rank alone is the reason.
        form, common = ("desync", parting.position - 1) if parted is None else ("mismatch", parted)
    else:
        common = _before_one_line(lanes, present, common, parting.position)
    after = turns(record, lanes, group.ranks, common + 1, blocked)
    proof = turns(record, lanes, present, parting.position, blocked) if common + 1 < parting.position else ()
    naming = step_culprit if form == "desync" else line_culprit
    culprit, reason = naming(lanes, after, common)
    return Divergence(
        form=form,
        group=group,
        sequence=common + 1,
        last_common=lanes.turn(present[0], common, False),
        turns=after,
        proof=proof,
        difference=parting.difference,
        callers_alone=_callers_alone(lanes, after),
        culprit=culprit,
        culprit_reason=reason,
    )


def _parted_before(lanes: Lanes, ranks: list[int], position: int) -> int | None:
    """Return the last entry before ranks called from different lines and then drifted apart; None if they did not."""
    first = position
    while first > 0 and _steps_differ(lanes, ranks, first - 1):
        if len({lanes.line(rank, first - 1) for rank in ranks}) > 1:
            break
        first -= 1
    common = last_common_position(lanes, ranks, first)
    return common if common + 1 < first else None


def _before_one_line(lanes: Lanes, ranks: list[int], common: int, position: int) -> int:
    """Return the last common entry before calls that one line makes: a trainer's ``fit`` makes all of a framework's.

    That the ranks agree in such a line says nothing, where a call from another line was paired with one of it before.
    """
    lines = {lanes.line(rank, position) for rank in ranks}
    if len(lines) > 1 or None in lines:
        return common
    walked = common
    while walked >= 0 and {lanes.line(rank, walked) for rank in ranks} == lines:
        walked -= 1
    before = last_common_position(lanes, ranks, walked + 1)
    return before if before < walked else common


def _steps_differ(lanes: Lanes, ranks: list[int], position: int) -> bool:
    rows = {rank: lanes.row(rank, position) for rank in ranks}
    return len({lanes.tracks[rank].step[row] for rank, row in rows.items() if row is not None}) > 1


def from_absentee(record: RunRecord, matcher: Matcher, absentee: Rank, blocked: Mapping[int, Blocked]) -> Divergence:
    """Describe a rank that left, and what the others wait in."""
    waiting = sorted(
        (entry for entry in blocked.values() if absentee.rank in entry.missing),
        key=lambda entry: (entry.since_ns, entry.rank),
    )
    reason = "it left"
    # What the rank did last may look incomplete, because no one was left to see it complete.
    blocked = {rank: entry for rank, entry in blocked.items() if rank != absentee.rank}
    first = next((entry for entry in waiting if entry.group is not None), None)
    at = None if first is None or first.group is None or first.position is None else (first.group, first.position)
    if at is None and (unmatched := unmatched_group(record, matcher, absentee)) is not None:
        lane = matcher.lanes[unmatched].get(absentee.rank)
        at = unmatched, 0 if lane is None else lane.end
    if at is None:
        ordered = sorted(record.ranks, key=lambda entry: entry.rank)
        everyone = tuple(elsewhere(record, rank.rank, rank, blocked.get(rank.rank)) for rank in ordered)
        return Divergence(form="absentee", turns=everyone, culprit=absentee.rank, culprit_reason=reason)
    number, position = at
    lanes = Lanes(record, matcher, number)
    group = record.groups[number]
    own_end = lanes.lanes[absentee.rank].end if absentee.rank in lanes.lanes else 0
    common = last_common_position(lanes, group.ranks, min(own_end, position))
    after = turns(record, lanes, group.ranks, common + 1, blocked)
    proof = turns(record, lanes, group.ranks, position, blocked) if common + 1 < own_end else ()
    return Divergence(
        form="absentee",
        group=group,
        sequence=common + 1,
        last_common=lanes.turn(min(lanes.lanes), common, False),
        turns=after,
        proof=proof,
        culprit=absentee.rank,
        culprit_reason=reason,
    )


def from_aborted(record: RunRecord, aborted: Aborted, blocked: Mapping[int, Blocked]) -> Divergence:
    """Describe a rank that a collective ended because the others were not in it, and where they were."""
    culprit, reason = aborted_culprit(aborted)
    return Divergence(
        form="aborted",
        group=record.groups[aborted.call.group],
        turns=aborted_turns(record, aborted, blocked),
        difference=aborted.difference,
        died=aborted.died,
        culprit=culprit,
        culprit_reason=reason,
    )


def from_standstill(
    record: RunRecord, matcher: Matcher, blocked: Mapping[int, Blocked], now_ns: int
) -> Divergence | None:
    """Describe ranks that wait for each other, or for a rank that does nothing; None while someone can continue."""
    stuck = frozenset(rank.rank for rank in record.ranks if rank.stuck)
    still = standing_still(blocked, stuck)
    if not still or any(now_ns - blocked[rank].since_ns < STANDSTILL_NS for rank in still):
        return None
    entries = [blocked[rank] for rank in sorted(still)]
    # A rank that waits for another does nothing either, in `new_group` for example, and is no culprit for that.
    waited_for = (stuck - still) & {rank for entry in entries for rank in entry.missing}
    culprit = min(waited_for) if len(waited_for) == 1 else None
    first = min(entries, key=lambda entry: (entry.position is None, entry.since_ns, entry.rank))
    everyone = sorted({rank.rank for rank in record.ranks} & (still | waited_for))
    known = {rank.rank: rank for rank in record.ranks}
    # A rank that was stopped in a collective which the others have reached meanwhile waits for no one there.
    after = tuple(elsewhere(record, rank, known[rank], blocked[rank] if rank in still else None) for rank in everyone)
    loops = any(turn.endless is not None and turn.rank == culprit for turn in after)
    does = "goes around one loop while the others wait" if loops else "was idle while the others waited"
    calls = {(turn.line, turn.signature and turn.signature.kind) for turn in after}
    groups = {turn.group for turn in after}
    found = Divergence(
        form="stuck" if waited_for else "standstill",
        turns=after,
        world_size=len(record.ranks),
        difference="group" if not waited_for and len(calls) == 1 < len(groups) and None not in groups else "",
        culprit=culprit,
        culprit_reason="" if culprit is None else f"it {does}",
    )
    if first.group is None or first.position is None:
        return found
    lanes = Lanes(record, matcher, first.group)
    return msgspec.structs.replace(
        found,
        group=record.groups[first.group],
        sequence=first.position,
        last_common=lanes.turn(first.rank, first.position - 1, False),
    )


def from_idle(record: RunRecord) -> Divergence | None:
    """Describe ranks that all do nothing, and wait for no collective; None while another rank is at work.

    Their scripts are over and something keeps the processes, or they stand, be it that the others have ended. That is
    told of a watched run only, of which it was measured for how long: in a rehearsal all ranks may wait for a program
    that they started, and two looks at stacks say little.
    """
    alive = [rank for rank in record.ranks if rank.end == "running"]
    expected = record.job.world_size or record.job.ranks_expected or 0
    if not alive or not all(rank.stuck for rank in alive) or len(record.ranks) < expected:
        return None
    kept = all(what_keeps(record, rank.rank) is not None for rank in alive)
    # One that is in a collective waits for others; in which, its recorder shows a moment later, where torch has one.
    measured = {heartbeat.rank for heartbeat in record.heartbeats if not heartbeat.collective or heartbeat.enqueued < 0}
    if not kept and (record.job.kind != "run" or not all(rank.rank in measured for rank in alive)):
        return None
    shown = alive if kept else record.ranks
    culprit = alive[0].rank if len(alive) == 1 else None
    return Divergence(
        form="stuck",
        turns=tuple(elsewhere(record, rank.rank, rank, None) for rank in shown),
        world_size=len(record.ranks),
        culprit=culprit,
        culprit_reason="" if culprit is None else "its process does not end",
    )


def _callers_alone(lanes: Lanes, turns: tuple[NextCall, ...]) -> frozenset[int]:
    places = {turn.rank: (turn.line.file, turn.line.line) for turn in turns if turn.row is not None and turn.line}
    run = {rank: {lanes.line_of(site) for site in set(lanes.tracks[rank].site)} for rank in places}
    alone = set()
    for rank, own in places.items():
        others = {other: place for other, place in places.items() if place != own}
        if others and all(own not in run[other] and place in run[rank] for other, place in others.items()):
            alone.add(rank)
    return frozenset(alone)


def _from_exchange(record: RunRecord, matcher: Matcher) -> Divergence | None:
    """Describe ranks that call the same in another order: the turns of a loop, or else two collectives."""
    swap = None
    if any(signature.subject for signature in record.signatures):
        swap = _first_exchange(record, matcher, _first_swap)
    found = swap or _first_exchange(record, matcher, _first_crossing)
    if found is None:
        return None
    number, ranks, position = found
    lanes, group = Lanes(record, matcher, number), record.groups[number]
    return Divergence(
        form="swapped" if swap else "crossed",
        group=group,
        sequence=position,
        last_common=lanes.turn(ranks[0], position - 1, False),
        turns=turns(record, lanes, group.ranks if swap else ranks, position, {}),
        proof=() if swap else turns(record, lanes, ranks, position + 1, {}),
        difference="order of a loop" if swap else "order of two collectives",
    )
