"""A standstill for the faces: which ranks stand where, who is the culprit, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.live.hangs import may_go_on
from ddpdoctor.finding import Fact, Finding, Frame
from ddpdoctor.monitor.snapshot import StallSide, StallView
from ddpdoctor.record.model import RunRecord

_PLURALS = {"waits": "wait", "calls": "call", "was": "were", "is": "are", "polls": "poll", "sleeps": "sleep"}


def stall_view(divergence: Divergence, finding: Finding | None, record: RunRecord, seen_ns: int) -> StallView:
    """Describe what the job stands in; ``finding`` is what the check says that reports it.

    ``seen_ns`` is when it was found, which for who attaches later says nothing of how long the job has stood.
    """
    facts = finding.evidence if finding is not None else describe.facts(divergence, "run")
    timeout_ns = divergence.group.timeout_ns if divergence.group is not None else 0
    since_ns = _since_ns(divergence, record, seen_ns)
    return StallView(
        title=finding.title if finding is not None else describe.title(divergence),
        since_ns=since_ns,
        sides=_sides(facts, accused(divergence, finding)),
        remedy=finding.remedy if finding is not None else "",
        timeout_at_ns=min(_waits_ns(divergence, record), default=since_ns) + timeout_ns if timeout_ns else None,
        may_go_on=may_go_on(record, divergence),
    )


def accused(divergence: Divergence, finding: Finding | None) -> int | None:
    """Return the one rank that the finding of a standstill names, which may know more than how the ranks stand."""
    return finding.ranks[0] if finding is not None and len(finding.ranks) == 1 else divergence.culprit


def _since_ns(divergence: Divergence, record: RunRecord, seen_ns: int) -> int:
    """When the first rank began to wait in the store, or else when a rank last came to something new."""
    stores = [turn.wait.started_ns for turn in divergence.turns if turn.wait is not None]
    changes = [heartbeat.phase_since_ns for heartbeat in record.heartbeats if heartbeat.phase_since_ns]
    return min(stores) if stores else min(seen_ns, max(changes, default=seen_ns))


def _waits_ns(divergence: Divergence, record: RunRecord) -> Iterator[int]:
    """When each waiting rank entered its collective: its timeout counts from there."""
    for turn in divergence.turns:
        track = record.track(turn.rank)
        if turn.waiting and turn.row is not None and track is not None and turn.row < len(track):
            yield track.started_ns[turn.row]


def _sides(facts: Sequence[Fact], culprit: int | None) -> tuple[StallSide, ...]:
    """Ranks that stand at the same place, the culprit's side first."""
    alike: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for fact in facts:
        if fact.rank is not None and fact.text.startswith(f"rank {fact.rank} ") and "is named because" not in fact.text:
            said = fact.text.removeprefix(f"rank {fact.rank} ")
            alike.setdefault((said, fact.stack), []).append(fact.rank)
    sides = [
        StallSide(
            ranks=tuple(ranks),
            text=_of_several(said) if len(ranks) > 1 else said,
            stack=stack,
            culprit=culprit in ranks,
        )
        for (said, stack), ranks in alike.items()
    ]
    return tuple(sorted(sides, key=lambda side: (not side.culprit, side.ranks)))


def _of_several(said: str) -> str:
    """Return a predicate of one rank as one of several."""
    verb, space, rest = said.partition(" ")
    return f"{_PLURALS.get(verb, verb)}{space}{rest}"
