"""Rehearses one script, or a broken variant of it, as a user would: the command line, in a project of its own."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.check_command import check
from tests.script_table.model import Edit, Script


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the command said and did."""

    exit_code: int
    seconds: float
    report: dict[str, Any]
    left_behind: tuple[str, ...]
    """What is not in the project as it was before."""

    @property
    def codes(self) -> dict[str, str]:
        """The worst severity of each code that was found; the report begins with the worst."""
        return {finding["code"]: finding["severity"] for finding in reversed(self.report["findings"])}


def rehearse(script: Script, project: Path, state: Path, edit: Edit | None = None) -> Outcome:
    """Lay the script out in ``project``, break it where an edit is given, and check it."""
    script.lay_out(project)
    if edit is not None:
        edit.apply(project)
    before = tree(project)
    options = edit.options if edit is not None else ()
    started_s = time.perf_counter()
    exit_code, report = check(*options, script.script, "--", *script.arguments, cwd=project, XDG_STATE_HOME=str(state))
    seconds = time.perf_counter() - started_s
    after = tree(project)
    return Outcome(
        exit_code=exit_code,
        seconds=seconds,
        report=report,
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


def complaints(script: Script, outcome: Outcome, edit: Edit | None = None) -> list[str]:
    """What is not as it has to be, in sentences; empty when all is well."""
    said = []
    if outcome.left_behind:
        said.append(f"the tree is not what it was: {', '.join(outcome.left_behind)}")
    codes = outcome.codes
    if edit is not None:
        if codes.get(edit.code) != edit.severity:
            said.append(f"{edit.code} is not found as {edit.severity}")
        surplus = set(codes) - {edit.code} - set(edit.others) - set(script.advice)
        wanted_exit = 0 if edit.severity == "advice" else 1
    else:
        surplus = {code for code, severity in codes.items() if severity != "advice" or code not in script.advice}
        wanted_exit = 0
        rehearsal = outcome.report["rehearsal"]
        if rehearsal["status"] != "completed":
            said.append(f"not rehearsed to the end: {rehearsal['reason']}")
    if surplus:
        said.append(f"found besides: {', '.join(sorted(surplus))}")
    if outcome.exit_code != wanted_exit:
        said.append(f"exit code {outcome.exit_code} instead of {wanted_exit}")
    return said
