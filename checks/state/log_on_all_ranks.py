"""Every rank prints, logs, shows a progress bar or opens a tracker.

What it finds
    print, pprint and tables of a model, lines of level INFO alike where a logger shows them on the screen of all ranks
    (by logging.basicConfig, a handler, Hydra or loguru), progress bars without `disable=`, wandb.init,
    mlflow.start_run and SummaryWriter, reached by all ranks without naming the rank; a fixed text under an option is
    left out. All places of a file become one finding.

Why it is bad
    Eight ranks write every line eight times, mixed with each other, and progress bars overwrite each other. A tracker
    opened by every rank makes eight runs, or eight writers to one directory.

Example
    for epoch in range(epochs):
        print(f"epoch {epoch}: loss {loss.item():.3f}")

Remedy
    `if dist.get_rank() == 0:` around it, tqdm(..., disable=rank != 0), or the rank in the line where each one counts.

When it is wrong
    If the launcher sends each rank's output to its own file.

References
    https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.state.load_without_map_location import callers
from ddpdoctor.finding import Finding, Severity, grouped
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.rank_logging import lines_of_every_rank

CHECK = Check(
    code="DDP605",
    name="log-on-all-ranks",
    severity={"source": Severity.ADVICE},
    subjects=("job",),
    triggers=(
        *("print", "pprint", "summary", "tqdm", "trange", "info"),
        *("wandb", "mlflow", "SummaryWriter", "Experiment", "neptune", "clearml", "aim"),
    ),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report what every rank prints or tracks, one finding a file."""
    lines = lines_of_every_rank(whole_projection(script))
    for events in grouped(lines, lambda event: str(event.module.path)).values():
        events.sort(key=lambda event: (not event.loops, getattr(event.node, "lineno", 0)))  # What repeats is worse.
        title = "every rank prints, shows or tracks this"
        yield CHECK.finding(
            title if len(events) == 1 else f"{title}, and so in {len(events)} places of this file",
            remedy="Do it on rank 0 only (`if dist.get_rank() == 0:`), or include the rank in the line.",
            locations=tuple(event.location for event in events),
            because=callers(events, "every rank comes to it by this caller"),
        )
