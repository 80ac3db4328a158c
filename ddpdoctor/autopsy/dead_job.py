"""The autopsy: reads what a dead job left, asks the checks, and puts the first cause ahead of its echoes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from ddpdoctor.autopsy.parameter_names import with_names
from ddpdoctor.autopsy.recorded_runs import RecordedRuns
from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import CheckResult, outcome_of, run_log_checks
from ddpdoctor.diagnosis.logs.advice import advice_of, hosts_of, of_trouble
from ddpdoctor.diagnosis.logs.causes import causes_of, first_cause
from ddpdoctor.diagnosis.logs.findings import explains_the_death
from ddpdoctor.diagnosis.logs.missing_evidence import missing_evidence
from ddpdoctor.errors import ExitCode, UsageError
from ddpdoctor.examination import (
    AutopsySection,
    Culprit,
    Examination,
    FirstCause,
    RehearsalSection,
    SourceSection,
    Verdict,
)
from ddpdoctor.finding import Finding, Severity, Trouble
from ddpdoctor.findings.locations import with_fingerprints
from ddpdoctor.postmortem.read import Postmortem, read_postmortem
from ddpdoctor.record.model import RunRecord

_ORDER = {"cause": 0, "": 1, "echo": 2}


class AutopsyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for."""

    paths: tuple[str, ...]
    fail_on: Severity = Severity.WARNING


def autopsy(request: AutopsyRequest, stdin: BinaryIO | None = None) -> Examination:
    """Read logs and dumps and say what ended the job; raises UsageError when none of the paths is there."""
    absent = [name for name in request.paths if name != "-" and not Path(name).exists()]
    if len(absent) == len(request.paths):
        raise UsageError(
            f"there is no {absent[0]}" if absent else "nothing readable was given",
            "Give logs, directories of logs or of flight-recorder dumps, or `-` for stdin.",
        )
    started = time.perf_counter()
    runs = RecordedRuns()
    read = read_postmortem(request.paths, stdin, runs.read)
    record, notes = with_names(read.record, runs.records)
    read = replace(read, record=record, notes=(*read.notes, *runs.notes, *_other_nodes(read), *notes))
    return concluded(request, read, time.perf_counter() - started, runs.findings)


def concluded(
    request: AutopsyRequest, read: Postmortem, seconds: float, of_runs: Sequence[Finding] = ()
) -> Examination:
    """Ask the checks about what was read, and sum it up; ``of_runs`` is what the recorded runs' own monitors found."""
    results = run_log_checks(read_catalogue().entries, read.record)
    root = str(Path.cwd())
    findings = with_fingerprints(_ordered(results, read, of_runs), root)
    causes = [finding for finding in findings if finding.role == "cause"]
    failing = any(finding.severity.at_least(request.fail_on) for finding in findings)
    crashed = [result for result in results if result.crashed]
    verdict: Verdict = "findings" if failing else "inconclusive"
    if causes and not failing:
        verdict = "clean"
    code = {"findings": ExitCode.FINDINGS, "clean": ExitCode.CLEAN, "inconclusive": ExitCode.INCONCLUSIVE}[verdict]
    stands = {finding.code for finding in findings}
    return Examination(
        target=" ".join(request.paths) or "the running job",
        root=root,
        verdict=verdict,
        exit_code=code,
        complete=bool(causes) and not crashed,
        fail_on=request.fail_on,
        source=SourceSection(status="read", files=0, seconds=0.0),
        rehearsal=RehearsalSection(status="skipped", reason="an autopsy runs nothing"),
        findings=findings,
        outcomes=tuple(outcome_of(result, stands=result.code in stands, cut_short="") for result in results),
        notes=(*read.notes, *(f"{result.name}: {result.gap}" for result in crashed), *_of_runs(read)),
        autopsy=AutopsySection(
            logs=read.logs,
            lines=read.lines,
            dumps=read.dumps,
            error_files=read.error_files,
            processes=read.processes,
            ranks=read.record.rank_numbers(),
            attempts=read.record.logs.attempts,
            certain=bool(causes) and not causes[0].doubt,
            **_for_launchers(findings, read.record),
            runs=len(read.runs),
            missing=()
            if read.processes or read.runs
            else missing_evidence(read.record, dumps=read.dumps, explained=explains_the_death(read.record)),
            seconds=round(seconds, 3),
        ),
    )


def _for_launchers(findings: Sequence[Finding], record: RunRecord) -> dict[str, Any]:
    """Return the fields of the section by which a launcher decides what to do."""
    cause = next((finding for finding in findings if finding.role == "cause"), None)
    if cause is None:
        return {}
    told = first_cause(record)
    of_logs = told is not None and told.trouble == cause.trouble and not explains_the_death(record)
    return {
        "first_cause": FirstCause(code=cause.code, name=cause.name, title=cause.title),
        "culprit": Culprit(ranks=cause.ranks, hosts=hosts_of(told) if told is not None and of_logs else ()),
        "echoes": tuple(finding.title for finding in findings if finding.role == "echo"),
        "confidence": "probable" if cause.doubt else "certain",
        "advice": advice_of(told) if told is not None and of_logs else of_trouble(cause.trouble),
    }


def _ordered(results: Iterable[CheckResult], read: Postmortem, of_runs: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the first cause first, then the echoes in the order in which they came."""
    places: dict[Trouble | None, int] = {}
    for told in causes_of(read.record):
        places.setdefault(told.trouble, len(places))
    found = _with_runs([finding for result in results for finding in result.from_run], read.record, of_runs)
    found.sort(key=lambda finding: (_ORDER[finding.role], places.get(finding.trouble, len(places))))
    causes = [finding for finding in found if finding.role == "cause"]
    # A cause is one: where dumps and logs both report one, the dumps know the line of every rank.
    return tuple(replace(finding, role="echo") if finding in causes[1:] else finding for finding in found)


def _with_runs(found: list[Finding], record: RunRecord, of_runs: Sequence[Finding]) -> list[Finding]:
    """Add what the recorded runs say: of a cause that logs report as well they know more.

    Where no rank failed by itself the first of the other findings is the cause, and who gave up waiting is an echo.
    """
    others = []
    for finding in of_runs:
        same = next((one for one in found if one.code == finding.code), None)
        if same is None:
            others.append(finding)
            continue
        shown = {fact.stack for fact in finding.evidence}
        again = (replace(fact, stack=()) if fact.stack in shown else fact for fact in same.evidence)
        evidence = (*finding.evidence, *again)
        found[found.index(same)] = replace(finding, role=same.role, doubt=same.doubt, evidence=evidence)
    first = first_cause(record)
    if others and (first is None or first.first.kind in ("timed-out", "stuck", "lost-peer")):
        found = [replace(one, role="echo", severity=Severity.ADVICE) for one in found]
        found.append(replace(others.pop(0), role="cause"))
    return [*found, *(replace(one, role="echo") for one in others)]


def _other_nodes(read: Postmortem) -> Sequence[str]:
    """A run directory holds the ranks of one node."""
    world, known = read.record.job.world_size, len(read.record.ranks)
    if not read.runs or known >= world:
        return ()
    return (f"{known} of the job's {world} ranks are known: give the run directories of its other nodes, too",)


def _of_runs(read: Postmortem) -> Sequence[str]:
    return [f"{name} is a run that ddpdoctor recorded: `ddpdoctor report {name}` shows it" for name in read.runs]
