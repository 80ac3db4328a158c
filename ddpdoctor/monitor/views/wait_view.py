"""A wait for a rank that is at work, while it lasts and once the job was ended in the midst of it."""

from __future__ import annotations

from ddpdoctor.diagnosis.divergence.waiting import LEFT
from ddpdoctor.diagnosis.live.lasting_waits import LastingWait, wait_text
from ddpdoctor.monitor.snapshot import WaitView
from ddpdoctor.record.model import RunRecord

SHOWN_AFTER_NS = 10_000_000_000
"""A wait for a rank that works is shown after so long."""


class LastWait:
    """The wait that a watched job is in, or was ended in."""

    def __init__(self) -> None:
        self._last: tuple[LastingWait, int] | None = None

    def look(self, wait: LastingWait | None, record: RunRecord, *, told_to_end: bool) -> WaitView | None:
        """Take in what a look found; what is to be shown of it."""
        now_ns = record.job.ended_ns
        ending = told_to_end or any(rank.end in LEFT for rank in record.ranks)
        if ending:
            return None
        lasts = wait is not None and now_ns - wait.since_ns >= SHOWN_AFTER_NS
        self._last = (wait, now_ns) if wait is not None and lasts else None
        if wait is None or not lasts:
            return None
        return WaitView(
            late=wait.late,
            since_ns=wait.since_ns,
            text=wait_text(wait, now_ns),
            timeout_at_ns=wait.since_ns + wait.timeout_ns if wait.timeout_ns else None,
        )

    @property
    def ended_in(self) -> tuple[LastingWait, str] | None:
        """The wait, and what to say of it once the job was ended in it."""
        if self._last is None:
            return None
        wait, seen_ns = self._last
        return wait, wait_text(wait, seen_ns, over=True)

    def at_end(self, record: RunRecord, exit_code: int | None) -> tuple[LastingWait, str] | None:
        """Return the wait in which the job was ended, and what to say of it; None where it ended otherwise."""
        if exit_code == 0 or all(rank.main_finished for rank in record.ranks):
            return None
        return self.ended_in
