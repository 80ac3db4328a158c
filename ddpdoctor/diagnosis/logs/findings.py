"""The findings of a check about what the logs of a dead job tell, and where its ranks part by their dumps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from signal import SIGABRT
from typing import Literal

import msgspec
from msgspec.structs import replace

from ddpdoctor.check import Check
from ddpdoctor.diagnosis.divergence.divergence import Divergence, find_divergence
from ddpdoctor.diagnosis.divergence_kind import classify, divergence_finding
from ddpdoctor.diagnosis.logs import remedies
from ddpdoctor.diagnosis.logs.causes import causes_of, first_cause
from ddpdoctor.diagnosis.stacks import limits, native_stacks, parted_stacks, worker_stacks
from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.finding import WENT_ON, Finding, Severity, Trouble
from ddpdoctor.record.model import RunRecord


def from_log(check: Check, record: RunRecord) -> Iterator[Finding]:
    """Yield the first cause, where this check reports it, and the echoes that it speaks for; echoes are advice."""
    for cause in causes_of(record):
        if cause.trouble == check.stands_for and check.stands_for in remedies.OF_LOGS:
            remedy = remedies.OF_LOGS[check.stands_for]
            is_cause = cause.role == "cause" and not explains_the_death(record)
            named = cause.absent if cause.first.kind in ("timed-out", "lost-peer") and is_cause else cause.ranks
            usual = remedy if isinstance(remedy, str) else remedy(cause)
            title = f"{remedies.title(cause)}{WENT_ON if cause.survived else ''}"
            if cause.leads and not is_cause and not cause.survived:
                title = f"in attempt {cause.attempts[0] + 1} of the launcher, {title}"
            yield check.finding(
                title,
                basis="log",
                remedy=next((one.implies for one in cause.incidents if one.implies), usual)
                if is_cause
                else remedies.of_echo(cause),
                locations=remedies.locations(cause),
                ranks=named,
                evidence=tuple(remedies.facts(cause)),
                severity=None if is_cause and cause.is_known else Severity.WARNING if is_cause else Severity.ADVICE,
                role="cause" if is_cause else "echo",
                doubt=cause.doubt,
            )


def from_dead_job(check: Check, record: RunRecord, remedy: Callable[[Divergence], str]) -> Iterator[Finding]:
    """Yield where the ranks' collectives part by the dumps, if this check reports it, and what the logs say."""
    parting = parting_of(record)
    if parting is not None and parting.trouble == check.stands_for:
        role: Literal["cause", "echo"] = "cause" if explains_the_death(record) else "echo"
        finding = divergence_finding(check, record, parting.divergence, remedy(parting.divergence))
        # What a divergence in a record of logs rests on are the dumps, unless the logs hold the stacks.
        of_dumps = not record.stacks
        evidence = tuple(
            replace(fact, basis="dump") if of_dumps and fact.basis == "log" else fact for fact in finding.evidence
        )
        basis = frozenset(fact.basis for fact in evidence) or finding.basis
        if record.stacks:
            evidence = (*evidence, *worker_stacks(record), *limits(record), *native_stacks(record))
        yield replace(finding, role=role, doubt=parting.doubt, evidence=evidence, basis=basis)
    yield from from_log(check, record)


def explains_the_death(record: RunRecord) -> bool:
    """Return whether dumps show where ranks diverge, and no log reports a failure that comes before that."""
    if parting_of(record) is None:
        return False
    cause = first_cause(record)
    # The watchdog that prints such stacks ends its rank by an abort.
    by_watchdog = cause is not None and cause.first.signal == SIGABRT and bool(record.stacks)
    return cause is None or by_watchdog or cause.first.kind in ("timed-out", "stuck", "lost-peer")


class DumpParting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks diverge by their dumps."""

    divergence: Divergence
    trouble: Trouble
    doubt: str = ""


@once_per_record()
def parting_of(record: RunRecord) -> DumpParting | None:
    """Return the one divergence that dumps, or the stacks of living ranks, show.

    Of dumps: among the ranks that left one, and only then with those that did not.
    """
    if record.stacks:
        parted = parted_stacks(record)
        seen = None if parted is None else DumpParting(divergence=parted[0], trouble=parted[1], doubt=parted[2])
        told = seen is not None and seen.divergence.culprit is not None and not seen.doubt
        # Recorders are read one after the other: of ranks that move they do not show one moment.
        stands = all(rank.stuck for rank in record.ranks if rank.rank in {dump.rank for dump in record.stacks})
        return seen if told or not record.collectives or not stands else _by_tracks(record) or seen
    return _by_tracks(record) if record.collectives else None


def _by_tracks(record: RunRecord) -> DumpParting | None:
    """Return where the ranks diverge by what their flight recorders hold."""
    present = frozenset(track.rank for track in record.collectives)
    looks = [(record, record.logs.dumps_doubt)]
    if len(present) != len(record.ranks):
        groups = (replace(one, ranks=tuple(filter(present.__contains__, one.ranks))) for one in record.groups)
        ranks = tuple(rank for rank in record.ranks if rank.rank in present)
        silent = rank_list(rank.rank for rank in record.ranks if rank.rank not in present)
        # First as if the ranks with a dump were the whole job.
        looks = [
            (replace(record, groups=tuple(groups), ranks=ranks), record.logs.dumps_doubt),
            (record, f"{silent} left no dump, and may have reached it nevertheless"),
        ]
    for among, doubt in looks:
        divergence = find_divergence(among)
        if divergence is not None:
            return DumpParting(divergence=divergence, trouble=classify(divergence, among), doubt=doubt)
    return None
