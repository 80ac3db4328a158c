"""The lines at which ranks stood in the collective that NCCL's watchdog gave up, as it prints them before an abort.

Each rank prints its own, when it is asked to record stacks: where they are not the same call, the ranks had parted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpdoctor.finding import Frame, in_user_code
from ddpdoctor.record.streams.setup import StackDump

HEADER = "Stack trace of the failed collective"
_GROUP = re.compile(r"\[PG (?:ID )?(\w+)")
"""Two groups that time out stand at two calls, and their ranks have not parted."""
_FRAME = re.compile(r"^#\d+ (?P<function>\S+) from (?P<file>.+):(?P<line>\d+)$")


class FailedCollectives:
    """Gathers the stacks of one log, line by line."""

    def __init__(self) -> None:
        self.stacks: dict[int, list[Frame]] = {}
        """By rank, innermost frame first; the first stack of each, as later ones are of other groups."""
        self.groups: set[str] = set()
        """Of which the watchdog speaks in this log."""
        self._rank: int | None = None

    def take(self, rank: int | None, text: str) -> bool:
        """Return whether a line is a frame of such a stack; the line before the first says whose it is."""
        match = _FRAME.match(text.strip()) if self._rank is not None else None
        if match is not None and self._rank is not None:
            self.stacks[self._rank].append(Frame(match["file"], int(match["line"]), match["function"]))
            return True
        self.groups.update(_GROUP.findall(text) if "[PG " in text else ())
        self._rank = rank if HEADER in text and rank not in self.stacks else None
        if self._rank is not None:
            self.stacks[self._rank] = []
        return False


def parted(logs: Sequence[FailedCollectives]) -> tuple[StackDump, ...]:
    """Return the stacks of the ranks in some logs, if they stand in one group at different lines of the user's."""
    found = {rank: tuple(frames) for one in logs for rank, frames in one.stacks.items() if frames}
    if len({group for one in logs for group in one.groups}) > 1:
        return ()
    lines = set()
    for frames in found.values():
        own = next((frame for frame in frames if in_user_code(frame.file)), frames[0])
        lines.add((own.file, own.line))
    if len(lines) < 2:
        return ()
    return tuple(StackDump(rank=rank, thread="MainThread", main=True, frames=found[rank]) for rank in sorted(found))
