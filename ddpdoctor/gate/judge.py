"""Passes the verdict of a gate: what is new, what grew, what is no longer reached. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding
from ddpdoctor.findings.fingerprint import with_fingerprints
from ddpdoctor.findings.locations import plain, shown_path
from ddpdoctor.findings.merge import DIVERGENCES
from ddpdoctor.gate import budget_growth, lost_reach, step_time_growth
from ddpdoctor.gate.baseline import Entry, KnownFinding, Rehearsed
from ddpdoctor.gate.budget import budget_of
from ddpdoctor.gate.compare import compared
from ddpdoctor.gate.reach import lost, reach_of
from ddpdoctor.gate_section import Figure, GateSection, TimeComparison

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

NEVER_KNOWN = DIVERGENCES | {"hang"}
"""What a rehearsal proves to hang or to compute something else is red, whatever a baseline says."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a target is compared with, and how."""

    against: str
    """The baseline file, or ``the revision REV``."""
    before: Entry | None
    """None where nothing is compared: a baseline is being written, or the revision could not be rehearsed."""
    allowed_growth: float = 0.0
    ignored: frozenset[str] = frozenset()
    """Codes of this gate's own findings that the user does not want."""
    update: str = ""
    """The command that agrees on what is found now; empty where a revision is compared, and there is none."""
    times: TimeComparison | None = None
    notes: tuple[str, ...] = ()


def entry_of(examination: Examination, record: RunRecord) -> Entry:
    """Return what a baseline keeps of a rehearsal."""
    job = record.job
    return Entry(
        rehearsed=Rehearsed(
            ranks=job.world_size,
            layout=job.layout,
            device=job.device,
            batches=job.batches,
            batch_size=job.batch_size,
        ),
        torch=job.torch_version.partition("+")[0],
        findings=tuple(sorted(_known(finding, examination.root) for finding in examination.findings)),
        budget=budget_of(record, examination.root),
        reach=reach_of(record, examination.root),
    )


def may_be_agreed_on(examination: Examination) -> bool:
    """Return whether a baseline may be written of this: the rehearsal reached its end, and nothing hung or parted."""
    return examination.rehearsal.status == "completed" and not any(map(_is_never_known, examination.findings))


def judged(examination: Examination, now: Entry | None, wanted: Wanted) -> Examination:
    """Leave out what was known before, add what grew and what is no longer reached, and pass the verdict.

    ``now`` is None where nothing was rehearsed. Only rehearsals that reached their end are compared.
    """
    before = wanted.before
    known = {finding.fingerprint for finding in before.findings} if before is not None else set()
    standing = [finding for finding in examination.findings if _stands(finding, known)]
    seen = {finding.fingerprint for finding in examination.findings}
    completed = now is not None and examination.rehearsal.status == "completed"
    doubt = ""
    figures: tuple[Figure, ...] = ()
    own: list[Finding] = []
    if completed and now is not None:
        has_budget = before is not None and bool(before.budget.shares)
        doubt = _incomparable(before, now, wanted) if has_budget else ""
        usable = before if has_budget and not doubt else None
        figures = compared(usable.budget if usable else None, now.budget, examination.root, wanted.allowed_growth)
        own = [*budget_growth.findings(figures, wanted.against, wanted.update)]
        if usable is not None and usable.reach is not None and now.reach is not None:
            lines = lost(usable.reach, now.reach, examination.root)
            own += lost_reach.findings(lines, wanted.against, examination.root, wanted.update)
        if wanted.times is not None and wanted.times.slower:
            own.append(step_time_growth.finding(wanted.times, wanted.against))
    own = [finding for finding in own if finding.code not in wanted.ignored]
    findings = (*with_fingerprints(own, examination.root), *standing)
    gone = tuple(one.shown for one in before.findings if one.fingerprint not in seen) if before and completed else ()
    section = GateSection(
        against=wanted.against,
        figures=tuple(figures),
        known=len(examination.findings) - len(standing),
        gone=gone,
        allowed_growth=wanted.allowed_growth,
        steps=sum(now.budget.windows) if now is not None else 0,
        times=wanted.times,
        doubt=doubt,
        notes=(*wanted.notes, *_notes(before, now, figures, gone, wanted.update)),
    )
    return with_verdict(msgspec.structs.replace(examination, findings=findings, gate=section), doubt)


def with_verdict(examination: Examination, doubt: str = "") -> Examination:
    """Return the examination with the verdict that its findings and its completeness lead to."""
    complete = examination.complete and not doubt
    if any(finding.severity.at_least(examination.fail_on) for finding in examination.findings):
        return msgspec.structs.replace(examination, verdict="findings", exit_code=ExitCode.FINDINGS, complete=complete)
    if complete:
        return msgspec.structs.replace(examination, verdict="clean", exit_code=ExitCode.CLEAN)
    return msgspec.structs.replace(examination, verdict="inconclusive", exit_code=ExitCode.INCONCLUSIVE, complete=False)


def pruned(before: Entry, now: Entry, figures: Iterable[Figure]) -> Entry:
    """Return the entry without what is no longer there; nothing new is taken in."""
    seen = {finding.fingerprint for finding in now.findings}
    kept = tuple(finding for finding in before.findings if finding.fingerprint in seen)
    grew = any(figure.change in ("grown", "within") for figure in figures)
    return msgspec.structs.replace(before, findings=kept, budget=before.budget if grew else now.budget)


def _known(finding: Finding, root: str) -> KnownFinding:
    place = finding.location
    where = f"{shown_path(place.file, root)}: " if place is not None else ""
    return KnownFinding(fingerprint=finding.fingerprint, code=finding.code, shown=plain(f"{where}{finding.name}"))


def _stands(finding: Finding, known: set[str]) -> bool:
    return finding.fingerprint not in known or _is_never_known(finding)


def _is_never_known(finding: Finding) -> bool:
    return finding.trouble in NEVER_KNOWN and "rehearsal" in finding.basis


def _incomparable(before: Entry | None, now: Entry, wanted: Wanted) -> str:
    if before is None or before.rehearsed == now.rehearsed:
        return ""
    old, new = msgspec.structs.asdict(before.rehearsed), msgspec.structs.asdict(now.rehearsed)
    differ = [f"{name.replace('_', ' ')} {old[name] or 'kept'}" for name in old if old[name] != new[name]]
    here = [f"{new[name] or 'kept'}" for name in old if old[name] != new[name]]
    return (
        f"{wanted.against} was written by a rehearsal with {', '.join(differ)}, and this one has {', '.join(here)}: "
        "rehearse the same way" + (f", or rewrite it: `{wanted.update}`" if wanted.update else "")
    )


def _notes(
    before: Entry | None, now: Entry | None, figures: Iterable[Figure], gone: tuple[str, ...], update: str
) -> list[str]:
    notes = []
    shrunk = [figure.label for figure in figures if figure.change == "shrunk"]
    if shrunk or gone:
        what = [f"less than before: {', '.join(shrunk)}"] if shrunk else []
        what += [f"no longer found: {', '.join(gone)}"] if gone else []
        notes.append("; ".join(what) + (f". `{update}` locks this in" if update else ""))
    if before is not None and now is not None and before.torch != now.torch:
        notes.append(
            f"before it was torch {before.torch}, now it is {now.torch}, which may bucket gradients differently"
        )
    return notes
