"""Ranks train on their parts of the data, and nothing averages their gradients.

What it finds
    A script that joins a process group and divides its data with a DistributedSampler, but never wraps the model in
    DistributedDataParallel and has nothing else that averages gradients. In a run also parameters of the optimizer that
    are in no wrapped or sharded module.

Why it is bad
    Every rank trains its own model on its part of the data. The losses fall, the job ends, and rank 0 saves a
    model that has seen one part only; the other ranks' work is thrown away.

Example
    dist.init_process_group("nccl")
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
    model = Net().cuda()                    # never wrapped

Remedy
    model = DistributedDataParallel(model, device_ids=[local_rank]), after the model is on its device and before the
    training loop.

When it is wrong
    If independent models are intended, one per rank. FSDP, DeepSpeed, Horovod, Accelerate, Lightning and averaging by
    hand are recognised.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.unwrapped_training_source import missing_wraps
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.checks.gradients.diverged_run import Independent
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP214",
    name="missing-ddp-wrap",
    stands_for="no-wrap",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"collectives", "loaders", "passes", "backwards"})
    | {"optimizer_steps", "gradient_digests", "parameter_digests", "written_averages"},
    subjects=("training",),
    triggers=("DistributedSampler",),
)
_REMEDIES = {
    "": "Wrap the model in DistributedDataParallel after it is on its device and before the training loop.",
    "wrapped": "Wrap the module that holds them as well, or average their gradients by dist.all_reduce in each step.",
    "sharded": "Call fully_shard on the whole model as well, after its layers: what is in no unit is not reduced.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report the first backward of a distributed job whose gradients stay on their rank."""
    for missing in missing_wraps(whole_projection(script)):
        backward, init, loader = missing.backward, missing.init, missing.loader
        yield CHECK.finding(
            "source",
            "the gradients of this backward stay on their rank: the model is not wrapped in DistributedDataParallel",
            remedy="Wrap the model in DistributedDataParallel after it is on its device and before the training loop.",
            locations=backward.location,
            because=(
                ("the ranks join a process group here", init.location),
                ("this loader gives every rank its own part of the data", loader.location),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report optimizers that make a different model on every rank."""
    from ddpdoctor.checks.gradients.diverged_run import independent_models

    basis = record.job.kind
    for found in independent_models(record):
        told = (
            (found.step_location, "this step uses them"),
            (found.loader_location, "this loader gives every rank its own part of the data"),
        )
        yield CHECK.finding(
            basis,
            _title(found),
            remedy=_REMEDIES[found.beside],
            locations=found.backward_location,
            because=(
                (
                    f"before each of {found.steps} steps the gradients of {found.unequal:,} of {found.compared:,} "
                    f"parameters differ between ranks, and so do the parameters after it: {', '.join(found.names)}",
                    None,
                    {"steps": found.steps, "parameters": found.unequal, "compared": found.compared},
                ),
            ),
            evidence=(*(Fact(text=text, basis=basis, location=place) for place, text in told),),
        )


def _title(found: Independent) -> str:
    from ddpdoctor.diagnosis.wording import rank_list

    if not found.beside:
        return (
            "the gradients of this backward stay on their rank: the model is not wrapped in DistributedDataParallel, "
            f"and {rank_list(found.ranks)} train different models"
        )
    by = "is sharded" if found.beside == "sharded" else "DistributedDataParallel wraps"
    are = "parameter of the optimizer is" if found.unequal == 1 else "parameters of the optimizer are"
    return (
        f"{found.unequal:,} {are} in no module that {by}: gradients stay on their rank, "
        f"and {rank_list(found.ranks)} train different models"
    )
