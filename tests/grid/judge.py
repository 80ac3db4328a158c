"""Reads the scripts of the grid and counts what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.finding import Finding
from ddpdoctor.source.script.script import Script, read_script
from tests.grid.cases import ACTIONS, PLACES, SHAPES, TESTS, Case, grid
from tests.index_of_checks import BUILT_IN

CODES = ("DDP301", "DDP302", "DDP303", "DDP309", "DDP314")
"""The checks of divergences: a broken case is one finding of one of them."""
MATRIX = Path(__file__).with_name("MATRIX.md")


class Judged(NamedTuple):
    """A case and whether what was said of it is right."""

    case: Case
    right: bool
    """Broken: found, once, at a line that only some ranks run. Correct: nothing said."""
    said: tuple[str, ...]


def judge_all(directory: Path, cases: Iterable[Case] | None = None) -> list[Judged]:
    """Write and read cases in a directory, by default all of the grid."""
    return [_judge(case, directory / str(number)) for number, case in enumerate(cases or grid())]


def divergences(script: Script) -> list[Finding]:
    """Return what the source says of ranks that part."""
    return [finding for code in CODES for finding in import_module(BUILT_IN[code]).in_source(script)]


def _judge(case: Case, directory: Path) -> Judged:
    directory.mkdir()
    for name, text in case.files.items():
        (directory / name).write_text(text, encoding="utf-8")
    found = divergences(read_script(directory / "train.py"))
    places = {(Path(finding.locations[0].file).name, finding.locations[0].line) for finding in found}
    right = bool(places) and places <= case.lines if case.broken else not found
    return Judged(case, right, tuple(f"{finding.code} line {finding.locations[0].line}" for finding in found))


def matrix(judged: Iterable[Judged]) -> str:
    """The table of what is found and the list of what is not, as Markdown."""
    cases = list(judged)
    broken = [one for one in cases if one.case.broken]
    correct = [one for one in cases if not one.case.broken]
    found, silent = sum(one.right for one in broken), sum(one.right for one in correct)
    lines = [
        "# Which divergences are found in the source",
        "",
        "Written by `python -m tests.grid`; a test keeps it up to date. Every cell counts the broken scripts that are",
        f"found at the right line, of {len(TESTS)} forms of the rank test each.",
        "",
        f"* broken: {found} of {len(broken)} found",
        f"* correct twins: {len(correct) - silent} of {len(correct)} reported",
        "",
    ]
    total, hit = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for one in broken:
        key = (one.case.action, one.case.place, one.case.shape)
        total[key] += 1
        hit[key] += one.right
    for action in ACTIONS:
        if not any(key[0] == action for key in total):
            continue
        lines += [f"## {action}", "", f"| | {' | '.join(SHAPES)} |", f"| --- |{' --- |' * len(SHAPES)}"]
        for place in PLACES:
            cells = [f"{hit[action, place, shape]}/{total[action, place, shape]}" for shape in SHAPES]
            lines.append(f"| {place} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Not found, or reported though correct", ""]
    wrong = [one for one in cases if not one.right]
    lines += [f"* {one.case.name}: {', '.join(one.said) or 'nothing said'}" for one in wrong] or ["Nothing."]
    return "\n".join(lines) + "\n"
