"""The cases of each check are its documentation by example; here every example is tried."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import run_checks
from ddpdoctor.finding import Finding
from ddpdoctor.source.script.script import Script, read_script, uses_part
from tests.checks.case_blocks import Case, Mark, cases_of
from tests.index_of_checks import BUILT_IN, READ_IN_SOURCE

CHECKS = Path(__file__).parents[2] / "checks"
FILES = sorted(CHECKS.glob("*/*.md"))
TESTS = CHECKS.with_name("tests")
SCRIPTS = [*sorted((TESTS / "source" / "correct").glob("*.py")), *sorted((TESTS.parent / "examples").glob("*.py"))]
CASES = [(path, case) for path in FILES for case in cases_of(path)]


@pytest.mark.parametrize(
    ("path", "case"), CASES, ids=[f"{path.parent.name}/{path.stem}:{case.line}" for path, case in CASES]
)
def test_the_findings_are_the_marks(path: Path, case: Case, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name, text in case.files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    script = read_script(tmp_path / "train.py")
    found = [finding for finding in _findings(script) if not case.only or finding.name in case.only]
    marks = [mark for mark in case.marks if not case.only or mark[3] in case.only]
    assert sorted(_mark(finding, tmp_path) for finding in found) == marks, _shown(found)
    assert list(fired_without_words(script)) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_no_check_fires_on_a_script_without_its_words(path: Path) -> None:
    assert list(fired_without_words(read_script(path))) == []


@pytest.mark.parametrize("code", sorted(READ_IN_SOURCE))
def test_a_check_of_the_source_has_a_block_that_fires_and_one_that_does_not(code: str) -> None:
    group, _, name = BUILT_IN[code].removeprefix("ddpdoctor.checks.").partition(".")
    cases = cases_of(CHECKS / group / f"{name}.md")
    own = [any(mark[3] == name.replace("_", "-") for mark in case.marks) for case in cases]
    assert any(own)
    assert any(case.says_ok and not fires for case, fires in zip(cases, own, strict=True))


def test_a_file_belongs_to_a_check() -> None:
    known = {module.removeprefix("ddpdoctor.checks.").replace(".", "/") for module in BUILT_IN.values()}
    assert {path.with_suffix("").relative_to(CHECKS).as_posix() for path in FILES} <= known


def fired_without_words(script: Script) -> Iterator[str]:
    """Yield the checks that fire on a script though it lacks all of their trigger words."""
    for code, words in READ_IN_SOURCE.items():
        if not uses_part(script, words) and next(iter(import_module(BUILT_IN[code]).in_source(script)), None):
            yield code


def _findings(script: Script) -> list[Finding]:
    assert not script.notes
    entries = [described for described in read_catalogue().entries if described.code in READ_IN_SOURCE]
    results = run_checks(entries, script, None, static=True)
    assert not [(result.code, result.gap) for result in results if result.gap and not result.unfollowed]
    return [finding for result in results for finding in result.from_source]


def _mark(finding: Finding, root: Path) -> Mark:
    place = finding.locations[0]
    return Path(place.file).relative_to(root).as_posix(), place.line, finding.severity.value, finding.name


def _shown(found: list[Finding]) -> str:
    return "\n".join(f"line {finding.locations[0].line}: {finding.name}: {finding.title}" for finding in found)
