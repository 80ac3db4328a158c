from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.examination import Examination, RehearsalSection
from ddpdoctor.finding import Fact, Frame, Location, Severity
from ddpdoctor.report.formats import concise, full
from ddpdoctor.report.formats import json as json_report
from tests.report.examples import TRAIN, at, dataparallel, examination, finding, hang, result, unsharded, unsharded_seen
from tests.report.golden import assert_golden

PASSED = CheckResult(code="DDP102", name="missing-set-epoch", looked_at_run=True)


def clean() -> Examination:
    return examination(PASSED)


def stopped_at_a_proof() -> Examination:
    section = RehearsalSection(
        status="stopped", reason="rank 0 waits for rank 1", ranks=2, steps=3, seconds=2.71, device="cpu"
    )
    return examination(result(hang()), PASSED, rehearsal=section)


def merged_with_advice() -> Examination:
    merged = CheckResult(
        code="DDP101",
        name="missing-distributed-sampler",
        from_source=(unsharded(),),
        from_run=(unsharded_seen(),),
    )
    advice = CheckResult(code="DDP209", name="dataparallel", from_source=(dataparallel(19), dataparallel(20)))
    return examination(advice, merged, PASSED)


def failed() -> Examination:
    section = RehearsalSection(
        status="failed",
        reason="ranks 0 and 1 left with exit code 2",
        hint="Pass the script's own arguments after `--`; `--static` reads the source only.",
        output="usage: train.py [-h] --data DIR\ntrain.py: error: the following arguments are required: --data",
        ranks=2,
        seconds=1.04,
        device="cpu",
        not_held_back=("ran `nvidia-smi`",),
        notes=("part of the observation failed: KeyError",),
    )
    return examination(PASSED, result(dataparallel()), rehearsal=section)


def static_only() -> Examination:
    of_runs = CheckResult(code="DDP305", name="hang", gap="needs a rehearsal", by_nature=True)
    return examination(result(unsharded()), of_runs, static=True)


EXAMINATIONS = [clean, stopped_at_a_proof, merged_with_advice, failed, static_only]
with_every_examination = pytest.mark.parametrize("build", EXAMINATIONS, ids=lambda build: build.__name__)


@with_every_examination
def test_full(build: Callable[[], Examination]) -> None:
    assert_golden(f"{build.__name__}.full.txt", full.render(build(), 80, colour=False))


@with_every_examination
def test_concise(build: Callable[[], Examination]) -> None:
    assert_golden(f"{build.__name__}.concise.txt", concise.render(build()))


@with_every_examination
def test_json(build: Callable[[], Examination]) -> None:
    text = json_report.render(build())
    assert_golden(f"{build.__name__}.json", text)


@with_every_examination
@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_line_of_the_full_text_is_wider_than_the_terminal(build: Callable[[], Examination], width: int) -> None:
    assert max(map(len, full.render(build(), width, colour=False).splitlines())) <= width


@with_every_examination
def test_colours_change_nothing_but_colours(build: Callable[[], Examination]) -> None:
    coloured = full.render(build(), 80, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == full.render(build(), 80, colour=False)


def test_the_exit_code_in_the_json_is_the_one_of_the_process() -> None:
    assert json.loads(json_report.render(failed()))["exit_code"] == int(failed().exit_code)


def test_text_from_outside_can_neither_command_the_terminal_nor_be_markup() -> None:
    evil = "\x1b[2J[bold]x[/bold]\u202e\r\n:smile: \udcff"
    hostile = finding(
        "DDP706",
        "root-exception",
        Severity.ERROR,
        Location(file=f"/elsewhere/{evil}.py", line=3, function=evil),
        basis="rehearsal",
        title=f"rank 0 raised {evil}",
        remedy=evil,
        evidence=(Fact(text=evil, basis="rehearsal", rank=0, location=at(9)),),
    )
    section = RehearsalSection(status="failed", reason=evil, output=evil, notes=(evil,), device=evil)
    report = examination(result(hostile), rehearsal=section, notes=(evil,))
    for text in (full.render(report, 80, colour=False), concise.render(report)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)
        assert "[bold]x[/bold]" in re.sub(r"\n *", "", text)
    assert len(concise.render(report).splitlines()) == len(report.findings)
    assert json.loads(json_report.render(report))["findings"][0]["title"].startswith("rank 0 raised \x1b")


def test_one_line_a_finding_even_when_it_has_no_place() -> None:
    report = examination(result(finding(severity=Severity.ERROR)))
    expected = "train.py:1:1: error DDP101 missing-distributed-sampler: missing-distributed-sampler from the source\n"
    assert concise.render(report) == expected


def test_the_first_line_says_of_how_many_ranks_a_rehearsal_showed_a_few() -> None:
    section = RehearsalSection(status="completed", ranks=2, ranks_of_job=16, steps=8, seconds=3.1, device="cpu")
    assert full.what_was_done(examination(rehearsal=section)).endswith("on 2 of 16 ranks (CPU): 8 steps in 3.1 s.")


@pytest.mark.parametrize(("code", "said"), [("DDP201", False), ("DDP101", True)])
def test_a_failure_is_not_told_again_below_the_finding_that_tells_it(code: str, said: bool) -> None:
    section = RehearsalSection(status="failed", reason="it raised", ranks=2, told_by=frozenset({"unused-parameters"}))
    report = examination(result(finding(code, "name", Severity.ERROR, basis="rehearsal")), rehearsal=section)
    assert ("rehearsal failed" in full.render(report, 80, colour=False)) is said


def test_ranks_that_did_the_same_share_a_column() -> None:
    frames = (Frame(TRAIN, 22, "train"), Frame(TRAIN, 30, "main"))
    facts = tuple(Fact(text=f"rank {rank} waits", basis="rehearsal", rank=rank, stack=frames) for rank in (1, 2))
    stands = Fact(text="rank 0 is elsewhere", basis="rehearsal", rank=0, stack=frames[:1])
    standing = finding("DDP305", "hang", Severity.ERROR, basis="rehearsal", evidence=(stands, *facts))
    report = examination(result(standing))
    text = full.render(report, 80, colour=False)
    assert text.count("ranks 1 and 2") == 1
    assert text.count("waits") == 1
    assert "  seen in the rehearsal, see the columns\n  do " in text


@pytest.mark.parametrize(
    ("innermost", "said"),
    [
        (Frame("/usr/lib/python3.11/queue.py", 171, "Queue.get"), "in Queue.get (queue.py:171)"),
        (Frame("/usr/lib/python3.11/site-packages/torch/autograd/graph.py", 979, "run_backward"), ""),
        (Frame(TRAIN, 7, "inner"), ""),
    ],
)
def test_a_column_says_what_a_library_waits_in_below_the_users_line(innermost: Frame, said: str) -> None:
    facts = tuple(
        Fact(text=f"rank {rank} is at 22", basis="run", rank=rank, stack=(innermost, Frame(TRAIN, 22 + rank, "train")))
        for rank in (0, 1)
    )
    report = examination(result(finding("DDP305", "hang", Severity.ERROR, basis="run", evidence=facts)))
    text = full.render(report, 80, colour=False)
    assert said in text and text.count("    in ") == (2 if said else 0)


def test_what_was_not_held_back_is_said_in_the_first_line() -> None:
    assert "Not isolated: it ran `nvidia-smi`." in full.what_was_done(failed())
    assert json.loads(json_report.render(failed()))["rehearsal"]["notes"] == [
        "not isolated: the script ran `nvidia-smi`",
        "part of the observation failed: KeyError",
    ]
