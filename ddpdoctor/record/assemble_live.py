"""Makes tracks and pulses of the rings of a live run."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from ddpdoctor.errors import RecordError
from ddpdoctor.record import layout
from ddpdoctor.record.measured import CallTrack, Phase, Pulse, StepTrack
from ddpdoctor.record.numbered_tail import NumberedTail, RawPulse

NumberOf = Callable[[int, str, int], int]
"""The record's number for a process's own: process, kind, number there."""
RankOf = Callable[[int], "int | None"]
_PHASES = get_args(Phase)


class LiveRings:
    """The numbered rings of a run directory, by process."""

    def __init__(self, directory: Path, rank_of: RankOf, number_of: NumberOf) -> None:
        self._directory = directory
        self._rank_of = rank_of
        self._number_of = number_of
        self.steps: dict[int, NumberedTail] = {}
        self.calls: dict[int, NumberedTail] = {}
        self.refused: dict[int, str] = {}
        """Processes whose rings could not be read, and why."""

    def poll(self, processes: set[int]) -> None:
        """Take in new rows of these processes."""
        for pid in processes:
            self._open(pid, layout.steps_name(pid), layout.STEPS_MAGIC, layout.STEP_FIELDS, self.steps)
            self._open(pid, layout.calls_name(pid), layout.CALLS_MAGIC, layout.CALL_FIELDS, self.calls)
        for tail in (*self.steps.values(), *self.calls.values()):
            tail.read()

    def step_tracks(self) -> tuple[StepTrack, ...]:
        """One track a rank, ascending."""
        tracks = [
            StepTrack(rank=rank, dropped=tail.dropped, **{name: column[:] for name, column in tail.columns.items()})
            for pid, tail in self.steps.items()
            if (rank := self._rank_of(pid)) is not None
        ]
        return tuple(sorted(tracks, key=lambda track: track.rank))

    def call_tracks(self) -> tuple[CallTrack, ...]:
        """One track a rank, ascending."""
        tracks = []
        for pid, tail in self.calls.items():
            rank = self._rank_of(pid)
            if rank is None:
                continue
            columns = {name: column[:] for name, column in tail.columns.items()}
            for kind in ("group", "site"):
                columns[kind] = self._translated(pid, kind, columns[kind])
            tracks.append(CallTrack(rank=rank, dropped=tail.dropped, kinds=layout.CALL_KINDS, **columns))
        return tuple(sorted(tracks, key=lambda track: track.rank))

    def pulses(self) -> tuple[Pulse, ...]:
        """The newest pulse of each rank, ascending."""
        pulses = []
        for pid, tail in self.steps.items():
            rank, raw = self._rank_of(pid), tail.pulse()
            if rank is not None and raw is not None:
                pulses.append(self._pulse(pid, rank, raw))
        return tuple(sorted(pulses, key=lambda pulse: pulse.rank))

    def close(self) -> None:
        """Let go of every file."""
        for tail in (*self.steps.values(), *self.calls.values()):
            tail.close()

    def _pulse(self, pid: int, rank: int, raw: RawPulse) -> Pulse:
        return Pulse(
            rank=rank,
            beat_at_ns=raw.beat_at_ns,
            phase=cast("Phase", _PHASES[raw.phase]) if 0 <= raw.phase < len(_PHASES) else "other",
            phase_since_ns=raw.phase_since_ns,
            step=raw.step,
            collective=layout.CALL_KINDS[raw.kind] if 0 <= raw.kind < len(layout.CALL_KINDS) else "",
            sequence=raw.sequence,
            enqueued=raw.enqueued,
            completed=raw.completed,
            site=self._number_of(pid, "site", raw.site),
            main_cpu_ns=raw.main_cpu_ns,
            unchanged_ms=raw.unchanged_ms,
        )

    def _open(self, pid: int, name: str, magic: bytes, fields: tuple[str, ...], tails: dict[int, NumberedTail]) -> None:
        if pid in tails or pid in self.refused:
            return
        try:
            tails[pid] = NumberedTail(self._directory / name, magic, fields)
        except RecordError as error:
            self.refused[pid] = error.message
        except (OSError, ValueError):
            return

    def _translated(self, pid: int, kind: str, column: array[int]) -> array[int]:
        known = {number: self._number_of(pid, kind, number) for number in set(column)}
        return array("q", [known[number] for number in column])
