from __future__ import annotations

from pathlib import Path

import msgspec

from ddpdoctor.finding import Fact, Finding, Frame, Refuted, Severity
from ddpdoctor.findings.merge import Refutation, merge, unrefuted
from tests.report.examples import TRAIN, at, finding, hang, unsharded, unsharded_seen


def test_a_suspicion_seen_in_the_run_at_one_of_its_lines_becomes_one_finding_with_both_bases() -> None:
    (merged,) = merge([unsharded()], [unsharded_seen()])
    assert merged.basis == {"source", "rehearsal"}
    assert merged.severity is Severity.ERROR
    assert merged.title == "ranks 0 and 1 each draw 512 of 512 samples"
    assert merged.ranks == (0, 1)
    assert [fact.basis for fact in merged.evidence] == ["rehearsal", "source"]
    assert merged.location == unsharded().location


def test_a_run_finding_also_meets_a_suspicion_at_the_place_of_its_evidence() -> None:
    seen = finding("DDP101", "x", Severity.ERROR, at(3), basis="rehearsal", evidence=(_fact(16),))
    assert len(merge([unsharded()], [seen])) == 1


def test_findings_of_one_check_at_different_places_stay_two() -> None:
    seen = finding("DDP101", "x", Severity.ERROR, at(20), basis="rehearsal")
    assert len(merge([unsharded()], [seen])) == 2


def test_a_merged_suspicion_without_evidence_is_still_seen_in_the_source() -> None:
    suspicion = finding("DDP101", "x", Severity.WARNING, at(14, 17), title="it has no sampler")
    (merged,) = merge([suspicion], [unsharded_seen()])
    assert merged.evidence[-1].text == "it has no sampler"
    assert merged.evidence[-1].basis == "source"


def test_a_divergence_in_the_source_is_the_cause_of_an_exit_that_the_run_saw_on_its_lines() -> None:
    suspicion = _suspected_divergence(9)
    seen = finding("DDP306", "early-exit", Severity.ERROR, at(9), basis="rehearsal")
    (merged,) = merge([suspicion], [seen])
    assert merged.code == "DDP306"
    assert merged.basis == {"source", "rehearsal"}


def test_a_divergence_in_the_source_merges_through_the_stack_of_a_waiting_rank() -> None:
    (merged,) = merge([_suspected_divergence(22)], [hang()])
    assert merged.title == hang().title


def test_a_parting_of_which_the_run_blames_no_rank_is_told_with_the_remedy_and_the_call_of_the_source() -> None:
    places = at(22), at(9)
    seen = finding("DDP301", "rank-divergent-collective", Severity.ERROR, *places, basis="rehearsal", ranks=(0, 1))
    (merged,) = merge([_suspected_divergence(9)], [seen])
    assert (merged.remedy, merged.location) == (_suspected_divergence(9).remedy, at(9))
    blamed = msgspec.structs.replace(seen, ranks=(1,))
    (merged,) = merge([_suspected_divergence(9)], [blamed])
    assert (merged.remedy, merged.location) == (blamed.remedy, at(22))


def test_a_divergence_elsewhere_in_the_source_stays_a_finding_of_its_own() -> None:
    seen = finding("DDP306", "early-exit", Severity.ERROR, at(23), basis="rehearsal", evidence=(_stack(23),))
    assert len(merge([_suspected_divergence(9)], [seen])) == 2


def test_only_divergences_absorb_a_suspected_divergence() -> None:
    seen = finding("DDP201", "unused-parameters", Severity.ERROR, at(9), basis="rehearsal")
    assert len(merge([_suspected_divergence(9)], [seen])) == 2


def test_two_suspicions_confirmed_by_one_divergence_are_one_finding() -> None:
    (merged,) = merge([_suspected_divergence(9), _suspected_divergence(22)], [hang()])
    assert len(merged.locations) == 2


def test_a_refutation_drops_the_suspicion_of_the_same_check_at_the_same_place_only() -> None:
    other = finding("DDP601", "save-on-all-ranks", Severity.WARNING, at(14))
    elsewhere = finding("DDP101", "missing-distributed-sampler", Severity.WARNING, at(20))
    refutation = Refutation("DDP101", Refuted(location=at(15), reason="the ranks draw different samples"))
    kept, (cleared,) = unrefuted([unsharded(), other, elsewhere], [refutation])
    assert kept == (other, elsewhere)
    assert (cleared.code, cleared.location) == ("DDP101", unsharded().location)
    assert cleared.reason == "the ranks draw different samples"


def test_a_file_reached_through_a_symbolic_link_is_the_same_place(tmp_path: Path) -> None:
    link = tmp_path / "train.py"
    link.symlink_to(TRAIN)
    seen = finding("DDP101", "x", Severity.ERROR, at(15, file=str(link)), basis="rehearsal")
    assert len(merge([unsharded()], [seen])) == 1


def test_the_same_finding_said_twice_is_one() -> None:
    assert len(merge([unsharded(), unsharded()], [])) == 1


def test_findings_are_sorted_from_worst_to_mildest_and_then_by_place() -> None:
    findings = [
        finding("DDP209", "a", Severity.ADVICE, at(1)),
        finding("DDP101", "b", Severity.WARNING, at(20)),
        finding("DDP102", "c", Severity.WARNING, at(3)),
        finding("DDP301", "d", Severity.ERROR, at(22)),
    ]
    assert [found.name for found in merge(findings, [])] == ["d", "c", "b", "a"]


def test_the_source_says_why_ranks_part_where_the_run_cannot_tell() -> None:
    seen = finding("DDP302", "data-dependent-divergence", Severity.ERROR, at(9), basis="rehearsal")
    (merged,) = merge([_suspected_divergence(9)], [seen])
    assert (merged.code, merged.name, merged.title) == ("DDP301", "rank-divergent-collective", seen.title)
    other = finding("DDP303", "rank-zero-forward", Severity.ERROR, at(9))
    (merged,) = merge([_suspected_divergence(9), other], [seen])
    assert merged.code == "DDP302"


def test_what_one_condition_keeps_from_some_ranks_beside_the_call_is_no_second_finding() -> None:
    names = ("DDP301", "rank-divergent-collective", Severity.ERROR)
    seen = finding(*names, at(9), basis="rehearsal")
    suspicions = [finding(*names, at(9), at(8)), finding(*names, at(12), at(8)), finding(*names, at(20), at(19))]
    assert len(merge(suspicions, [seen])) == 2


def test_a_rank_that_can_raise_is_confirmed_by_its_exception() -> None:
    seen = finding("DDP706", "root-exception", Severity.ERROR, at(9), basis="rehearsal")
    (merged,) = merge([_suspected_divergence(9)], [seen])
    assert merged.code == "DDP706"


def _suspected_divergence(line: int) -> Finding:
    return finding("DDP301", "rank-divergent-collective", Severity.ERROR, at(line))


def _fact(line: int) -> Fact:
    return Fact(text="seen", basis="rehearsal", location=at(line))


def _stack(line: int) -> Fact:
    return Fact(text="seen", basis="rehearsal", rank=0, stack=(Frame(file=TRAIN, line=line, function="main"),))
