"""Two budgets, figure by figure and line by line."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.examination import Figure
from ddpdoctor.gate.budget import Budget, Metric, amount
from ddpdoctor.gate.budget import share as budget_share
from ddpdoctor.gate.judge import compared
from tests.gate.budgets import budget, place, share


def figure(before: Budget | None, now: Budget, metric: Metric = "collectives", *, allowed: float = 0.0) -> Figure:
    (found,) = [one for one in compared(before, now, "/job", allowed) if one.metric == metric]
    return found


def test_the_same_is_the_same_wherever_the_line_moved() -> None:
    before = budget(share("collectives", (1, 1, 1), (1, 1, 1), at=place(10, code="reduce()")))
    now = budget(share("collectives", (1, 1, 1), (1, 1, 1), at=place(30, code="reduce()")))
    assert figure(before, now).change == "same"


def test_a_line_more_is_growth_and_is_named() -> None:
    old = share("collectives", (1, 1, 1), (1, 1, 1), what="gradients (all_reduce)", at=place(20))
    new = share("collectives", (1, 1, 1), (1, 1, 1), at=place(40))
    found = figure(budget(old), budget(old, new))
    assert (found.change, found.before, found.now) == ("grown", 1.0, 2.0)
    assert [(one.shown, one.before, one.now) for one in found.differences] == [("train.py:40", 0.0, 1.0)]
    assert found.differences[0].location is not None
    assert found.differences[0].location.file == "/job/train.py"


def test_less_is_shrinking_and_says_what_is_gone() -> None:
    old = share("collectives", (1, 1, 1), (1, 1, 1), at=place(40))
    kept = share("collectives", (1, 1, 1), (1, 1, 1), at=place(20))
    found = figure(budget(kept, old), budget(kept))
    assert found.change == "shrunk"
    assert [(one.shown, one.location) for one in found.differences] == [("train.py:40", None)]


def test_growth_that_is_allowed_is_told_and_not_red() -> None:
    before, now = budget(share("bytes_sent", (100, 100, 100))), budget(share("bytes_sent", (104, 104, 104)))
    assert figure(before, now, "bytes_sent", allowed=0.05).change == "within"
    assert figure(before, now, "bytes_sent", allowed=0.03).change == "grown"


def test_something_from_nothing_is_growth_whatever_is_allowed() -> None:
    now = budget(share("host_synchronisations", (1, 1, 1), what=".item()"))
    assert figure(budget(), now, "host_synchronisations", allowed=9.0).change == "grown"


def test_the_first_step_does_not_count_for_ddp_settles_its_buckets_in_it() -> None:
    before = budget(share("collectives", (1, 1, 1), (1, 1, 1)))
    now = budget(share("collectives", (3, 1, 1), (1, 1, 1)))
    assert figure(before, now).change == "same"


def test_only_steps_that_both_made_are_compared() -> None:
    """A log every so many steps must not become growth because a pass got shorter."""
    before = budget(share("collectives", (0, 0, 1), (0, 0, 1)), windows=(3, 3))
    now = budget(share("collectives", (0, 0), (0, 0)), windows=(2, 2))
    assert [one.change for one in compared(before, now, "/job", 0.0)] in ([], ["same"])
    longer = budget(share("collectives", (0, 0, 1, 5), (0, 0, 1, 5)), windows=(4, 4))
    assert figure(before, longer).change == "same"


def test_a_line_that_moved_to_another_function_brought_nothing() -> None:
    moved = place(50, file="steps.py", function="step", code="reduce()")
    before = budget(share("collectives", (1, 1, 1), at=place(10, code="reduce()")))
    now = budget(share("collectives", (1, 1, 1), at=moved), share("collectives", (1, 1, 1), at=place(60)))
    assert [one.shown for one in figure(before, now).differences] == ["train.py:60"]


def test_a_line_that_was_rewritten_is_one_difference() -> None:
    before = budget(share("batches_per_pass", (24,), what="Data", at=place(5, code="DataLoader(a,sampler=s)")))
    now = budget(share("batches_per_pass", (48,), what="Data", at=place(5, code="DataLoader(a)")))
    found = figure(before, now, "batches_per_pass")
    assert [(one.before, one.now) for one in found.differences] == [(24.0, 48.0)]


def test_bytes_that_follow_the_data_are_not_compared() -> None:
    """Objects and ragged batches have another size in each run."""
    before = budget(share("bytes_sent", (100, 120, 90), what="all_gather_object"))
    now = budget(share("bytes_sent", (400, 320, 390), what="all_gather_object"))
    assert compared(before, now, "/job", 0.0) == ()


def test_without_anything_to_compare_with_figures_are_new() -> None:
    found = figure(None, budget(share("collectives", (3, 1, 1), (1, 1, 1))))
    assert (found.change, found.before, found.now) == ("new", None, 1.0)


def test_what_ddp_sends_for_a_larger_model_is_put_down_to_the_line_that_wraps_it() -> None:
    def needs(size: int, backwards: int = 1) -> Budget:
        return budget(
            share("bytes_sent", (size,) * 3, what="gradients (all_reduce)", at=place(30)),
            share("synchronised_backwards", (backwards,) * 3, what="backward", at=place(30)),
            share("model_state_bytes", (2 * size,), what="Net", at=place(20)),
        )

    assert figure(needs(100), needs(300), "bytes_sent").differences[0].shown == "train.py:20"
    assert figure(needs(100), needs(300, 2), "bytes_sent").differences[0].shown == "train.py:30"


@pytest.mark.parametrize(
    ("before", "now", "told", "by"),
    [
        (1_318_916, 1_318_920, ("1,318,916 B", "1,318,920 B"), "less than +0.1%"),
        (1_318_920, 1_318_916, ("1,318,920 B", "1,318,916 B"), "less than -0.1%"),
        (1_318_916, 1_418_916, ("1.26 MiB", "1.35 MiB"), "+7.6%"),
        (0, 4, ("0 B", "4 B"), "new"),
        (1_318_916, 1_318_916, ("1.26 MiB", "1.26 MiB"), ""),
        (None, 1_318_916, ("1.26 MiB", "1.26 MiB"), ""),
    ],
)
def test_no_figure_is_said_to_grow_to_what_it_was(
    before: float | None, now: float, told: tuple[str, str], by: str
) -> None:
    change: Any = "new" if before is None else "same" if before == now else "grown" if before < now else "shrunk"
    row = Figure(metric="bytes", label="bytes sent a step", unit="bytes", before=before, now=now, change=change)
    assert (amount(row, now if before is None else before), amount(row, now)) == told
    assert budget_share(row) == by
