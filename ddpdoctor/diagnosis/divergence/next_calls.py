"""Where ranks part: the last entry they have in common, and what each of them did next."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.waiting import Blocked
from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.finding import Frame, in_user_code
from ddpdoctor.record.model import Rank, RankException, RunRecord
from ddpdoctor.record.streams.collectives import CollectiveTrack, EndlessLoop, Group, Handled, Signature, Wait
from ddpdoctor.record.streams.setup import StackDump

Action = Literal["collective", "store", "finished", "left-by-exit", "raised", "signalled", "elsewhere"]

OLD_NS = 2_000_000_000
"""A stack that may have changed since and is older is marked as such."""
_BEAT_NS = 400_000_000
_ONE_LOOK_NS = 500_000_000
_MOST_FRAMES = 100
"""``faulthandler`` writes no more of a stack."""
WALK_BOUND = 10_000
"""Entries that are walked back at most."""


class NextCall(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did at the point where the ranks diverge."""

    rank: int
    action: Action
    waiting: bool = False
    """Its main thread is held there."""
    row: int | None = None
    """Index into the rank's track."""
    signature: Signature | None = None
    group: Group | None = None
    """Of the collective."""
    step: int = 0
    frames: tuple[Frame, ...] = ()
    """The user's call chain of the collective, the exception or the stack, innermost frame first."""
    wait: Wait | None = None
    exception: RankException | None = None
    handling: Handled | None = None
    """The exception in whose handler it makes the call."""
    exit_code: int | None = None
    signal: int | None = None
    sleeps_ns: int = 0
    """How long the ``time.sleep`` that it is in continues after the end of the record."""
    polls_for: str = ""
    """The file that it asks for again and again, for nothing."""
    stopped: bool = False
    """A signal has stopped its process."""
    loops: bool = False
    """It works at one place for so long that it seems to be in an endless loop."""
    endless: EndlessLoop | None = None
    """The same, where nothing changes in the loop; ``frames`` is the loop then."""
    kept_by: str = ""
    """The thread or exit handler that keeps the process though its script is over; ``frames`` is where that stands."""
    seen_ago_ns: int = 0
    """How long before the end of the record it was seen there, where it may be elsewhere by then."""
    stack: tuple[Frame, ...] = ()
    """The main thread's stack at the end of the record, torch's frames included; empty when not taken."""

    @property
    def line(self) -> Frame | None:
        """The user's line."""
        return self.frames[0] if self.frames else None


class Lanes:
    """The entries of one group on the ranks that have any, addressed by position."""

    def __init__(self, record: RunRecord, matcher: Matcher, group: int) -> None:
        self.record = record
        self.lanes = matcher.lanes.get(group, {})
        self.tracks: dict[int, CollectiveTrack] = {
            track.rank: track for track in record.collectives if track.rank in self.lanes
        }
        self._lines: dict[int, tuple[str, int] | None] = {}

    def row(self, rank: int, position: int) -> int | None:
        """Index into the rank's track of what it did at a position; None when it did not get there."""
        lane = self.lanes.get(rank)
        return lane.row(position) if lane is not None and lane.base <= position < lane.end else None

    def line(self, rank: int, position: int) -> tuple[str, int] | None:
        """File and line that made the entry; None when unknown or not there."""
        row = self.row(rank, position)
        return None if row is None else self.line_of(self.tracks[rank].site[row])

    def place(self, rank: int, position: int) -> tuple[tuple[str, int], str, str] | None:
        """Line of an entry with what torch made it for: one line of a sharded model gathers many modules."""
        row, line = self.row(rank, position), self.line(rank, position)
        if row is None or line is None:
            return None
        signature = self.record.signatures[self.tracks[rank].signature[row]]
        return line, signature.origin, signature.module

    def line_of(self, site: int) -> tuple[str, int] | None:
        """File and line of a call chain."""
        if site not in self._lines:
            frame = self.record.site(site).innermost
            self._lines[site] = None if frame is None else (frame.file, frame.line)
        return self._lines[site]

    def held_at(self, held: Blocked | None, position: int) -> bool:
        """Return whether a rank waits in the entry at a position, or in a later one that the same line made with it."""
        if held is None or held.position is None or held.row is None or held.rank not in self.lanes:
            return False
        own = self.row(held.rank, position)
        if own is None or held.position < position:
            return False
        track = self.tracks[held.rank]
        same_lane = self.row(held.rank, held.position) == held.row
        return own == held.row or (same_lane and track.site[own] == track.site[held.row])

    def turn(self, rank: int, position: int, waiting: bool) -> NextCall | None:
        """Return what a rank did at a position, if it got there."""
        row = self.row(rank, position)
        return None if row is None else _of_row(self.record, self.tracks[rank], row, waiting)

    def times(self, line: tuple[str, int]) -> dict[int, int]:
        """Return how often each rank came to a call of a line; empty where the beginning is lost, or too long ago."""
        if any(lane.base for lane in self.lanes.values()) or sum(lane.end for lane in self.lanes.values()) > WALK_BOUND:
            return {}
        return {
            rank: sum(self.line(rank, position) == line for position in range(lane.end))
            for rank, lane in self.lanes.items()
        }


def last_common_position(lanes: Lanes, ranks: Iterable[int], position: int) -> int:
    """Walk back from a position over entries that fit in kind and size but come from different lines.

    Returns the last position at which the ranks agree in the line as well, -1 if there is none. A pairing of different
    lines that occurred before and after which the ranks agreed again is legal and ends the walk.
    """
    members = [rank for rank in ranks if rank in lanes.lanes]
    lowest = max((lanes.lanes[rank].base for rank in members), default=0)
    lowest = max(lowest, position - WALK_BOUND)
    walked = position - 1
    while walked >= lowest and len({lanes.line(rank, walked) for rank in members} - {None}) > 1:
        walked -= 1
    run = {_pairing(lanes, members, entry) for entry in range(walked + 1, position)}
    if run:
        legal = {
            pairing
            for entry in range(lowest, walked)
            if (pairing := _pairing(lanes, members, entry)) in run and pairing
        }
        while walked + 1 < position and _pairing(lanes, members, walked + 1) in legal:
            walked += 1
    return walked if walked >= lowest else lowest - 1


def turns(
    record: RunRecord, lanes: Lanes, ranks: Iterable[int], position: int, blocked: Mapping[int, Blocked]
) -> tuple[NextCall, ...]:
    """Tell what each of the ranks did at a position of a group, or instead of coming there."""
    found = []
    known = {rank.rank: rank for rank in record.ranks}
    for number in ranks:
        held = blocked.get(number)
        here = lanes.turn(number, position, lanes.held_at(held, position))
        found.append(here or elsewhere(record, number, known.get(number), held))
    return tuple(found)


def elsewhere(record: RunRecord, number: int, rank: Rank | None, held: Blocked | None) -> NextCall:
    """Tell what a rank did that did not reach a position of a group."""
    stack = main_stack(record, number)
    if held is not None and held.row is not None:
        track = record.track(number)
        assert track is not None
        return _of_row(record, track, held.row, waiting=True)
    if held is not None and held.call is not None:
        return NextCall(
            rank=number,
            action="collective",
            waiting=True,
            signature=held.call.signature,
            group=record.groups[held.call.group],
            step=held.call.step,
            frames=held.call.site.frames,
            stack=stack,
        )
    if held is not None and held.wait is not None:
        frames = record.site(held.wait.site).frames
        return NextCall(rank=number, action="store", waiting=True, wait=held.wait, frames=frames, stack=stack)
    if rank is not None and rank.end in ("finished", "left-by-exit", "raised", "signalled"):
        first = min(rank.exceptions, key=lambda entry: entry.time_ns, default=None) if rank.end == "raised" else None
        return NextCall(
            rank=number,
            action=rank.end,
            exception=first,
            exit_code=rank.exit_code,
            signal=rank.signal,
            frames=() if first is None else first.frames,
        )
    if (keeper := what_keeps(record, number)) is not None:
        what, frames = keeper
        return NextCall(rank=number, action="elsewhere", kept_by=what, frames=user_frames(record, frames), stack=frames)
    frames = user_frames(record, stack)
    seen_ago_ns = _seen_ago_ns(record, number)
    dump, heartbeat = _main_dump(record, number), record.heartbeat(number)
    stands_since_ns = 0 if heartbeat is None else heartbeat.beat_at_ns - heartbeat.unchanged_ms * 1_000_000
    # The newest heartbeat may have come well after the newest stack, from another place.
    if not frames or dump is None or stands_since_ns > dump.time_ns + _BEAT_NS:
        frames = (() if heartbeat is None else record.site(heartbeat.site).frames) or frames
    endless = record.endless_loop(number) if rank is not None and rank.loops else None
    if endless is not None:
        frames = record.site(endless.site).frames
    sleeps_ns = 0 if rank is None or not rank.sleeps_until_ns else max(1, rank.sleeps_until_ns - record.job.ended_ns)
    return NextCall(
        rank=number,
        action="elsewhere",
        sleeps_ns=sleeps_ns,
        polls_for="" if rank is None else rank.polls_for,
        stopped=rank is not None and rank.stopped,
        loops=rank is not None and rank.loops,
        endless=endless,
        seen_ago_ns=seen_ago_ns,
        frames=frames,
        stack=stack,
    )


def _of_row(record: RunRecord, track: CollectiveTrack, row: int, waiting: bool) -> NextCall:
    """Return the call that a row of a rank's track stands for."""
    rank, site = track.rank, track.site[row]
    return NextCall(
        rank=rank,
        action="collective",
        waiting=waiting,
        row=row,
        signature=record.signatures[track.signature[row]],
        group=record.groups[track.group[row]],
        step=track.step[row],
        frames=record.site(site).frames,
        handling=next((one for one in record.handled if (one.rank, one.site) == (rank, site)), None),
        stack=main_stack(record, rank),
    )


def main_stack(record: RunRecord, rank: int) -> tuple[Frame, ...]:
    """Return the last stack of the main thread of a rank, innermost frame first."""
    dump = _main_dump(record, rank)
    return () if dump is None else dump.frames


def what_keeps(record: RunRecord, rank: int) -> tuple[str, tuple[Frame, ...]] | None:
    """Return the thread or exit handler that keeps the process of a rank whose script is over, and where it stands.

    None where the script is not over.
    """
    dump = _main_dump(record, rank)
    if dump is None or not dump.frames:
        return None
    outermost = dump.frames[-1]
    in_threading = outermost.file.endswith("threading.py")
    if outermost.function != "_shutdown" or not in_threading:
        # Where a thread trained it stands for the main one; else it is the function that Python calls at its end.
        is_over = record.job.kind == "run" and _all_scripts_are_over(record) and not in_threading
        return (f"exit handler `{outermost.function}`", dump.frames) if is_over else None
    threads = [other for other in record.stacks_of(rank) if not other.main and not other.daemon]
    newest_ns = max((other.time_ns for other in threads), default=0)
    # What is written of the threads of one moment is written at once.
    keeper = next((other for other in threads if newest_ns - other.time_ns < _ONE_LOOK_NS), None)
    return None if keeper is None else (f"thread {keeper.thread}", keeper.frames)


@once_per_record()
def _all_scripts_are_over(record: RunRecord) -> bool:
    """Return whether below nothing that the living ranks do is the code of a module, as it is below all of a script."""
    dumps = [_main_dump(record, rank.rank) for rank in record.ranks if rank.end == "running"]
    return all(
        dump is not None
        and 0 < len(dump.frames) < _MOST_FRAMES
        and not any(frame.function == "<module>" for frame in dump.frames)
        for dump in dumps
    )


def _main_dump(record: RunRecord, rank: int) -> StackDump | None:
    dumps = [dump for dump in record.stacks_of(rank) if dump.main]
    return max(dumps, key=lambda dump: dump.time_ns, default=None)


def _seen_ago_ns(record: RunRecord, rank: int) -> int:
    """Return how old the stack of a rank is, where it may have changed since; 0 where it has not."""
    dump, heartbeat = _main_dump(record, rank), record.heartbeat(rank)
    if heartbeat is None or record.job.kind != "run":
        return 0
    taken_ns = heartbeat.beat_at_ns if dump is None else max(dump.time_ns, 0)
    if dump is not None and heartbeat.beat_at_ns - heartbeat.unchanged_ms * 1_000_000 <= dump.time_ns + _BEAT_NS:
        taken_ns = max(taken_ns, heartbeat.beat_at_ns)
    ago_ns = record.job.ended_ns - taken_ns
    return ago_ns if ago_ns > OLD_NS else 0


def user_frames(record: RunRecord, stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of a stack that are in the user's files."""
    files, beside = _user_files(record), os.path.dirname(record.job.script) + os.sep
    own = tuple(frame for frame in stack if in_user_code(frame.file))
    of_the_script = {frame.file for frame in own if frame.file.startswith(beside)} if beside != os.sep else set()
    return tuple(frame for frame in stack if frame.file in files or frame.file in of_the_script) or own


@once_per_record()
def _user_files(record: RunRecord) -> frozenset[str]:
    return frozenset(frame.file for site in record.sites for frame in site.frames) | {record.job.script}


def _pairing(lanes: Lanes, ranks: list[int], position: int) -> tuple[tuple[str, int] | None, ...]:
    return tuple(lanes.line(rank, position) for rank in ranks)
