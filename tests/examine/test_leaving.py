"""The statement by which a rank left early, of a run alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examine.rehearsal_result import with_leaving
from ddpdoctor.finding import Finding, Location, Severity

SCRIPT = """\
import sys


def train(asked):
    for step in range(9):
        if asked(step):
            {leave}
        work(step)
    if step > 3:
        return


train(print)
"""


def left(ranks: tuple[int, ...] = (1,), basis: str = "rehearsal") -> Finding:
    return Finding(
        code="DDP306",
        name="early-exit",
        trouble="early-exit",
        severity=Severity.ERROR,
        title="rank 1 left",
        ranks=ranks,
        locations=(Location(file="/job/other.py", line=3),),
        basis=frozenset({basis}),  # type: ignore[arg-type]
        evidence=(),
        remedy="leave together",
    )


@pytest.mark.parametrize("leave", ["return", "break", "sys.exit(0)"])
def test_the_way_out_that_a_rank_took_alone_leads(leave: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(leave=leave), encoding="utf-8")
    # Rank 0 waits in a turn that rank 1 never made.
    (finding,) = with_leaving([left()], {str(script): {7: (1,), 9: (1,), 10: (1,), 13: (1,)}})
    assert [place.line for place in finding.locations] == [7, 3]
    assert [fact.text for fact in finding.evidence] == [
        f"rank 1 alone ran `{leave}`",
        "`asked(step)` decides, which every rank asked",
    ]


def test_what_several_ranks_ran_or_the_source_explains_or_nobody_knows_is_left_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(leave="return"), encoding="utf-8")
    whose = {str(script): {7: (1,)}}
    for finding, alone in (
        (left(), {str(script): {7: (1, 2)}}),
        (left(), {str(script): {8: (1,)}}),
        (left(), {str(script): {6: (1,), 7: (1,)}}),
        (left(), {}),
        (left(basis="source"), whose),
        (left(ranks=(0, 1)), whose),
    ):
        assert with_leaving([finding], alone) == (finding,)
