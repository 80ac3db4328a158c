"""Passes and trainings in which the ranks made as much, and averaged gradients different numbers of times."""

from __future__ import annotations

from collections.abc import Iterator, Set

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.sync_points import replica_sets
from ddpdoctor.diagnosis.training.loaders import LoaderOnRanks, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import count, rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.data import Pass

_NO_RANKS: Set[int] = frozenset()


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A pass from which on the ranks average gradients of different batches."""

    ordinal: int
    """n-th pass of the loader, from 0."""
    batches: int
    """Of each rank."""
    averaged: tuple[tuple[int, int], ...]
    """Rank and backwards in which it averaged gradients, by rank."""
    location: Location | None
    """The line that goes through the loader."""

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that left something out, where the others averaged once for each batch; otherwise all."""
        most = max(averaged for _, averaged in self.averaged)
        return tuple(rank for rank, averaged in self.averaged if averaged < most or most != self.batches)

    @property
    def sentence(self) -> str:
        """How often which ranks averaged, in words."""
        by_count: dict[int, list[int]] = {}
        for rank, averaged in self.averaged:
            by_count.setdefault(averaged, []).append(rank)
        most, *fewer = sorted(by_count, reverse=True)
        parts = [f"{rank_list(by_count[most])} averaged gradients {count(most, 'time', 'times')}"]
        parts += [f"{rank_list(by_count[number])} {number:,}" for number in fewer[:3]]
        return f"in a pass of {count(self.batches, 'batch', 'batches')} for each {', '.join(parts)}"


def drifts(record: RunRecord, in_backward: Set[int] = _NO_RANKS) -> Iterator[Drift]:
    """Yield the first such pass of each loader that feeds a DDP module.

    Only passes over the whole loader, by a ``for`` statement, outside of ``join()``, of ranks that average with each
    other: a loop that draws with ``next`` may legally draw another batch for one that it left out. Ranks that stand in
    a backward for good (``in_backward``) have a pass that is not over, and an averaging more than they could count.
    """
    if not record.wraps:
        return
    sets = replica_sets(record)
    for loader in loaders_on_all_ranks(record):
        found = (
            _drift(record, loader, tuple(entry for entry in entries if entry.rank in members), in_backward)
            for entries in loader.pass_places()
            for members in sets
        )
        drift = next(filter(None, found), None)
        if drift is not None:
            yield drift


class SkippedBackward(msgspec.Struct, frozen=True, kw_only=True):
    """A training in which every rank made as many forwards, and some ranks fewer backwards."""

    forwards: int
    """Of each rank."""
    backwards: tuple[tuple[int, int], ...]
    """Rank and backwards, by rank."""

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks with the fewer backwards."""
        most = max(number for _, number in self.backwards)
        return tuple(rank for rank, number in self.backwards if number < most)

    @property
    def sentence(self) -> str:
        """Who left out how many, in words."""
        most = max(number for _, number in self.backwards)
        parts = [f"rank {rank} {number:,}" for rank, number in self.backwards if number < most]
        whole = [rank for rank, number in self.backwards if number == most]
        return (
            f"every rank made {count(self.forwards, 'training forward', 'training forwards')}, and {rank_list(whole)} "
            f"{count(most, 'backward', 'backwards')}, {', '.join(parts[:3])}"
        )


def skipped_backward(record: RunRecord, divergence: Divergence) -> SkippedBackward | None:
    """Find the backward that a rank left out which then ran to its end, while others wait in one that it never made."""
    in_backward, blocked = _in_backward(divergence, record), blocked_in_backward(divergence, record)
    # Of a rank that its peer's leaving threw out of the backward, the backward has been counted.
    counts = {beat.rank: (beat.forwards, beat.backwards + (beat.rank in blocked)) for beat in record.heartbeats}
    for members in replica_sets(record) if record.wraps else ():
        known = [counts[rank] for rank in members if rank in counts]
        made = {forwards for forwards, _ in known}
        if len(known) < len(members) or len(made) != 1 or not in_backward & set(members):
            continue
        backwards = tuple((rank, counts[rank][1]) for rank in members)
        most = max(number for _, number in backwards)
        fewer = {rank for rank, number in backwards if number < most}
        finished = {rank.rank for rank in record.ranks if rank.end == "finished"}
        if fewer and fewer <= finished and most <= max(made):
            return SkippedBackward(forwards=max(made), backwards=backwards)
    return None


def blocked_in_backward(divergence: Divergence, record: RunRecord) -> Set[int]:
    """Return the ranks that live and wait in a backward for one that does not come.

    Of ranks that diverge for good one whose reduction is not over waits, be it that its heartbeat has not said so yet.
    """
    return {rank.rank for rank in record.ranks if rank.end == "running"} & _in_backward(divergence, record)


def _in_backward(divergence: Divergence, record: RunRecord) -> Set[int]:
    """Return the ranks that diverge in a backward, alive or not."""
    return {
        turn.rank
        for turn in divergence.turns + divergence.proof
        if turn.signature is not None
        and turn.signature.origin == "ddp-backward"
        and (turn.waiting or _is_under_way(record, turn))
    }


def _is_under_way(record: RunRecord, turn: NextCall) -> bool:
    track = record.track(turn.rank)
    return track is not None and turn.row is not None and not track.completed_ns[turn.row]


def _drift(record: RunRecord, loader: LoaderOnRanks, entries: tuple[Pass, ...], in_backward: Set[int]) -> Drift | None:
    if len(entries) < 2 or any(entry.joined or not entry.looped or not entry.averaged for entry in entries):
        return None
    if len({entry.yielded for entry in entries}) > 1 or not any(entry.end == "exhausted" for entry in entries):
        return None
    gone = {rank.rank for rank in record.ranks if rank.end != "running"}
    if any(entry.end != "exhausted" and entry.rank not in gone | in_backward for entry in entries):
        return None
    averaged = tuple(
        (entry.rank, entry.averaged + (entry.end != "exhausted" and entry.rank in in_backward))
        for entry in entries
        if entry.averaged
    )
    if len({number for _, number in averaged}) == 1:
        return None
    return Drift(
        ordinal=entries[0].ordinal,
        batches=entries[0].yielded,
        averaged=averaged,
        location=site_location(record.site(entries[0].site)) or loader.location,
    )
