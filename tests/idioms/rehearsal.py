"""Rehearses one idiom, or a variant of it, as a user would: the command line, in a project of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.idioms.cases import Idiom
from tests.idioms.defects import Defect

ROOT = Path(__file__).parents[2]
AT_MOST_S = 600.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the command said and did."""

    exit_code: int
    seconds: float
    report: dict[str, Any]
    left_behind: tuple[str, ...]
    """What is not in the project as it was before."""

    @property
    def codes(self) -> dict[str, str]:
        """Severity of each code that was found."""
        return {finding["code"]: finding["severity"] for finding in self.report["findings"]}


def missing(idiom: Idiom) -> tuple[str, ...]:
    """The packages that the idiom needs and that are not installed."""
    return tuple(name for name in idiom.needs if importlib.util.find_spec(name) is None)


def rehearse(idiom: Idiom, project: Path, state: Path, defect: Defect | None = None) -> Outcome:
    """Lay the idiom out in ``project``, break it where a defect is given, and check it."""
    idiom.lay_out(project)
    if defect is not None:
        defect.apply(project)
    before = tree(project)
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "check", "--output-format", "json", idiom.script, "--", *idiom.arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state)},
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
    )
    seconds = time.perf_counter() - started_s
    assert done.stdout, done.stderr
    after = tree(project)
    return Outcome(
        exit_code=done.returncode,
        seconds=seconds,
        report=json.loads(done.stdout),
        left_behind=tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))),
    )


def tree(directory: Path) -> dict[str, tuple[str, int, int]]:
    """Content, mode and, of what is no directory, time of the last change of everything below a directory."""
    return {str(path.relative_to(directory)): _state(path) for path in sorted(directory.rglob("*"))}


def _state(path: Path) -> tuple[str, int, int]:
    status = path.lstat()
    if path.is_symlink():
        return "link to " + os.readlink(path), status.st_mode, status.st_mtime_ns
    if path.is_dir():
        return "directory", status.st_mode, 0
    return hashlib.sha256(path.read_bytes()).hexdigest(), status.st_mode, status.st_mtime_ns


def complaints(idiom: Idiom, outcome: Outcome, defect: Defect | None = None) -> list[str]:
    """What is not as it has to be, in sentences; empty when all is well."""
    said = []
    if outcome.left_behind:
        said.append(f"the tree is not what it was: {', '.join(outcome.left_behind)}")
    codes = outcome.codes
    if defect is not None:
        if codes.get(defect.code) != defect.severity:
            said.append(f"{defect.code} is not found as {defect.severity}")
        surplus = set(codes) - {defect.code} - set(defect.others) - set(idiom.advice)
        wanted_exit = 1
    else:
        surplus = {code for code, severity in codes.items() if severity != "advice" or code not in idiom.advice}
        wanted_exit = 0
        rehearsal = outcome.report["rehearsal"]
        if rehearsal["status"] != "completed":
            said.append(f"not rehearsed to the end: {rehearsal['reason']}")
    if surplus:
        said.append(f"found besides: {', '.join(sorted(surplus))}")
    if outcome.exit_code != wanted_exit:
        said.append(f"exit code {outcome.exit_code} instead of {wanted_exit}")
    return said
