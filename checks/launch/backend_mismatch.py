"""The backend of the process group does not fit the job's device.

What it finds
    The nccl backend in a script that never mentions a GPU, whose ranks, which it starts itself, all choose the same
    GPU, or which sets CUDA_VISIBLE_DEVICES to one GPU for all ranks of a launcher; and the gloo backend in a script
    that trains a DDP model on GPUs and mentions no other backend. Ranks of one group that request different backends
    are an error. In a run: an initialisation that failed because there is no GPU, which is advice where the script is
    written for GPUs.

Why it is bad
    NCCL only handles CUDA tensors: with a model on the CPU the first collective fails with "No backend type associated
    with device type cpu", and two ranks on one GPU are refused ("Duplicate GPU detected") or hang. Gloo does work with
    CUDA tensors, but it copies every gradient through the host's memory, many times slower than NCCL over NVLink. And
    ranks of different backends wait for each other until the timeout.

Example
    dist.init_process_group("gloo")
    torch.cuda.set_device(local_rank)
    model = DDP(Net().cuda(), device_ids=[local_rank])

Remedy
    "nccl" for CUDA, "gloo" for the CPU; or omit the backend and let torch choose one for each device.

When it is wrong
    If gloo is used on purpose, for a machine on which NCCL does not run. A mention of nccl anywhere in the script
    is taken as a sign of that.

References
    https://docs.pytorch.org/docs/stable/distributed.html#which-backend-to-use
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.launch.backends_source import backend_mismatches
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP505",
    name="backend-mismatch",
    stands_for="no-backend",
    severity={"source": Severity.WARNING, **dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR)},
    needs=frozenset({"waits"}),
    subjects=("job", "device"),
    triggers=("init_process_group",),
)
_TITLES = {
    "nccl-without-gpu": "NCCL needs CUDA tensors, and nothing in the script uses a GPU",
    "shared-gpu": "all ranks that this script starts choose the same GPU, and NCCL needs one GPU per rank",
    "one-visible": "every rank leaves itself one and the same GPU, and NCCL needs one GPU per rank",
    "gloo-for-cuda": "the model trains on GPUs, and gloo copies every gradient through host memory",
    "mixed": "ranks of one group request different backends and wait for each other",
}
_REMEDIES = {
    "shared-gpu": "Give each process its own GPU: torch.cuda.set_device(rank).",
    "one-visible": "Leave CUDA_VISIBLE_DEVICES to the launch: the ranks choose among the GPUs that it names.",
    "nccl-without-gpu": 'Use "gloo" for a job on the CPU.',
    "gloo-for-cuda": 'Use "nccl", or omit the backend: torch then uses NCCL for CUDA tensors.',
    "mixed": 'Give all ranks the same backend; "cpu:gloo,cuda:nccl" serves tensors on either device.',
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report process groups whose backend does not fit."""
    for mismatch in backend_mismatches(whole_projection(script)):
        event = mismatch.event
        asked = "; ".join(f"{ranks_text(ranks)}: {name}" for name, ranks in mismatch.backends)
        yield CHECK.finding(
            "source",
            _TITLES[mismatch.form] + (f" ({asked})" if asked else ""),
            remedy=_REMEDIES[mismatch.form],
            locations=event.location,
            severity=Severity.ERROR if asked else None,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report initialisations of NCCL that failed because there is no GPU."""
    from ddpdoctor.diagnosis.failures import failed_initialisations

    if record.job.device == "stand-in" or record.job.environment.get("CUDA_VISIBLE_DEVICES") == "":
        return
    for wait, location in failed_initialisations(record):
        if "nccl" not in wait.backend.lower() or "NCCL" not in wait.error:
            continue
        yield CHECK.finding(
            record.job.kind,
            "NCCL needs GPUs, and there are none here: init_process_group fails"
            if wait.mentions_cuda
            else "NCCL needs GPUs, and the script uses none: init_process_group fails",
            remedy='Use "gloo" where there is no GPU: "nccl" if torch.cuda.is_available() else "gloo".',
            locations=location,
            because=((wait.error[:200], location),),
            severity=Severity.ADVICE if wait.mentions_cuda else None,
        )
