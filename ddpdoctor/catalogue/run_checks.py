"""Runs the checks on the evidence and says of each what happened to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ddpdoctor.catalogue.registry import CatalogueEntry, load
from ddpdoctor.check import (
    ASKED_FOR,
    NEEDS_A_RUN,
    BoundHit,
    LoadedCheck,
    NotStated,
    Outcome,
    OutcomeState,
    TooLittleEvidence,
)
from ddpdoctor.finding import Confirmed, Finding, FoundInRun, Refuted, Severity
from ddpdoctor.source.script.module import deep_recursion
from ddpdoctor.source.script.script import take_gap, uses_part

if TYPE_CHECKING:
    from ddpdoctor.record.model import Restart, RunRecord
    from ddpdoctor.source.script.script import Script

Evidence = TypeVar("Evidence")
Yield = TypeVar("Yield")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that one check said."""

    code: str
    name: str
    from_source: tuple[Finding, ...] = ()
    from_run: tuple[Finding, ...] = ()
    refuted: tuple[Refuted, ...] = ()
    confirmed: tuple[Confirmed, ...] = ()
    looked_at_run: bool = False
    gap: str = ""
    """Why it could not look at everything that was asked for; empty when it could."""
    bound_hit: bool = False
    """The gap is a bound of the analysis."""
    crashed: bool = False
    """The gap is a defect of the check."""
    by_nature: bool = False
    """The gap is that only a run can show it: nothing that was asked of the source is missing."""
    nothing: bool = False
    """The source, and the run if there was one, have nothing of what the check looks at."""
    unfollowed: bool = False
    """The gap is code that was not followed; a run that shows all of it closes it."""
    unstated: bool = False
    """The gap is what no one has said of the job; without it nothing that was asked for is missing."""
    source_severity: Severity | None = None
    """How bad the check calls what it sees in the source, unless it says otherwise; None where a run shows all of that,
    and where only the source was asked."""
    nodes_wanted: int = 0
    """The nodes that a run must have to show it, where the run had fewer; 0 where it had enough."""


def run_checks(
    entries: Sequence[CatalogueEntry], script: Script, record: RunRecord | None, *, static: bool
) -> tuple[CheckResult, ...]:
    """Run every check on the source and, where there is a record, on the run.

    A check that raises costs its own result and nothing else. In a script in which no trigger word of a check occurs
    it has nothing to look at. With ``static`` nothing but the source is asked for, and checks that have nothing to
    look at are not imported. Raises ConfigurationError when a built-in check cannot be loaded.
    """
    take_gap(script)
    with deep_recursion():
        return tuple([_run_check(entry, script, record, static=static) for entry in entries])


def run_live_checks(entries: Sequence[CatalogueEntry], record: RunRecord) -> tuple[CheckResult, ...]:
    """Run every check that looks at runs of this kind on a record alone.

    Raises ConfigurationError when a built-in check cannot be loaded.
    """
    results = []
    for entry in entries:
        check = load(entry)
        if check.in_run is not None and record.job.kind in check.check.severity:
            results.append(_look_at_run(_said_nothing(entry.code, entry.name, ""), check, record))
    return tuple(results)


def run_log_checks(entries: Sequence[CatalogueEntry], record: RunRecord) -> tuple[CheckResult, ...]:
    """Run every check that looks at what a dead job left.

    Raises ConfigurationError when a built-in check cannot be loaded.
    """
    return _asked(entries, record, lambda check: check.in_log)


def run_restart_checks(entries: Sequence[CatalogueEntry], restart: Restart) -> tuple[CheckResult, ...]:
    """Run every check that looks at a second start, likewise."""
    return _asked(entries, restart, lambda check: check.in_restart)


def _asked(
    entries: Sequence[CatalogueEntry],
    evidence: Evidence,
    half_of: Callable[[LoadedCheck], Callable[[Evidence], Iterator[FoundInRun]] | None],
) -> tuple[CheckResult, ...]:
    results = []
    for entry in entries:
        half = half_of(load(entry))
        if half is not None:
            heard = _ask(half, evidence)
            results.append(
                CheckResult(
                    code=entry.code,
                    name=entry.name,
                    from_run=tuple(item for item in heard.yielded if isinstance(item, Finding)),
                    looked_at_run=True,
                    gap=heard.gap,
                    bound_hit=heard.bound_hit,
                    crashed=heard.crashed,
                )
            )
    return tuple(results)


def outcome_of(result: CheckResult, *, stands: bool, cut_short: str) -> Outcome:
    """Say what happened to a check.

    ``stands`` tells whether a finding of it is left after merging, ``cut_short`` says why the run did not show all that
    it should have (empty when it did): a check that looked at such a run and found nothing has not passed.
    """
    gap = result.gap or (cut_short if result.looked_at_run else "")
    if result.unfollowed and result.looked_at_run and not cut_short:
        gap = ""  # The run went where the source was not followed.
    if stands:
        state = OutcomeState.FINDINGS
    elif result.bound_hit:
        state = OutcomeState.BOUND_HIT
    elif gap:
        state = OutcomeState.NOT_EVALUATED
    elif result.nothing:
        state = OutcomeState.NOTHING_TO_LOOK_AT
    else:
        state = OutcomeState.PASSED
    unstated = state is OutcomeState.NOT_EVALUATED and result.unstated
    return Outcome(
        code=result.code,
        name=result.name,
        state=state,
        reason="" if stands else gap,
        by_nature=result.by_nature,
        unstated=unstated,
    )


def bounds_of(results: Iterable[CheckResult]) -> tuple[str, ...]:
    """Return what bounds of the analysis left out, each said once."""
    return tuple(dict.fromkeys(result.gap for result in results if result.bound_hit))


def _run_check(entry: CatalogueEntry, script: Script, record: RunRecord | None, *, static: bool) -> CheckResult:
    if static and not entry.in_source:
        return msgspec.structs.replace(_said_nothing(entry.code, entry.name, NEEDS_A_RUN), by_nature=True)
    result = _said_nothing(entry.code, entry.name, "")
    triggered = not entry.triggers or uses_part(script, entry.triggers)
    if static and not triggered:
        return _with_subjects(result, entry, script, triggered=False)
    check = load(entry)
    if check.in_source is not None and triggered:
        said = _ask(check.in_source, script)
        gap = take_gap(script)
        if gap or said is not _NOTHING:
            result = msgspec.structs.replace(
                result,
                from_source=said.yielded,
                gap=said.gap or gap,
                bound_hit=said.bound_hit or bool(gap),
                crashed=said.crashed,
                unfollowed=bool(said.gap) and not said.bound_hit and not said.crashed,
            )
    if entry.in_source and not result.from_source and not result.gap:
        result = _with_subjects(result, entry, script, triggered=triggered)
    if static or check.in_run is None or (record is not None and record.job.kind not in check.check.severity):
        return result
    if record is None:
        return msgspec.structs.replace(result, gap=result.gap or "there was no rehearsal")
    return _look_at_run(result, check, record)


def _with_subjects(result: CheckResult, entry: CatalogueEntry, script: Script, *, triggered: bool) -> CheckResult:
    """Note what a check that found nothing looked at."""
    from ddpdoctor.source.queries.subjects import looked_at

    try:
        seen = looked_at(script, entry.subjects, triggered=triggered)
    except Exception as error:
        gap = f"what it looks at could not be found: {type(error).__name__}: {error}"
        return msgspec.structs.replace(result, gap=gap, crashed=True)
    if not seen.nothing and not seen.gap:
        return result
    return msgspec.structs.replace(result, nothing=seen.nothing, gap=seen.gap, unfollowed=bool(seen.gap))


def _look_at_run(result: CheckResult, check: LoadedCheck, record: RunRecord) -> CheckResult:
    assert check.in_run is not None
    missing = _missing_evidence(check, record)
    if missing and any(record.stream(name).state == "absent" for name in check.check.needs_of(record.job.kind)):
        asked_for = not result.gap and not ASKED_FOR.keys().isdisjoint(check.check.needs_of(record.job.kind))
        return msgspec.structs.replace(result, gap=result.gap or missing, by_nature=asked_for)
    heard = _ask(check.in_run, record)
    elsewhere = [item for one in record.other_starts for item in _ask(check.in_run, one).yielded]
    # One start of the ranks says nothing of what another has shown.
    yielded = (*heard.yielded, *(item for item in elsewhere if not isinstance(item, Refuted)))
    return msgspec.structs.replace(
        result,
        from_run=tuple(item for item in yielded if isinstance(item, Finding)),
        refuted=tuple(item for item in heard.yielded if isinstance(item, Refuted)),
        confirmed=tuple(item for item in yielded if isinstance(item, Confirmed)),
        looked_at_run=True,
        nothing=(result.nothing or check.in_source is None) and not _has_subject(check, record),
        source_severity=None if check.check.advice_in_run else check.check.severity.get("source"),
        gap=result.gap or heard.gap or missing,
        bound_hit=result.bound_hit or heard.bound_hit,
        crashed=result.crashed or heard.crashed,
        unstated=heard.unstated and not result.gap and not missing,
        nodes_wanted=check.check.nodes if len({rank.node for rank in record.ranks}) < check.check.nodes else 0,
    )


@lru_cache(maxsize=1_024)
def _said_nothing(code: str, name: str, gap: str) -> CheckResult:
    """Return the same for all scripts of a directory."""
    return CheckResult(code=code, name=name, gap=gap)


class _Said(msgspec.Struct, frozen=True):
    yielded: tuple[FoundInRun, ...]
    gap: str = ""
    bound_hit: bool = False
    crashed: bool = False
    unstated: bool = False


_NOTHING = _Said(())


def _ask(function: Callable[[Evidence], Iterator[Yield]], evidence: Evidence) -> _Said:
    yielded: list[FoundInRun] = []
    try:
        for item in function(evidence):
            if not isinstance(item, (Finding, Refuted, Confirmed)):
                raise TypeError(f"yielded a {type(item).__name__}")
            yielded.append(item)
    except BoundHit as bound:
        return _Said(tuple(yielded), gap=str(bound), bound_hit=True)
    except TooLittleEvidence as gap:
        return _Said(tuple(yielded), gap=str(gap))
    except NotStated as gap:
        return _Said(tuple(yielded), gap=str(gap), unstated=True)
    except RecursionError:
        return _Said(tuple(yielded), gap="the script holds code that is nested too deeply", bound_hit=True)
    except Exception as error:
        return _Said(tuple(yielded), gap=f"the check failed: {type(error).__name__}: {error}", crashed=True)
    return _Said(tuple(yielded)) if yielded else _NOTHING


def _missing_evidence(check: LoadedCheck, record: RunRecord) -> str:
    for name in sorted(check.check.needs_of(record.job.kind)):
        stream = record.stream(name)
        if name in ASKED_FOR and stream.state == "absent":
            return stream.reason if name in record.streams else ASKED_FOR[name]
        if stream.state != "complete":
            because = f" ({stream.reason})" if stream.reason else ""
            what = name.replace("_", " ")
            told = f"no {what} were recorded" if stream.state == "absent" else f"only some {what} were recorded"
            return told + because
    return ""


def _has_subject(check: LoadedCheck, record: RunRecord) -> bool:
    """Return whether the run has what the check looks at: a model wrapped in DDP, where it cannot do without."""
    if "wraps" not in check.check.needs_of(record.job.kind):
        return True
    return any(one.wraps for one in (record, *record.other_starts))
