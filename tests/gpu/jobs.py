"""Records of live runs with GPUs, built by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ddpdoctor.record.model import Job, Rank, RunRecord, StreamState
from ddpdoctor.record.streams.measured import Gpu, GpuSample, StepTrack

STARTED_NS = 1_700_000_000_000_000_000
MS = 1_000_000
S = 1_000 * MS


def steps(
    rank: int,
    count: int = 600,
    step_ms: float = 100,
    *,
    data_wait: float = 0.0,
    exposed: float = 0.0,
    explicit: float = 0.0,
    pause_after: int = 0,
    pause_s: float = 0.0,
) -> StepTrack:
    """Equal steps; the phases are shares of a step, and after one of them there may be a pause."""
    step_ns = int(step_ms * MS)
    started = array("q", [STARTED_NS + n * step_ns + int(pause_s * S) * (n >= pause_after > 0) for n in range(count)])
    nothing = array("q", [0]) * count
    unknown = array("q", [-1]) * count
    return StepTrack(
        rank=rank,
        step=array("q", range(1, count + 1)),
        started_at_ns=started,
        ended_at_ns=array("q", [start + step_ns for start in started]),
        data_wait_ns=array("q", [int(data_wait * step_ns)]) * count,
        forward_ns=array("q", [step_ns // 10]) * count,
        backward_ns=array("q", [int(exposed * step_ns) + step_ns // 10]) * count,
        explicit_ns=array("q", [int(explicit * step_ns)]) * count,
        optimizer_ns=nothing,
        exposed_ns=array("q", [int(exposed * step_ns) if n % 10 == 0 else -1 for n in range(count)]),
        window_ns=unknown,
        ready_at_ns=nothing,
        reduced_at_ns=nothing,
        reduced_bytes=nothing,
        buckets=nothing,
        explicit_calls=nothing,
        explicit_bytes=nothing,
        samples=nothing,
        batches=nothing,
        micro_batches=nothing,
        synchronised=nothing,
        device_forward_ns=unknown,
        device_backward_ns=unknown,
        device_optimizer_ns=unknown,
    )


def looks(
    count: int = 55,
    *,
    first_s: float = 2,
    utilisation: float | Sequence[float] | None = 97,
    clock: int | None = 1980,
    reasons: tuple[str, ...] = (),
    **fields: object,
) -> tuple[GpuSample, ...]:
    """One sample a second; a list of utilisations is gone through again and again."""
    cycle = list(utilisation) if isinstance(utilisation, Sequence) else [utilisation]
    return tuple(
        GpuSample(
            taken_at_ns=STARTED_NS + int((first_s + n) * S),
            utilisation_percent=cycle[n % len(cycle)],
            temperature_c=70,
            power_w=500,
            sm_clock_mhz=clock,
            throttle_reasons=reasons,
            **fields,  # type: ignore[arg-type]
        )
        for n in range(count)
    )


def gpu(index: int, samples: tuple[GpuSample, ...], *ranks: int, limit_w: float = 700) -> Gpu:
    """A GPU that the rank of its index uses, or the ranks that are given."""
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="H100",
        memory_total_bytes=80 << 30,
        power_limit_w=limit_w,
        default_power_limit_w=700,
        maximum_sm_clock_mhz=1980,
        ranks=ranks or (index,),
        samples=samples,
    )


def record(gpus: Sequence[Gpu], tracks: Sequence[StepTrack] = (), *, backend: str = "nccl") -> RunRecord:
    """A live run of as many ranks as there are GPUs."""
    return RunRecord(
        job=Job(kind="run", backend=backend, device="cuda", world_size=len(gpus)),
        ranks=tuple(Rank(rank=rank) for rank in range(len(gpus))),
        step_tracks=tuple(tracks) or tuple(steps(rank) for rank in range(len(gpus))),
        gpus=tuple(gpus),
        streams={name: StreamState("complete") for name in ("ranks", "step_tracks", "gpus")},
    )
