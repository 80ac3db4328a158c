"""Reads the scripts of the corpus and compares what is said with what a person found."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import msgspec

from ddpdoctor.finding import Finding
from tests.real_code.corpus import Defect, Labelled, Missing, Verdict, lay_out, newest

NEAR_LINES = 12
"""A finding belongs to a label of its code when their lines are so close: a call and the function around it."""
Judgement = Literal["right", "wrong", "unread"]


class Said(msgspec.Struct, frozen=True):
    """One finding."""

    code: str
    severity: str
    path: str
    """Relative to the repository."""
    line: int
    other_places: tuple[tuple[str, int], ...]
    title: str
    remedy: str = ""

    @property
    def loud(self) -> bool:
        """It is more than advice."""
        return self.severity != "advice"


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of one script."""

    script: Labelled
    said: tuple[Said, ...] = ()
    failure: str = ""
    """Why the reading gave no answer: not in the mirror, no Python, inconclusive."""
    bound: str = ""
    """Which checks did not follow everything."""
    recognised: bool = True
    """Something of a distributed training was found in it."""
    looked: int = 0
    """Checks of the source that could look at all that they look at."""
    blind: int = 0
    """Those that could not: something that was not understood may be theirs."""
    modules: int = 0
    cpu_s: float = 0.0

    project: tuple[Labelled, ...] = ()
    """The labelled scripts of the same repository: a finding in a module that they share is labelled once."""

    def judgement(self, said: Said) -> Judgement:
        """Whether a finding is right, as far as a person has read it."""
        for script in self.project:
            for verdict in script.verdicts:
                if _same_place(verdict, said, script.path):
                    return "right" if verdict.right else "wrong"
        if any(tells_of(said, defect, script.path) for script in self.project for defect in script.defects):
            return "right"
        return "unread"


def _same_place(verdict: Verdict, said: Said, entry: str) -> bool:
    near = abs(verdict.line - said.line) <= 1
    return newest(verdict.code) == said.code and near and (verdict.path or entry) == said.path


def tells_of(said: Said, defect: Defect, entry: str) -> bool:
    """Return whether a finding speaks of a defect: of its code, and near its lines or at one of its other places."""
    if said.code not in map(newest, defect.codes):
        return False
    if not defect.lines:
        return True
    places = [(said.path, said.line), *said.other_places]
    return any(
        (path == (defect.path or entry) and abs(line - wanted) <= NEAR_LINES) or f"{path}:{line}" in defect.elsewhere
        for path, line in places
        for wanted in defect.lines
    )


def read_all(scripts: Sequence[Labelled], mirror: Path, directory: Path, jobs: int = 2) -> list[Reading]:
    """Lay the repositories out below a directory and read every script as ``check --static`` does."""
    places: dict[tuple[str, str], Path | str] = {}
    for script in scripts:
        key = (script.repo, script.commit)
        if key not in places:
            target = directory / f"{script.repo.replace('/', '+')}@{script.commit[:8]}"
            try:
                if not target.exists():
                    lay_out(mirror, script.repo, script.commit, target)
                places[key] = target
            except Missing as missing:
                places[key] = str(missing)
    work = [(script, places[script.repo, script.commit]) for script in scripts]
    projects: dict[str, list[Labelled]] = {}
    for script in scripts:
        projects.setdefault(script.repo, []).append(script)
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        readings = list(pool.map(_read, *zip(*work, strict=True)))
    return [msgspec.structs.replace(one, project=tuple(projects[one.script.repo])) for one in readings]


def _read(script: Labelled, place: Path | str) -> Reading:
    from ddpdoctor.check import OutcomeState
    from ddpdoctor.errors import DdpDoctorError
    from ddpdoctor.examine.one_script import ExamineRequest, examine

    if isinstance(place, str):
        return Reading(script=script, failure=place)
    os.chdir(place)
    started_s = time.process_time()
    try:
        examination = examine(ExamineRequest(target=script.path, static=True))
    except DdpDoctorError as error:
        return Reading(script=script, failure=str(error))
    cpu_s = time.process_time() - started_s
    said = tuple(_said(finding, place) for finding in examination.findings)
    notes = examination.source.notes if examination.exit_code == 3 else ()
    of_source = [one for one in examination.outcomes if not one.by_nature and not one.unstated]
    blind = sum(one.state in (OutcomeState.NOT_EVALUATED, OutcomeState.BOUND_HIT) for one in of_source)
    return Reading(
        script=script,
        said=said,
        bound="; ".join(notes),
        recognised=examination.recognised,
        looked=len(of_source) - blind,
        blind=blind,
        modules=examination.source.files,
        cpu_s=cpu_s,
    )


def _said(finding: Finding, root: Path) -> Said:
    shown = [*finding.locations, *(fact.location for fact in finding.evidence if fact.location is not None)]
    places = [(os.path.relpath(one.file, root), one.line) for one in shown] or [("", 0)]
    frames = {(os.path.relpath(frame.file, root), frame.line) for fact in finding.evidence for frame in fact.stack}
    rest = tuple(sorted({*places[1:], *frames}))
    return Said(finding.code, finding.severity.value, *places[0], rest, finding.title, finding.remedy)


class Figures(msgspec.Struct, frozen=True):
    """A share."""

    part: int
    whole: int

    def __str__(self) -> str:
        share = f"{100 * self.part / self.whole:.1f} %" if self.whole else "-"
        return f"{share} ({self.part} of {self.whole})"

    def at_least(self, percent: float) -> bool:
        """Tell whether the share reaches a bound."""
        return 100 * self.part >= percent * self.whole


def precision(readings: Iterable[Reading], severities: Sequence[str]) -> Figures:
    """Which share of what is said is right; what nobody has read counts as wrong."""
    judged = [reading.judgement(said) for reading in readings for said in reading.said if said.severity in severities]
    return Figures(judged.count("right"), len(judged))


def recall(readings: Sequence[Reading], confidences: Sequence[str]) -> Figures:
    """Which share of the labelled defects is told of."""
    wanted = [one for one in expected(readings) if one[1].confidence in confidences]
    return Figures(len(wanted) - sum(one[1].confidence in confidences for one in missed(readings)), len(wanted))


def missed(readings: Sequence[Reading]) -> list[tuple[Reading, Defect]]:
    """The defects that no reading of their repository tells of, by any severity."""
    said: dict[str, list[Said]] = {}
    for reading in readings:
        said.setdefault(reading.script.repo, []).extend(reading.said)
    return [
        (reading, defect)
        for reading, defect in expected(readings)
        if not any(tells_of(one, defect, reading.script.path) for one in said[reading.script.repo])
    ]


def expected(readings: Iterable[Reading]) -> Iterator[tuple[Reading, Defect]]:
    """The defects that the source alone shows, of scripts that could be read."""
    for reading in readings:
        if not reading.failure:
            yield from ((reading, defect) for defect in reading.script.defects if defect.expected)


def clean(readings: Iterable[Reading]) -> Figures:
    """Which share of the scripts with nothing wrong is told nothing but advice and what is right."""
    free = [reading for reading in readings if reading.script.clean and not reading.failure]
    silent = [all(not said.loud or reading.judgement(said) == "right" for said in reading.said) for reading in free]
    return Figures(sum(silent), len(silent))
