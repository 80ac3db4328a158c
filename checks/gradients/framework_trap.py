"""A framework does something else with several ranks than its call says.

What it finds
    Calls of Accelerate, Lightning, Fabric, FSDP and Horovod that mean another thing with several ranks than with one,
    each known from the framework's documentation or its issue threads: a prepared scheduler that is stepped once for
    each process, a monitored value that every rank logs for itself, state that prepare_data leaves on one rank only,
    gradients that are scaled, clipped or averaged at another time than the script assumes.

Why it is bad
    The script runs, and trains something else: learning rates that fall N times too fast or differ between the ranks,
    gradients that are divided twice or not averaged, the wrong checkpoint as the best one.

Example
    scheduler = accelerator.prepare(ReduceLROnPlateau(optimizer))
    scheduler.step(loss)                    # N processes: N steps

Remedy
    What the finding says: each trap has its own.

When it is wrong
    With one process, and where the script corrects for it elsewhere.

References
    https://huggingface.co/docs/accelerate/concept_guides/performance
    https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
    https://lightning.ai/docs/pytorch/stable/visualize/logging_advanced.html
    https://horovod.readthedocs.io/en/stable/pytorch.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.framework_trap_source import (
    Place,
    clips_before_reduction,
    clips_of_shards,
    divided_twice,
    lengths_of_prepared,
    monitors_of_one_rank,
    own_monitors,
    own_schedules,
    plain_backwards,
    prepared_plateaus,
    scaled_clips,
    state_of_one_rank,
    steps_of_epochs,
    undivided_lengths,
    undivided_loaders,
    unequal_starts,
    unprepared_optimizers,
    values_of_one_rank,
)
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP224",
    name="framework-trap",
    severity={"source": Severity.WARNING},
    subjects=("training",),
    triggers=("ccelerator", "ightning", "Fabric", "horovod", "FullyShardedDataParallel"),
)


class Trap(msgspec.Struct, frozen=True):
    """One trap: where a script falls into it, and what to do instead."""

    find: Callable[[Projection], Iterator[Place]]
    title: str
    remedy: str
    severity: Severity | None = None


def in_source(script: Script) -> Iterator[Finding]:
    """Report every place where the script falls into a trap."""
    projection = whole_projection(script)
    for trap in TRAPS:
        for module, node in dict.fromkeys(trap.find(projection)):
            yield CHECK.finding(
                "source",
                trap.title,
                remedy=trap.remedy,
                locations=(module.location(node),),
                severity=trap.severity,
            )


TRAPS = (
    Trap(
        # accelerate/scheduler.py; accelerate#1398, #2142.
        prepared_plateaus,
        "a ReduceLROnPlateau that went through prepare is stepped once for each process, and its patience runs out as "
        "many times faster",
        "Do not give it to accelerator.prepare: step it as it is, with the reduced value.",
    ),
    Trap(
        # accelerate#2926, #2773.
        steps_of_epochs,
        "a scheduler that went through prepare makes a step for each process at every call, though it is called once "
        "an epoch",
        "Do not give it to accelerator.prepare: a schedule in epochs is not to be scaled by the number of processes.",
    ),
    Trap(
        # accelerate#662, diffusers#3954, transformers#24088, LTX-Video-Trainer#67.
        lengths_of_prepared,
        "this schedule is as long as the training of one process, and once prepared it makes a step for each process: "
        "it ends after the N-th part of the training",
        "Multiply its length by accelerator.num_processes, or do not give it to prepare.",
    ),
    Trap(
        # Accelerate's guide to gradient accumulation; Fabric's to its methods.
        plain_backwards,
        "this backward leaves out what the framework does to the loss: its scale for float16, or the division by the "
        "accumulation steps",
        "Call backward of the Accelerator or Fabric with the loss.",
    ),
    Trap(
        # Accelerate's guide to gradient accumulation; accelerate/accelerator.py, backward.
        divided_twice,
        "the loss is divided by the accumulation steps, and accelerator.backward divides it again",
        "Leave the division to accelerator.backward.",
    ),
    Trap(
        # Accelerate's guide to mixed precision; torch's notes on GradScaler.
        scaled_clips,
        "these gradients still bear the scale of float16 when they are clipped, so that nearly all of them are cut",
        "Use clip_grad_norm_ of the Accelerator, or clip_gradients of the Fabric, which unscale them first.",
    ),
    Trap(
        # accelerate/optimizer.py; accelerate/accelerator.py, accumulate.
        unprepared_optimizers,
        "this optimizer was not prepared, and steps on every micro-batch under accumulate, with gradients that are not "
        "averaged: the replicas diverge",
        "Give the optimizer to accelerator.prepare, which lets it step when the gradients were averaged.",
        Severity.ERROR,
    ),
    Trap(
        # Accelerate's and Fabric's quick tours.
        undivided_loaders,
        "this loader was not given to the framework, which would divide it: each rank trains on all samples",
        "Give the loader to accelerator.prepare, or to fabric.setup_dataloaders.",
    ),
    Trap(
        # Lightning's documentation of LightningDataModule.prepare_data.
        state_of_one_rank,
        "prepare_data runs in one process of a node, and the others never get this attribute",
        "Set it in setup, which runs on every rank; leave downloads in prepare_data.",
        Severity.ERROR,
    ),
    Trap(
        # lightning_utilities/core/rank_zero.py.
        values_of_one_rank,
        "a function that rank_zero_only guards returns None on all other ranks, and this uses what it returns",
        "Broadcast the value from rank 0, or compute it on every rank.",
    ),
    Trap(
        # lightning/pytorch/loops/training_epoch_loop.py; Lightning#8727.
        own_schedules,
        "ReduceLROnPlateau decides on each rank by the value that this rank logged: learning rates, and with them the "
        "replicas, come apart",
        "Give self.log sync_dist=True.",
        Severity.ERROR,
    ),
    Trap(
        # Lightning#5865, #379.
        own_monitors,
        "a callback judges by the value that each rank logged of its own part of the data",
        "Give self.log sync_dist=True.",
    ),
    Trap(
        # Lightning's documentation of log.
        monitors_of_one_rank,
        "a value that only rank 0 logs is monitored on every rank",
        "Log it on every rank, with sync_dist=True in place of rank_zero_only=True.",
        Severity.ERROR,
    ),
    Trap(
        # Lightning's documentation of estimated_stepping_batches.
        undivided_lengths,
        "this schedule is as long as the loader before the Trainer divides it: with N ranks the training ends at the "
        "N-th part of the schedule",
        "Use self.trainer.estimated_stepping_batches, which counts the steps of one rank.",
    ),
    Trap(
        # torch's documentation of FullyShardedDataParallel.clip_grad_norm_.
        clips_of_shards,
        "each rank clips its own shard by that shard's norm: FSDP needs the norm over all of them",
        "Use model.clip_grad_norm_ of the FSDP model.",
    ),
    Trap(
        # Horovod's guide to PyTorch, step 6.
        unequal_starts,
        "the ranks start from parameters of their own: DistributedOptimizer averages gradients and broadcasts nothing",
        "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the training.",
        Severity.ERROR,
    ),
    Trap(
        # Horovod's guide to PyTorch, about gradient clipping.
        clips_before_reduction,
        "the gradients are clipped while Horovod still averages them: step is what waits for it",
        "Call optimizer.synchronize() before, and step under optimizer.skip_synchronize().",
    ),
)
