"""The trigger words of the checks: a check never fires on a script that lacks all of its words."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from ddpdoctor.checks import BUILT_IN, READ_IN_SOURCE
from ddpdoctor.source.script.script import Script, read_script, uses_part
from tests.checks.case_blocks import cases_of

TESTS = Path(__file__).parents[1]
MARKDOWN = sorted((TESTS.parent / "checks").glob("*/*.md"))
SCRIPTS = [*sorted((TESTS / "source" / "correct").glob("*.py")), *sorted((TESTS.parent / "examples").glob("*.py"))]


def test_no_check_fires_on_an_example_without_its_words(tmp_path: Path) -> None:
    fired = []
    for path in MARKDOWN:
        for case in cases_of(path):
            directory = tmp_path / f"{path.stem}-{case.line}"
            for name, text in case.files.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(text, encoding="utf-8")
            fired += [f"{path}:{case.line}: {code}" for code in _fired_without_words(directory / "train.py")]
    assert fired == []


def test_no_check_fires_on_a_script_without_its_words() -> None:
    assert [f"{path.name}: {code}" for path in SCRIPTS for code in _fired_without_words(path)] == []


def _fired_without_words(entry: Path) -> Iterator[str]:
    script: Script = read_script(entry)
    for code, words in READ_IN_SOURCE.items():
        if not uses_part(script, words) and next(iter(import_module(BUILT_IN[code]).in_source(script)), None):
            yield code
