"""A collective runs before the process has selected its GPU.

What it finds
    A barrier, or a collective of Python objects, in an NCCL job before torch.cuda.set_device, with neither device_ids
    nor a device_id at the initialisation.

Why it is bad
    These collectives have no tensor that determines their device, so NCCL uses the current GPU, which is GPU 0 in every
    process, or guesses one from the rank. It then holds memory on a GPU that is not the rank's own, and with several
    ranks on one GPU it can hang.

Example
    dist.init_process_group("nccl")
    dist.barrier()
    torch.cuda.set_device(local_rank)

Remedy
    Call torch.cuda.set_device first, or give device_id= to init_process_group.

When it is wrong
    Where each process sees one GPU only.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.barrier
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.launch.missing_set_device import early_collectives
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP514",
    name="collective-before-set-device",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"waits", "device_choices"}),
    subjects=("job",),
    triggers=("set_device",),
)

REMEDY = "Call torch.cuda.set_device before it, or give device_id= to init_process_group."


def in_source(script: Script) -> Iterator[Finding]:
    """Report the first collective on a GPU that the process has not chosen yet."""
    for event, choice in early_collectives(whole_projection(script)):
        yield CHECK.finding(
            f"{event.name} runs on the current GPU, and the process selects its GPU only afterwards",
            remedy=REMEDY,
            locations=event.location,
            because=("the GPU is chosen here", choice.location),
        )


in_run = CHECK.judged_by("checks.launch.environment_run", "barriers_before_choice", REMEDY)
