"""How many findings change when a program is written otherwise, over the cases of all checks."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.catalogue.registry import CatalogueEntry, read_catalogue
from ddpdoctor.catalogue.run_checks import run_checks
from ddpdoctor.source.script.script import read_script
from tests.checks.case_blocks import cases_of
from tests.index_of_checks import READ_IN_SOURCE
from tests.metamorphic.transforms import TRANSFORMS, in_comments, lines_of_origin

CHECKS = Path(__file__).parents[2] / "checks"
Found = frozenset[tuple[str, str, int]]
"""Code, severity and line of the original entry or module, by its number in the original."""


class Change(NamedTuple):
    """One program whose findings changed."""

    case: str
    transform: str
    lost: Found
    made: Found

    @property
    def errors(self) -> int:
        """How many errors were lost or made."""
        return sum(severity == "error" for _, severity, _ in (*self.lost, *self.made))


class Row(NamedTuple):
    """What one way of writing changes."""

    transform: str
    programs: int
    findings: int
    changes: tuple[Change, ...]

    @property
    def changed(self) -> int:
        """How many findings were lost or made."""
        return sum(len(change.lost) + len(change.made) for change in self.changes)

    @property
    def share(self) -> float:
        """The changed part of the findings."""
        return self.changed / max(1, self.findings)


def programs() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the cases of all checks by their places."""
    for path in sorted(CHECKS.glob("*/*.md")):
        for case in cases_of(path):
            yield f"{path.with_suffix('').relative_to(CHECKS)}:{case.line}", case.files


def rows(transforms: Sequence[str], only: str = "", each: int = 1) -> list[Row]:
    """Measure some transforms on all programs, or on each so many-th."""
    entries = [entry for entry in read_catalogue().entries if entry.code in READ_IN_SOURCE]
    chosen = [(name, files) for name, files in programs() if only in name][::each]
    with tempfile.TemporaryDirectory() as directory:
        before = {name: _findings(files, origins(files), Path(directory) / "before", entries) for name, files in chosen}
        return [_row(transform, chosen, before, Path(directory) / transform, entries) for transform in transforms]


def _row(
    transform: str,
    chosen: Sequence[tuple[str, Mapping[str, str]]],
    before: Mapping[str, Found],
    directory: Path,
    entries: Sequence[CatalogueEntry],
) -> Row:
    changes: list[Change] = []
    count = findings = 0
    for name, files in chosen:
        written = rewritten(transform, files)
        if written is None:
            continue
        count += 1
        findings += len(before[name])
        after = _findings(*written, directory, entries)
        if after != before[name]:
            changes.append(Change(name, transform, before[name] - after, after - before[name]))
    return Row(transform, count, findings, tuple(changes))


def rewritten(transform: str, project: Mapping[str, str]) -> tuple[dict[str, str], dict[tuple[str, int], int]] | None:
    """Return the files in another form, with the line of the original for each of their lines; those that are no Python
    (a command, a README) stay what they are.
    """
    files = _of_python(project)
    others = {name: text for name, text in project.items() if name not in files}
    if transform == "comments":
        texts = {name: in_comments(text) for name, text in files.items()}
        return texts | others, {(name, line + 1): old for (name, line), old in origins(files).items()}
    changed = TRANSFORMS[transform]({name: ast.parse(text) for name, text in files.items()})
    if changed is None:
        return None
    texts = {name: ast.unparse(ast.fix_missing_locations(tree)) for name, tree in changed.items()}
    lines = {name: lines_of_origin(tree, texts[name]) for name, tree in changed.items()}
    return texts | others, {(name, line): old for name, found in lines.items() for line, old in found.items()}


def origins(files: Mapping[str, str]) -> dict[tuple[str, int], int]:
    """Return for each line where its innermost statement begins."""
    lines = {name: lines_of_origin(ast.parse(text), text) for name, text in _of_python(files).items()}
    return {(name, line): old for name, found in lines.items() for line, old in found.items()}


def _of_python(files: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in files.items() if name.endswith(".py")}


def _findings(
    files: Mapping[str, str], origin: Mapping[tuple[str, int], int], directory: Path, entries: Sequence[CatalogueEntry]
) -> Found:
    with tempfile.TemporaryDirectory(dir=_made(directory)) as place:
        root = Path(place)
        (root / ".git").mkdir()
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        found: set[tuple[str, str, int]] = set()
        for result in run_checks(entries, read_script(root / "train.py"), None, static=True):
            for finding in result.from_source:
                where = finding.location
                line = where.line if where is not None else 0
                name = Path(where.file).relative_to(root).as_posix() if where is not None else ""
                found.add((finding.code, finding.severity.value, origin.get((name, line), line)))
    return frozenset(found)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
