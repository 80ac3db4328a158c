"""No log of a CI takes a line of ours for a command, whatever the words in it and wherever they are folded."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from rich.text import Text

from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.examination import AutopsySection, Examination
from ddpdoctor.finding import Fact, Severity
from ddpdoctor.monitor.snapshot import FindingView, Snapshot, StallSide, StallView
from ddpdoctor.report import streams
from ddpdoctor.report.formats import concise, full, markdown
from ddpdoctor.report.layout import paragraph, to_string
from ddpdoctor.report.run import run_text
from ddpdoctor.report.run.run_lines import RunLines
from ddpdoctor.report.streams import one_line, visible, without_commands
from tests.report.examples import at, examination, finding, result

WORDS = (
    "::error::owned",
    "::set-output name=a::b",
    "::stop-commands::x",
    "::add-mask::a",
    "##[error]owned",
    "##vso[task.setvariable variable=a]b",
    "##teamcity[buildProblem description='x']",
    "\x1b[0Ksection_start:1560896352:a\r\x1b[0K",
)
LONG = " ".join(f"a word {number} {word} b" for number, word in enumerate(WORDS)) + "".join(WORDS)
WIDTHS = range(20, 201)
_COMMAND = re.compile(r"^\s*::[A-Za-z]|##[A-Za-z]*\[|section_start:\d+:\w+\r?\x1b", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def hostile() -> Examination:
    """An examination in which every text is full of commands, its script's name first."""
    place = at(3, file=f"/p/{WORDS[0]}/{WORDS[0]}.py", function=WORDS[1])
    found = finding(
        "DDP101", "missing-distributed-sampler", Severity.WARNING, place,
        title=LONG, remedy=LONG, evidence=(Fact(text=LONG, basis="source", location=place),),
    )  # fmt: skip
    made = examination(result(found), notes=(LONG, *WORDS))
    rehearsal = replace(made.rehearsal, status="failed", reason=LONG, output="\n".join(WORDS), hint=LONG)
    return replace(made, target=f"{WORDS[0]}.py", root="/p", rehearsal=rehearsal)


def watched() -> Snapshot:
    """A run in which every text is full of commands."""
    found = hostile().findings[0]
    side = StallSide(ranks=(0,), text=LONG)
    return Snapshot(
        now_ns=2, name=WORDS[0], state="stalled", started_at_ns=1, run_directory=f"/{WORDS[0]}",
        verdict=RunVerdict(state="broken", text=LONG, why=WORDS, next=LONG), notes=WORDS,
        findings=(FindingView(finding=found, since_ns=1), FindingView(finding=found, since_ns=1, until_ns=2)),
        stall=StallView(title=LONG, since_ns=1, sides=(side,), remedy=LONG),
    )  # fmt: skip


def dead() -> Examination:
    """An autopsy that quotes lines of a log."""
    made = hostile()
    cause = replace(made.findings[0], role="cause", doubt=LONG)
    echo = replace(made.findings[0], role="echo")
    return replace(made, findings=(cause, echo), autopsy=AutopsySection(logs=1, missing=WORDS))


@pytest.mark.parametrize(
    "render",
    [
        lambda width, colour: full.render(hostile(), width, colour=colour),
        lambda width, colour: full.render(dead(), width, colour=colour),
        lambda width, colour: run_text.render(watched(), "/", width, colour=colour),
    ],
)
def test_no_line_of_a_text_is_a_command_at_any_width(render: Callable[[int, bool], str]) -> None:
    for width in WIDTHS:
        assert [found.group() for found in _COMMAND.finditer(render(width, False))] == [], width
    assert _COMMAND.search(_COLOUR.sub("", render(40, True))) is None


@pytest.mark.parametrize("render", [concise.render, markdown.render])
def test_no_line_of_other_formats_is_a_command(render: Callable[[Examination], str]) -> None:
    assert _COMMAND.search(render(hostile())) is None


def test_folded_words_are_commands_without_our_doing() -> None:
    """What is tested here happens: of these words some come to stand at the beginning of a line."""
    texts = ["\n".join(line.plain for line in paragraph(Text(LONG), width)) for width in WIDTHS]
    assert sum(bool(re.search(r"^\s*::", text, re.MULTILINE)) for text in texts) > len(WIDTHS) // 4


def test_lines_keep_all_but_the_first_colon_and_a_hash() -> None:
    assert without_commands("a ::b\n  ::error::c\n::\n") == "a ::b\n  \\x3a:error::c\n::\n"
    assert visible("##vso[a] ## b #[c]") == "\\x23#vso[a] ## b #[c]"
    assert to_string([Text("::error::x", "bold")], colour=False) == "\\x3a:error::x\n"


def test_talk_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    streams.say("\n".join(WORDS))
    streams.say_lines(RunLines("/").news(watched()))
    said = capsys.readouterr().err
    assert "owned" in said
    assert _COMMAND.search(said) is None


def test_a_text_of_millions_of_characters_is_shown_in_part() -> None:
    assert len(one_line("x" * 50_000_000)) < 21_000
