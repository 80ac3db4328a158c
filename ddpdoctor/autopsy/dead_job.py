"""The autopsy: reads what a dead job left, asks the checks, and puts the first cause ahead of its echoes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import CheckResult, outcome_of, run_live_checks, run_log_checks
from ddpdoctor.diagnosis.logs.causes import causes_of, first_cause
from ddpdoctor.diagnosis.logs.findings import explains_the_death
from ddpdoctor.diagnosis.logs.remedies import advice_of, hosts_of, missing_evidence, of_trouble
from ddpdoctor.errors import DdpDoctorError, ExitCode, UsageError
from ddpdoctor.examination import (
    AutopsySection,
    Culprit,
    Examination,
    FirstCause,
    RehearsalSection,
    SourceSection,
    Verdict,
)
from ddpdoctor.finding import Finding, Frame, Severity, Trouble, in_user_code, with_fingerprints
from ddpdoctor.postmortem.failures import details_of
from ddpdoctor.postmortem.inputs import Found
from ddpdoctor.postmortem.launchers import signal_number
from ddpdoctor.postmortem.log_reader import LogRead
from ddpdoctor.postmortem.read import Postmortem, read_postmortem
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Incident, RankEnding

# Reads a core file of a rank with pystack, an optional dependency: the signal that ended it, and its Python stack.

PATIENCE_S = 120
_THREAD = re.compile(r"^Traceback for thread (?P<thread>\d+)(?P<marks>.*)\(most recent call last\):$", re.MULTILINE)
_FRAME = re.compile(r'^\s*\(Python\) File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_PID = re.compile(r"^pid: (?P<pid>\d+)", re.MULTILINE)
_SIGNAL = re.compile(r"The process died due receiving signal SIG(?P<name>\w+)")


def read_core(found: Found, positions: count[int]) -> LogRead:
    """Return the death that a core file shows; raises OSError with a sentence where it cannot be read."""
    assert found.path is not None
    text = _by_pystack(found.path)
    stacks = _THREAD.split(text)
    threads = list(zip(stacks[1::3], stacks[2::3], stacks[3::3], strict=True))
    pid = _PID.search(text)
    if not threads:
        raise OSError("pystack finds no stack of Python in it")
    own = [stack for thread, _, stack in threads if pid is not None and thread == pid["pid"]]
    held = [stack for _, marks, stack in threads if "Has the GIL" in marks]
    frames = [
        Frame(one["file"], int(one["line"]), one["function"]) for one in _FRAME.finditer((held or own or [""])[0])
    ]
    died = _SIGNAL.search(text)
    incident = Incident(
        kind="signalled",
        trouble="killed",
        type="core file",
        signal=signal_number(died["name"]) if died else None,
        pid=int(pid["pid"]) if pid else 0,
        rank=found.rank,
        host=found.host,
        position=next(positions),
        file=found.name,
        message=died[0] if died else "the process wrote a core file",
        frames=tuple(reversed(frames)),
    )
    return LogRead(incidents=[incident], ranks=set() if found.rank is None else {found.rank})


def _by_pystack(path: Path) -> str:
    beside = Path(sys.executable).with_name("pystack")
    program = str(beside) if beside.exists() else shutil.which("pystack")
    if program is None:
        raise OSError("it is a core file, which pystack reads: `pip install 'ddpdoctor[cores]'`")
    command = (program, "--no-color", "core", str(path.absolute()))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False, text=True
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"pystack took longer than {PATIENCE_S} s") from error
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise OSError(f"pystack cannot read this core file ({said[-1][:200] if said else 'it says nothing'})")
    return done.stdout


# Runs that we recorded as evidence of a death: what each rank raised, how it ended, and what was found meanwhile.

OF_A_DEATH = ("gradients", "collectives", "death")
"""Families of checks that may tell why a job ended, or why it hung: its figures are another matter."""


class RecordedRuns:
    """The runs of one autopsy."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self.findings: list[Finding] = []
        """What the runs' own monitors, or the checks of live runs now, say of their end, the worst first."""
        self.notes: list[str] = []

    def read(self, directory: Path, name: str, positions: count[int]) -> LogRead:
        """Return what a run records of its ranks' ends; one that cannot be read costs a note."""
        # Most autopsies have no run, and the monitor takes 0.1 s to load.
        from ddpdoctor.profile.recorded_run import recorded

        try:
            snapshot, record = recorded(directory.absolute())
        except (DdpDoctorError, OSError) as error:
            self.notes.append(f"{name} cannot be read: {error}")
            return LogRead()
        self.notes += [f"{name}: {note}" for note in record.job.notes]
        self.records.append(record)
        known = [view.finding for view in snapshot.findings]
        now = [found for result in run_live_checks(read_catalogue().entries, record) for found in result.from_run]
        for finding in (*known, *(one for one in now if isinstance(one, Finding))):
            telling = finding.family in OF_A_DEATH and finding.severity.at_least(Severity.WARNING)
            if telling and not any(finding.code == other.code for other in self.findings):
                self.findings.append(finding)
        self.findings.sort(key=lambda finding: not finding.severity.at_least(Severity.ERROR))
        return _ends(record, name, positions)


def _ends(record: RunRecord, name: str, positions: count[int]) -> LogRead:
    told = LogRead(world_size=record.job.world_size)
    raised = [(one.time_ns, rank, one) for rank in record.ranks for one in rank.exceptions]
    for time_ns, rank, one in sorted(raised, key=lambda entry: entry[0]):
        kind, trouble, more = details_of(one.type, one.message, one.frames)
        told.incidents.append(
            Incident(
                kind=kind, trouble=trouble, rank=rank.rank, host=rank.host, pid=rank.pid, time_ns=time_ns, file=name,
                position=next(positions), message=one.message, frames=one.frames, **{"type": one.type, **more},
            )
        )  # fmt: skip
    for rank in record.ranks:
        told.ranks.add(rank.rank)
        code_of_end = -rank.signal if rank.signal else rank.exit_code or 0
        if code_of_end:
            told.endings.append(
                RankEnding(
                    rank=rank.rank, local_rank=rank.local_rank, pid=rank.pid, host=rank.host, exit_code=code_of_end,
                    time_ns=rank.ended_ns, file=name, position=next(positions),
                )
            )  # fmt: skip
    return told


# Turns the numbers of parameters in DDP's errors into names: by a run that we recorded, or by the script itself.


def with_names(record: RunRecord, runs: Sequence[RunRecord]) -> tuple[RunRecord, tuple[str, ...]]:
    """Return the record with names where they are known, and sentences on where they are from."""
    incidents, notes = [], set[str]()
    for one in record.logs.incidents:
        if any(name.startswith("#") for name in one.unused):
            named, origin = _named(one, runs)
            if named:
                notes.add(origin)
                one = replace(one, unused=named)
        incidents.append(one)
    return replace(record, logs=replace(record.logs, incidents=tuple(incidents))), tuple(sorted(notes))


def _named(one: Incident, runs: Sequence[RunRecord]) -> tuple[tuple[str, ...], str]:
    numbers = [int(name[1:]) for name in one.unused if name[1:].isdecimal()]
    for run in runs:
        for wrap in run.wraps:
            names = [info.name for info in wrap.reduced]
            if numbers and max(numbers) < len(names):
                found = tuple(names[number] for number in numbers)
                return found, "the names of parameters are those of the recorded run"
    script = next((Path(frame.file) for frame in reversed(one.frames) if in_user_code(frame.file)), None)
    if script is None or script.suffix != ".py" or not script.is_file():
        return (), ""
    names = list(_of_script(script.absolute()))
    if not numbers or max(numbers) >= len(names):
        return (), ""
    return tuple(names[number] for number in numbers), f"the names of parameters are read from {script} as it is now"


def _of_script(path: Path) -> tuple[str, ...]:
    from ddpdoctor.source.queries.parameters import parameter_names
    from ddpdoctor.source.script.module import deep_recursion
    from ddpdoctor.source.script.script import script_at

    try:
        with deep_recursion():
            return parameter_names(script_at(path))
    except (DdpDoctorError, OSError, RecursionError):
        return ()


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
    read = read_postmortem(request.paths, stdin, runs.read, read_core)
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
    verdict: Verdict = "findings" if failing else "clean" if causes else "inconclusive"
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
        notes=(
            *read.notes,
            *(f"{result.name}: {result.gap}" for result in crashed),
            *(f"{name} is a run that ddpdoctor recorded: `ddpdoctor report {name}` shows it" for name in read.runs),
        ),
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
