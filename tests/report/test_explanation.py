from __future__ import annotations

import json

import pytest

from ddpdoctor.check import Check, LoadedCheck
from ddpdoctor.cli.main import main
from ddpdoctor.finding import Severity
from ddpdoctor.report.explanation import as_list, as_text, sections, summary
from tests.index_of_checks import BUILT_IN
from tests.report.golden import assert_golden

DOCUMENTATION = """Ranks are counted from one,
as people count.

What it finds
    A loop over the ranks that starts with one, on every line of this sentence, which is longer than the eighty columns
    that a terminal has.

    rank 0:
      is not counted

Example
    for rank in range(1, world_size):
        print(rank)

Remedy
    Start with zero.
"""
CHECK = LoadedCheck(
    check=Check(
        code="XYZ001",
        name="ranks-from-one",
        severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    ),
    documentation=DOCUMENTATION,
    in_source=lambda script: iter(()),
)


def test_the_text_is_filled_to_80_columns_and_keeps_listings() -> None:
    assert_golden("explanation.txt", as_text([CHECK]))


def test_the_list_has_one_line_a_check() -> None:
    assert as_list([CHECK]) == "XYZ001  ranks-from-one  error    source\n"


def test_the_summary_is_one_line_and_the_sections_are_dedented() -> None:
    assert summary(DOCUMENTATION) == "Ranks are counted from one, as people count"
    assert list(sections(DOCUMENTATION)) == ["What it finds", "Example", "Remedy"]
    assert sections(DOCUMENTATION)["Example"] == "for rank in range(1, world_size):\n    print(rank)"


def test_explain_all_as_json_holds_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--all", "--output-format", "json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert {check["code"] for check in explained} >= set(BUILT_IN)
    assert {key for check in explained for key in check} == {
        "code",
        "name",
        "severity",
        "sees",
        "needs",
        "summary",
        "sections",
        "documentation",
    }


@pytest.mark.parametrize("word", ["DDP301", "ddp301", "rank-divergent-collective"])
def test_explain_takes_a_code_or_a_name(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("rank-divergent-collective (DDP301), error")
    assert err == ""


def test_explain_lists_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BUILT_IN)
