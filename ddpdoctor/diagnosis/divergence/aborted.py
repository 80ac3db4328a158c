"""A rank that died in a collective which the others were not in: its own, or one that another rank called alone.

Where the sizes of two collectives that meet do not fit, gloo ends the process of one rank at once; the other sees a
lost connection. In a live run nothing is left of torch's flight recorder then. The explicit calls are: a row is written
when a call is entered.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

import msgspec

from ddpdoctor.diagnosis.divergence.long_waits import timed_out_wait
from ddpdoctor.diagnosis.divergence.matching import Matcher, disagreement
from ddpdoctor.diagnosis.divergence.next_calls import NextCall, elsewhere, main_stack, user_frames
from ddpdoctor.diagnosis.divergence.waiting import Blocked, is_echo, was_ended_by_launcher
from ddpdoctor.diagnosis.sync_points import lane
from ddpdoctor.finding import Frame
from ddpdoctor.record.model import Rank, RunRecord, Site
from ddpdoctor.record.streams.collectives import Signature
from ddpdoctor.record.streams.measured import CallTrack

SEEN_LATER_NS = 1_000_000_000
"""A living rank whose heart beat so long after a call of another has not made it, where its rows do not hold it."""
CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""What a process does to itself, and is seen to do."""
_ONE_FAILURE_NS = 5_000_000_000
"""An exception that came so soon after a call, at its line, came out of it."""
_IN_BACKWARD = "_engine_run_backward"
_IN_A_CALL = "distributed_c10d.py"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """An explicit collective that a rank was in at its end."""

    rank: int
    group: int
    """Index into ``RunRecord.groups``."""
    at: tuple[bool, int]
    """Its place in the lane of its group."""
    signature: Signature
    step: int
    site: Site
    entered_at_ns: int
    over: bool
    """Its row says that the rank left it, be it by an exception."""
    habitual: bool
    """The rank had called it at this line before."""


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended because its collective and another rank's did not belong together."""

    died: int
    call: Call
    callers: tuple[Call, ...]
    """What each rank called that reached this place of the group."""
    absent: tuple[int, ...]
    """Ranks that went another way."""
    outsiders: tuple[int, ...]
    """Ranks of the group of which neither is known."""
    difference: str = ""
    """What differs between calls of one line."""


def find_aborted(record: RunRecord, matcher: Matcher) -> Aborted | None:
    """Find the rank that a collective ended; None where no proof of it is left."""
    if not record.call_tracks or any(rank.exceptions and not is_echo(rank) for rank in record.ranks):
        return None
    if timed_out_wait(record, matcher) is not None:
        return None
    for rank in record.ranks:
        if rank.end == "signalled" and not rank.main_finished and not was_terminated(record, rank):
            found = _inside_its_call(record, rank) or _beside_a_call(record, rank)
            if found is not None:
                return found
    return None


def call_it_died_in(record: RunRecord, rank: Rank) -> Call | None:
    """Return the explicit collective that a dead rank was in; None where it was in none, or had left it."""
    call = _last_call(record, rank.rank)
    if call is None or call.over:
        return None
    stack = last_stack(record, rank)
    if stack and not any(frame.file.endswith(_IN_A_CALL) for frame in stack):
        return None
    for other in record.groups[call.group].ranks:
        theirs = _call_at(record, other, call)
        if theirs is not None and other != rank.rank and theirs.over and not _failed_in(record, theirs):
            return None  # It was over for that rank: it may have been over for this one, whose row came late.
    return call


def aborted_culprit(aborted: Aborted) -> tuple[int | None, str]:
    """Return the rank that may be blamed, by the others' majority or by what was done before, and why."""
    callers, absent = aborted.callers, aborted.absent
    if aborted.difference or aborted.outsiders or not absent:
        return None, ""
    if len(callers) == 1 and len(absent) > 1:
        return callers[0].rank, f"the other {len(absent)} ranks agree"
    if len(absent) == 1 and len(callers) > 1:
        return absent[0], f"the other {len(callers)} ranks agree"
    if len(absent) == 1 and all(call.habitual for call in callers):
        return absent[0], "the ranks called it at this line before"
    return None, ""


def aborted_turns(record: RunRecord, aborted: Aborted, blocked: Mapping[int, Blocked]) -> tuple[NextCall, ...]:
    """Return what each rank of which it is known did, by rank."""
    known = {rank.rank: rank for rank in record.ranks}
    turns = [
        NextCall(
            rank=call.rank,
            action="collective",
            signature=msgspec.structs.replace(call.signature, numels=()),
            group=record.groups[call.group],
            step=call.step,
            frames=call.site.frames,
            stack=last_stack(record, known[call.rank]),
            signal=known[call.rank].signal,
        )
        for call in aborted.callers
    ]
    for number in aborted.absent:
        stack, has_died = last_stack(record, known[number]), number == aborted.died
        if has_died or (stack and known[number].end == "signalled"):
            turn = NextCall(
                rank=number,
                action="signalled" if has_died else "elsewhere",
                signal=known[number].signal if has_died else None,
                frames=user_frames(record, stack),
                stack=stack,
            )
        else:
            turn = elsewhere(record, number, known[number], blocked.get(number))
            # A rank that raised left no stack of its end, but perhaps one of long before.
            turn = msgspec.structs.replace(turn, stack=()) if known[number].exceptions else turn
        turns.append(turn)
    return tuple(sorted(turns, key=lambda turn: turn.rank))


def last_stack(record: RunRecord, rank: Rank) -> tuple[Frame, ...]:
    """Return the main thread's stack when a signal ended a rank; empty where none did, or it could not say."""
    told = any(dump.of_the_end for dump in record.stacks_of(rank.rank) if dump.main)
    return main_stack(record, rank.rank) if told or rank.signal in CRASHES else ()


def was_terminated(record: RunRecord, rank: Rank) -> bool:
    """Return whether a rank was ended by a SIGTERM, as launchers send to those whose peer is dead."""
    told = rank.signal is None and bool(last_stack(record, rank))
    return was_ended_by_launcher(rank) or (rank.end == "signalled" and told)


def is_in_backward(turn: NextCall) -> bool:
    """Return whether a rank that went another way was in backward."""
    if turn.signature is not None:
        return turn.signature.origin == "ddp-backward"
    return _runs_backward(turn.stack) or (turn.exception is not None and _IN_BACKWARD in turn.exception.traceback)


def _inside_its_call(record: RunRecord, rank: Rank) -> Aborted | None:
    call = call_it_died_in(record, rank)
    if call is None:
        return None
    heartbeat, timeout_ns = record.heartbeat(rank.rank), record.groups[call.group].timeout_ns
    if heartbeat is not None and 0 < timeout_ns <= heartbeat.beat_at_ns - call.entered_at_ns:
        return None  # It waited for as long as its group may: the timeout ended it.
    callers, absent, outsiders = [call], list[int](), list[int]()
    for member in record.groups[call.group].ranks:
        theirs = _call_at(record, member, call)
        if theirs is not None and member != rank.rank:
            callers.append(theirs)
        elif member != rank.rank:
            (absent if _went_past(record, member, call, rank) else outsiders).append(member)
    return _judged(record, rank.rank, call, callers, absent, outsiders)


def _beside_a_call(record: RunRecord, rank: Rank) -> Aborted | None:
    """The dead rank was in backward when others failed in an explicit collective that it had not called."""
    stack = last_stack(record, rank)
    if not _ended_natively(record, rank) or not _runs_backward(stack):
        return None
    for other in record.ranks:
        call = _last_call(record, other.rank)
        if call is None or not _failed_in(record, call) or rank.rank not in record.groups[call.group].ranks:
            continue
        members = record.groups[call.group].ranks
        calls = {member: _call_at(record, member, call) for member in members}
        if calls[rank.rank] is not None or _is_beyond(record, rank.rank, call):
            return None
        callers = [theirs for theirs in calls.values() if theirs is not None]
        outsiders = [member for member, theirs in calls.items() if theirs is None and member != rank.rank]
        return _judged(record, rank.rank, call, callers, [rank.rank], outsiders)
    return None


def _judged(
    record: RunRecord, died: int, call: Call, callers: list[Call], absent: list[int], outsiders: list[int]
) -> Aborted | None:
    backend = record.groups[call.group].backend
    differences = [what for theirs in callers if (what := disagreement(call.signature, theirs.signature, backend))]
    if not differences and not absent:
        return None
    one_line = len({theirs.site.innermost for theirs in callers}) == 1
    return Aborted(
        died=died,
        call=call,
        callers=tuple(callers),
        absent=tuple(absent),
        outsiders=tuple(outsiders),
        difference=differences[0] if differences and one_line and not absent else "",
    )


def _went_past(record: RunRecord, member: int, call: Call, died: Rank) -> bool:
    """Return whether a rank of which everything is known continued, or failed, without a call that it had come to."""
    rank, heartbeat = record.of_rank(member), record.heartbeat(member)
    if rank is None or heartbeat is None or _is_beyond(record, member, call) or _track(record, member) is None:
        return False
    terminated = was_terminated(record, rank) and bool(last_stack(record, rank)) and _ended_natively(record, died)
    # The row of a call that no one waits for later is written before it is entered, so none of these is lost.
    is_whole = terminated or is_echo(rank)
    if not is_whole and not (rank.end == "running" and heartbeat.beat_at_ns > call.entered_at_ns + SEEN_LATER_NS):
        return False
    return heartbeat.step > call.step or (is_whole and _ended_natively(record, died))


def _is_beyond(record: RunRecord, member: int, call: Call) -> bool:
    """Return whether a rank has later calls in the lane: this one is then lost, or was never waited for."""
    track = _track(record, member)
    return track is not None and any(at[0] == call.at[0] and at[1] > call.at[1] for at in lane(track, call.group))


def _failed_in(record: RunRecord, call: Call) -> bool:
    """Return whether the lost connection that a rank reports came out of a call, or the launcher ended it in there."""
    rank, innermost = record.of_rank(call.rank), call.site.innermost
    last = _last_call(record, call.rank)
    if rank is None or innermost is None or last is None or (last.at, last.group) != (call.at, call.group):
        return False
    if was_terminated(record, rank):
        return not call.over and any(frame.file.endswith(_IN_A_CALL) for frame in last_stack(record, rank))
    if not is_echo(rank):
        return False
    first = min(rank.exceptions, key=lambda entry: entry.time_ns)
    same_line = bool(first.frames) and (first.frames[0].file, first.frames[0].line) == (innermost.file, innermost.line)
    track = _track(record, call.rank)
    assert track is not None
    left_ns = track.left_at_ns[lane(track, call.group)[call.at]] or call.entered_at_ns
    return same_line and abs(first.time_ns - left_ns) < _ONE_FAILURE_NS


def _last_call(record: RunRecord, rank: int) -> Call | None:
    track = _track(record, rank)
    if track is None or not len(track) or track.sequence[-1] < 0 or track.group[-1] < 0:
        return None
    return _call(record, track, len(track) - 1)


def _call_at(record: RunRecord, rank: int, call: Call) -> Call | None:
    """Return what a rank called at the place of another's call."""
    track = _track(record, rank)
    row = None if track is None else lane(track, call.group).get(call.at)
    return None if track is None or row is None else _call(record, track, row)


def _call(record: RunRecord, track: CallTrack, row: int) -> Call:
    kind, site = track.kinds[track.kind[row]], record.site(track.site[row])
    before = {record.site(number).innermost for number in set(track.site[:row])}
    return Call(
        rank=track.rank,
        group=track.group[row],
        at=(kind == "buffers", track.sequence[row]),
        # Of a payload only its bytes are known; two ranks' calls fit where these do.
        signature=Signature(kind=kind, numels=(track.size_bytes[row],), size_bytes=track.size_bytes[row]),
        step=track.step[row],
        site=site,
        entered_at_ns=track.entered_at_ns[row],
        over=track.left_at_ns[row] != 0,
        habitual=site.innermost is not None and site.innermost in before,
    )


def _ended_natively(record: RunRecord, rank: Rank) -> bool:
    """Return whether a thread of gloo's or NCCL's own ended a rank."""
    return rank.signal in CRASHES and any(dump.native_end for dump in record.stacks_of(rank.rank))


def _runs_backward(stack: tuple[Frame, ...]) -> bool:
    return any(frame.function == _IN_BACKWARD for frame in stack)


def _track(record: RunRecord, rank: int) -> CallTrack | None:
    return next((track for track in record.call_tracks if track.rank == rank), None)
