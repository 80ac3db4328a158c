"""What the gradients of ranks and of one process come to, by vectors that are made by hand."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.gradients import unlike_one_process
from ddpdoctor.diagnosis.training.equivalence import compare
from ddpdoctor.diagnosis.training.equivalence_words import difference, remedy, sentence
from ddpdoctor.diagnosis.training.first_steps import Gradient, Runs, Step, read_step
from ddpdoctor.finding import Finding
from ddpdoctor.record.model import Job, RunRecord

_drawn = random.Random(0)
A = {name: [_drawn.gauss(0, 1) for _ in range(20)] for name in ("trunk.weight", "head.weight")}
B = {name: [_drawn.gauss(0, 1) for _ in range(20)] for name in A}
Vectors = dict[str, list[float]]


def mixed(a: float, b: float) -> Vectors:
    return {name: [a * x + b * y for x, y in zip(A[name], B[name], strict=True)] for name in A}


def step(own: Vectors, local: Vectors | None = None, **fields: Any) -> Step:
    rows = tuple(Gradient(0, name, own[name], local[name] if local else None) for name in own)
    return Step(optimizer=0, ordinal=1, gradients=rows, **fields)


def runs(here: Vectors, one: Vectors, other: Vectors | None = None, **fields: Any) -> Runs:
    ranks = ((step(here, A),), (step(other or here, B),))
    known = Runs(ranks=ranks, one=(step(one),), again=ranks, alone=((step(A),), (step(B),)))
    return msgspec.structs.replace(known, **fields)


def test_rounding_is_equality() -> None:
    section = compare(runs(mixed(0.5, 0.5), mixed(0.5 + 1e-6, 0.5)))
    assert section.status == "equal" and section.equal == section.parameters == 2
    assert "2 of 2 parameters" in sentence(section)


@pytest.mark.parametrize(
    ("here", "one", "kind", "words"),
    [
        (mixed(1, 1), mixed(0.5, 0.5), "scaled", "2.00"),
        (mixed(0.25, 0.25), mixed(0.5, 0.5), "scaled", "0.50"),
        (mixed(0.5, 0.5), mixed(0.75, 0.25), "weighted", "75%, 25%"),
        ({**mixed(0.5, 0.5), "head.weight": mixed(1, 1)["head.weight"]}, mixed(0.5, 0.5), "part", "head"),
    ],
)
def test_what_differs_is_named(here: Vectors, one: Vectors, kind: str, words: str) -> None:
    section = compare(runs(here, one))
    assert (section.status, section.kind) == ("differs", kind)
    assert words in difference(section) and remedy(section)


def test_a_little_more_than_rounding_is_told_by_how_much() -> None:
    section = compare(runs(mixed(0.502, 0.502), mixed(0.5, 0.5)))
    assert section.status == "equal" and section.equal == 2 and "within 4e-03" in sentence(section)


def test_what_rounding_makes_of_gradients_matters_only_where_they_differ() -> None:
    again = ((step(mixed(0.7, 0.7)),), (step(mixed(0.7, 0.7)),))
    near = compare(runs(mixed(0.51, 0.51), mixed(0.5, 0.5), again=again))
    assert near.status == "equal" and "within 2e-02" in sentence(near)
    assert compare(runs(mixed(0.6, 0.6), mixed(0.5, 0.5), again=again)).status == "inconclusive"


def test_gradients_that_are_all_zero_are_told_and_those_that_are_zero_in_one_process_only_are_no_alarm() -> None:
    section = compare(runs(mixed(0, 0), mixed(0, 0)))
    assert (section.status, section.zero, section.equal) == ("equal", True, 2)
    assert "2 parameters of 2 ranks have a gradient of zero" in sentence(section)
    assert compare(runs(mixed(0.5, 0.5), mixed(0, 0))).status == "inconclusive"
    assert compare(runs(mixed(0, 0), mixed(0.5, 0.5), other=mixed(0, 0))).kind == "scaled"
    kept = msgspec.structs.replace(step(mixed(0, 0)), share=0.5)
    assert compare(msgspec.structs.replace(runs(mixed(0, 0), mixed(0, 0)), one=(kept,))).status == "inconclusive"


def test_a_sum_over_samples_is_no_alarm() -> None:
    section = compare(runs(mixed(0.5, 0.5), mixed(1, 1)))
    assert section.status == "inconclusive" and "adds up" in section.reason


def test_ranks_that_differ_are_told_and_those_outside_of_ddp_are_not() -> None:
    section = compare(runs(A, mixed(0.5, 0.5), other=B))
    assert section.kind == "unsynchronised"
    bare = [msgspec.structs.replace(g, wrap=-1) for g in step(A, A).gradients]
    ranks = ((msgspec.structs.replace(step(A), gradients=tuple(bare)),), (step(B, B),))
    assert compare(runs(A, mixed(0.5, 0.5), ranks=ranks)).status == "inconclusive"


def test_chance_and_what_is_not_explained_are_no_alarm() -> None:
    noisy = runs(mixed(1, 1), mixed(0.5, 0.5), again=((step(A),), (step(A),)))
    assert "run again" in compare(noisy).reason
    undrawn = msgspec.structs.replace(
        runs(mixed(1, 1), mixed(0.5, 0.5)), one=(step(mixed(0.5, 0.5), unmatched_draws=1),)
    )
    assert "random numbers" in compare(undrawn).reason
    other = {name: [_drawn.gauss(0, 1) for _ in range(20)] for name in A}
    assert compare(runs(mixed(0.5, 0.5), other)).status == "inconclusive"
    assert compare(runs(mixed(0.7, 0.7), mixed(0.5, 0.5))).status == "inconclusive"
    assert compare(runs(mixed(0.5, 0.5), A)).status == "inconclusive"


def test_a_rank_with_another_loss_is_named() -> None:
    extra = {name: [x + 0.3 for x in B[name]] for name in B}
    ranks = tuple((step(mixed(0.5, 0.5), local),) for local in (A, extra))
    here = {name: [x + 0.15 for x in mixed(0.5, 0.5)[name]] for name in A}
    ranks = tuple((step(here, local),) for local in (A, extra))
    section = compare(runs(here, mixed(0.5, 0.5), ranks=ranks, again=ranks))
    assert (section.kind, section.at) == ("one-rank", (1,))


def test_a_clip_by_norms_of_the_ranks_is_named() -> None:
    def clipped(norm: float) -> tuple[Step]:
        clip = {"file": "train.py", "line": 7, "norm": norm, "most": 1.0, "name": "clip_grad_norm_"}
        return (step(mixed(0.3, 0.7), A, clips=(clip,)),)

    ranks = (clipped(3.0), clipped(2.0))
    section = compare(runs(A, mixed(0.5, 0.5), ranks=ranks, again=ranks))
    assert section.kind == "clipped" and section.places == (("clip_grad_norm_", "train.py", 7),)


def test_a_damaged_step_is_refused() -> None:
    row = {"wrap": 0, "name": "a", "gradient": True, "local": False, "kept": 3, "piece": 0, "stride": 1}
    with pytest.raises(ValueError, match="other numbers"):
        read_step({"parameters": [row]}, array("f", [1.0]))


def test_two_launches_differ_in_whatever_way_they_do() -> None:
    other = {**mixed(0.5, 0.5), "head.weight": mixed(0.8, 0.1)["head.weight"]}
    section = compare(runs(mixed(0.5, 0.5), other, against="torchrun b.py", alone=()))
    assert (section.status, section.kind, section.modules) == ("differs", "other", ("head",))
    assert "than `torchrun b.py` does" in difference(section) and section.factors[0][0] == "head.weight"
    by_half = compare(runs(mixed(0.75, 0.75), mixed(0.5, 0.5), against="torchrun b.py", alone=()))
    assert (by_half.kind, by_half.factor) == ("scaled", 1.5)
    apart = runs(mixed(1, 1), mixed(0.5, 0.5), against="torchrun b.py", others=((step(mixed(0.5, 0.4)),),))
    assert compare(apart).status == "inconclusive"


def test_what_is_kept_beside_gradients_is_told_and_is_no_alarm() -> None:
    def holding(values: list[float]) -> Step:
        return msgspec.structs.replace(step(mixed(0.5, 0.5)), beside={"buffer center": values}, share=0.25)

    known = runs(mixed(0.5, 0.5), mixed(0.5, 0.5))
    known = msgspec.structs.replace(known, ranks=((holding([1.0, 2.0]),),) * 2, one=(holding([1.0, 3.0]),))
    section = compare(known)
    assert (section.status, section.beside) == ("equal", ("buffer center",))
    assert "25.00% of the elements" in sentence(section) and "buffer center has other values" in sentence(section)
    alike = msgspec.structs.replace(known, one=(holding([1.0, 2.0]),))
    assert compare(alike).beside == ()
    # The momentum of a bias before a norm is rounding, and so is what differs in it.
    rounding = msgspec.structs.replace(known, ranks=((holding([1e-9, 2e-9]),),) * 2, one=(holding([2e-9, -1e-9]),))
    assert compare(rounding).beside == ()


@pytest.mark.parametrize(("shares", "severity"), [((0.52, 0.48), "advice"), ((0.6, 0.4), "warning")])
def test_shares_that_differ_by_chance_alone_are_advice(shares: tuple[float, float], severity: str) -> None:
    section = compare(runs(mixed(0.5, 0.5), mixed(*shares)))
    (found,) = unlike_one_process.in_run(RunRecord(job=Job(kind="rehearsal"), equivalence=(section,)))
    assert isinstance(found, Finding) and found.severity.value == severity


def in_pieces(first: float, second: float, piece: int = 10) -> Step:
    """The half of each gradient that a rank holds, at a factor of the rank's own."""
    whole = mixed(0.5, 0.5)
    own = {name: [first * x for x in values[:10]] + [second * x for x in values[10:]] for name, values in whole.items()}
    rows = tuple(Gradient(-2, name, own[name], None, piece) for name in own)
    return Step(optimizer=0, ordinal=1, gradients=rows, rescaled=(("train.py", 7),))


def test_pieces_at_factors_of_the_ranks_own_no_longer_make_one_gradient() -> None:
    one = in_pieces(1, 1)
    section = compare(Runs(ranks=((in_pieces(0.5, 0.8),),) * 2, one=(one,)))
    assert (section.kind, section.by_rank, section.places) == ("own-factors", (0.5, 0.8), (("", "train.py", 7),))
    assert "0.50 on rank 0, 0.80 on rank 1" in difference(section) and "clip_grad_norm_" in remedy(section)
    for alike in (in_pieces(0.5, 0.5), in_pieces(0.5, 0.8, piece=0), in_pieces(0.5, -0.8)):
        assert compare(Runs(ranks=((alike,),) * 2, one=(one,))).kind != "own-factors"
