"""A standstill for the faces: which ranks stand where, who is the culprit, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.diagnosis import account
from ddpdoctor.diagnosis.divergence import Divergence
from ddpdoctor.finding import Fact, Finding, Frame
from ddpdoctor.monitor.snapshot import StallSide, StallView
from ddpdoctor.monitor.stacks import without_ours


def stall_view(divergence: Divergence, finding: Finding | None, since_ns: int) -> StallView:
    """Describe a proof that the job will not go on; ``finding`` is what the check says that speaks for it."""
    facts = finding.evidence if finding is not None else account.facts(divergence, "run")
    starts = [turn.wait.started_ns for turn in divergence.turns if turn.wait is not None]
    timeout_ns = divergence.group.timeout_ns if divergence.group is not None else 0
    return StallView(
        title=finding.title if finding is not None else account.title(divergence),
        since_ns=min(starts, default=since_ns),
        sides=_sides(facts, divergence.culprit),
        remedy=finding.remedy if finding is not None else "",
        timeout_at_ns=since_ns + timeout_ns if timeout_ns else None,
    )


def _sides(facts: Sequence[Fact], culprit: int | None) -> tuple[StallSide, ...]:
    """Ranks that stand at the same place, the culprit's side first."""
    alike: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for fact in facts:
        if fact.rank is not None and fact.text.startswith(f"rank {fact.rank} ") and "is named because" not in fact.text:
            said = fact.text.removeprefix(f"rank {fact.rank} ")
            alike.setdefault((said, without_ours(fact.stack)), []).append(fact.rank)
    sides = [
        StallSide(ranks=tuple(ranks), text=said, stack=stack, culprit=culprit in ranks)
        for (said, stack), ranks in alike.items()
    ]
    return tuple(sorted(sides, key=lambda side: (not side.culprit, side.ranks)))
