"""What the doctor says of the demo's job: its verdicts, its findings, and the standstill at its end."""

from __future__ import annotations

from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.files.untrusted import hold
from ddpdoctor.finding import Basis, Fact, Finding, Frame, Location, Severity
from ddpdoctor.monitor.replay import SCRIPT
from ddpdoctor.monitor.snapshot import FindingView, StallSide, StallView
from tests.demo.story import (
    ACTS,
    HANG_S,
    JUDGED_S,
    LAST_COMMON_STEP,
    NOTICED_S,
    NS,
    RANKS,
    SHORT_RANK,
    SLOW_RANK,
)

_CODE = {
    61: "    for inputs, targets in loader:",
    74: "        loss.backward()",
    97: "    dist.barrier()  # every rank is through with the epoch",
    118: "    model = DistributedDataParallel(build_model(options).cuda(), device_ids=[local_rank])",
    131: "        train_epoch(model, loader, optimizer, epoch)",
    140: "    main(parse_options())",
}
"""The lines of the script that never was which the demo shows."""
CODE = "\n".join(_CODE.get(number, "") for number in range(1, 141))
hold(SCRIPT, CODE.encode())
TIMEOUT_S = 600
_BASIS: frozenset[Basis] = frozenset({"run"})
_OTHERS = tuple(rank for rank in range(RANKS) if rank != SHORT_RANK)
BACKWARD_STACK = (Frame(SCRIPT, 74, "train_epoch"), Frame(SCRIPT, 131, "main"), Frame(SCRIPT, 140, "<module>"))
BARRIER_STACK = (Frame(SCRIPT, 97, "train_epoch"), Frame(SCRIPT, 131, "main"), Frame(SCRIPT, 140, "<module>"))


def _place(line: int, function: str) -> tuple[Location, ...]:
    return (Location(file=SCRIPT, line=line, function=function),)


_COPIED = Finding(
    code="DDP211",
    name="no-gradient-bucket-view",
    severity=Severity.ADVICE,
    title="gradients are stored twice: 712 MB of every GPU's memory",
    locations=_place(118, "main"),
    basis=_BASIS,
    evidence=(
        Fact(text="DDP copies 7 gradient buckets of together 712 MB", basis="run", numbers={"bytes": 712_000_000}),
    ),
    remedy="Build the model with DistributedDataParallel(..., gradient_as_bucket_view=True).",
)
_STRAGGLER = Finding(
    code="DDP403",
    name="straggler",
    severity=Severity.WARNING,
    title=f"rank {SLOW_RANK} makes the 7 other ranks wait 84 ms in every step of 269 ms",
    ranks=(SLOW_RANK,),
    locations=_place(74, "train_epoch"),
    basis=_BASIS,
    evidence=(
        Fact(text=f"forward and backward take 246 ms on rank {SLOW_RANK} and 162 ms on the others", basis="run"),
        Fact(text="its data wait is the others' (3.1 ms): it is the computation that is late", basis="run"),
        Fact(text=f"GPU {SLOW_RANK} runs at 1,155 of 1,980 MHz", basis="run", rank=SLOW_RANK),
    ),
    remedy=f"See to the cooling of GPU {SLOW_RANK}, or leave it out; training is 1.45 times as fast without it.",
)
_THROTTLED = Finding(
    code="DDP409",
    name="gpu-throttled",
    severity=Severity.WARNING,
    title=f"GPU {SLOW_RANK} slows down because it is too hot: 1,155 of 1,980 MHz at 88 °C",
    ranks=(SLOW_RANK,),
    basis=_BASIS,
    evidence=(Fact(text="the driver reports thermal slowdown in every sample of the last 10 s", basis="run"),),
    remedy=f"See to the cooling of GPU {SLOW_RANK}: fans, air flow, neighbours.",
)
_INPUT_BOUND = Finding(
    code="DDP404",
    name="input-bound",
    severity=Severity.WARNING,
    title="every rank waits 97 ms for data in a step of 280 ms: the loaders cannot keep up",
    locations=_place(61, "train_epoch"),
    basis=_BASIS,
    evidence=(
        Fact(text="data wait is 35% of the step on all 8 ranks, after the workers' start", basis="run"),
        Fact(text="2 workers a rank; 16 workers share 64 cores, which are 9% busy", basis="run"),
    ),
    remedy="Raise num_workers from 2 to 8, with persistent_workers=True and prefetch_factor=4.",
)
_SHORT = Finding(
    code="DDP103",
    name="uneven-inputs",
    severity=Severity.ERROR,
    title=f"rank {SHORT_RANK} ran out of batches after step {LAST_COMMON_STEP:,}, the others hang in the next backward",
    ranks=(SHORT_RANK,),
    locations=_place(61, "train_epoch"),
    basis=_BASIS,
    evidence=(
        Fact(text=f"rank {SHORT_RANK} has 4,312 batches in this pass, the others have 4,313", basis="run"),
        Fact(
            text=f"rank {SHORT_RANK} waits in barrier at demo/train.py:97",
            basis="run",
            rank=SHORT_RANK,
            stack=BARRIER_STACK,
        ),
        Fact(
            text="rank 0 waits for gradients in backward at demo/train.py:74", basis="run", rank=0, stack=BACKWARD_STACK
        ),
    ),
    remedy="Give the loader's sampler drop_last=True, or train inside `with Join([model]):`; kill this run.",
)
_REMEDY_NOW = (
    "Kill the job: it cannot go on. Then give the sampler drop_last=True, or train inside `with Join([model]):`, and"
    " start again from the last checkpoint."
)


def findings_at(elapsed_s: float, started_at_ns: int) -> tuple[FindingView, ...]:
    """The findings so far, those that hold no longer with their end; newest and worst first."""

    def during(finding: Finding, act: int) -> FindingView | None:
        begins = ACTS[act].starts_s
        ends = ACTS[act + 1].starts_s + JUDGED_S
        if elapsed_s < begins + JUDGED_S:
            return None
        until = started_at_ns + int(ends * NS) if elapsed_s >= ends else None
        return FindingView(finding=finding, since_ns=started_at_ns + int(begins * NS), until_ns=until)

    views = [during(_STRAGGLER, 1), during(_THROTTLED, 1), during(_INPUT_BOUND, 2)]
    if elapsed_s >= HANG_S + NOTICED_S:
        views.insert(0, FindingView(finding=_SHORT, since_ns=started_at_ns + int(HANG_S * NS)))
    views.append(FindingView(finding=_COPIED, since_ns=started_at_ns - 760 * NS))
    return tuple(view for view in views if view is not None)


def verdict_at(elapsed_s: float, started_at_ns: int) -> RunVerdict:
    """The first line that anybody reads."""
    if elapsed_s >= HANG_S + NOTICED_S:
        return RunVerdict(
            state="broken",
            code=_SHORT.code,
            text=f"the job hangs: rank {SHORT_RANK} ran out of batches, the 7 others wait for its gradients",
            why=(
                f"rank {SHORT_RANK} left the loop after step {LAST_COMMON_STEP:,} and stands in barrier at {SCRIPT}:97",
                "ranks 0-2 and 4-7 wait for gradients in backward at demo/train.py:74",
            ),
            next=_REMEDY_NOW,
            since_ns=started_at_ns + int(HANG_S * NS),
        )
    for act, finding, why in (
        (ACTS[1], _STRAGGLER, ("its computation takes 246 ms, the others' 162 ms", _THROTTLED.title)),
        (ACTS[2], _INPUT_BOUND, tuple(fact.text for fact in _INPUT_BOUND.evidence)),
    ):
        following = ACTS[ACTS.index(act) + 1].starts_s
        if act.starts_s + JUDGED_S <= elapsed_s < following + JUDGED_S:
            return RunVerdict(
                state="slow",
                code=finding.code,
                text=finding.title,
                why=why,
                next=finding.remedy,
                since_ns=started_at_ns + int(act.starts_s * NS),
            )
    return RunVerdict(
        state="healthy",
        text="training runs well: 95% of each step is work on the model",
        why=("communication hides behind the backward, nobody waits for data, all ranks arrive within 3 ms",),
    )


def stall_at(elapsed_s: float, started_at_ns: int) -> StallView | None:
    """The standstill, once it is proved."""
    if elapsed_s < HANG_S + NOTICED_S:
        return None
    return StallView(
        title=f"7 ranks wait for rank {SHORT_RANK}, which waits for them elsewhere",
        since_ns=started_at_ns + int(HANG_S * NS),
        sides=(
            StallSide(
                ranks=(SHORT_RANK,),
                text=f"left the training loop after step {LAST_COMMON_STEP:,} and waits in barrier #8,625",
                stack=BARRIER_STACK,
                culprit=True,
            ),
            StallSide(
                ranks=_OTHERS,
                text="wait in all_reduce #8,625 for the gradients of bucket 1 of 7",
                stack=BACKWARD_STACK,
            ),
        ),
        remedy=_REMEDY_NOW,
        timeout_at_ns=started_at_ns + int((HANG_S + TIMEOUT_S) * NS),
    )
