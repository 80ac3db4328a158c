"""The verdict on a job that runs: a proof that it hangs or goes wrong, or nothing.

The caller hands in a snapshot of the record again and again: the growing tracks, the sites, signatures and groups that
they refer to, the ranks (how they ended, what their main thread is held by, whether liveness called them stuck) and the
waits in the store. The tracks of the ranks may have been read at slightly different moments.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import (
    Divergence,
    find_departed_rank,
    from_absentee,
    from_idle,
    from_parting,
    from_standstill,
)
from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.next_calls import OLD_NS, NextCall, elsewhere, user_frames
from ddpdoctor.diagnosis.divergence.waiting import LEFT, Blocked, Waiters, blocked_ranks
from ddpdoctor.diagnosis.failures import may_yet_be_known
from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.diagnosis.wording import duration_text, location_of, place, rank_list, verb
from ddpdoctor.finding import Frame, Location, grouped
from ddpdoctor.record.model import Rank, RunRecord

# What a run did between its newest step and its end, where nothing else shows it.

SHORTEST_NS = 10_000_000_000
USUAL_STEPS = 20
"""No one wonders at an end so soon after the newest step, nor at one that comes as soon as so many usual steps last."""

ASK_IT = "Look while it hangs: `ddpdoctor autopsy --live PID` shows what each rank does."


def with_last_steps(verdict: RunVerdict, record: RunRecord, usual_step_ns: float) -> RunVerdict:
    """Return the verdict on a run that is over, whose ranks may have made no step for long before its end.

    A run that was well until then is called so no more, and of a slow one nothing matters as much if it did nothing for
    longer than all its steps together have taken.
    """
    lived_ns, stood = stood_at_the_end(record, usual_step_ns)
    if not stood or verdict.state not in ("healthy", "slow"):
        return verdict
    steps_ns = usual_step_ns * max(track.step[-1] for track in record.step_tracks if len(track))
    if verdict.state == "healthy" or lived_ns > steps_ns:
        before = (f"before that, {verdict.text}",) if verdict.state == "slow" else ()
        why = (*before, *verdict.why)
        return msgspec.structs.replace(verdict, state="unknown", code="", text=stood, why=why, next=ASK_IT)
    return msgspec.structs.replace(verdict, why=(*verdict.why, stood))


def stood_at_the_end(record: RunRecord, usual_step_ns: float) -> tuple[int, str]:
    """Return for how long the ranks lived on after the newest step, in ns, and say where; nothing if that was not long.

    So it is where all scripts have run to their ends: what they did then belonged to them.
    """
    ended_ns = max((track.ended_at_ns[-1] for track in record.step_tracks if len(track)), default=0)
    left = [rank.rank for rank in record.ranks if rank.end == "left-by-exit" and not rank.exit_code]
    over = [rank.rank for rank in record.ranks if rank.main_finished or rank.end == "finished"]
    at_work = [rank.rank for rank in record.ranks if rank.rank not in (*over, *left)]
    beats = [beat for beat in record.heartbeats if beat.rank in at_work]
    lived_ns = max((beat.beat_at_ns for beat in beats), default=0) - ended_ns
    if not ended_ns or lived_ns < max(SHORTEST_NS, USUAL_STEPS * usual_step_ns):
        return 0, ""
    by_place = grouped(beats, lambda beat: record.site(beat.site).innermost)
    told = ((frame, rank_list(beat.rank for beat in here)) for frame, here in by_place.items() if frame is not None)
    places = "; ".join(f"{ranks} at {place(frame)}" for frame, ranks in told)
    return lived_ns, f"no step was completed in the last {duration_text(lived_ns)} of the job{places and f': {places}'}"


# Ranks that wait now for one which is at work elsewhere, or sleeps by a clock of its own: no standstill.

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
    behind = waiters.behind([late])
    waiting = tuple(sorted(behind))
    awaited = (rank for rank in unseen if any(not behind.isdisjoint(bunch.ranks) for bunch in waiters.awaited[rank]))
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
        unseen=tuple(sorted(awaited)) if late in unseen else (),
    )


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
    within = f" in `{at.function}`" if at is not None and at.function not in ("", "<module>") else ""
    if 0 < turn.sleeps_ns < POLLING_NS:
        return f"which polls in a loop{within} at {place(at)}"
    if turn.sleeps_ns:
        return f"which sleeps{within} at {place(at)} for another {duration_text(turn.sleeps_ns)}"
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


CONFIRM_NS = 300_000_000
"""How long an absentee or a standstill must look the same before it is believed: one rank's track may be older than
another's, so the rank that seems to be missing may have come meanwhile."""


class VerdictMemory:
    """What the live verdict remembers between two looks at one job."""

    def __init__(self) -> None:
        self.matcher = Matcher()
        """How far the tracks have been compared."""
        self.wait: LastingWait | None = None
        """What ranks wait for now, where that is no standstill."""
        self.confirm_ns = CONFIRM_NS
        """How long what the ranks wait for has to look the same."""
        self._suspicion: tuple[object, ...] | None = None
        self._since_ns = 0
        self._waits: tuple[object, ...] = ()
        self._waits_since_ns = 0
        self.confirmed_since_ns = 0
        """Since when that has looked the same which the newest verdict rests on; 0 where it had not to."""

    def confirmed(self, suspicion: tuple[object, ...], now_ns: int, waits: tuple[object, ...] = ()) -> bool:
        """Remember a suspicion; tell whether it has looked the same for long enough.

        With ranks on other nodes the ``waits`` that it rests on have to stay the same, not the suspicion: that a rank
        does nothing was seen for seconds where it runs, and is reported later.
        """
        if suspicion != self._suspicion:
            self._suspicion, self._since_ns = suspicion, now_ns
        self.confirmed_since_ns = self._since_ns
        if waits and self.confirm_ns > CONFIRM_NS and now_ns - self._waits_since_ns >= self.confirm_ns:
            self.confirmed_since_ns = self._waits_since_ns
            return True
        return now_ns - self._since_ns >= self.confirm_ns

    def note_waits(self, waits: tuple[object, ...], now_ns: int) -> None:
        """Remember who waits where for whom."""
        if waits != self._waits:
            self._waits, self._waits_since_ns = waits, now_ns

    def forget(self) -> None:
        """Drop the suspicion."""
        self._suspicion = None


def live_verdict(memory: VerdictMemory, record: RunRecord, now_ns: int) -> Divergence | None:
    """Return the proof that the job hangs or computes something else, or None while there is none.

    A mismatch or a desync is a proof when it was seen for 0.3 s, and at once in a rehearsal whose ranks are all there
    or in a live run where a rank says already that it waits; an absentee once another rank waits for it, and a
    standstill once its ranks have waited for a second, both when seen for 0.3 s. ``now_ns`` is when the record was
    made.
    """
    memory.confirmed_since_ns = 0
    parting = memory.matcher.advance(record)
    blocked = blocked_ranks(record, memory.matcher)
    memory.wait = lasting_wait(record, blocked)
    held = sorted(rank for rank, entry in blocked.items() if entry.missing)
    waits = tuple((rank, blocked[rank].row, blocked[rank].since_ns, blocked[rank].missing) for rank in held)
    memory.note_waits(waits, now_ns)
    if parting is not None:
        parted = from_parting(record, memory.matcher, parting, blocked)
        # What the ranks say of where they are may come a beat later than the calls that part them; and of three ranks
        # the one that comes last says which of the other two is wrong.
        if record.job.kind == "run":
            known = any(turn.waiting for turn in parted.turns)
        else:
            known = all(turn.action != "elsewhere" for turn in parted.turns)
        return parted if known or memory.confirmed((parted.form, parted.group, parted.sequence), now_ns) else None
    absentee = find_departed_rank(record, memory.matcher, blocked)
    found = None
    if absentee is not None and may_yet_be_known(record, absentee):
        return None
    if absentee is not None:
        waiters = {rank: entry for rank, entry in blocked.items() if absentee.rank in entry.missing}
        found = from_absentee(record, memory.matcher, absentee, blocked) if waiters else None
    else:
        found = from_standstill(record, memory.matcher, blocked, now_ns) or from_idle(record)
    if found is None:
        memory.forget()
        return None
    suspicion = (found.form, found.culprit, found.group, found.sequence, waits)
    rests_on = () if found.form == "absentee" else waits
    return found if memory.confirmed(suspicion, now_ns, rests_on) else None


# Whether a rank that does nothing may still continue by itself.

POLLING_NS = 2_000_000_000
"""A rank that stood long and has less than this left to sleep is taken to sleep in a loop."""

PATIENCE_NS = 60_000_000_000
"""In a live run a rank may do nothing for so long and continue: it saves to a slow disk, uploads, sleeps before it
tries again. A rehearsal has no disk of the cluster's and a time limit instead."""


def may_go_on(record: RunRecord, divergence: Divergence) -> bool:
    """Return whether it is not proved yet that the ranks will stand for good.

    That is so for a sleep that ends before the group's timeout, for what another program may make, for a rank that
    works, or whose other threads or children do, and in a live run for the first minute in which a living rank does
    nothing.
    """
    if any(turn.polls_for or turn.loops for turn in divergence.turns):
        return True
    asleep = [turn for turn in divergence.turns if turn.sleeps_ns]
    timeout_ns = divergence.group.timeout_ns if divergence.group is not None else 0
    if asleep:
        return all(turn.sleeps_ns < timeout_ns for turn in asleep)
    restless = {rank.rank for rank in record.ranks if rank.restless}
    if any(turn.rank in restless and not turn.waiting for turn in divergence.turns):
        return True
    if record.job.kind != "run" or divergence.form != "stuck" or any(turn.stopped for turn in divergence.turns):
        return False
    return _stood_ns(record) < PATIENCE_NS


def _stood_ns(record: RunRecord) -> int:
    """Return for how long the stuck ranks that live have stood at one place; very long where none of them lives."""
    stuck = {rank.rank for rank in record.ranks if rank.stuck and rank.end == "running"}
    now_ns = record.job.ended_ns
    beats = [beat for beat in record.heartbeats if beat.rank in stuck]
    return max((now_ns - beat.beat_at_ns + beat.unchanged_ms * 1_000_000 for beat in beats), default=now_ns)
