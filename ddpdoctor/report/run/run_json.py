"""A watched run as JSON, for machines: one object, schema 1.

Phases are means per step over the measured steps, in milliseconds; null is what was not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ddpdoctor.report.formats.json import HEAD, finding_object, indented

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import RankView, Snapshot
    from ddpdoctor.record.streams.measured import Gpu

VERDICT = ("state", "code", "text", "why", "next")
FACTS = ("name", "run_directory", "exit_code", "world_size", "backend", "device", "steps")
FIGURES = (
    *("samples_per_s", "steps_per_s", "exposed_share", "overlap_ratio", "efficiency"),
    *("one_rank_samples_per_s", "scaling_efficiency"),
)
"""Fields of a verdict and of a snapshot that are written as they are."""


def render(snapshot: Snapshot, root: str) -> str:
    """Render a run as indented JSON that ends with a line feed; paths are relative to ``root``."""
    return indented(as_object(snapshot, root))


def as_object(snapshot: Snapshot, root: str) -> dict[str, Any]:
    """Build the object that is encoded."""
    ended_ns = snapshot.ended_at_ns or snapshot.now_ns
    return {
        **HEAD,
        "verdict": {name: getattr(snapshot.verdict, name) for name in VERDICT},
        **{name: getattr(snapshot, name) for name in FACTS},
        "measured_steps": min((rank.measured_steps for rank in snapshot.ranks), default=0),
        "seconds": round((ended_ns - snapshot.started_at_ns) / 1e9, 3) if snapshot.started_at_ns else None,
        **{name: getattr(snapshot, name) for name in FIGURES},
        "ranks": [_rank(rank, snapshot) for rank in snapshot.ranks],
        "traffic": [msgspec.to_builtins(traffic) for traffic in snapshot.traffic],
        "findings": [
            finding_object(view.finding, root) | {"since_ns": view.since_ns, "until_ns": view.until_ns}
            for view in snapshot.findings
        ],
        "notes": [*snapshot.notes, *((snapshot.gpus_note,) if snapshot.gpus_note else ())],
    }


def _rank(rank: RankView, snapshot: Snapshot) -> dict[str, Any]:
    times = rank.step_times
    return {
        "rank": rank.rank,
        "host": rank.host,
        "state": rank.state,
        "step_ms": {
            "p50": _ms(times.p50_ns) if times is not None else None,
            "p95": _ms(times.p95_ns) if times is not None else None,
        },
        "phases_ms": None if rank.phases is None else {name: _ms(ns) for name, ns in rank.phases.parts_ns().items()},
        "waiting_ms": _ms(rank.waiting_ns),
        "late_ms": _ms(rank.late_ns),
        "late_phase": rank.late_phase,
        "overlap_ratio": rank.overlap_ratio,
        "bytes_per_step": rank.bytes_per_step,
        "collectives_per_step": rank.collectives_per_step,
        "samples_per_s": rank.samples_per_s,
        "gpu": next((_gpu(gpu) for gpu in snapshot.gpus if rank.rank in gpu.ranks), None),
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    used = [sample.utilisation_percent for sample in gpu.samples if sample.utilisation_percent is not None]
    newest = gpu.samples[-1] if gpu.samples else None
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "utilisation_percent": sum(used) / len(used) if used else None,
        "memory_used_bytes": newest.memory_used_bytes if newest is not None else None,
        "memory_total_bytes": gpu.memory_total_bytes,
        "temperature_c": newest.temperature_c if newest is not None else None,
        "power_w": newest.power_w if newest is not None else None,
        "power_limit_w": gpu.power_limit_w,
        "sm_clock_mhz": newest.sm_clock_mhz if newest is not None else None,
        "throttle_reasons": list(newest.throttle_reasons) if newest is not None else [],
    }


def _ms(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 4)
