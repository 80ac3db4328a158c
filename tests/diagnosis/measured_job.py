"""Plays a measured job by hand: ranks that compute, meet and wait in milliseconds, and the tracks that this leaves."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.record.model import STREAMS, Job, Rank, RunRecord, StreamState
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import CallTrack, StepTrack

MILLISECOND_NS = 1_000_000
GRADIENT_BYTES = 40_000_000
COLUMNS = tuple(name for name in StepTrack.__struct_fields__ if name not in ("rank", "dropped"))
CALL_COLUMNS = tuple(name for name in CallTrack.__struct_fields__ if name not in ("rank", "dropped", "kinds"))
PHASES = ("data_wait", "forward", "backward", "optimizer", "other")
Durations = Mapping[str, float]


class MeasuredJob:
    """A job whose ranks run step after step; all times are milliseconds.

    A step is data wait, forward, backward until the last gradient is ready, the meeting of the gradients with its
    transfer, optimizer, and other code, in this order; ``barrier`` makes the ranks meet once more at the end.
    """

    def __init__(self, ranks: int = 2, *, kinds: Sequence[str] = ("barrier",), **job: Any) -> None:
        self.ranks = tuple(range(ranks))
        self.now_ms = dict.fromkeys(self.ranks, 1_000.0)
        self.step = 0
        self.rows: dict[int, dict[str, list[int]]] = {rank: {name: [] for name in COLUMNS} for rank in self.ranks}
        self.calls: dict[int, dict[str, list[int]]] = {rank: {name: [] for name in CALL_COLUMNS} for rank in self.ranks}
        self.kinds = tuple(kinds)
        self.job = {"kind": "run", "world_size": ranks, "device": "cpu", "backend": "gloo", **job}
        self.groups = [Group(ranks=self.ranks, backend=str(self.job["backend"]))]

    def pause(self, milliseconds: float, *ranks: int) -> None:
        """Let time pass between two steps, on all ranks or some."""
        for rank in ranks or self.ranks:
            self.now_ms[rank] += milliseconds

    def run(
        self,
        steps: int,
        durations: Durations,
        slower: Mapping[int, Durations] | None = None,
        *,
        transfer: float = 0.0,
        hidden: float = 0.0,
        barrier: bool = False,
        sampled: int = 1,
        samples: int = 32,
        **columns: int,
    ) -> MeasuredJob:
        """Run steps of the given durations, with more of some phases on some ranks.

        ``hidden`` is how much of the communication backward hid, ``transfer`` what is left when all have come;
        one step in ``sampled`` is sampled.
        """
        for _ in range(steps):
            self.step += 1
            is_sampled = self.step % sampled == 0
            took = {
                rank: {
                    phase: durations.get(phase, 0.0) + (slower or {}).get(rank, {}).get(phase, 0.0) for phase in PHASES
                }
                for rank in self.ranks
            }
            started = dict(self.now_ms)
            ready = {
                rank: started[rank] + sum(took[rank][phase] for phase in ("data_wait", "forward", "backward"))
                for rank in self.ranks
            }
            reduced = max(ready.values()) + transfer
            ended = {rank: reduced + took[rank]["optimizer"] + took[rank]["other"] for rank in self.ranks}
            met = max(ended.values())
            for rank in self.ranks:
                explicit = met - ended[rank] if barrier else 0.0
                values = {
                    "step": self.step,
                    "started_at_ns": _ns(started[rank]),
                    "ended_at_ns": _ns(ended[rank] + explicit),
                    "data_wait_ns": _ns(took[rank]["data_wait"]),
                    "forward_ns": _ns(took[rank]["forward"]),
                    "backward_ns": _ns(took[rank]["backward"] + reduced - ready[rank]),
                    "explicit_ns": _ns(explicit),
                    "optimizer_ns": _ns(took[rank]["optimizer"]),
                    "exposed_ns": _ns(reduced - ready[rank]) if is_sampled else -1,
                    "window_ns": _ns(reduced - ready[rank] + hidden) if is_sampled else -1,
                    "ready_at_ns": _ns(ready[rank]) if is_sampled else 0,
                    "reduced_at_ns": _ns(reduced) if is_sampled else 0,
                    "reduced_bytes": GRADIENT_BYTES,
                    "buckets": 4,
                    "explicit_calls": int(barrier),
                    "samples": samples,
                    "batches": 1,
                    "micro_batches": 1,
                    "synchronised": 1,
                    "device_forward_ns": -1,
                    "device_backward_ns": -1,
                    "device_optimizer_ns": -1,
                    **columns,
                }
                for name in COLUMNS:
                    self.rows[rank][name].append(values.get(name, 0))
                if barrier:
                    self.call(rank, "barrier", ended[rank], met)
                self.now_ms[rank] = ended[rank] + explicit
        return self

    def call(
        self, rank: int, kind: str, entered: float, left: float, *, group: int = 0, size_bytes: int = 0, site: int = -1
    ) -> None:
        """Let a rank run an explicit collective between two times."""
        calls = self.calls[rank]
        values = {
            "kind": self.kinds.index(kind),
            "group": group,
            "sequence": calls["group"].count(group),
            "peer": -1,
            "step": self.step,
            "entered_at_ns": _ns(entered),
            "left_at_ns": _ns(left) if left else 0,
            "size_bytes": size_bytes,
            "site": site,
        }
        for name in CALL_COLUMNS:
            calls[name].append(values[name])

    def record(self, **streams: Any) -> RunRecord:
        """What is known of the job."""
        return RunRecord(
            **{
                "job": Job(ended_ns=_ns(max(self.now_ms.values())), **self.job),
                "ranks": tuple(Rank(rank=rank, end="running") for rank in self.ranks),
                "groups": tuple(self.groups),
                "streams": {name: StreamState("complete") for name in STREAMS},
                "step_tracks": tuple(StepTrack(rank=rank, **_columns(self.rows[rank])) for rank in self.ranks),
                "call_tracks": tuple(
                    CallTrack(rank=rank, kinds=self.kinds, **_columns(self.calls[rank])) for rank in self.ranks
                ),
                **streams,
            }
        )


def _columns(values: Mapping[str, list[int]]) -> dict[str, Any]:
    return {name: array("q", column) for name, column in values.items()}


def _ns(milliseconds: float) -> int:
    return round(milliseconds * MILLISECOND_NS)
