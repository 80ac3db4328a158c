"""A watched job in plain lines: how fast it goes, what is wrong with it, and when it stands still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpdoctor.places import named_ranks
from ddpdoctor.report.escape import one_line

if TYPE_CHECKING:
    from ddpdoctor.finding import Frame
    from ddpdoctor.monitor.snapshot import Snapshot, StallView

PREFIX = "ddpdoctor: "
PROGRESS_EVERY_NS = 5_000_000_000


class RunLines:
    """Remembers what was said of a run, so that each thing is said once."""

    def __init__(self) -> None:
        self._progress_at_ns = 0
        self._stall = ""
        self._notes: set[str] = set()

    def news(self, snapshot: Snapshot, *, ended: bool) -> list[str]:
        """What is worth saying since the last call, in order."""
        lines = [*self._new_notes(snapshot), *self._stalled(snapshot)]
        due = snapshot.now_ns - self._progress_at_ns >= PROGRESS_EVERY_NS
        if due and not ended and snapshot.state != "waiting":
            self._progress_at_ns = snapshot.now_ns
            lines.append(progress(snapshot))
        return [PREFIX + line for line in lines]

    def _new_notes(self, snapshot: Snapshot) -> list[str]:
        new = [note for note in snapshot.notes if note not in self._notes]
        self._notes.update(new)
        return [one_line(note) for note in new]

    def _stalled(self, snapshot: Snapshot) -> list[str]:
        title = snapshot.stall.title if snapshot.stall is not None else ""
        known, self._stall = self._stall, title
        if snapshot.stall is not None and title != known:
            return stall_lines(snapshot.stall)
        return ["the job goes on"] if known and not title and snapshot.state == "running" else []


def progress(snapshot: Snapshot) -> str:
    """One line: where the job is, and how fast."""
    parts = [f"step {snapshot.steps:,}" if snapshot.steps is not None else "no step yet"]
    if snapshot.steps_per_s is not None:
        parts.append(f"{snapshot.steps_per_s:.1f} steps/s")
    return ", ".join(parts)


def stall_lines(stall: StallView) -> list[str]:
    """The verdict on a standstill: what, who, where, and what to do."""
    lines = [f"STALLED: {one_line(stall.title)}"]
    for side in stall.sides:
        mark = "culprit " if side.culprit else ""
        lines.append(f"  {mark}{named_ranks(side.ranks)} {one_line(side.text)}{_at(side.stack)}")
    if stall.remedy:
        lines.append(f"  do: {one_line(stall.remedy)}")
    return lines


def _at(stack: Sequence[Frame]) -> str:
    return f" (at {one_line(stack[0].file)}:{stack[0].line})" if stack else ""
