"""Makes the stream of waits in the store of what the ranks wrote when they began and ended."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ddpdoctor.record import events
from ddpdoctor.record.model import shared_fields
from ddpdoctor.record.streams.waits import Wait

MOST_WAITS = 2_000
"""From there on those that are over are dropped, oldest first: a job may make groups for weeks."""


class WaitRows:
    """Takes in the events of one run; a process that waits for its world may get its rank later."""

    def __init__(self, rank_of: Callable[[int], int | None], site_of: Callable[[int, object], int]) -> None:
        self._rank_of = rank_of
        self._site_of = site_of
        self.rows: dict[tuple[int, int], Wait] = {}
        """By process and number there."""

    def ranked(self) -> tuple[Wait, ...]:
        """Return the waits, with the ranks that their processes are by now."""
        return tuple(
            msgspec.structs.replace(wait, rank=_rank(self._rank_of(pid))) for (pid, _), wait in self.rows.items()
        )

    def on_begun(self, pid: int, event: events.WaitBegun) -> None:
        """Take in that a wait has begun."""
        place = {"rank": _rank(self._rank_of(pid)), "site": self._site_of(pid, event.site), "started_ns": event.time_ns}
        self.rows[pid, event.number] = Wait(**shared_fields(event, Wait) | place)

    def on_led(self, pid: int, event: events.Led) -> None:
        """Take in that the newest wait of a process was led elsewhere."""
        key = max(key for key in self.rows if key[0] == pid)  # led while it waits
        told = {"led_from": event.address, "ranks_asked": event.ranks, "rank_taken": event.rank}
        known = {name: value for name, value in told.items() if value is not None}
        self.rows[key] = msgspec.structs.replace(self.rows[key], **known)

    def on_ended(self, pid: int, event: events.WaitEnded) -> None:
        """Take in that a wait is over."""
        key = (pid, event.number)
        self.rows[key] = msgspec.structs.replace(
            self.rows[key], ended_ns=event.time_ns, error=event.error, mentions_cuda=event.mentions_cuda
        )
        if len(self.rows) > MOST_WAITS:
            over = [key for key, wait in self.rows.items() if wait.ended_ns and not wait.error]
            for key in over[: len(over) // 2]:
                del self.rows[key]


def _rank(rank: int | None) -> int:
    return -1 if rank is None else rank
