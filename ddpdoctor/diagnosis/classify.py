"""Gives the one divergence of a run its one code, the most specific first."""

from __future__ import annotations

from ddpdoctor.diagnosis.absence import root_exception
from ddpdoctor.diagnosis.divergence import Divergence, find_divergence
from ddpdoctor.diagnosis.lengths import uneven_passes
from ddpdoctor.diagnosis.named_failures import name_of_failure
from ddpdoctor.record.model import RunRecord


def classify(divergence: Divergence, record: RunRecord) -> str:
    """Return the code of the check that speaks for a divergence.

    A desync keeps its own code even when passes differ in length later: it came first.
    """
    if divergence.form in ("desync", "crossed"):
        return "DDP312"
    parts = divergence.form != "stuck" and not _raised(divergence)
    if parts and any(uneven.overrun for uneven in uneven_passes(record)):
        return "DDP103"
    if divergence.form == "absentee":
        return (_named(divergence, record) or "DDP706") if _raised(divergence) else "DDP306"
    if divergence.form == "stuck":
        return "DDP305"
    entries = [turn for turn in divergence.turns if turn.action in ("collective", "store")]
    chains = {tuple((frame.file, frame.line) for frame in turn.frames) for turn in entries if turn.frames}
    if divergence.form == "standstill":
        return "DDP301" if len(chains) > 1 else "DDP305"
    return "DDP301" if len(chains) > 1 else "DDP304"


def divergence_with_code(record: RunRecord, code: str) -> Divergence | None:
    """Find the divergence of a run if it is the one that a check speaks for."""
    divergence = find_divergence(record)
    return divergence if divergence is not None and classify(divergence, record) == code else None


def _named(divergence: Divergence, record: RunRecord) -> str:
    """The code of the check that knows the culprit's exception by its message; empty when there is none."""
    culprit = next((rank for rank in record.ranks if rank.rank == divergence.culprit), None)
    raised = root_exception(culprit) if culprit is not None else None
    return name_of_failure(raised) if raised is not None else ""


def _raised(divergence: Divergence) -> bool:
    turns = divergence.turns + divergence.proof
    return any(turn.action == "raised" and turn.rank == divergence.culprit for turn in turns)
