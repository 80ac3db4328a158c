"""Judges a watched run of a row by a plain one."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ddpdoctor
from tests.monitor_faults.play import Outcome, Row, play

ANSWERS_WITHIN_S = 20.0
_OURS = re.compile(re.escape(f'File "{Path(ddpdoctor.__file__).parent}'))
_VERDICT = re.compile(r"^(?:\x1b\[[0-9;]*m)*(HEALTHY|SLOW|BROKEN|UNKNOWN): ", re.MULTILINE)
_FAULTS = re.compile(r"(?:observation|screen) failed \(.*")
_ELSEWHERE = r"(?:tmp|home)/ddpdoctor-run-|home/\.local"
_KEPT = re.compile(
    r"ddpdoctor/runs/run-[^/]+/(?:(?:calls|steps)-\d+\.ring|events-\d+\.jsonl|(?:last-words|stacks)-\d+\.txt|job\.json|"
    r"history\.(?:lock|sqlite|sqlite-journal)|launcher\.out|probe-\d+\.log)"
)


def wrong(row: Row, bare: Outcome, seen: Outcome) -> list[str]:
    """Return what a watched run did that it must not do; nothing where all was right."""
    return list(_wrong(row, bare, seen))


def _wrong(row: Row, bare: Outcome, seen: Outcome) -> Iterator[str]:
    if seen.fault:
        yield seen.fault
    if not row.answers_nobody and seen.exit_code != bare.exit_code:
        yield f"exit code {seen.exit_code}, {bare.exit_code} without the doctor"
    if row.trains == "on" and (len(seen.digests) != row.ranks or seen.digests != bare.digests):
        yield f"digests {seen.digests}, {bare.digests} without the doctor"
    if not set(seen.digests) <= set(bare.digests) and bare.digests:
        yield f"digests {seen.digests} are not among {bare.digests}"
    if row.trains == "on" and not row.screen and (lost := bare.printed - seen.printed):
        yield f"{lost.total()} lines of the job are lost: {next(iter(lost))[:80]!r}"
    if seen.answered_s > max(ANSWERS_WITHIN_S, bare.answered_s):
        yield f"the answer came after {seen.answered_s:.0f} s, {bare.answered_s:.0f} s without the doctor"
    if seen.left_processes:
        yield f"processes left: {seen.left_processes}"
    # What is documented to be kept where the state directory cannot be written.
    ours = {name for name in seen.left_files if row.keeps == "any" and re.match(_ELSEWHERE, name)}
    if left := set(seen.left_files - bare.left_files) - ours:
        yield f"files left: {sorted(left)}"
    if row.keeps == "run" and (strange := [name for name in seen.kept if not _KEPT.fullmatch(name)]):
        yield f"files in the state directory: {strange}"
    if (row.keeps == "run" and not seen.kept) or (row.keeps == "none" and seen.kept):
        yield f"kept: {seen.kept}"
    if _OURS.search(seen.talk):
        yield f"a traceback of ours: {seen.talk[-3_000:]}"
    yield from (text for text in _FAULTS.findall(seen.talk) if not row.says or not re.search(row.says, text))
    if row.answers_nobody:
        return
    words = _VERDICT.findall(seen.talk)
    if [word for word in words if word not in row.verdicts] or (row.verdicts and not words):
        yield f"verdicts {words}: {seen.talk[-3_000:]}"
    if not re.search(row.says, seen.talk):
        yield f"{row.says!r} is not said: {seen.talk[-3_000:]}"


def reported(folder: Path, seen: Outcome) -> Iterator[str]:
    """Return what is wrong with the report that the user asks for afterwards."""
    for directory in seen.runs:
        began_s = time.monotonic()
        words = (sys.executable, "-m", "ddpdoctor", "report", f"{directory}")
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=2 * ANSWERS_WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            yield "report: no answer"
            continue
        if done.returncode not in (0, 2) or "Traceback" in done.stderr:
            yield f"report: exit code {done.returncode}: {done.stderr[-2_000:]}"
        if (took_s := time.monotonic() - began_s) > ANSWERS_WITHIN_S:
            yield f"report: took {took_s:.0f} s"


def played(row: Row, folder: Path, seed: str, bare: Outcome) -> list[str]:
    """Play a row once, watched, in the empty directory ``folder``; what is wrong with what came of it."""
    seen = play(row, folder, seed, watched=True)
    return [*wrong(row, bare, seen), *reported(folder, seen)]
