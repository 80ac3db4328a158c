"""A run as a Chrome trace, which Perfetto and chrome://tracing open: ranks as processes, phases as slices.

What was measured is when a step began and ended, how long each phase took, and when collectives began and ended. Within
a step the phases are laid out in their usual order: their lengths are measured, their places are not.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord
    from ddpdoctor.record.streams.measured import CallTrack, Gpu, StepTrack

STEPS, PHASES, GRADIENTS, COLLECTIVES = range(1, 5)
_THREADS = {STEPS: "steps", PHASES: "phases", GRADIENTS: "gradient communication", COLLECTIVES: "collectives"}
_GPUS = 1_000_000
"""Process ids from here on stand for GPUs."""


def encode(record: RunRecord) -> bytes:
    """Return the trace of a record, compressed by gzip."""
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"tool": "ddpdoctor", "phases": "durations are measured, their order within a step is not"},
        "traceEvents": list(events(record)),
    }
    return gzip.compress(msgspec.json.encode(trace), 6, mtime=0)


def events(record: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace; times are in microseconds since the first of them."""
    starts = [track.started_at_ns[0] for track in record.step_tracks if len(track)]
    starts += [track.entered_at_ns[0] for track in record.call_tracks if len(track)]
    origin_ns = min(starts, default=0)
    hosts = {rank.rank: rank.host for rank in record.ranks}
    ranks = {track.rank for track in record.step_tracks} | {track.rank for track in record.call_tracks}
    for rank in sorted(ranks):
        host = f" on {hosts[rank]}" if hosts.get(rank) else ""
        yield _meta("process_name", rank, 0, {"name": f"rank {rank}{host}"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
        for thread, name in _THREADS.items():
            yield _meta("thread_name", rank, thread, {"name": name})
            yield _meta("thread_sort_index", rank, thread, {"sort_index": thread})
    for steps in record.step_tracks:
        yield from _step_events(steps, origin_ns)
    for calls in record.call_tracks:
        yield from _call_events(calls, record, origin_ns)
    for gpu in record.gpus:
        yield from _gpu_events(gpu, origin_ns)


def _step_events(track: StepTrack, origin_ns: int) -> Iterator[dict[str, Any]]:
    sent_ns = 0
    for row in range(len(track)):
        start_ns, end_ns = track.started_at_ns[row], track.ended_at_ns[row]
        figures = {
            "samples": track.samples[row],
            "micro_batches": track.micro_batches[row],
            "reduced_bytes": track.reduced_bytes[row],
            "buckets": track.buckets[row],
        }
        yield _slice(f"step {track.step[row]}", track.rank, STEPS, start_ns - origin_ns, end_ns - start_ns, figures)
        at_ns = start_ns
        for name, length_ns in _phases(track, row, end_ns - start_ns):
            length_ns = min(length_ns, end_ns - at_ns)
            if length_ns > 0:
                yield _slice(name, track.rank, PHASES, at_ns - origin_ns, length_ns)
                at_ns += length_ns
        if track.window_ns[row] > 0 and track.reduced_at_ns[row]:
            exposed = {"exposed_us": track.exposed_ns[row] / 1_000, "bytes": track.reduced_bytes[row]}
            # A window that was scaled up from one backward of several may be longer than there was time for it.
            first_ns = max(track.reduced_at_ns[row] - track.window_ns[row], start_ns, sent_ns)
            sent_ns = max(track.reduced_at_ns[row], first_ns)
            yield _slice("gradients", track.rank, GRADIENTS, first_ns - origin_ns, sent_ns - first_ns, exposed)


def _phases(track: StepTrack, row: int, step_ns: int) -> list[tuple[str, int]]:
    exposed_ns = max(0, track.exposed_ns[row])
    known = [
        ("data wait", track.data_wait_ns[row]),
        ("forward", track.forward_ns[row]),
        ("backward compute", max(0, track.backward_ns[row] - exposed_ns)),
        ("exposed communication", exposed_ns),
        ("explicit collectives", track.explicit_ns[row]),
        ("optimizer", track.optimizer_ns[row]),
    ]
    return [*known, ("other", step_ns - sum(length_ns for _, length_ns in known))]


def _call_events(track: CallTrack, record: RunRecord, origin_ns: int) -> Iterator[dict[str, Any]]:
    for row in range(len(track)):
        entered_ns = track.entered_at_ns[row]
        next_ns = track.entered_at_ns[row + 1] if row + 1 < len(track) else record.job.ended_ns
        left_ns = track.left_at_ns[row] or next_ns
        kind, group, site = track.kind[row], track.group[row], track.site[row]
        line = record.site(site).innermost if site < len(record.sites) else None
        figures: dict[str, Any] = {"bytes": track.size_bytes[row], "sequence": track.sequence[row]}
        if 0 <= group < len(record.groups):
            figures["group_ranks"] = list(record.groups[group].ranks)
        if line is not None:
            figures["line"] = f"{line.file}:{line.line}"
        if not track.left_at_ns[row]:
            figures["unfinished"] = True
        name = track.kinds[kind] if 0 <= kind < len(track.kinds) else "collective"
        length_ns = max(0, left_ns - entered_ns)
        yield _slice(name, track.rank, COLLECTIVES, entered_ns - origin_ns, length_ns, figures)


def _gpu_events(gpu: Gpu, origin_ns: int) -> Iterator[dict[str, Any]]:
    process = _GPUS + gpu.index
    yield _meta("process_name", process, 0, {"name": f"GPU {gpu.index} {gpu.name}".rstrip()})
    for sample in gpu.samples:
        values = {"utilisation (%)": sample.utilisation_percent, "power (W)": sample.power_w}
        for name, value in values.items():
            if value is not None and sample.taken_at_ns >= origin_ns:
                ts = (sample.taken_at_ns - origin_ns) / 1_000
                yield {"name": name, "ph": "C", "ts": ts, "pid": process, "tid": 0, "args": {"value": value}}


def _slice(
    name: str, rank: int, thread: int, start_ns: int, length_ns: int, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    event = {"name": name, "cat": _THREADS[thread], "ph": "X", "ts": start_ns / 1_000, "dur": length_ns / 1_000}
    return event | {"pid": rank, "tid": thread} | ({"args": args} if args else {})


def _meta(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": args}
