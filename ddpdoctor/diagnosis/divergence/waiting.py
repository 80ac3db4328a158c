"""Which ranks wait, and for whom."""

from __future__ import annotations

import signal
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import msgspec

from ddpdoctor.diagnosis.divergence.matching import POINT_TO_POINT, Matcher
from ddpdoctor.diagnosis.sync_points import lane
from ddpdoctor.record.model import Rank, RunRecord, Site
from ddpdoctor.record.streams.collectives import CollectiveTrack, Signature, Wait
from ddpdoctor.record.streams.measured import CallTrack

_COUNTERPARTS = {"send": "recv", "recv": "send"}
_BARRIER = "monitored_barrier"
_KINDS = frozenset({"send", "recv", "isend", "irecv", _BARRIER})
STANDS_MS = 500
"""A thread is held by the call that it is in once its stack has stood for so long."""


class OpenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A send, receive or monitored barrier that holds a living rank: torch's flight recorder has none of gloo's."""

    rank: int
    peer: int
    """-1 where any may be it, or where there is none."""
    absent: tuple[int, ...]
    """Ranks that have not reached the barrier that it is."""
    group: int
    signature: Signature
    site: Site
    step: int
    entered_at_ns: int


def open_calls(record: RunRecord) -> dict[int, OpenCall]:
    """By rank the send, receive or monitored barrier that it stands in."""
    found = {}
    alive = {rank.rank for rank in record.ranks if rank.end == "running"}
    standing = {beat.rank for beat in record.heartbeats if beat.unchanged_ms >= STANDS_MS and beat.collective in _KINDS}
    for track in record.call_tracks:
        row = len(track) - 1
        if track.rank not in alive & standing or row < 0 or track.left_at_ns[row] or len(track.peer) != len(track):
            continue
        kind, peer = track.kinds[track.kind[row]], track.peer[row]
        if kind in _KINDS and track.group[row] >= 0:
            found[track.rank] = OpenCall(
                rank=track.rank,
                peer=peer,
                absent=_absent(record, track, row) if kind == _BARRIER else (),
                group=track.group[row],
                signature=Signature(kind=kind, root=peer if peer >= 0 else None, size_bytes=track.size_bytes[row]),
                site=record.site(track.site[row]),
                step=track.step[row],
                entered_at_ns=track.entered_at_ns[row],
            )
    return found


def missing_peer(record: RunRecord, track: CollectiveTrack, row: int) -> tuple[int, ...] | None:
    """Return the peer that has not made the matching call yet, no one when it has; None where it cannot be known.

    The n-th send from one rank to another in a group matches the n-th receive there; a receive from any source, on
    either side, may match anything.
    """
    signature, group = record.signatures[track.signature[row]], track.group[row]
    counterpart, peer = _COUNTERPARTS.get(signature.kind), signature.root
    other = None if peer is None else record.track(peer)
    if counterpart is None or peer is None or other is None:
        return None
    answers = _peers(record, other, group, counterpart, len(other))
    if None in answers:
        return None
    earlier = _peers(record, track, group, signature.kind, row).count(peer)
    return () if answers.count(track.rank) > earlier else (peer,)


def _peers(record: RunRecord, track: CollectiveTrack, group: int, kind: str, stop: int) -> list[int | None]:
    """Peers of the calls of one kind that a rank made in a group before the row ``stop``."""
    made = zip(track.signature[:stop], track.group[:stop], strict=True)
    calls = (record.signatures[index] for index, made_in in made if made_in == group)
    return [call.root for call in calls if call.kind == kind]


LEFT = frozenset({"finished", "left-by-exit", "raised", "signalled"})
"""Ends of a rank that the doctor did not bring about."""


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose main thread is held by a collective or by the store."""

    rank: int
    missing: tuple[int, ...]
    """Ranks that must come before it can continue; empty when all are there and it will finish."""
    since_ns: int
    row: int | None = None
    """Index into the rank's track; None for a wait in the store."""
    group: int | None = None
    position: int | None = None
    """Position in the lanes of the group; None for point-to-point."""
    wait: Wait | None = None
    call: OpenCall | None = None
    """The send or receive of a live run that it waits in."""


class Bunch(msgspec.Struct, frozen=True, eq=False):
    """Ranks that wait for the same ones."""

    ranks: tuple[int, ...]
    since_ns: int
    """When the first of them began to wait."""


class Waiters:
    """Who waits for whom; ranks that wait for the same ones are a bunch, for there may be thousands of both."""

    def __init__(self, blocked: Mapping[int, Blocked]) -> None:
        members: dict[tuple[int, ...], list[int]] = {}
        shared: dict[int, list[int]] = {}  # By identity: those that wait at one place share a tuple.
        for rank, entry in blocked.items():
            if entry.missing:
                if id(entry.missing) not in shared:
                    shared[id(entry.missing)] = members.setdefault(entry.missing, [])
                shared[id(entry.missing)].append(rank)
        self.held = frozenset(rank for ranks in members.values() for rank in ranks)
        """The ranks that wait for others."""
        self.awaited: dict[int, list[Bunch]] = {}
        """Of each rank that is waited for, the bunches that wait for it."""
        for missing, ranks in members.items():
            bunch = Bunch(tuple(ranks), min(blocked[rank].since_ns for rank in ranks))
            for rank in missing:
                self.awaited.setdefault(rank, []).append(bunch)

    def behind(self, ranks: Iterable[int]) -> frozenset[int]:
        """Return who waits for one of them, be it through others."""
        reached, front, seen = set[int](), list(ranks), set[Bunch]()
        while front:
            for bunch in self.awaited.get(front.pop(), ()):
                if bunch not in seen:
                    seen.add(bunch)
                    front += bunch.ranks
                    reached.update(bunch.ranks)
        return frozenset(reached)


def blocked_ranks(record: RunRecord, matcher: Matcher) -> dict[int, Blocked]:
    """Find the ranks that wait in a collective, in a send or receive whose peer is known, or in the store."""
    found: dict[int, Blocked] = {}
    missing: dict[tuple[int, int], tuple[int, ...]] = {}
    tracks = {track.rank: track for track in record.collectives}
    for rank in record.ranks:
        track = tracks.get(rank.rank)
        row = None if track is None else _row_waited_in(rank, track, flights=record.job.kind == "run")
        if track is None or row is None:
            continue
        if record.signatures[track.signature[row]].kind in POINT_TO_POINT:
            peers = missing_peer(record, track, row)
            if peers is not None:
                found[rank.rank] = Blocked(
                    rank=rank.rank, missing=peers, since_ns=track.started_ns[row], row=row, group=track.group[row]
                )
            continue
        lanes = matcher.lanes.get(track.group[row], {})
        own = lanes[rank.rank].rows if rank.rank in lanes else ()
        offset = bisect_left(own, row)
        if row not in own[offset : offset + 1]:
            continue
        position = lanes[rank.rank].base + offset
        at = track.group[row], position
        if at not in missing:  # Thousands of ranks wait at one place for the same few.
            members = record.groups[track.group[row]].ranks
            missing[at] = tuple(member for member in members if member not in lanes or lanes[member].end <= position)
        found[rank.rank] = Blocked(
            rank=rank.rank,
            missing=missing[at],
            since_ns=track.started_ns[row],
            row=row,
            group=track.group[row],
            position=position,
        )
    calls = open_calls(record)
    for call in calls.values():
        if not _meets(call, calls.get(call.peer)):
            absent = call.absent if call.peer < 0 else (call.peer,)
            found[call.rank] = Blocked(rank=call.rank, missing=absent, since_ns=call.entered_at_ns, call=call)
    for entry in _store_waits(record):
        found.setdefault(entry.rank, entry)
    return found


def _absent(record: RunRecord, track: CallTrack, row: int) -> tuple[int, ...]:
    """Return the members of a group that have not made a call which stands in a rank's row, nor a later one."""
    group, place = track.group[row], (False, track.sequence[row])
    reached = {
        other.rank
        for other in record.call_tracks
        if any(at[0] == place[0] and at[1] >= place[1] for at in lane(other, group))
    }
    return tuple(member for member in record.groups[group].ranks if member not in reached)


def _meets(call: OpenCall, other: OpenCall | None) -> bool:
    """Return whether the peer is in the call that belongs to this one, so that what they send is on its way."""
    if other is None or other.peer != call.rank or other.group != call.group:
        return False
    return {call.signature.kind.lstrip("i"), other.signature.kind.lstrip("i")} == {"send", "recv"}


def left_on_their_own(record: RunRecord) -> list[Rank]:
    """List the ranks that left by themselves, first in time first.

    Echoes are left out: ranks that failed because a peer's connection closed, that were terminated after another rank
    had left or together with all the others, and everything after the doctor ended a rank.
    """
    endings = [rank.ended_ns for rank in record.ranks if rank.end == "ended-by-rehearsal" and rank.ended_ns]
    limit_ns = min(endings, default=0)
    left = [rank for rank in record.ranks if rank.end in LEFT and rank.waiting_in is None and not rank.stuck]
    together = all(map(_terminated, record.ranks)) and len({rank.signal for rank in record.ranks}) == 1
    stopped = record.job.stop_reason in ("time-limit", "interrupted") or together
    own = [
        rank
        for rank in left
        if not is_echo(rank) and not (limit_ns and left_ns(rank) > limit_ns) and not (stopped and _terminated(rank))
    ]
    # The launcher ends the peers of a dead rank within milliseconds, so that times say little between the two.
    own.sort(key=lambda rank: (was_ended_by_launcher(rank), left_ns(rank), rank.rank))
    return [rank for position, rank in enumerate(own) if position == 0 or not _terminated(rank)]


def was_ended_by_launcher(rank: Rank) -> bool:
    """Return whether a rank died as the launcher ends those whose peer is dead."""
    return rank.end == "signalled" and rank.signal == signal.SIGTERM and not rank.main_finished


def is_echo(rank: Rank) -> bool:
    """Return whether the first thing that went wrong on a rank was that a peer had left."""
    return bool(rank.exceptions) and min(rank.exceptions, key=lambda entry: entry.time_ns).communication


def left_ns(rank: Rank) -> int:
    """Return when a rank left: the time of its first exception if it raised, else the end of its process."""
    if rank.end == "raised" and rank.exceptions:
        return min(entry.time_ns for entry in rank.exceptions)
    return rank.ended_ns


def standing_still(blocked: Mapping[int, Blocked], stuck: frozenset[int]) -> frozenset[int]:
    """Find the waiting ranks from which no rank that can continue is reachable in the wait-for graph.

    ``stuck`` are ranks that wait in no collective but were seen to do nothing; all others can continue.
    """
    waiters = Waiters(blocked)
    moving = [rank for rank in waiters.awaited if rank not in waiters.held and rank not in stuck]
    return waiters.held - waiters.behind(moving)


def _terminated(rank: Rank) -> bool:
    """Return whether a rank ended as a launcher, a user or a failed peer makes it end; an unknown signal may be one."""
    usual = (None, signal.SIGTERM, signal.SIGKILL, signal.SIGABRT, signal.SIGINT)
    return rank.end == "signalled" and rank.signal in usual


def _row_waited_in(rank: Rank, track: CollectiveTrack, *, flights: bool) -> int | None:
    """Return the row of a track that a rank waits in, or failed in.

    ``flights``: rows are of a flight recorder that may have been read long before the rank failed; one that was over
    by then is not what it failed in.
    """
    if rank.waiting_in is not None or not len(track):
        return rank.waiting_in
    completed_ns = track.completed_ns[len(track) - 1]
    incomplete = completed_ns == 0
    if flights and rank.end == "raised" and 0 < completed_ns < left_ns(rank):
        return None
    if (rank.end == "raised" and is_echo(rank)) or (rank.end == "signalled" and incomplete and not rank.main_finished):
        return len(track) - 1
    return None


def _store_waits(record: RunRecord) -> list[Blocked]:
    alive = {rank.rank for rank in record.ranks if rank.end in ("running", "unknown", "ended-by-rehearsal")}
    everyone = tuple(range(record.job.world_size or record.job.ranks_expected or len(record.ranks)))
    called: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    ordinals: list[int] = []
    for wait in record.waits:
        counts = called.setdefault((wait.kind, wait.ranks), {})
        ordinals.append(counts.get(wait.rank, 0))
        counts[wait.rank] = counts.get(wait.rank, 0) + 1
    found = []
    for wait, ordinal in zip(record.waits, ordinals, strict=True):
        if wait.ended_ns or wait.kind == "destroy_process_group" or wait.rank not in alive:
            continue
        counts = called[wait.kind, wait.ranks]
        # With local synchronisation a new group waits for its members only, otherwise for everyone.
        members = wait.ranks if wait.kind == "new_group" and wait.ranks else everyone
        missing = tuple(rank for rank in members if counts.get(rank, 0) <= ordinal)
        missing = missing or tuple(rank for rank in everyone if counts.get(rank, 0) <= ordinal)
        found.append(Blocked(rank=wait.rank, missing=missing, since_ns=wait.started_ns, wait=wait))
    return found
