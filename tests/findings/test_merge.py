from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ddpdoctor.equivalence_section import OWN_GRADIENTS
from ddpdoctor.finding import Fact, Finding, Frame, Refuted, Severity
from ddpdoctor.findings import merge, unrefuted
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


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("DDP301", "rank-divergent-collective"),
        ("DDP302", "data-dependent-divergence"),
        ("DDP303", "rank-zero-forward"),
        ("DDP304", "collective-mismatch"),
        ("DDP305", "hang"),
        ("DDP306", "early-exit"),
        ("DDP312", "silent-desync"),
    ],
)
def test_a_divergence_that_the_source_explains_is_told_as_the_source_tells_it_with_the_proof_of_the_run(
    code: str, name: str
) -> None:
    suspicion = _suspected_divergence(9)
    seen = finding(code, name, Severity.ERROR, at(22), at(9), basis="rehearsal", ranks=(1,), title="rank 1 left")
    (merged,) = merge([suspicion], [seen])
    assert (merged.code, merged.title, merged.remedy) == ("DDP301", suspicion.title, suspicion.remedy)
    assert merged.locations == (at(9), at(22))
    assert merged.basis == {"source", "rehearsal"}
    assert merged.evidence[0].text == "rank 1 left"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("forward-bypasses-ddp", 14),
        ("diverged-replicas", 14),
        ("unlike-one-process", 14),
        ("missing-distributed-sampler", 12),
    ],
)
def test_where_the_run_sees_an_effect_alone_the_line_that_does_it_leads(name: str, first: int) -> None:
    code = "DDP208"
    cause = finding(code, name, Severity.ERROR, at(14), title="rank 0 alone lowers it", remedy="Lower it everywhere.")
    effect = finding(code, name, Severity.ERROR, at(12), basis="rehearsal", title="they differ", evidence=(_fact(14),))
    (merged,) = merge([cause], [effect])
    assert merged.location == at(first)
    if first == 14:
        assert (merged.title, merged.remedy) == ("rank 0 alone lowers it", "Lower it everywhere.")
        assert merged.evidence[0].text == "they differ"


@pytest.mark.parametrize(("said", "leads"), [("divided by a count of all", True), ("another cause", False)])
def test_several_lines_of_one_cause_lead_together_and_several_causes_do_not(said: str, leads: bool) -> None:
    name, title, facts = "unlike-one-process", "divided by a count of all", (_fact(12),)
    causes = [
        finding("DDP223", name, Severity.WARNING, at(14), title=title, remedy="Multiply it.", evidence=facts),
        finding("DDP223", name, Severity.WARNING, at(15), title=said, remedy="Multiply it.", evidence=facts),
    ]
    effect = finding(
        "DDP223", name, Severity.WARNING, at(12), basis="rehearsal", title="half of it", remedy="Look for it."
    )
    merged = merge(causes, [effect])
    assert [one.remedy for one in merged] == ["Multiply it." if leads else "Look for it."]
    assert merged[0].locations == ((at(14), at(12), at(15)) if leads else (at(12), at(14), at(15)))


def test_parameters_of_a_replaced_module_that_get_no_gradient_are_told_as_the_replacement() -> None:
    cause = finding("DDP213", "module-changed-after-wrap", Severity.ERROR, at(14), evidence=(_fact(12),))
    effect = msgspec.structs.replace(
        finding("DDP201", "unused-parameters", Severity.ERROR, at(12), basis="rehearsal", title="no gradient"),
        trouble="unused-parameters",
    )
    (merged,) = merge([cause], [effect])
    assert (merged.code, merged.location, merged.trouble) == ("DDP213", at(14), "unused-parameters")
    assert merged.evidence[0].text == "no gradient"


def test_a_divergence_in_the_source_merges_through_the_stack_of_a_waiting_rank() -> None:
    (merged,) = merge([_suspected_divergence(22)], [hang()])
    assert merged.evidence[0].text == hang().title


def test_the_rank_that_leaves_is_blamed_and_of_a_branch_the_rank_that_calls() -> None:
    evidence = (_on_rank(0, 23), _on_rank(1, 9))
    seen = finding("DDP301", "x", Severity.ERROR, at(23), at(9), basis="rehearsal", ranks=(1,), evidence=evidence)
    leaving = finding("DDP301", "x", Severity.ERROR, at(9), at(7), at(6))
    assert merge([leaving], [seen])[0].ranks == (0,)
    assert merge([_suspected_divergence(9)], [seen])[0].ranks == (1,)


def test_a_second_defect_under_the_same_condition_that_takes_another_remedy_is_told_as_well() -> None:
    seen = finding("DDP303", "rank-zero-forward", Severity.ERROR, at(9), basis="rehearsal", evidence=(_on_rank(0, 9),))
    forward = finding("DDP303", "rank-zero-forward", Severity.ERROR, at(9), at(8))
    reduction = finding("DDP301", "rank-divergent-collective", Severity.ERROR, at(12), at(8))
    assert [found.code for found in merge([forward, reduction], [seen])] == ["DDP303", "DDP301"]


def test_of_two_conditions_of_a_ranks_own_the_run_does_not_choose_one() -> None:
    seen = finding("DDP306", "early-exit", Severity.ERROR, at(9), basis="rehearsal")
    own = [finding("DDP302", "data-dependent-divergence", Severity.WARNING, at(line), at(9)) for line in (5, 7)]
    told = merge(own, [seen])
    assert [(one.code, one.locations[0].line) for one in told] == [("DDP306", 9), ("DDP302", 5), ("DDP302", 7)]
    assert [one.code for one in merge(own[:1], [seen])] == ["DDP302"]


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
    refutation = ("DDP101", Refuted(location=at(15), reason="the ranks draw different samples"))
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


def test_what_one_condition_keeps_from_some_ranks_beside_the_call_is_no_second_finding() -> None:
    names = ("DDP301", "rank-divergent-collective", Severity.ERROR)
    seen = finding(*names, at(9), basis="rehearsal")
    suspicions = [finding(*names, at(9), at(8)), finding(*names, at(12), at(8)), finding(*names, at(20), at(19))]
    assert len(merge(suspicions, [seen])) == 2


def test_ranks_that_leave_behind_the_call_are_mended_by_a_remedy_of_their_own() -> None:
    names = ("DDP301", "rank-divergent-collective", Severity.ERROR)
    seen = finding(*names, at(9), basis="rehearsal")
    call = msgspec.structs.replace(finding(*names, at(9), at(8)), remedy="Move the call.")
    left = msgspec.structs.replace(finding(*names, at(12), at(10), at(8)), remedy="Leave together.")
    beside = msgspec.structs.replace(finding(*names, at(13), at(8)), remedy="Move that call.")
    assert [found.remedy for found in merge([call, beside], [seen])] == ["Move the call."]
    assert [found.remedy for found in merge([call, left], [seen])] == ["Move the call. Leave together."]


def test_a_rank_that_can_raise_is_confirmed_by_its_exception() -> None:
    seen = finding("DDP706", "root-exception", Severity.ERROR, at(9), basis="rehearsal")
    (merged,) = merge([_suspected_divergence(9)], [seen])
    assert merged.code == "DDP706"


def _suspected_divergence(line: int) -> Finding:
    return finding("DDP301", "rank-divergent-collective", Severity.ERROR, at(line))


def _fact(line: int) -> Fact:
    return Fact(text="seen", basis="rehearsal", location=at(line))


def _on_rank(rank: int, line: int) -> Fact:
    return Fact(text="seen", basis="rehearsal", rank=rank, location=at(line))


def _stack(line: int) -> Fact:
    return Fact(text="seen", basis="rehearsal", rank=0, stack=(Frame(file=TRAIN, line=line, function="main"),))


def test_gradients_that_are_not_averaged_are_told_once_with_their_reason() -> None:
    reason = finding("DDP217", "misplaced-no-sync", Severity.ERROR, at(17), basis="rehearsal", evidence=(_fact(19),))
    title = f"{OWN_GRADIENTS} of its own, which is not averaged"
    unlike = finding("DDP223", "unlike-one-process", Severity.WARNING, at(19), basis="rehearsal", title=title)
    elsewhere = finding("DDP223", "unlike-one-process", Severity.WARNING, at(40), basis="rehearsal", title=title)
    doubled = msgspec.structs.replace(unlike, title="2 ranks compute 2.00 x the gradient that one process would")
    assert [one.code for one in merge([], [reason, unlike])] == ["DDP217"]
    assert [one.code for one in merge([], [unlike])] == ["DDP223"]
    assert len(merge([], [reason, elsewhere])) == len(merge([], [reason, doubled])) == 2
