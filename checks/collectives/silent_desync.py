"""Nothing hangs, but ranks combine values that do not belong together.

What it finds
    Ranks whose step counters differ when DDP averages their gradients: one of them skipped or repeated a backward, and
    from then on gradients of different steps are averaged. Ranks that run one loop in different orders, so that a
    collective mixes up two tensors of one shape, distinguished by the key, variable or parameter of the iteration. In a
    live run: passes over a loader in which the ranks drew the same number of batches and averaged gradients different
    numbers of times, ranks that draw more batches for as many steps, and ranks that run their training forward once
    more than the others for one backward, as warnings while the job continues; an error once the ranks part for it. As
    a warning, too: two lines whose collectives are paired crosswise (A with B, then B with A).

Why it is bad
    No error, exit code 0, wrong gradients from that step on. Often the job hangs only at the end of training, when one
    rank has one step more than the others, far from the cause.

Example
    if loss > 100:                      # true on one rank only
        continue                        # skips backward there
    loss.backward()

Remedy
    Decide together: all-reduce the condition so that all ranks skip, or keep the backward and multiply the loss by 0.
    Iterate over sorted names, not over a set or a dict that each rank fills in its own order.

When it is wrong
    The warnings: where a rank chooses by itself between two branches that reduce the same quantity; and in a live run,
    if training ends after a number of steps that each rank counts without the batches that it skips, or where a rank
    runs the forward of one batch again by itself.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.check import Check, RunRecord, Verdict
from ddpdoctor.checks.collectives.divergences_run import batches_ahead
from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence_kind import divergence_finding, divergence_of
from ddpdoctor.diagnosis.training.lone_forwards import lasting, left_out_before
from ddpdoctor.diagnosis.training.replicas import blocked_in_backward, drifts, skipped_backward
from ddpdoctor.finding import Fact, Finding, Location, Refuted, Severity

CHECK = Check(
    code="DDP312",
    name="silent-desync",
    stands_for="desync",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
    needs_live=frozenset({"ranks", "wraps", "loaders", "passes", "step_tracks", "unfollowed_forwards"}),
)
_REMEDIES = {
    "crossed": "Call the two collectives in the same order on every rank.",
    "swapped": "Iterate in the same order on every rank, for example over sorted names.",
}
_SKIP_TOGETHER = (
    "Let all ranks skip a step together (all-reduce the condition first), or run backward on every rank and multiply "
    "the loss by 0 where it should not count."
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the divergence of the run when ranks pair different steps, or lines crosswise; else where they drifted."""
    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is None or divergence.form not in ("desync", *_REMEDIES):
        yield from _drifts(record, divergence)
        return
    severity = Severity.WARNING if divergence.form == "crossed" else None
    yield divergence_finding(CHECK, record, divergence, _remedy(divergence), severity)


def _drifts(record: RunRecord, divergence: Divergence | None) -> Iterator[Finding | Refuted]:
    """Report the passes in which the ranks drifted apart, with what happened to it; else the backwards left out."""
    blocked = frozenset() if divergence is None else blocked_in_backward(divergence, record)
    drifted = [_desync(record, divergence, drift) for drift in drifts(record, blocked)]
    if drifted:
        yield from drifted
    elif divergence is None:
        ahead = list(CHECK.judged(record.job.kind, batches_ahead(record), _SKIP_TOGETHER))
        yield from ahead or (_desync(record, None, found) for found in lasting(record))
    elif (left_out := left_out_before(record, divergence)) is not None:
        yield _desync(record, divergence, left_out)
    elif (skipped := skipped_backward(record, divergence)) is not None:
        yield _desync(record, divergence, skipped, is_dated=False)


def _desync(record: RunRecord, divergence: Divergence | None, found: Verdict, *, is_dated: bool = True) -> Finding:
    """Return the finding that ranks are out of step: a warning while the job continues, and an error where it has ended
    in a divergence. ``is_dated``: the sentence says since when.
    """
    consequences = ["from there on, gradients of different steps are averaged"] if is_dated else []
    at_end: tuple[Location, ...] = ()
    facts: Iterable[Fact] = ()
    if divergence is not None:
        consequences.append(f"in the end {describe.title(divergence)}")
        at_end, facts = describe.locations(divergence), describe.facts(divergence, record.job.kind)
    return CHECK.finding(
        f"{found.sentence}: {', and '.join(consequences)}",
        basis=record.job.kind,
        remedy=_SKIP_TOGETHER,
        locations=tuple(dict.fromkeys((*found.places, *at_end))),
        ranks=found.ranks,
        because=found.because,
        evidence=facts,
        severity=Severity.WARNING if divergence is None else None,
    )


def _remedy(divergence: Divergence) -> str:
    return _REMEDIES.get(divergence.form, _SKIP_TOGETHER)


in_log = CHECK.reported_by("diagnosis.logs.findings", "from_dead_job", _remedy)
