"""Ranks that wait now for one which is at work elsewhere, or sleeps by a clock of its own: no standstill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ddpdoctor.diagnosis.divergence.next_calls import OLD_NS, NextCall, elsewhere, user_frames
from ddpdoctor.diagnosis.divergence.waiting import LEFT, Blocked, Waiters
from ddpdoctor.diagnosis.live.hangs import sleep_text
from ddpdoctor.diagnosis.wording import duration_text, location_of, place, rank_list, verb
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import Rank, RunRecord

_WAITED_FOR = (
    (("torch/utils/data/dataloader.py",), frozenset({"_try_get_data", "_get_data"}), "its loader's workers"),
    (("/subprocess.py",), frozenset({"wait", "_wait", "communicate", "_communicate"}), "a child process"),
    (("/queue.py", "/multiprocessing/queues.py"), frozenset({"get", "put"}), "a queue"),
    (("/threading.py",), frozenset({"join", "wait", "_wait_for_tstate_lock"}), "another thread"),
    (("/multiprocessing/popen_fork.py", "/multiprocessing/process.py"), frozenset({"wait", "join"}), "a child process"),
    (("/multiprocessing/connection.py",), frozenset({"wait", "poll", "recv", "recv_bytes"}), "another process"),
    (("/socket.py", "/ssl.py"), frozenset({"readinto", "recv", "read", "accept", "create_connection"}), "a connection"),
)
"""Functions that return when someone else has done something: ends of their files, their names, and what that is."""


_UNSEEN = "which cannot be seen from here"


class LastingWait(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that others wait for."""

    late: int
    waiting: tuple[int, ...]
    since_ns: int
    """When the first of them began to wait."""
    timeout_ns: int
    """After so long a wait their group gives up; 0 where that is not known."""
    doing: str
    """What the late rank does, as a predicate without its subject: ``busy in `evaluate` at train.py:88``."""
    locations: tuple[Location, ...] = ()
    """Where the late rank is, then where the others wait."""
    place: Frame | None = None
    """The line of the user's in the innermost function that the late rank has been in all the time."""
    stacks: tuple[tuple[int, tuple[Frame, ...]], ...] = ()
    """Of the late rank and of one that waits."""
    unseen: tuple[int, ...] = ()
    """Where it is for ranks that run elsewhere: those of which some have not come, ``late`` the first of them."""


def lasting_wait(record: RunRecord, blocked: Mapping[int, Blocked]) -> LastingWait | None:
    """Return the rank for which others have waited longest, be it through a third; None while no one waits for one."""
    gone = {rank.rank for rank in record.ranks if rank.end in LEFT}
    waiters = Waiters(blocked)
    known = {rank.rank: rank for rank in record.ranks}
    absent = set(waiters.awaited) - waiters.held - gone
    # Who is in a process group was started, if out of sight; whether it has come is not known of it.
    unseen = {
        late
        for late in absent - set(known)
        if any(blocked[rank].wait is None for bunch in waiters.awaited[late] for rank in bunch.ranks)
    }
    found = [
        (min(bunch.since_ns for bunch in waiters.awaited[late]), late)
        for late in (absent if absent == unseen else absent - unseen)
    ]
    if not found:
        return None
    since_ns, late = min(found)
    waiting = tuple(sorted(waiters.behind([late])))
    first = min((blocked[rank] for rank in waiting), key=lambda entry: entry.since_ns)
    timeout_ns = record.groups[first.group].timeout_ns if first.group is not None else 0
    turn = elsewhere(record, late, known.get(late), None)
    theirs = elsewhere(record, first.rank, known.get(first.rank), first)
    at = _function_it_is_in(record, turn)
    places = (location_of(at), location_of(turn.line), location_of(theirs.line))
    return LastingWait(
        late=late,
        waiting=waiting,
        since_ns=since_ns,
        timeout_ns=timeout_ns,
        doing=_UNSEEN if late in unseen else _doing(turn, at, _waited_for(record, turn, at), known.get(late)),
        locations=tuple(dict.fromkeys(where for where in places if where is not None)),
        place=at,
        stacks=tuple(
            (turn.rank, stack) for turn in (turn, theirs) if (stack := turn.stack or turn.frames) or turn.rank in known
        ),
        unseen=_awaited_by(waiting, unseen, waiters) if late in unseen else (),
    )


def _awaited_by(waiting: Iterable[int], ranks: Iterable[int], waiters: Waiters) -> tuple[int, ...]:
    """Those of some ranks for which ones of ``waiting`` wait, ascending."""
    waits = frozenset(waiting)
    awaited = (rank for rank in ranks if any(not waits.isdisjoint(bunch.ranks) for bunch in waiters.awaited[rank]))
    return tuple(sorted(awaited))


def wait_text(wait: LastingWait, now_ns: int, *, over: bool = False) -> str:
    """Say it at a moment: ``ranks 0 and 2 have waited 14 s for rank 1, busy in `evaluate` at train.py:88``."""
    waited = duration_text(now_ns - wait.since_ns)
    has = "had" if over else verb(wait.waiting, "has", "have")
    when = ", when the job was ended" if over else ""
    some = "some of " if len(wait.unseen) > 1 else ""
    whom = some + rank_list(wait.unseen or (wait.late,))
    return f"{rank_list(wait.waiting)} {has} waited {waited} for {whom}, {wait.doing}{when}"


def _doing(turn: NextCall, at: Frame | None, waited_for: str, rank: Rank | None) -> str:
    if rank is None:
        return "which has not reported"
    if turn.sleeps_ns:
        return sleep_text(turn, at)
    within = f" in `{at.function}`" if at is not None and at.function not in ("", "<module>") else ""
    ago = f" {duration_text(turn.seen_ago_ns)} ago" if turn.seen_ago_ns else ""
    if at is None:
        return "busy at an unknown line"
    if waited_for:
        return f"{'last seen waiting' if ago else 'which waits'}{within} at {place(at)}{ago} for {waited_for}"
    if rank.restless and not ago:
        return f"which is stuck{within} at {place(at)} (its process still has some activity)"
    return f"{'last seen' if ago else 'busy'}{within} at {place(at)}{ago}"


def _waited_for(record: RunRecord, turn: NextCall, at: Frame | None) -> str:
    """Return what the line of the user's at which a rank is waits for; empty where it works, or that is not known."""
    frames = user_frames(record, turn.stack)
    if not frames or at is None or (frames[0].file, frames[0].line) != (at.file, at.line):
        return ""
    inside = turn.stack[: turn.stack.index(frames[0])]
    for ends, functions, what in _WAITED_FOR:
        if any(frame.function.rpartition(".")[2] in functions and frame.file.endswith(ends) for frame in inside):
            return what
    return ""


def _function_it_is_in(record: RunRecord, turn: NextCall) -> Frame | None:
    """Return the innermost of the user's functions that a rank has been in for a while.

    Its heartbeat says which line has called that function; the stack says where in it the rank is.
    """
    heartbeat = record.heartbeat(turn.rank)
    stood = None if heartbeat is None else record.site(heartbeat.site).innermost
    frames = user_frames(record, turn.stack)
    if heartbeat is None or stood is None or record.job.ended_ns - heartbeat.beat_at_ns > OLD_NS:
        return turn.line  # A call holds its interpreter: the stack that was taken from outside is newer.
    places = [(frame.file, frame.line) for frame in frames]
    at = places.index((stood.file, stood.line)) if (stood.file, stood.line) in places else 0
    return frames[at - 1] if at else stood
