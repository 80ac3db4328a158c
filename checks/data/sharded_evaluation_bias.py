"""Evaluation is done by every rank over the whole data set.

What it finds
    A loop without gradients over a loader that no sampler divides, in which every rank of a DDP job runs the model; and
    quotients by a count of what each rank's own samples hold, as of labels that are there, averaged over the ranks. In
    a run: equal index lists over the whole data set, results averaged over shards that a sampler padded, or sums over
    the ranks with a count of all samples of such shards. As a warning: the results of a sampler's parts that are
    gathered, joined one after another and cut to the length of the data set; or joined in another order than the
    sampler's, and compared with the labels of the data set.

Why it is bad
    Every rank computes the same result: the evaluation takes as long as on one GPU, however many there are, and each
    checkpoint waits for it. An average over padded shards counts the repeated samples twice. DistributedSampler deals
    the samples out in turns: joined one after another, results are compared with the targets of other samples, and the
    cut drops real ones and keeps those that were repeated.

Example
    with torch.no_grad():
        for batch in DataLoader(validation_set):        # on every rank
            correct += (model(batch).argmax(1) == batch.y).sum()

Remedy
    Divide the data set with DistributedSampler(shuffle=False), and all-reduce counts and sums, not averages. The
    sampler repeats some samples to give all ranks the same number; drop them where the exact number matters.

When it is wrong
    Where the evaluation is short, or every rank needs the exact result without communication.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    https://github.com/mllam/neural-lam/issues/749
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.training_loops import division, evaluating_forwards, feedings, is_averaged, only_loader
from ddpdoctor.source.script.script import calls_any
from ddpdoctor.source.vocabulary import PART_GATHERS

CHECK = Check(
    code="DDP105",
    name="sharded-evaluation-bias",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"loaders", "passes", "forwards", "collectives"}),
    subjects=("training-loader",),
    triggers=("DistributedDataParallel", "DataLoader", "ccelerat", "Fabric", "auto_model"),
)
REMEDIES = {
    "repeated": "Divide it with DistributedSampler(shuffle=False) and all-reduce counts and sums.",
    "counted": "Sum over the first len(range(rank, len(dataset), world_size)) samples of the rank's part alone: what "
    "follows is what the sampler repeats.",
    "divided": "All-reduce the sum and the count, and divide once after that.",
    "padded": "All-reduce sums and counts instead of averages, and leave out the samples that the sampler repeats.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report evaluation loops that repeat the same work on every rank."""
    for loop, loader in repeated_evaluations(whole_projection(script)):
        yield CHECK.finding(
            "every rank evaluates the whole data set and gets the same result",
            remedy=REMEDIES["repeated"],
            locations=loop.module.head_location(loop.node),
            because=("no sampler divides this loader's data set between the ranks", loader.location),
        )
    if calls_any(script, ("all_reduce", "reduce")):
        from ddpdoctor.checks.data.averaged_ratios_source import averaged_ratios

        yield from CHECK.suspected(averaged_ratios(whole_projection(script)), REMEDIES["divided"])
    if calls_any(script, PART_GATHERS):
        from ddpdoctor.checks.data.gathered_order_source import cut_gathers, paired_out_of_order

        projection = whole_projection(script)
        yield from CHECK.suspected((*cut_gathers(projection), *paired_out_of_order(projection)))


in_run = CHECK.judged_by("checks.data.samples_run", "judge_evaluations", "", REMEDIES)


def repeated_evaluations(projection: Projection) -> Iterator[tuple[LoopAround, Event]]:
    """Loops without gradients in which every rank runs the model over the same samples, each once, with the loader."""
    training = {feeding.loader.ordinal for feeding in feedings(projection)}
    if not training and not any(is_averaged(projection, one) for one in projection.in_course("backward")):
        return
    evaluating = tuple(evaluating_forwards(projection))
    seen = {loop.node for event in evaluating for loop in event.loops if not _is_whole(projection, loop)}
    for forward in evaluating:
        if forward.ranks != ALL_RANKS or forward.guards:
            continue
        for loop in forward.loops:
            loader = only_loader(projection, loop)
            if loader is None or loop.node in seen or loader.ordinal in training or loader.guards:
                continue
            seen.add(loop.node)
            yield loop, loader


def _is_whole(projection: Projection, loop: LoopAround) -> bool:
    """Return whether a loop goes over the whole data set: what a divided one leaves is done by all ranks."""
    loader = only_loader(projection, loop)
    return loader is not None and division(projection.machine, loader) == "whole"
