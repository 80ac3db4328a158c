"""One rank keeps the others waiting.

What it finds
    In a live run: ranks for which the others wait 5% of the step or more, in the reduction of gradients or in an
    explicit collective, while they hardly wait themselves; in most of the run, not once. With the phase that makes them
    late; as advice where no phase explains most of it, as on a machine that others share. If less than 10 s were
    measured, the limit is 15% of the step. What a rank loses to other programs on its cores, or to page faults, is
    named as the cause where it is most of what the others wait: its own work is not longer then.

Why it is bad
    Every step takes as long as on its slowest rank: the time of all the others is lost.

Example
    sampler.num_samples += 100 * (rank == 3)        # one rank augments, logs or loads more than the others

Remedy
    Look for what only that rank does in the named phase: work for rank 0, longer samples, a slower disk, other
    programs on its cores, a slower GPU. Page faults come from memory that the allocator gives back and takes again in
    every step: keep it, by MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, or allocate large buffers once.

When it is wrong
    On machines that are shared with other jobs. The clocks of several machines need not agree: there the rank that
    waits least is the one that arrived last.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Reason, RunRecord
from ddpdoctor.diagnosis.performance.stragglers import Loss, standing, straggler
from ddpdoctor.diagnosis.wording import milliseconds_text, rank_list, verb
from ddpdoctor.finding import Finding, Refuted, Severity

CHECK = Check(
    code="DDP403",
    name="straggler",
    stands_for="straggler",
    severity={"run": Severity.WARNING},
    needs=frozenset({"step_tracks", "call_tracks"}),
)
_PHASES = {
    "data_wait": ("its loader", "Check its loader: longer samples, a slower disk, fewer workers or cores."),
    "forward": (
        "its forward",
        "Check what it computes in forward that the others do not: longer samples, other layers.",
    ),
    "backward": ("its backward", "Check what slows its backward: longer samples, hooks, a busy or throttled device."),
    "computation": (
        "its forward and backward",
        "Check what it computes that the others do not: longer samples, other layers; or a busy or throttled device.",
    ),
    "optimizer": ("its optimizer step", "Check what its optimizer step does that the others' do not."),
    "explicit": (
        "its own collectives",
        "Check which collectives it runs more often, or with more data, than the others.",
    ),
    "other": (
        "code outside of forward, backward and optimizer",
        "Check what it does in a step beside these: printing, metrics, checkpoints, work that only one rank does, "
        "between forward and backward as well as between the steps.",
    ),
}
_LOSSES = {
    "cores": (
        "what else runs on its cores",
        "Look for other programs on its node (top), and give each rank cores that nothing else uses (taskset, the "
        "scheduler's CPU binding).",
    ),
    "memory": (
        "its page faults",
        "Keep freed memory: set MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ to 1073741824 for all ranks before "
        "they start, or allocate large buffers once and use them again.",
    ),
}


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the ranks that the others wait for."""
    late = straggler(record)
    if late is None:
        return
    cause, remedy = _PHASES.get(
        late.phase, ("", "Check for other programs on its cores or device, and its clock rates.")
    )
    several, loss = len(late.ranks) > 1, late.loss
    line = standing(record, late.ranks, late.phase)
    where = line.place if line is not None else ""
    others = rank_list(late.waiting) if len(late.waiting) == 1 else "the others"
    if loss is not None:
        cause, remedy = _LOSSES[loss.to]
    because = (
        f" because of {cause.replace('its', 'their') if several else cause}" if cause else ", slower in every phase"
    )
    because += f" at {where}" if where else ""
    facts: list[Reason] = [
        (
            f"{rank_list(late.waiting)} {verb(late.waiting, 'waits', 'wait')} {milliseconds_text(late.waiting_ns)} of "
            f"each step longer than {rank_list(late.ranks)}",
            None,
            {"waiting_ns_per_step": late.waiting_ns, "share_of_step": late.share},
        )
    ]
    if late.phase:
        text = (
            f"{late.phase.replace('_', ' ')} takes {milliseconds_text(late.phase_ns)} of a step on "
            f"{rank_list(late.ranks)}, and {milliseconds_text(late.phase_elsewhere_ns)} on the others"
        )
        phase_numbers = {"phase_ns": late.phase_ns, "phase_ns_elsewhere": late.phase_elsewhere_ns}
        facts.append((text, None, phase_numbers, late.ranks[0]))
    if loss is not None:
        facts.append((_lost(late.ranks, loss), None, {"lost_ns": loss.ns, "lost_ns_elsewhere": loss.elsewhere_ns}))
    if line is not None:
        text = (
            f"{rank_list(late.ranks)} stood at {where} in {line.looks} of {line.of} looks during that time{line.others}"
        )
        facts.append((text, line.location, {"looks": line.looks, "looks_in_phase": line.of}))
    part = f"{late.share:.0%} of the step ({milliseconds_text(late.waiting_ns)})"
    yield CHECK.finding(
        f"{rank_list(late.ranks)} {verb(late.ranks, 'keeps', 'keep')} {others} waiting for {part}{because}",
        basis="run",
        remedy=remedy,
        locations=() if line is None else (line.location,),
        what_if=("straggler=none",),
        ranks=late.ranks,
        because=facts,
        severity=None if late.phase else Severity.ADVICE,
    )


def _lost(ranks: tuple[int, ...], loss: Loss) -> str:
    who, lost, on_others = rank_list(ranks), milliseconds_text(loss.ns), milliseconds_text(loss.elsewhere_ns)
    if loss.to == "cores":
        return f"{who} {verb(ranks, 'waits', 'wait')} {lost} of a step for a free core, and the others {on_others}"
    return (
        f"the kernel takes {lost} of a step on {who} over {loss.faults:,.0f} page faults, and {on_others} over "
        f"{loss.faults_elsewhere:,.0f} on the others"
    )
