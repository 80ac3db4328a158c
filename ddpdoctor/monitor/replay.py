"""Shows a recorded run as it was watched: at its end, or at any moment of its course."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from ddpdoctor.monitor.history import NeverWatched, recorded_moments, recorded_snapshot
from ddpdoctor.monitor.snapshot import PlaybackState, Snapshot
from ddpdoctor.record.plan import read_plan


def final_snapshot(directory: Path) -> Snapshot:
    """Return the last thing that was shown of a run.

    Raises RecordError when the directory cannot be read, and NeverWatched when the run was never watched.
    """
    read_plan(directory)
    moments = recorded_moments(directory)
    return recorded_snapshot(directory, moments[-1] if moments else 0)


def recorded_run(directory: Path) -> Replay:
    """Return a run as it was watched.

    Raises RecordError when the directory cannot be read or the run was never watched.
    """
    read_plan(directory)
    moments = recorded_moments(directory)
    if not moments:
        raise NeverWatched(f"{directory} holds no snapshots: the run was never watched")
    return Replay(moments, partial(recorded_snapshot, directory))


class Replay:
    """Recorded snapshots as a source whose time can be moved; starts at the end, holding still."""

    def __init__(
        self, moments: Sequence[int], read: Callable[[int], Snapshot], source: Literal["replay", "demo"] = "replay"
    ) -> None:
        """``read`` returns the snapshot of one of the moments, of which there is at least one."""
        self._moments = moments
        self._read = read
        self._source = source
        self._speed = 0.0
        self._elapsed_ns = self._length_ns
        self._set_at_ns = time.monotonic_ns()
        self._shown: tuple[int, Snapshot] | None = None

    def snapshot(self) -> Snapshot:
        """Return what was shown at the moment where the replay stands."""
        at_ns = self._moments[0] + self._position_ns()
        moment = self._moments[max(0, bisect_right(self._moments, at_ns) - 1)]
        if self._shown is None or self._shown[0] != moment:
            self._shown = moment, msgspec.structs.replace(self._read(moment), source=self._source, launched=False)
        return self._shown[1]

    def ask_for_stacks(self, rank: int) -> None:
        """A run that is over has no stacks to give."""

    def end_job(self) -> None:
        """A run that is over cannot be ended."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def playback(self) -> PlaybackState:
        """Return where the replay stands."""
        return PlaybackState(elapsed_ns=self._position_ns(), length_ns=self._length_ns, speed=self._speed)

    def play(self, speed: float) -> None:
        """Go on at this speed; 0 holds still."""
        self.seek(self._position_ns())
        self._speed = speed

    def seek(self, elapsed_ns: int) -> None:
        """Go to a moment of the run; beyond its ends means to its ends."""
        self._elapsed_ns = min(max(0, elapsed_ns), self._length_ns)
        self._set_at_ns = time.monotonic_ns()

    @property
    def _length_ns(self) -> int:
        return self._moments[-1] - self._moments[0]

    def _position_ns(self) -> int:
        moved_ns = int((time.monotonic_ns() - self._set_at_ns) * self._speed)
        return min(max(0, self._elapsed_ns + moved_ns), self._length_ns)
