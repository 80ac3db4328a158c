"""Training waits for its data.

What it finds
    A DataLoader that feeds the training of a DDP model on a GPU from files, or through a transformation, without worker
    processes; and one with workers but without pinned memory. In a live run: steps that wait for their batch for more
    than 10% of their time on half of the ranks or more, on the whole and in three of four quarters; the figures are
    those of the quarter in the middle, so that one long wait does not make them. Where the data of a single rank come
    late, see DDP403.

Why it is bad
    Without workers each batch is read and decoded in the training process, between two steps, while the GPU and,
    through the next collective, all other ranks wait. From memory that is not pinned each batch is copied twice, and
    non_blocking=True has no effect.

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
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.speed.input_speed_source import slow_loaders
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.checks.speed.steps_run import DataWait
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP404",
    name="input-bound",
    stands_for="input-bound",
    severity={"source": Severity.ADVICE, "run": Severity.WARNING},
    needs=frozenset({"step_tracks"}),
    subjects=("training-loader",),
    triggers=("DataLoader",),
)
MUCH_MORE = 1.25
"""Times the typical share from which on the mean of the whole run is worth a word."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report loaders of training data without workers or without pinned memory."""
    for loader, has_no_workers in slow_loaders(whole_projection(script)):
        if has_no_workers:
            title = "this DataLoader has no worker processes: batches are loaded between the steps, while the GPU waits"
            remedy = "Give it num_workers (cores over ranks), persistent_workers=True and pin_memory=True."
        else:
            title = "this DataLoader does not pin its batches: each is copied twice on its way to the GPU"
            remedy = "Give it pin_memory=True, and move batches with non_blocking=True."
        yield CHECK.finding("source", title, remedy=remedy, locations=loader.location)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report steps that wait for data, with the loader that feeds them."""
    from ddpdoctor.checks.speed.steps_run import data_wait
    from ddpdoctor.diagnosis.wording import milliseconds_text, site_location

    wait = data_wait(record)
    if wait is None:
        return
    location = None if wait.loader is None else site_location(record.site(wait.loader.site))
    yield CHECK.finding(
        "run",
        f"training waits for data for {wait.share:.0%} of the step ({milliseconds_text(wait.wait_ns)} of "
        f"{milliseconds_text(wait.step_ns)})",
        remedy=_remedy(wait),
        what_if=("data=ready",) if wait.loader is None or wait.first_of_pass_ns else ("workers",),
        locations=location,
        because=(
            (
                f"rank {wait.worst_rank} waits longest, {milliseconds_text(wait.worst_wait_ns)} a step",
                None,
                {"wait_ns": wait.wait_ns, "worst_wait_ns": wait.worst_wait_ns, "step_ns": wait.step_ns},
                wait.worst_rank,
            ),
        ),
        evidence=(
            *_lines(record, wait),
            *_single_waits(wait),
        ),
    )


def _lines(record: RunRecord, wait: DataWait) -> Iterator[Fact]:
    """Yield the line that makes the samples, where the ranks make them themselves."""
    from ddpdoctor.diagnosis.performance.stragglers import standing

    line = None if wait.loader is None or wait.loader.workers else standing(record, record.rank_numbers(), "data_wait")
    if line is not None:
        yield Fact(
            text=f"the ranks stood at {line.place} in {line.looks} of {line.of} looks during that time",
            basis="run",
            numbers={"looks": line.looks, "looks_in_phase": line.of},
            location=line.location,
        )


def _single_waits(wait: DataWait) -> tuple[Fact, ...]:
    """Return what single long waits add to the mean of the whole run, where that is much, and which these are."""
    from ddpdoctor.diagnosis.wording import milliseconds_text

    if wait.first_of_pass_ns:
        return (
            Fact(
                text=f"it is the first batch of each epoch that waits, {milliseconds_text(wait.first_of_pass_ns)} on "
                f"rank {wait.worst_rank}, and the others hardly do",
                basis="run",
                numbers={"first_wait_ns": wait.first_of_pass_ns},
                rank=wait.worst_rank,
            ),
        )
    if wait.mean_share < MUCH_MORE * wait.share:
        return ()
    return (
        Fact(
            text=f"these are the figures of the quarter of the steps in the middle; with single long waits it is "
            f"{wait.mean_share:.0%} of all steps together",
            basis="run",
            numbers={"mean_share": wait.mean_share},
        ),
    )


def _remedy(wait: DataWait) -> str:
    if wait.loader is None:
        return "Prepare the batches in worker processes, ahead of the step that needs them."
    if not wait.loader.workers:
        return "Give the loader worker processes: num_workers (cores over ranks) and persistent_workers=True."
    if wait.first_of_pass_ns:
        if wait.loader.persistent:
            return "Its workers are kept already: let the data set open what it needs before the first sample is asked."
        return (
            "Give the loader persistent_workers=True: its workers start anew for every epoch, and keep up after that."
        )
    kept = "" if wait.loader.persistent else ", or keep the workers between epochs with persistent_workers=True"
    return (
        f"The {wait.loader.workers} workers of each rank do not keep up: give it more, make the samples cheaper "
        f"(smaller files, less decoding){kept}."
    )
