"""Snapshots of runs that never were, built by hand, and a source that shows them; the clock stands still."""

from __future__ import annotations

from ddpdoctor.diagnosis.performance.summary import Phases, RunVerdict, StepTimes, Traffic
from ddpdoctor.finding import Basis, Fact, Finding, Frame, Location, Severity
from ddpdoctor.monitor.snapshot import (
    BucketView,
    CallView,
    FindingView,
    History,
    PlaybackState,
    RankView,
    Snapshot,
    StallSide,
    StallView,
)
from ddpdoctor.record.streams.measured import Gpu, GpuSample

NOW = 1_700_000_000_000_000_000
S = 1_000_000_000
MS = 1_000_000
GIB = 2**30
SEEN_IN_RUN: frozenset[Basis] = frozenset({"run"})
STACK = (Frame("/work/train.py", 74, "train_epoch"), Frame("/work/train.py", 131, "main"))
OTHER_STACK = (Frame("/work/train.py", 97, "evaluate"), Frame("/work/train.py", 133, "main"))


class Still:
    """Shows one snapshot until it is given another; notes what it was asked for."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.shown = snapshot
        self.asked: list[str] = []

    def snapshot(self) -> Snapshot:
        if self.shown is None:
            raise OSError("the record cannot be read")
        return self.shown

    def ask_for_stacks(self, rank: int) -> None:
        self.asked.append(f"stacks of rank {rank}")

    def end_job(self) -> None:
        self.asked.append("end")

    def close(self) -> None:
        self.asked.append("close")


class Recording(Still):
    """One whose time can be moved."""

    state = PlaybackState(elapsed_ns=60 * S, length_ns=600 * S, speed=1.0)

    def playback(self) -> PlaybackState:
        return self.state

    def play(self, speed: float) -> None:
        self.asked.append(f"play {speed:g}")
        self.state = PlaybackState(elapsed_ns=self.state.elapsed_ns, length_ns=600 * S, speed=speed)

    def seek(self, elapsed_ns: int) -> None:
        self.asked.append(f"seek {elapsed_ns / S:g}")
        self.state = PlaybackState(elapsed_ns=elapsed_ns, length_ns=600 * S, speed=self.state.speed)


def phases(**changed: float | None) -> Phases:
    """A healthy step of 200 ms, changed; what is over is other."""
    parts: dict[str, float | None] = {
        "data_wait_ns": 3.0,
        "forward_ns": 62.0,
        "backward_compute_ns": 112.0,
        "exposed_waiting_ns": 2.0,
        "exposed_transfer_ns": 8.0,
        "explicit_ns": 1.0,
        "optimizer_ns": 9.0,
        "other_ns": 3.0,
    }
    parts |= changed
    scaled = {name: None if value is None else value * MS for name, value in parts.items()}
    return Phases(step_ns=sum(value for value in scaled.values() if value is not None), **scaled)  # type: ignore[arg-type]


def course(length: int, before: float, after: float, turned: int) -> tuple[float | None, ...]:
    """A series that changes its height ``turned`` slices before its end, with a small regular ripple."""
    return tuple(
        (after if index >= length - turned else before) * (1 + 0.004 * (index * 7 % 5)) for index in range(length)
    )


def rank(number: int, *, step: Phases, late: float = 0.0, **changed: object) -> RankView:
    """One rank of a run that goes on."""
    base = RankView(
        rank=number,
        node=number // 8,
        host=f"node-{number // 8:02}",
        pid=4_000 + number,
        gpu_index=number % 8,
        state="computing (backward)",
        state_since_ns=NOW - 40 * MS,
        where=STACK[0],
        step=1_234,
        step_times=StepTimes(p50_ns=step.step_ns, p95_ns=step.step_ns * 1.08),
        phases=step,
        waiting_ns=step.exposed_waiting_ns,
        lateness_ns=course(200, 0.4 * MS, max(0.4, late) * MS, 30),
        samples_per_s=64e9 / step.step_ns,
        measured_at_ns=NOW - 200 * MS,
        beat_at_ns=NOW - 300 * MS,
        calls=tuple(
            CallView(
                kind="all_reduce",
                group="8 ranks",
                sequence=400 + call,
                entered_at_ns=NOW - (9 - call) * 200 * MS,
                left_at_ns=NOW - (9 - call) * 200 * MS + 400_000,
                size_bytes=4,
            )
            for call in range(8)
        ),
    )
    return _changed(base, changed)


def _changed(base: RankView, changes: dict[str, object]) -> RankView:
    import msgspec

    return msgspec.structs.replace(base, **changes)


def gpu(index: int, *, hot: bool = False, use: float = 97.0) -> Gpu:
    """One GPU with two minutes of samples."""
    return Gpu(
        index=index,
        uuid=f"GPU-{index:08x}",
        name="NVIDIA H100 80GB HBM3",
        memory_total_bytes=80 * GIB,
        power_limit_w=700.0,
        maximum_sm_clock_mhz=1_980,
        ranks=(index,),
        samples=tuple(
            GpuSample(
                taken_at_ns=NOW - (120 - second) * S,
                utilisation_percent=use - second * 3 % 7,
                memory_used_bytes=61 * GIB,
                temperature_c=88.0 if hot else 64.0 + index % 3,
                power_w=431.0 if hot else 605.0 + second % 9,
                sm_clock_mhz=1_155 if hot else 1_980,
                throttle_reasons=("thermal slowdown",) if hot else (),
                processes=((4_000 + index, 60 * GIB),),
            )
            for second in range(120)
        ),
    )


def finding(code: str, name: str, severity: Severity, title: str, remedy: str, *facts: str, rank: int = -1) -> Finding:
    """A finding of a run."""
    return Finding(
        code=code,
        name=name,
        severity=severity,
        title=title,
        ranks=(rank,) if rank >= 0 else (),
        locations=(Location(file="/work/train.py", line=74, function="train_epoch"),),
        basis=SEEN_IN_RUN,
        evidence=tuple(Fact(text=text, basis="run") for text in facts),
        remedy=remedy,
    )


def traffic(bandwidth: float = 312e9) -> tuple[Traffic, ...]:
    """Gradients, and one reduce for logging."""
    return (
        Traffic(
            group="all 8 ranks",
            backend="nccl",
            kind="gradients",
            calls_per_step=7,
            bytes_per_step=712e6,
            ns_per_step=66 * MS,
            bus_bandwidth_bytes_per_s=bandwidth,
            limit_bytes_per_s=450e9,
            overlap_ratio=0.86,
        ),
        Traffic(
            group="all 8 ranks", backend="nccl", kind="all_reduce", calls_per_step=1, bytes_per_step=4, ns_per_step=MS
        ),
    )


def snapshot(**changed: object) -> Snapshot:
    """A healthy run of 8 ranks, changed."""
    import msgspec

    step = phases()
    base = Snapshot(
        now_ns=NOW,
        name="train.py",
        command=("torchrun", "--nproc-per-node", "8", "train.py"),
        state="running",
        started_at_ns=NOW - 754 * S,
        world_size=8,
        nodes=1,
        backend="nccl",
        device="H100",
        torch_version="2.13.0",
        verdict=RunVerdict(
            state="healthy",
            text="training runs well: 95% of each step is work on the model",
            why=("5.0% of the step is exposed communication",),
        ),
        steps=1_234,
        steps_per_s=5.0,
        samples_per_s=2_560.0,
        step_times=StepTimes(p50_ns=step.step_ns, p95_ns=step.step_ns * 1.08),
        phases=step,
        overlap_ratio=0.86,
        exposed_share=0.05,
        efficiency=0.945,
        gpu_utilisation_percent=96.4,
        gpu_utilisation_corrected_percent=91.6,
        measured_at_ns=NOW - 200 * MS,
        ranks=tuple(rank(number, step=step) for number in range(8)),
        traffic=traffic(),
        buckets=tuple(
            BucketView(
                module="model",
                order=order,
                size_bytes=105_000_000,
                parameters=18,
                first_parameter=f"layers.{order}.weight",
            )
            for order in range(1, 8)
        ),
        gpus=tuple(gpu(index) for index in range(8)),
        history=history(200.0),
    )
    return msgspec.structs.replace(base, **changed)


def history(after_ms: float) -> History:
    """Steps of 200 ms that took another time in the last 42 s."""
    return History(
        slices_at_ns=tuple(NOW - (200 - index) * S for index in range(200)),
        step_p50_ns=course(200, 200 * MS, after_ms * MS, 42),
        step_p95_ns=course(200, 216 * MS, 1.1 * after_ms * MS, 42),
        samples_per_s=course(200, 2_560, 2_560 * 200 / after_ms, 42),
        exposed_share=course(200, 0.05, 0.05, 0),
    )


def slow(found: Finding, why: tuple[str, ...], **changed: object) -> Snapshot:
    """A run with one warning that decides, for 42 s."""
    verdict = RunVerdict(
        state="slow", code=found.code, text=found.title, why=why, next=found.remedy, since_ns=NOW - 42 * S
    )
    return snapshot(**{"verdict": verdict, "findings": (FindingView(finding=found, since_ns=NOW - 42 * S),), **changed})


def straggler() -> Snapshot:
    """Rank 5 computes for 80 ms longer than the others."""
    waits, works = phases(exposed_waiting_ns=82.0), phases(backward_compute_ns=192.0)
    found = finding(
        "DDP403",
        "straggler",
        Severity.WARNING,
        "rank 5 makes the 7 other ranks wait 80 ms in every step of 280 ms",
        "See to the cooling of GPU 5, or leave it out.",
        "its backward takes 192 ms, the others' 112 ms",
        "GPU 5 runs at 1,155 of 1,980 MHz",
        rank=5,
    )
    return slow(
        found,
        tuple(fact.text for fact in found.evidence),
        history=history(280.0),
        steps_per_s=3.57,
        samples_per_s=1_830.0,
        step_times=StepTimes(p50_ns=280 * MS, p95_ns=296 * MS),
        phases=waits,
        exposed_share=0.32,
        efficiency=0.67,
        gpu_utilisation_corrected_percent=64.0,
        ranks=tuple(
            rank(number, step=works if number == 5 else waits, late=80.0 if number == 5 else 0.0, culprit=number == 5)
            for number in range(8)
        ),
        gpus=tuple(gpu(index, hot=index == 5) for index in range(8)),
    )


def input_bound() -> Snapshot:
    """Every rank waits for data."""
    step = phases(data_wait_ns=97.0)
    found = finding(
        "DDP404",
        "input-bound",
        Severity.WARNING,
        "every rank waits 97 ms for data in a step of 294 ms: the loaders cannot keep up",
        "Raise num_workers from 2 to 8.",
        "data wait is 33% of the step on all 8 ranks",
    )
    return slow(
        found,
        ("data wait is 33% of the step on all 8 ranks",),
        phases=step,
        step_times=StepTimes(p50_ns=step.step_ns, p95_ns=step.step_ns * 1.1),
        ranks=tuple(rank(number, step=step, state="waiting for data") for number in range(8)),
        gpus=tuple(gpu(index, use=62.0) for index in range(8)),
        gpu_utilisation_percent=59.0,
        gpu_utilisation_corrected_percent=56.0,
    )


def exposed() -> Snapshot:
    """Communication that backward does not hide, over a slow link."""
    step = phases(exposed_transfer_ns=88.0)
    found = finding(
        "DDP401",
        "exposed-communication",
        Severity.WARNING,
        "32% of each step is communication that nothing hides",
        "Use bucket_cap_mb=100, and see to the link.",
        "88 ms of 280 ms are transfer",
    )
    link = finding(
        "DDP408",
        "slow-link",
        Severity.WARNING,
        "the link between the GPUs carries 21.4 GB/s, NVLink should carry 450 GB/s",
        "Ask for NCCL_DEBUG=INFO which way NCCL takes.",
        "2 (N - 1) / N times 712 MB in 58 ms",
    )
    return slow(
        found,
        ("88 ms of 280 ms are transfer", "the link carries 21.4 GB/s"),
        phases=step,
        exposed_share=0.32,
        overlap_ratio=0.31,
        efficiency=0.68,
        traffic=traffic(bandwidth=21.4e9),
        findings=(
            FindingView(finding=found, since_ns=NOW - 42 * S),
            FindingView(finding=link, since_ns=NOW - 12 * S),
            FindingView(finding=link, since_ns=NOW - 300 * S, until_ns=NOW - 100 * S),
        ),
    )


def stalled(**changed: object) -> Snapshot:
    """Rank 3 evaluates alone, the others wait for its gradients."""
    found = finding(
        "DDP301",
        "rank-divergent-collective",
        Severity.ERROR,
        "rank 3 runs all_reduce at train.py:97, the others backward at train.py:74",
        "Have every rank call evaluate, or none.",
        "entry 412 of the group differs",
        rank=3,
    )
    remedy = "Kill the job, then have every rank call evaluate, or none."
    ranks = tuple(
        rank(
            number,
            step=phases(),
            state="waiting in all_reduce #412",
            state_since_ns=NOW - 14 * S,
            measured_at_ns=NOW - 14 * S,
            culprit=number == 3,
            where=OTHER_STACK[0] if number == 3 else STACK[0],
            stack=OTHER_STACK if number == 3 else STACK,
            stack_taken_at_ns=NOW - 12 * S,
        )
        for number in range(8)
    )
    return snapshot(
        **{
            "state": "stalled",
            "verdict": RunVerdict(
                state="broken",
                code="DDP301",
                text=found.title,
                why=("7 ranks wait",),
                next=remedy,
                since_ns=NOW - 14 * S,
            ),
            "findings": (FindingView(finding=found, since_ns=NOW - 14 * S),),
            "measured_at_ns": NOW - 14 * S,
            "steps_per_s": None,
            "samples_per_s": None,
            "ranks": ranks,
            "stall": StallView(
                title="7 ranks wait for rank 3, which waits for them in another collective",
                since_ns=NOW - 14 * S,
                sides=(
                    StallSide(ranks=(0, 1, 2, 4, 5, 6, 7), text="wait in all_reduce #412 for gradients", stack=STACK),
                    StallSide(ranks=(3,), text="waits in all_reduce #412 of evaluate", stack=OTHER_STACK, culprit=True),
                ),
                remedy=remedy,
                timeout_at_ns=NOW + 586 * S,
            ),
            **changed,
        }
    )


def without_gpus() -> Snapshot:
    """Two ranks on the CPU."""
    step = phases(exposed_waiting_ns=None, exposed_transfer_ns=None)
    return snapshot(
        world_size=2,
        backend="gloo",
        device="cpu",
        gpus=(),
        gpus_note="no NVIDIA driver on this machine",
        gpu_utilisation_percent=None,
        gpu_utilisation_corrected_percent=None,
        exposed_share=None,
        overlap_ratio=None,
        efficiency=None,
        phases=step,
        traffic=(),
        buckets=(),
        ranks=tuple(rank(number, step=step, gpu_index=None, waiting_ns=None, calls=()) for number in range(2)),
    )


def one_rank() -> Snapshot:
    """A job of a single rank."""
    return snapshot(world_size=1, ranks=(rank(0, step=phases()),), gpus=(gpu(0),), traffic=())


def many_ranks(count: int = 512) -> Snapshot:
    """A big job with one late rank."""
    waits, works = phases(exposed_waiting_ns=82.0), phases(backward_compute_ns=192.0)
    late = count * 5 // 8
    return snapshot(
        world_size=count,
        nodes=count // 8,
        ranks=tuple(
            rank(
                number,
                step=works if number == late else waits,
                late=80.0 if number == late else 0.0,
                culprit=number == late,
            )
            for number in range(count)
        ),
    )


def waiting() -> Snapshot:
    """Nothing was measured yet."""
    return Snapshot(
        now_ns=NOW,
        name="train.py",
        state="waiting",
        started_at_ns=NOW - 2 * S,
        verdict=RunVerdict(state="unknown", text="no rank has trained a step yet"),
    )
