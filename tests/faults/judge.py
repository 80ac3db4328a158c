"""Runs one case of the tables and tells what is wrong with what was said of it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec

from ddpdoctor.examination import Examination
from ddpdoctor.examine.one_script import ExamineRequest, examine
from ddpdoctor.finding import Finding
from tests.faults.cases import Fault
from tests.faults.script import STAMPS_VARIABLE

SCRIPT_NAME = "train.py"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One examination of a script with a fault."""

    examination: Examination
    wrong: str
    """What was said wrongly; empty when all was right."""
    verdict_s: float | None
    """Seconds from the fault to the end of the examination; None when the script did not say when it struck."""


def run_fault(
    fault: Fault, folder: Path, *, overlay: bool = True, python: str | None = None, patience: float = 1.0
) -> Run:
    """Examine the script of a fault in the empty directory ``folder``, which has to be the working directory.

    ``python`` is the interpreter of the ranks, for the table of another torch; ``patience`` multiplies the time limit.
    """
    (folder / SCRIPT_NAME).write_text(fault.script)
    request = ExamineRequest(
        target=SCRIPT_NAME,
        nproc=fault.ranks,
        time_limit_s=patience * fault.time_limit_s,
        overlay=overlay,
        python=python,
        sockets=(folder / "stamps",),
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stamps:
        stamps.bind(str(folder / "stamps"))
        os.environ[STAMPS_VARIABLE] = str(folder / "stamps")
        try:
            examination = examine(request)
            ended_ns = time.monotonic_ns()
        finally:
            del os.environ[STAMPS_VARIABLE]
        struck_ns = _first_stamp_ns(stamps)
    return Run(
        examination=examination,
        wrong=wrong_verdict(fault, examination),
        verdict_s=None if struck_ns is None else (ended_ns - struck_ns) / 1e9,
    )


def _first_stamp_ns(stamps: socket.socket) -> int | None:
    stamps.setblocking(False)
    times = []
    while True:
        try:
            times.append(int(stamps.recv(64)))
        except BlockingIOError:
            return min(times, default=None)


def wrong_verdict(fault: Fault, examination: Examination) -> str:
    """What was said wrongly of a fault; empty when all was right."""
    found = [finding for finding in examination.findings if finding.severity.value != "advice"]
    if not fault.code:
        if found or examination.exit_code != 3:
            return f"not inconclusive: {_told(found)}"
        reason = examination.rehearsal.reason
        return "" if fault.says in reason else f"the reason does not say {fault.says!r}: {reason}"
    seen = [finding for finding in found if finding.basis & {"rehearsal"}]
    if len(seen) != 1:
        return f"{len(seen)} findings: {_told(found)} {examination.rehearsal.reason}"
    (finding,) = seen
    if len(found) > 1:
        return f"a second finding: {_told(found)}"
    if (finding.code, finding.severity.value) != (fault.code, fault.severity):
        return f"{finding.code} {finding.severity.value}: {finding.title}"
    if fault.says not in finding.title:
        return f"the title does not say {fault.says!r}: {finding.title}"
    return _wrong_place(fault, finding)


def _wrong_place(fault: Fault, finding: Finding) -> str:
    if fault.culprit is not None and finding.ranks != (fault.culprit,):
        return f"names {finding.ranks}: {finding.title}"
    told = {fact.rank for fact in finding.evidence if fact.rank is not None}
    if fault.culprit is None and not fault.either and not set(range(fault.ranks)) <= told:
        return f"does not show what each rank did: {finding.title}"
    places = {location.line for location in finding.locations}
    places |= {frame.line for fact in finding.evidence for frame in fact.stack}
    wanted = {number for number, text in enumerate(fault.script.splitlines(), 1) if text.endswith("# here")}
    return "" if wanted <= places else f"line {sorted(wanted - places)} is not among {sorted(places)}: {finding.title}"


def _told(findings: list[Finding]) -> str:
    return "; ".join(f"{finding.code} {finding.severity.value} {finding.title}" for finding in findings) or "nothing"
