"""Shows a recorded run as it was watched: at its end, or at any moment of its course."""

from __future__ import annotations

import lzma
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.files.untrusted import hold
from ddpdoctor.monitor.history import NeverWatched, recorded_moments, recorded_snapshot
from ddpdoctor.monitor.snapshot import History, OnlyShown, PlaybackState, Snapshot
from ddpdoctor.record.reader import read_plan

# The course of a run in a bounded number of slices, for sparklines and heat strips.

FIRST_SLICE_NS = 1_000_000_000
OVERDUE = 2.0
"""A step that has lasted so many times as long as the median one is missing; until then the figures are those of the
last."""
MOST_SLICES = 240
"""When there are more, two become one, and a slice is twice as long from then on."""


class _Slice(msgspec.Struct, frozen=True, kw_only=True):
    at_ns: int
    step_p50_ns: float | None = None
    step_p95_ns: float | None = None
    samples_per_s: float | None = None
    exposed_share: float | None = None
    lateness_ns: Mapping[int, float | None] = {}


class Series:
    """The slices of one run."""

    def __init__(self) -> None:
        self._slices: list[_Slice] = []
        self._slice_ns = FIRST_SLICE_NS
        self._measured_at_ns: int | None = None

    @property
    def slice_ns(self) -> int:
        """How long a slice is now."""
        return self._slice_ns

    def is_due(self, now_ns: int) -> bool:
        """Return whether it is time for the next slice."""
        return not self._slices or now_ns - self._slices[-1].at_ns >= self._slice_ns

    def add(self, summary: RunSummary, now_ns: int) -> None:
        """Add the figures of the time since the last slice; nothing was seen when a newer step is overdue.

        The course begins with the first step.
        """
        times, measured_at_ns = summary.step_times, summary.measured_at_ns
        if measured_at_ns is None or times is None:
            self._slices += [_Slice(at_ns=now_ns)] if self._slices else []
        elif measured_at_ns == self._measured_at_ns:
            overdue = now_ns - measured_at_ns > max(self._slice_ns, OVERDUE * times.p50_ns)
            last = _Slice(at_ns=now_ns) if overdue else self._slices[-1]
            self._slices.append(msgspec.structs.replace(last, at_ns=now_ns))
        else:
            self._slices.append(
                _Slice(
                    at_ns=now_ns,
                    step_p50_ns=times.p50_ns,
                    step_p95_ns=times.p95_ns,
                    samples_per_s=summary.samples_per_s,
                    exposed_share=summary.exposed_share,
                    lateness_ns={rank.rank: rank.late_ns for rank in summary.ranks},
                )
            )
        self._measured_at_ns = measured_at_ns
        if len(self._slices) > MOST_SLICES:
            pairs = zip(self._slices[::2], self._slices[1::2], strict=False)
            self._slices = [_joined(first, second) for first, second in pairs]
            self._slice_ns *= 2

    def history(self) -> History:
        """Return the slices as series."""
        names = [name for name in History.__struct_fields__ if name != "slices_at_ns"]
        series = {name: tuple(getattr(entry, name) for entry in self._slices) for name in names}
        return History(slices_at_ns=tuple(entry.at_ns for entry in self._slices), **series)

    def lateness_ns(self, rank: int) -> tuple[float | None, ...]:
        """Return how late one rank came, slice by slice."""
        return tuple(entry.lateness_ns.get(rank) for entry in self._slices)


def _joined(first: _Slice, second: _Slice) -> _Slice:
    ranks = first.lateness_ns.keys() | second.lateness_ns.keys()
    worst = [value for value in (first.step_p95_ns, second.step_p95_ns) if value is not None]
    return _Slice(
        at_ns=second.at_ns,
        step_p50_ns=mean_of_known((first.step_p50_ns, second.step_p50_ns)),
        step_p95_ns=max(worst, default=None),
        samples_per_s=mean_of_known((first.samples_per_s, second.samples_per_s)),
        exposed_share=mean_of_known((first.exposed_share, second.exposed_share)),
        lateness_ns={
            rank: mean_of_known((first.lateness_ns.get(rank), second.lateness_ns.get(rank))) for rank in ranks
        },
    )


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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


class Replay(OnlyShown):
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
        at_ns = max(0, self._elapsed_ns + moved_ns)
        if self._source == "demo" and moved_ns and at_ns > self._length_ns:
            return at_ns % (self._length_ns + 1)  # The story begins again.
        return min(at_ns, self._length_ns)


# The demo: a minute of a job of 8 ranks that never was, recorded, to see the screen without a GPU.
#
# A healthy start, a GPU that runs hot and makes its rank late, a loader that cannot keep up, and a rank that runs out
# of batches and leaves the others waiting. ``python -m tests.demo`` invents the story and writes the recording.

SCRIPT = "demo/train.py"
RECORDING = "demo.xz"
"""Beside this file: one snapshot a line, as JSON; the first line is the text of the script."""


def demo() -> Replay:
    """Return the recording, at its beginning, playing."""
    content = lzma.decompress(files("ddpdoctor.monitor").joinpath(RECORDING).read_bytes())
    script, *lines = content.splitlines()
    hold(SCRIPT, msgspec.json.decode(script, type=str).encode())
    by_moment = {msgspec.json.decode(line, type=_Moment).now_ns: line for line in lines}
    replay = Replay(list(by_moment), lambda at_ns: msgspec.json.decode(by_moment[at_ns], type=Snapshot), "demo")
    replay.seek(0)
    replay.play(1.0)
    return replay


class _Moment(msgspec.Struct):
    now_ns: int
