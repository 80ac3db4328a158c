"""nn.DataParallel is used instead of DistributedDataParallel.

What it finds
    A model wrapped in torch.nn.DataParallel in a script that never wraps one in DistributedDataParallel.

Why it is bad
    DataParallel drives all GPUs from one Python process: threads share one interpreter lock, the model is copied to
    every GPU in each forward, and outputs and gradients are gathered on the first GPU, which runs out of memory first.
    It stops at one node. DistributedDataParallel is faster even on one node, and torch maintains only it.

Example
    model = torch.nn.DataParallel(model)

Remedy
    Start one process per GPU with torchrun, call init_process_group, wrap the model in DistributedDataParallel with
    device_ids=[local_rank] and give the loader a DistributedSampler.

When it is wrong
    In notebooks and scripts that have to stay one process. Scripts that use DataParallel only where they run without
    ranks are recognised by their use of DistributedDataParallel.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    https://docs.pytorch.org/docs/stable/notes/cuda.html#use-nn-parallel-distributeddataparallel-instead-of-multiprocessing-or-nn-dataparallel
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.dataparallel.source import data_parallel_uses
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import project
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP209",
    name="dataparallel",
    severity={"source": Severity.WARNING},
    subjects=("data-parallel",),
    triggers=("DataParallel",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps in DataParallel where DDP is not used as well."""
    trains = any(project(script).of_kind("backward"))
    for location in data_parallel_uses(script):
        yield CHECK.finding(
            "source",
            "nn.DataParallel drives every GPU from one process, copies the model in each forward and gathers on the "
            "first GPU",
            remedy="Start one process per GPU with torchrun, call init_process_group, and wrap the model in "
            "DistributedDataParallel.",
            locations=(location,),
            severity=None if trains else Severity.ADVICE,
        )
