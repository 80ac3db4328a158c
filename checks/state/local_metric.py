"""A loss or metric of one rank is reported as the job's.

What it finds
    A print, logger or tracker on rank 0 alone, of a value computed from rank 0's own batches that was never reduced;
    in a script that reduces anything else, only what is reported after a loop over batches. Also a summary that every
    rank reports of its part of an evaluation set without naming the rank, and what a LightningModule logs of batches
    without sync_dist=True, but not for the progress bar alone. All places of a file become one finding. And a
    checkpoint that one rank writes or not by such a value: a warning where that is compared with the best so far.

Why it is bad
    Rank 0 sees one N-th of the data. Its loss is noisier than the job's, its accuracy is measured on one shard,
    and the best checkpoint is chosen by luck.

Example
    if rank == 0:
        print(f"accuracy {correct / total:.3f}")

Remedy
    Sum numerator and count over the ranks with dist.all_reduce before dividing, on all ranks, then report on rank 0. In
    Lightning, self.log(..., sync_dist=True), or give it a metric of torchmetrics.

When it is wrong
    If the line is only a sign of life.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_reduce
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.state.load_without_map_location import callers
from ddpdoctor.finding import Finding, Severity, grouped
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.rank_logging import local_metrics, own_choices, reported, unreduced_logs

CHECK = Check(
    code="DDP606",
    name="local-metric",
    severity={"source": Severity.ADVICE},
    subjects=("job", "loss"),
    triggers=("print", "log", "add_scalar", "info", "set_postfix", "set_description", "tqdm", "save"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report what rank 0 says of its own batches, one finding a file."""
    files = grouped(local_metrics(whole_projection(script)), lambda event: str(event.module.path))
    logged = list(unreduced_logs(whole_projection(script)))
    if logged:
        yield CHECK.finding(
            "each rank logs results of its own batches, and rank 0's represent all"
            + ("" if len(logged) == 1 else f" ({len(logged)} places)"),
            remedy="Give self.log sync_dist=True, or log a torchmetrics metric, which reduces itself.",
            locations=tuple(event.location for event in logged),
        )
    for event, best in own_choices(whole_projection(script)):
        condition = next(reversed(event.conditions), "this condition")
        decides = condition if best is None else best.module.excerpt(best.node, 60)
        yield CHECK.finding(
            "one rank chooses the checkpoint by a value of its own batches, which is not reduced over the ranks"
            if best is None
            else f"the best checkpoint is chosen by the part of the data that one rank has: `{decides}` compares a "
            "score that is not reduced over the ranks",
            remedy="Average the value over the ranks with dist.all_reduce, on all ranks, before it is compared.",
            locations=(event.location,) if best is None else (best.location, event.location),
            because=(f"`{decides}` depends on the part of the data that this rank reads", event),
            severity=None if best is None else Severity.WARNING,
        )
    for events in files.values():
        events.sort(key=lambda event: getattr(event.node, "lineno", 0))
        who = "rank 0 reports" if all(event.ranks == 1 for event in events) else "a rank reports"
        reports = [reported(whole_projection(script), event) for event in events]
        names = dict.fromkeys(name for _, own in reports for name in own if len(name) <= LONGEST_NAME)
        named = ", ".join(f"`{name}`" for name in list(names)[:MOST_NAMED])
        title = f"{who} {f'{named} of' if named else 'a value of'} its own batches, not reduced over the ranks"
        yield CHECK.finding(
            title if len(events) == 1 else f"{title} ({len(events)} places)",
            remedy="Average it over the ranks with dist.all_reduce, on all ranks, before it is reported.",
            locations=dict.fromkeys((*(place for place, _ in reports), *(event.location for event in events))),
            because=callers(events, "it is reported here for this caller"),
        )


MOST_NAMED = 3
LONGEST_NAME = 40
