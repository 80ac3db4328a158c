"""What is said of suspicions of the source when a rehearsal ran: confirmed, cleared, not rehearsed, not confirmed."""

from __future__ import annotations

import json

import msgspec
import pytest

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.examination import Examination, RehearsalSection, Unreached
from ddpdoctor.examine.one_script import ExamineRequest, Reached, conclude, reached_lines
from ddpdoctor.finding import Confirmed, Fact, Frame, Refuted, Severity
from ddpdoctor.record.model import Job, RunRecord, Site, StreamState
from ddpdoctor.record.streams.setup import LinesExecuted
from ddpdoctor.report.formats import concise, full, github, gitlab, junit, markdown, sarif
from ddpdoctor.report.formats import json as json_report
from tests.report.examples import COMPLETED, SAMPLE, SKIPPED, SOURCE, TRAIN, at, finding, unsharded, unsharded_seen

STOPPED = RehearsalSection(
    status="stopped", reason="stopped at a proven defect", ranks=2, steps=3, seconds=1.0, device="cpu"
)
FAILED = RehearsalSection(status="failed", reason="it raised", ranks=2, seconds=1.0, device="cpu")
SUSPECTED = CheckResult(
    code="DDP101", name="missing-distributed-sampler", from_source=(unsharded(),), looked_at_run=True
)


def concluded(
    *results: CheckResult, rehearsal: RehearsalSection = COMPLETED, reached: Reached | None = None
) -> Examination:
    return conclude(ExamineRequest(target="train.py"), str(SAMPLE), SOURCE, rehearsal, results, reached=reached)


@pytest.mark.parametrize(
    ("rehearsal", "reached", "expected"),
    [
        (COMPLETED, Reached({TRAIN: frozenset({1, 2})}), "not rehearsed: no rank reached train.py:14"),
        (COMPLETED, Reached({TRAIN: frozenset({16})}), "not confirmed: it did not occur in the rehearsal"),
        (COMPLETED, None, "not confirmed: it did not occur in the rehearsal"),
        (
            msgspec.structs.replace(COMPLETED, passes_cut=True),
            None,
            "not confirmed: it did not occur in the rehearsal, on the first batches of each pass",
        ),
        (STOPPED, Reached({TRAIN: frozenset({16})}), "not confirmed: the rehearsal ended before it could occur"),
        (STOPPED, Reached(), "not rehearsed: no rank reached train.py:14"),
        (FAILED, None, "not rehearsed: no training step was made"),
        (SKIPPED, None, ""),
    ],
)
def test_a_suspicion_that_the_run_did_not_confirm_says_so(
    rehearsal: RehearsalSection, reached: Reached | None, expected: str
) -> None:
    (found,) = concluded(SUSPECTED, rehearsal=rehearsal, reached=reached).findings
    assert found.unconfirmed == expected


@pytest.mark.parametrize(
    ("alone", "expected"),
    [
        ({16: (1,)}, "not confirmed: only rank 1 ran train.py:16, and nothing came of it in the rehearsal"),
        ({15: (1,)}, "not confirmed: it did not occur in the rehearsal"),
    ],
)
def test_a_branch_that_one_rank_took_without_harm_is_said_to_have_been_taken(
    alone: dict[int, tuple[int, ...]], expected: str
) -> None:
    parting = finding("DDP301", "x", Severity.ERROR, at(14), at(16), trouble="rank-branch")
    result = CheckResult(code="DDP301", name="x", from_source=(parting,), looked_at_run=True)
    (found,) = concluded(result, reached=Reached({TRAIN: frozenset({14, 15, 16})}, {TRAIN: alone})).findings
    assert found.unconfirmed == expected


@pytest.mark.parametrize(
    ("nodes_wanted", "expected"), [(2, "use `--layout 2x1`"), (0, "it did not occur in the rehearsal")]
)
def test_a_suspicion_that_one_node_cannot_show_says_which_layout_does(nodes_wanted: int, expected: str) -> None:
    suspected = msgspec.structs.replace(SUSPECTED, nodes_wanted=nodes_wanted)
    (found,) = concluded(suspected, reached=Reached({TRAIN: frozenset({16})})).findings
    assert found.unconfirmed.startswith("not confirmed") and found.unconfirmed.endswith(expected)


@pytest.mark.parametrize(("severity", "said"), [(Severity.WARNING, True), (Severity.ADVICE, False)])
def test_nothing_is_said_of_what_is_milder_than_the_rest(severity: Severity, said: bool) -> None:
    habit = finding("DDP313", "hot", severity, at(14))
    result = CheckResult(
        code="DDP313", name="hot", from_source=(habit,), looked_at_run=True, source_severity=Severity.WARNING
    )
    assert bool(concluded(result).findings[0].unconfirmed) is said


def test_a_run_that_can_only_confirm_adds_what_it_saw_to_the_suspicion_and_says_nothing_without() -> None:
    seen = Fact(text="each rank ran it 8 times", basis="rehearsal")
    confirmed = tuple(Confirmed(location=at(line), fact=seen) for line in (14, 20))
    suspicions = tuple(finding("DDP313", "hot", Severity.ADVICE, at(line)) for line in (14, 16))
    result = CheckResult(code="DDP313", name="hot", from_source=suspicions, confirmed=confirmed, looked_at_run=True)
    other = CheckResult(code="DDP316", name="x", confirmed=(Confirmed(location=at(16), fact=seen),), looked_at_run=True)
    examination = concluded(result, other)
    first, second = examination.findings
    assert (first.location, sorted(first.basis), first.evidence) == (at(14), ["rehearsal", "source"], (seen,))
    assert (first.severity, first.title, first.unconfirmed) == (Severity.ADVICE, suspicions[0].title, "")
    assert (second.location, sorted(second.basis), second.evidence) == (at(16), ["source"], ())
    assert second.unconfirmed.startswith("not confirmed")
    assert "  also  train.py:16 (not confirmed)\n" in full.render(examination, 80, colour=False)
    assert concluded(msgspec.structs.replace(result, from_source=())).findings == ()


def test_nothing_is_said_of_what_was_confirmed_and_of_what_no_run_can_show() -> None:
    confirmed = CheckResult(
        code="DDP101",
        name="x",
        from_source=(unsharded(),),
        from_run=(unsharded_seen(),),
        looked_at_run=True,
    )
    of_source = CheckResult(
        code="DDP209", name="y", from_source=(finding("DDP209", "y", Severity.WARNING, at(3)),), looked_at_run=False
    )
    assert [found.unconfirmed for found in concluded(confirmed, of_source).findings] == ["", ""]


def test_a_suspected_divergence_could_have_been_confirmed_by_any_check_of_divergences() -> None:
    suspected = CheckResult(
        code="DDP302", name="z", from_source=(finding("DDP302", "z", Severity.WARNING, at(3)),), looked_at_run=False
    )
    looked = CheckResult(code="DDP306", name="early-exit", looked_at_run=True)
    assert concluded(suspected, looked).findings[0].unconfirmed.startswith("not confirmed")
    assert concluded(suspected).findings[0].unconfirmed == ""


def test_every_format_says_what_was_not_rehearsed() -> None:
    examination = concluded(SUSPECTED, reached=Reached())
    one_line = {
        "concise": concise.render(examination),
        "github": github.render(examination),
        "gitlab": gitlab.render(examination),
        "junit": junit.render(examination),
        "markdown": markdown.render(examination).replace("\\", ""),
        "sarif": sarif.render(examination, ()),
    }
    assert [name for name, text in one_line.items() if f"{unsharded().title} (not rehearsed)" not in text] == []
    assert "  not rehearsed  no rank reached train.py:14\n" in full.render(examination, 80, colour=False)
    (found,) = json.loads(json_report.render(examination))["findings"]
    assert found["unconfirmed"] == "not rehearsed: no rank reached train.py:14"


def test_what_the_run_cleared_is_counted_and_kept_for_machines() -> None:
    cleared = CheckResult(
        code="DDP101",
        name="missing-distributed-sampler",
        from_source=(unsharded(),),
        refuted=(Refuted(location=at(16), reason="the ranks draw different samples"),),
        looked_at_run=True,
    )
    examination = concluded(cleared)
    assert examination.findings == ()
    text = full.render(examination, 200, colour=False)
    assert text.endswith("No finding; 1 check passed; the rehearsal refuted 1 suspicion of the source.\n")
    (refuted,) = json.loads(json_report.render(examination))["refuted"]
    assert (refuted["code"], refuted["location"]["line"]) == ("DDP101", 14)
    assert refuted["reason"] == "the ranks draw different samples"


def test_lines_count_when_any_rank_ran_them_and_the_record_holds_all_of_them() -> None:
    lines = (
        LinesExecuted(rank=0, file=TRAIN, lines=frozenset({1})),
        LinesExecuted(rank=1, file=TRAIN, lines=frozenset({1, 2, 3}), by_chance=frozenset({3})),
    )
    record = RunRecord(job=Job(kind="rehearsal"), lines=lines, streams={"lines": StreamState("complete")})
    assert reached_lines(record) == Reached({TRAIN: frozenset({1, 2, 3})}, {TRAIN: {2: (1,)}})
    assert reached_lines(RunRecord(job=Job(kind="rehearsal"), lines=lines)) is None
    assert reached_lines(None) is None


def test_a_line_from_which_a_rank_called_something_was_reached_though_its_lines_came_too_late() -> None:
    lines = (LinesExecuted(rank=0, file=TRAIN, lines=frozenset({1})),)
    sites = (Site(frames=(Frame(file=TRAIN, line=14), Frame(file=TRAIN, line=20))),)
    record = RunRecord(job=Job(kind="rehearsal"), lines=lines, sites=sites, streams={"lines": StreamState("complete")})
    reached = reached_lines(record)
    assert reached is not None and reached.lines == {TRAIN: frozenset({1, 14, 20})}
    (found,) = concluded(SUSPECTED, rehearsal=STOPPED, reached=reached).findings
    assert found.unconfirmed == "not confirmed: the rehearsal ended before it could occur"


def test_lines_before_training_are_not_called_unreached_where_they_are_not_known() -> None:
    late = (LinesExecuted(rank=0, file=TRAIN, lines=frozenset({1, 2}), late=True),)
    record = RunRecord(job=Job(kind="rehearsal"), lines=late, streams={"lines": StreamState("complete")})
    reached = reached_lines(record)
    assert reached is not None and not reached.is_whole
    (found,) = concluded(SUSPECTED, reached=reached).findings
    assert found.unconfirmed == "not confirmed: it did not occur in the rehearsal"
    section = msgspec.structs.replace(COMPLETED, unreached=(Unreached(file=TRAIN, first_line=13, last_line=15),))
    (found,) = concluded(SUSPECTED, rehearsal=section, reached=reached).findings
    assert found.unconfirmed == "not rehearsed: no rank reached train.py:14"
