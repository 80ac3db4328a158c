"""Tensors go to the current GPU, and no process ever selects its own.

What it finds
    `.cuda()` without an index, or `.to("cuda")`, on all ranks of a job that joins a process group and in which nothing
    selects a GPU for the process: no set_device, no CUDA_VISIBLE_DEVICES, no framework that does it. In Accelerate
    scripts, code before the Accelerator is created.

Why it is bad
    The current GPU of a new process is GPU 0. All ranks of a node put their model and their batches there: it runs out
    of memory while the others idle, and NCCL refuses two ranks on one GPU ("Duplicate GPU detected") or hangs.

Example
    dist.init_process_group("nccl")
    model = DDP(Net().cuda())

Remedy
    Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything touches the GPU, or name the device of
    each tensor.

When it is wrong
    Where the launcher shows each process one GPU only (Slurm with --gpus-per-task, one process a node).

References
    https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script, Via
from ddpdoctor.checks.launch.device_choice_source import (
    moves_before_accelerator,
    unchosen_devices,
    unchosen_devices_of_collectives,
)
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP502",
    name="missing-set-device",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "device_uses", "settings"}),
    subjects=("job",),
    triggers=("cuda", "nccl"),
)
MAXIMUM_PLACES = 5
REMEDY = 'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of the GPU.'


def in_source(script: Script) -> Iterator[Finding]:
    """Report the moves to the current GPU of a job that never chooses one, as one finding."""
    moves = unchosen_devices(whole_projection(script))
    if not moves:
        yield from _before_accelerator(script)
        yield from _left_to_torch(script)
        return
    yield CHECK.finding(
        "every rank moves this to the current GPU, which is GPU 0 in all of them: no process selects its own",
        remedy=REMEDY,
        locations=tuple(move.location for move in moves[:MAXIMUM_PLACES]),
        because=(
            "neither set_device nor CUDA_VISIBLE_DEVICES occurs in the script and its modules",
            Via(moves[0].module.location(moves[0].node), moves[0].chain),
            {"places": len(moves)},
        ),
    )


def _before_accelerator(script: Script) -> Iterator[Finding]:
    """Report the moves that come before the choice of the GPU, as one finding."""
    moves = moves_before_accelerator(whole_projection(script))
    if moves:
        yield CHECK.finding(
            "every rank moves this to GPU 0: the Accelerator selects the GPU of a process, and is not created yet",
            remedy="Create the Accelerator first, and let prepare() move the model and the batches.",
            locations=tuple(move.location for move in moves[:MAXIMUM_PLACES]),
        )


def _left_to_torch(script: Script) -> Iterator[Finding]:
    """Advise where every tensor is placed by its index, and the current GPU stays GPU 0 nevertheless."""
    for joined in unchosen_devices_of_collectives(whole_projection(script)):
        yield CHECK.finding(
            "no process selects its GPU: barriers, collectives of objects and pinned memory use GPU 0 from every rank",
            remedy=REMEDY,
            locations=joined.location,
            severity=Severity.ADVICE,
        )


in_run = CHECK.judged_by("checks.launch.environment_run", "shared_first_gpu", REMEDY)
