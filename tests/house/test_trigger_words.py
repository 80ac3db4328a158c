"""The trigger words of the index: a check never fires on a script that lacks all of its words."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from ddpdoctor.checks import BUILT_IN, READ_IN_SOURCE
from ddpdoctor.source.script.script import Script, read_script
from ddpdoctor.source.script.text_search import mentions_any
from tests.checks.case_blocks import cases_of

TESTS = Path(__file__).parents[1]
MARKDOWN = sorted((TESTS.parent / "checks").glob("*/*/cases.md"))
SCRIPTS = [*sorted((TESTS / "source" / "correct").glob("*.py")), *sorted((TESTS.parent / "examples").glob("*.py"))]


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.parent.name)
def test_no_check_fires_on_an_example_without_its_words(path: Path, tmp_path: Path) -> None:
    for number, case in enumerate(cases_of(path)):
        directory = tmp_path / str(number)
        for name, text in case.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        assert list(_fired_without_words(read_script(directory / "train.py"))) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_no_check_fires_on_a_script_without_its_words(path: Path) -> None:
    assert list(_fired_without_words(read_script(path))) == []


def test_every_check_of_the_source_has_words() -> None:
    for code, words in READ_IN_SOURCE.items():
        assert words, code
        assert all(word and "." not in word.strip(".") for word in words), code


def _fired_without_words(script: Script) -> Iterator[str]:
    for code, words in READ_IN_SOURCE.items():
        if not mentions_any(script, words) and next(iter(import_module(BUILT_IN[code]).in_source(script)), None):
            yield code
