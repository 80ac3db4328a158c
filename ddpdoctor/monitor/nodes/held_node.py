"""What the head holds of one other node: its streams as they were sent last, and the newest rows of its ranks."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from ddpdoctor.diagnosis.clocks import Bound, ClockBounds
from ddpdoctor.errors import RecordError
from ddpdoctor.monitor.nodes.messages import JobFacts, Rows, Update, unpack_field, unpack_rows
from ddpdoctor.record import layout
from ddpdoctor.record.joining import Clock, NodePart
from ddpdoctor.record.model import Job, RunRecord
from ddpdoctor.record.streams.collectives import CollectiveTrack
from ddpdoctor.record.streams.measured import CallTrack, StepTrack

_HOLD_RANKS = frozenset({"groups", "wraps"})
"""Streams whose rows name all ranks of a group: with 4,096 ranks that is a third of a gigabyte, told by each anew."""
MOST_FIELD_BYTES = 1 << 20
"""Of all streams of a node in one update, for each of its ranks and twice more: a model of 5,000 parameters has half
of it."""
LOST_AFTER_NS = 10_000_000_000
"""A node that has sent nothing for so long is lost: nothing is concluded of its ranks any more."""


class HeldNode:
    """One agent's news, put together."""

    def __init__(self, session: str, host: str, source: str = "") -> None:
        self.session = session
        self.host = host
        self.source = source
        """The address that it sends from; empty where that is not known."""
        self.number = 0
        """Of the newest update that was taken in."""
        self.received_ns = 0
        """When that was, by the head's clock."""
        self._sent_ns = 0
        """When it was sent, by the node's own."""
        self.state = "running"
        self.exit_code: int | None = None
        self.is_quiet = False
        self.asks: tuple[int, ...] = ()
        """Ranks whose stacks the head's user wants."""
        self.bytes = 0
        """Received so far."""
        self.ranks: tuple[int, ...] = ()
        """Its ranks, ascending."""
        self.epoch = 0
        """Raised whenever its collectives do not join on to those before: what was made of these is void."""
        self._job = JobFacts()
        self._fields: dict[str, Any] = {}
        self._steps: dict[int, dict[str, array[int]]] = {}
        self._calls: dict[int, dict[str, array[int]]] = {}
        self._collectives: tuple[CollectiveTrack, ...] = ()
        self._bounds = ClockBounds()

    def takes(self, update: Update) -> bool:
        """Return whether an update joins on to what is held; one that was taken in before does, too."""
        return update.number in (1, self.number, self.number + 1)

    def take(self, update: Update, now_ns: int, most_rows: int) -> None:
        """Take in an update; raises RecordError for one that is damaged, of which nothing is taken in then."""
        fields = {name: unpack_field(name, content) for name, content in update.fields.items()}
        ranks = {rank.rank for rank in fields["ranks"]} if "ranks" in fields else set(self.ranks)
        if sum(map(len, update.fields.values())) > MOST_FIELD_BYTES * (len(ranks) + 2):
            raise RecordError(f"streams of more than {len(ranks) + 2} MiB for {len(ranks)} ranks")
        for name, rows in fields.items():
            # A node speaks for its own ranks.
            if name != "streams" and any(getattr(row, "rank", -1) not in ranks for row in rows):
                fields[name] = tuple(row for row in rows if getattr(row, "rank", -1) in {-1, *ranks})
        for name in fields.keys() & _HOLD_RANKS:
            fields[name] = tuple(msgspec.structs.replace(row, ranks=_shared(row.ranks)) for row in fields[name])
        steps = [(rows, unpack_rows(rows, StepTrack)) for rows in update.steps if rows.rank in ranks]
        calls = [(rows, unpack_rows(rows, CallTrack)) for rows in update.calls if rows.rank in ranks]
        if update.collectives is not None:
            collectives = tuple(
                _track(CollectiveTrack, rows.rank, unpack_rows(rows, CollectiveTrack))
                for rows in update.collectives
                if rows.rank in ranks
            )
            self.epoch += not _extends(collectives, self._collectives)
            self._collectives = collectives
        self._fields.update(fields)
        _add(self._steps, steps, "ended_at_ns", most_rows)
        _add(self._calls, calls, "entered_at_ns", most_rows)
        if "ranks" in fields:
            self.ranks = tuple(sorted(ranks))
            for held in (self._steps, self._calls):
                for gone in held.keys() - set(self.ranks):  # The job was started again with others here.
                    del held[gone]
        self.number, self.received_ns, self._sent_ns = update.number, now_ns, update.sent_at_ns
        self._job = update.job
        self.state, self.exit_code, self.is_quiet = update.state, update.exit_code, update.is_quiet
        if update.clock is not None:
            self._bounds.add(Bound(*update.clock))

    def reported_ns(self) -> int:
        """Return the moment of the newest update, by the head's clock: it may have been long under way."""
        clock = self.clock()
        return self.received_ns if clock is None else min(self.received_ns, clock.moved(self._sent_ns))

    def is_lost(self, now_ns: int) -> bool:
        """Return whether nothing has come from it for long, although it had not ended."""
        return self.state != "ended" and now_ns - self.received_ns > LOST_AFTER_NS

    def is_silent(self, now_ns: int) -> bool:
        """Return whether nothing more is expected of it: it has ended, or is lost."""
        return self.state == "ended" or self.is_lost(now_ns)

    def clock(self, narrowing: Sequence[Bound] = ()) -> Clock | None:
        """Return how its clock differs from ours; None while that is not known."""
        return self._bounds.clock(narrowing)

    def part(self, clock: Clock, since_ns: int = 0) -> NodePart:
        """Its record, with steps and calls since a time of the head's clock."""
        own_since_ns = since_ns - (clock.moved(since_ns) - since_ns) if since_ns else 0
        record = RunRecord(
            job=Job(
                kind="run",
                world_size=self._job.world_size,
                ranks_expected=self._job.world_size,
                ranks_reported=self._job.ranks_reported,
                torch_version=self._job.torch_version,
                backend=self._job.backend,
                started_ns=self._job.started_ns,
            ),
            step_tracks=tuple(
                _track(StepTrack, rank, _since(columns, "ended_at_ns", own_since_ns))
                for rank, columns in sorted(self._steps.items())
            ),
            call_tracks=tuple(
                _track(CallTrack, rank, _since(columns, "entered_at_ns", own_since_ns), kinds=layout.CALL_KINDS)
                for rank, columns in sorted(self._calls.items())
            ),
            collectives=self._collectives,
            **self._fields,
        )
        return NodePart(name=self.session, record=record, clock=clock)


def _add(
    held: dict[int, dict[str, array[int]]],
    news: Iterable[tuple[Rows, dict[str, array[int]]]],
    time: str,
    most_rows: int,
) -> None:
    """Put new rows behind the held ones, or in the place of those that they tell anew."""
    for rows, columns in news:
        known = held.get(rows.rank)
        if rows.anew or known is None:
            held[rows.rank] = columns
            continue
        if rows.count:
            keep = bisect_left(known[time], columns[time][0])
            for name, column in columns.items():
                del known[name][keep:]
                known[name].extend(column)
        over = len(known[time]) - most_rows
        if over > most_rows // 4:
            for column in known.values():
                del column[:over]


def _extends(tracks: Iterable[CollectiveTrack], before: Iterable[CollectiveTrack]) -> bool:
    """Return whether every track of before is there still, with all of its rows, and none but new ones behind them."""
    newer = {track.rank: track for track in tracks}
    for old in before:
        new = newer.get(old.rank)
        if new is None or any(
            getattr(new, name)[: len(old)] != getattr(old, name)
            for name in ("group", "sequence", "signature", "started_ns")
        ):
            return False
    return True


@lru_cache(maxsize=256)
def _shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """One object for the same ranks."""
    return ranks


def _since(columns: dict[str, array[int]], time: str, since_ns: int) -> dict[str, array[int]]:
    start = bisect_left(columns[time], since_ns) if since_ns else 0
    return {name: column[start:] for name, column in columns.items()}


def _track(kind: Any, rank: int, columns: dict[str, array[int]], **more: Any) -> Any:
    return kind(rank=rank, **columns, **more)
