"""Training waits for its data.

What it finds
    A DataLoader that feeds the training of a DDP model on a GPU from files, or through a transformation, without worker
    processes; and one with workers but without pinned memory. A stream of which each rank loads or transforms every
    item and keeps its share, also by a stage of a pipeline. In a live run: steps that wait for their batch for more
    than 10% of their time on half of the ranks or more, on the whole and in three of four quarters; the figures are
    those of the quarter in the middle, so that one long wait does not make them. Where the data of a single rank come
    late, see DDP403.

Why it is bad
    Without workers each batch is read and decoded in the training process, between two steps, while the GPU and,
    through the next collective, all other ranks wait. From memory that is not pinned each batch is copied twice, and
    non_blocking=True has no effect. Where the share of a rank is taken behind the work, more ranks make no batch come
    sooner: each works for all.

Example
    loader = DataLoader(ImageFolder(root, transform), batch_size=64, sampler=sampler)

Remedy
    num_workers=4 or more per rank (cores divided by ranks), persistent_workers=True, and pin_memory=True.

When it is wrong
    From the source: where the data set is small and lies in memory, or loading is a small part of the step. A run
    measures it.

References
    https://docs.pytorch.org/docs/stable/data.html#memory-pinning
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.speed.input_speed_source import slow_loaders
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP404",
    name="input-bound",
    stands_for="input-bound",
    severity={"source": Severity.ADVICE, "run": Severity.WARNING},
    needs=frozenset({"step_tracks"}),
    subjects=("training-loader",),
    triggers=("DataLoader",),
)

_OF_STREAMS = frozenset({"IterableDataset", "sharding_filter", "split_by_node"})
"""Words without one of which no stream is divided."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report loaders without workers or pinned memory, and streams that are divided behind the work."""
    if any(_OF_STREAMS & module.words for module in script.modules):
        from ddpdoctor.checks.speed.late_split_source import late_splits

        yield from CHECK.suspected(late_splits(whole_projection(script)))
    for loader, has_no_workers in slow_loaders(whole_projection(script)):
        if has_no_workers:
            title = "this DataLoader has no worker processes: batches are loaded between the steps, while the GPU waits"
            remedy = "Give it num_workers (cores over ranks), persistent_workers=True and pin_memory=True."
        else:
            title = "this DataLoader does not pin its batches: each is copied twice on its way to the GPU"
            remedy = "Give it pin_memory=True, and move batches with non_blocking=True."
        yield CHECK.finding(title, remedy=remedy, locations=loader.location)


in_run = CHECK.judged_by("checks.speed.steps_run", "data_wait")
