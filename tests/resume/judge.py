"""Starts a script and starts it again, and tells what is wrong with what is said of the second start."""

from __future__ import annotations

import os
from pathlib import Path

from ddpdoctor.catalogue.registry import load, read_catalogue
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.rehearsal_result import judge
from ddpdoctor.examine.resume import Resumed, prove_resume
from ddpdoctor.finding import Finding
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.monitor.rehearsal import rehearse
from ddpdoctor.record.model import RunRecord
from ddpdoctor.source.script.script import read_script
from tests.resume.job import Case


def proved(case: Case, folder: Path) -> Resumed:
    """Rehearse both starts of a case that is laid out in an empty folder, without the rehearsal that comes first."""
    target = folder / "train.py"
    target.write_text(case.script)

    def once(request: RehearsalRequest) -> tuple[RunRecord, RehearsalSection]:
        record = rehearse(request, lambda progress: None)
        return record, judge(record, str(folder))

    check = next(entry for entry in read_catalogue().entries if load(entry).in_restart is not None)
    before = Path.cwd()
    os.chdir(folder)
    try:
        request = RehearsalRequest(script=target)
        return prove_resume(
            request, read_script(target), case.resume_with, once, check, torn=case.torn, ranks=case.ranks
        )
    finally:
        os.chdir(before)


def complaints(case: Case, resumed: Resumed) -> list[str]:
    """What is wrong with what was said, in sentences; empty when all is well."""
    found, gap = resumed.result.from_run, resumed.result.gap
    told = [_text(one) for one in found]
    if case.inconclusive:
        good = bool(found) == bool(case.words) and case.inconclusive in gap
        good = good and all(word in " ".join(told) for word in case.words)
        return [] if good else [f"not inconclusive: {told} {resumed.note}"]
    if not case.words:
        good = not found and not gap and "were compared" in resumed.note
        return [] if good else [f"false alarm, or not judged: {told} {resumed.note}"]
    wrong = [f"{word!r} is not said: {told} {resumed.note}" for word in case.words if word not in " ".join(told)]
    if case.line and found and found[0].locations[0].line != case.line:
        wrong.append(f"line {found[0].locations[0].line} in the place of {case.line}")
    return wrong


def _text(finding: Finding) -> str:
    return " ".join((finding.title, finding.remedy, *(fact.text for fact in finding.evidence)))
