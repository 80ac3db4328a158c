"""Applies the remedies of the cases and tells what is wrong with what they lead to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.catalogue.registry import CatalogueEntry, read_catalogue
from ddpdoctor.catalogue.run_checks import run_checks
from ddpdoctor.finding import Finding
from ddpdoctor.source.script.script import read_script
from tests.check_command import check
from tests.checks.case_blocks import Case, Mend, cases_of
from tests.index_of_checks import READ_IN_SOURCE

CHECKS = Path(__file__).parents[2] / "checks"
RUNS = Path(__file__).with_name("runs.md")
"""Scripts that two ranks can run, with the remedies that the whole check prints for them."""
_OF_A_CASE = re.compile(
    r"`[^`]*`|\"[^\"]*\"|\w*[._(=][^\s,;:\"]*[^\s,;:\".]|\b(?:barrier|gather|backward through the DDP model)\b"
)
"""What a remedy quotes of the script."""


class Row(NamedTuple):
    """A broken example, what it gets for a remedy, and what is wrong with the example after it."""

    check: str
    case: Case
    mend: Mend
    wrong: tuple[str, ...]

    @property
    def place(self) -> str:
        """The check and the line of the example in its file of cases."""
        return f"{self.check}:{self.case.line}"


class Printed(NamedTuple):
    """A remedy that is printed for a case, and whether the case shows it applied."""

    check: str
    line: int
    remedy: str
    shown: bool


def mended_cases() -> list[tuple[str, Case, Mend]]:
    """Every remedy that a file of cases shows applied, with the check's name."""
    return [(name, case, mend) for name, case in _cases() for mend in case.mends]


def judged(name: str, case: Case, mend: Mend, directory: Path) -> Row:
    """Read a case as it is and with its remedy, each in a directory of its own."""
    before, after = _findings(case.files, directory / "before"), _findings(mend.files, directory / "after")
    return Row(name, case, mend, tuple(_complaints(name, mend, before, after)))


def rehearsed(case: Case, mend: Mend, directory: Path) -> Row:
    """Rehearse a case as it is and with its remedy, each in a directory of its own."""
    ((name, broken),) = {(mark[3], mark[1]) for mark in case.marks}
    before, after = _report(case.files, directory / "before"), _report(mend.files, directory / "after")
    told = [finding for finding in before["findings"] if finding["severity"] != "advice"]
    wrong = []
    if [(finding["name"], finding["locations"][0]["line"]) for finding in told] != [(name, broken)]:
        wrong.append(f"not told as {name} at line {broken}: {[finding['title'] for finding in told]}")
    if tuple(dict.fromkeys(finding["remedy"] for finding in told)) != mend.said:
        wrong.append(f"the remedy is {' '.join(finding['remedy'] for finding in told)!r}")
    left = [finding["title"] for finding in after["findings"] if finding["severity"] != "advice"]
    if left or after["exit_code"]:
        wrong.append(f"mended, it ends with {after['exit_code']}: {left or after['rehearsal']['reason']}")
    return Row(name, case, mend, tuple(wrong))


def _report(files: dict[str, str], directory: Path) -> dict[str, Any]:
    project = directory / "job"
    project.mkdir(parents=True)
    for name, text in files.items():
        (project / name).write_text(text, encoding="utf-8")
    return check("train.py", cwd=project, XDG_STATE_HOME=str(directory / "state"))[1]


def printed_remedies(directory: Path) -> Iterator[Printed]:
    """Every remedy that is printed for a case of its own check."""
    for number, (name, case) in enumerate(_cases()):
        if any(mark[3] == name for mark in case.marks):
            own = [finding.remedy for finding in _findings(case.files, directory / str(number), name)]
            yield from (Printed(name, case.line, remedy, bool(case.mends)) for remedy in dict.fromkeys(own))


def not_shown(printed: Iterable[Printed]) -> list[Printed]:
    """The first case of every remedy that no case shows applied, whatever the remedy quotes of its script."""
    rows = list(printed)
    shown = {(row.check, _pattern(row.remedy)) for row in rows if row.shown}
    missing: dict[tuple[str, str], Printed] = {}
    for row in rows:
        key = (row.check, _pattern(row.remedy))
        if key not in shown:
            missing.setdefault(key, row)
    return list(missing.values())


def _pattern(remedy: str) -> str:
    return _OF_A_CASE.sub("…", remedy)


def _cases() -> Iterator[tuple[str, Case]]:
    for path in sorted(CHECKS.glob("*/*.md")):
        yield from ((path.stem.replace("_", "-"), case) for case in cases_of(path))


@cache
def _entries() -> tuple[CatalogueEntry, ...]:
    return tuple(entry for entry in read_catalogue().entries if entry.code in READ_IN_SOURCE)


def _findings(files: dict[str, str], directory: Path, check: str = "") -> list[Finding]:
    """Return what all checks find in a case, or one of them."""
    (directory / ".git").mkdir(parents=True)
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text, name)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    script = read_script(directory / "train.py")
    entries = [entry for entry in _entries() if check in ("", entry.name)]
    return [finding for result in run_checks(entries, script, None, static=True) for finding in result.from_source]


def _complaints(name: str, mend: Mend, before: list[Finding], after: list[Finding]) -> Iterator[str]:
    said = dict.fromkeys(finding.remedy for finding in before if finding.name == name)
    if tuple(said) != mend.said:
        yield f"the remedy is {' '.join(said) or 'none'!r}"
    known = {finding.name for finding in before} - {name}
    for finding in after:
        if finding.name == name:
            yield f"it is still found at line {_line(finding)}: {finding.title}"
        elif finding.name not in known:
            yield f"the remedy brings about {finding.name} at line {_line(finding)}: {finding.title}"


def _line(finding: Finding) -> int:
    return finding.locations[0].line if finding.locations else 0
