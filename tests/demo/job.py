"""The snapshots of the demo's run, whose story is in ``tests.demo.story``."""

from __future__ import annotations

from ddpdoctor.diagnosis.performance.summary import Phases, StepTimes, Traffic
from ddpdoctor.monitor.replay import SCRIPT
from ddpdoctor.monitor.snapshot import BucketView, CallView, History, RankView, Snapshot
from tests.demo.findings import BACKWARD_STACK, BARRIER_STACK, findings_at, stall_at, verdict_at
from tests.demo.gpus import gpus_at
from tests.demo.story import (
    BATCH_SIZE,
    HANG_S,
    LAST_COMMON_STEP,
    NOTICED_S,
    NS,
    RANKS,
    SHORT_RANK,
    SLOW_RANK,
    RankTimes,
    noise,
    steps_at,
    times_at,
)

MS = 1_000_000
SLICES = 240
"""Seconds of history."""
RAN_BEFORE_S = 772
"""How long the job has run when the demo begins."""
GRADIENT_BYTES = 712_000_000
_BUCKETS = (
    ("lm_head.weight", 125_829_120, 1),
    ("layers.23.mlp.down_proj.weight", 104_857_600, 18),
    ("layers.19.attention.output.weight", 104_857_600, 18),
    ("layers.15.attention.output.weight", 104_857_600, 18),
    ("layers.11.attention.output.weight", 104_857_600, 18),
    ("layers.7.attention.output.weight", 104_857_600, 18),
    ("layers.3.attention.output.weight", 61_882_880, 21),
)


def demo_snapshot(elapsed_ns: int, started_at_ns: int, seed: int = 1, asked: dict[int, int] | None = None) -> Snapshot:
    """The snapshot of a moment; the story began at ``started_at_ns``."""
    elapsed_s = elapsed_ns / NS
    now_ns = started_at_ns + elapsed_ns
    moving = elapsed_s < HANG_S
    measured_s = min(elapsed_s, HANG_S - 0.2)
    measured_at_ns = started_at_ns + int(measured_s * NS)
    times = times_at(int(measured_s), seed)
    phases = _mean_phases(times)
    rate = 1e9 / phases.step_ns if elapsed_s < HANG_S + 1 else 0.0
    exposed = ((phases.exposed_waiting_ns or 0.0) + (phases.exposed_transfer_ns or 0.0)) / phases.step_ns
    verdict = verdict_at(elapsed_s, started_at_ns)
    late = {SLOW_RANK} if verdict.code == "DDP403" else {SHORT_RANK} if verdict.state == "broken" else set()
    history = _history(measured_s, started_at_ns, seed)
    gpus = gpus_at(elapsed_s, started_at_ns, seed)
    use = [gpu.samples[-1].utilisation_percent or 0.0 for gpu in gpus]
    spinning = exposed if moving else 1.0
    return Snapshot(
        now_ns=now_ns,
        source="demo",
        name="train.py",
        command=("torchrun", "--nproc-per-node", "8", SCRIPT),
        state="running" if elapsed_s < HANG_S + NOTICED_S else "stalled",
        started_at_ns=started_at_ns - RAN_BEFORE_S * NS,
        world_size=RANKS,
        nodes=1,
        backend="nccl",
        device="H100",
        torch_version="2.13.0",
        verdict=verdict,
        steps=int(steps_at(elapsed_s, seed)),
        steps_per_s=rate,
        samples_per_s=rate * BATCH_SIZE * RANKS,
        step_times=StepTimes(p50_ns=phases.step_ns, p95_ns=phases.step_ns * 1.07),
        phases=phases,
        overlap_ratio=1 - 7.2 / 64,
        exposed_share=exposed,
        efficiency=1 - exposed - phases.explicit_ns / phases.step_ns,
        gpu_utilisation_percent=sum(use) / RANKS,
        gpu_utilisation_corrected_percent=max(0.0, sum(use) / RANKS - 100 * spinning),
        measured_at_ns=measured_at_ns,
        ranks=tuple(_rank(rank, elapsed_s, started_at_ns, seed, rank in late, asked or {}) for rank in range(RANKS)),
        traffic=_traffic(phases),
        buckets=tuple(
            BucketView(module="model", order=order, size_bytes=size, parameters=parameters, first_parameter=name)
            for order, (name, size, parameters) in enumerate(_BUCKETS, 1)
        ),
        gpus=gpus,
        findings=findings_at(elapsed_s, started_at_ns),
        stall=stall_at(elapsed_s, started_at_ns),
        history=history,
    )


def _mean_phases(times: tuple[RankTimes, ...]) -> Phases:
    def mean(name: str) -> float:
        values: list[float] = [getattr(one, name) for one in times]
        return sum(values) / len(values) * MS

    return Phases(
        step_ns=mean("step"),
        data_wait_ns=mean("data"),
        forward_ns=mean("forward"),
        backward_compute_ns=mean("backward"),
        exposed_waiting_ns=mean("waiting"),
        exposed_transfer_ns=mean("transfer"),
        explicit_ns=mean("explicit"),
        optimizer_ns=mean("optimizer"),
        other_ns=mean("other"),
    )


def _rank(rank: int, elapsed_s: float, started_at_ns: int, seed: int, culprit: bool, asked: dict[int, int]) -> RankView:
    measured_s = min(elapsed_s, HANG_S - 0.2)
    second = int(measured_s)
    times = times_at(second, seed)[rank]
    phases = _mean_phases((times,))
    now_ns = started_at_ns + int(elapsed_s * NS)
    hung = elapsed_s >= HANG_S
    state, since_ns = _now(rank, elapsed_s, started_at_ns, seed, times)
    stack = BARRIER_STACK if hung and rank == SHORT_RANK else BACKWARD_STACK
    taken_at_ns = started_at_ns + int((HANG_S + 1) * NS) if elapsed_s >= HANG_S + NOTICED_S else asked.get(rank)
    return RankView(
        rank=rank,
        node=0,
        host="node-a17",
        pid=21_840 + rank,
        gpu_index=rank,
        state=state,
        state_since_ns=since_ns,
        where=stack[0],
        culprit=culprit,
        step=int(steps_at(elapsed_s, seed)) + (1 if hung and rank != SHORT_RANK else 0),
        step_times=StepTimes(p50_ns=phases.step_ns, p95_ns=phases.step_ns * (1.06 + 0.015 * noise(seed, rank, second))),
        phases=phases,
        waiting_ns=times.waiting * MS,
        lateness_ns=tuple(_lateness(past, seed)[rank] for past in range(second - SLICES + 1, second + 1)),
        samples_per_s=BATCH_SIZE * 1e9 / phases.step_ns,
        measured_at_ns=started_at_ns + int(measured_s * NS),
        beat_at_ns=now_ns - int(0.3e9),
        calls=_calls(elapsed_s, started_at_ns, seed),
        stack=stack if taken_at_ns is not None else (),
        stack_taken_at_ns=taken_at_ns,
    )


def _now(rank: int, elapsed_s: float, started_at_ns: int, seed: int, times: RankTimes) -> tuple[str, int]:
    if elapsed_s >= HANG_S:
        since_ns = started_at_ns + int(HANG_S * NS)
        if rank == SHORT_RANK:
            return "waiting in barrier #8,625", since_ns
        return "waiting in all_reduce #8,625 (gradients)", since_ns
    made = steps_at(elapsed_s, seed)
    at_ms = (made - int(made)) * times.step
    acts: tuple[tuple[str, float], ...] = (
        ("loading data", times.data),
        ("computing (forward)", times.forward),
        ("computing (backward)", times.backward),
        ("waiting for the last rank's gradients", times.waiting),
        ("reducing gradients", times.transfer),
        ("computing (optimizer)", times.optimizer + times.explicit + times.other),
    )
    for state, length in acts:
        if at_ms < length:
            return state, started_at_ns + int((elapsed_s - at_ms / 1_000) * NS)
        at_ms -= length
    return "computing (optimizer)", started_at_ns + int(elapsed_s * NS)


def _lateness(second: int, seed: int) -> tuple[float, ...]:
    arrivals = [times.step - times.waiting for times in times_at(second, seed)]
    return tuple((arrival - min(arrivals)) * MS for arrival in arrivals)


def _history(measured_s: float, started_at_ns: int, seed: int) -> History:
    seconds = range(int(measured_s) - SLICES + 1, int(measured_s) + 1)
    means = [_mean_phases(times_at(second, seed)) for second in seconds]
    exposed = [((one.exposed_waiting_ns or 0) + (one.exposed_transfer_ns or 0)) / one.step_ns for one in means]
    return History(
        slices_at_ns=tuple(started_at_ns + second * NS for second in seconds),
        step_p50_ns=tuple(one.step_ns for one in means),
        step_p95_ns=tuple(
            one.step_ns * (1.07 + 0.02 * noise(seed, second, 5)) for one, second in zip(means, seconds, strict=True)
        ),
        samples_per_s=tuple(BATCH_SIZE * RANKS * 1e9 / one.step_ns for one in means),
        exposed_share=tuple(exposed),
    )


def _traffic(phases: Phases) -> tuple[Traffic, ...]:
    group = f"all {RANKS} ranks"
    return (
        Traffic(
            group=group,
            backend="nccl",
            kind="gradients",
            calls_per_step=len(_BUCKETS),
            bytes_per_step=GRADIENT_BYTES,
            ns_per_step=64 * MS + (phases.exposed_waiting_ns or 0.0),
            bus_bandwidth_bytes_per_s=312e9,
            limit_bytes_per_s=450e9,
            overlap_ratio=1 - 7.2 / 64,
        ),
        Traffic(
            group=group, backend="nccl", kind="all_reduce", calls_per_step=1, bytes_per_step=4, ns_per_step=0.6 * MS
        ),
    )


def _calls(elapsed_s: float, started_at_ns: int, seed: int) -> tuple[CallView, ...]:
    made = int(steps_at(elapsed_s, seed))
    step_ns = times_at(int(min(elapsed_s, HANG_S - 1)), seed)[0].step * MS
    ended_ns = started_at_ns + int(min(elapsed_s, HANG_S) * NS)
    return tuple(
        CallView(
            kind="all_reduce",
            group=f"all {RANKS} ranks",
            sequence=made - back,
            entered_at_ns=ended_ns - int(back * step_ns) - MS,
            left_at_ns=ended_ns - int(back * step_ns) - int(0.4 * MS),
            size_bytes=4,
        )
        for back in range(9, 0, -1)
        if made - back > 0 and made <= LAST_COMMON_STEP
    )
